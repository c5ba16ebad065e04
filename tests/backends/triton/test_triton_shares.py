"""TRITON divides keys in equal shares: every feature, any lengths, prefixes, and which steps are served so."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings, share_bindings, shares
from attnplug.backends.triton import impl as triton_impl
from attnplug.backends.triton.builder import TritonMetadataBuilder
from attnplug.backends.triton.launch import Gpu, most_rows, tile_side
from attnplug.backends.triton.share_launch import ShareLaunch, share_launch
from attnplug.backends.triton.shares import Shares, SharesPlan, SharesStep
from attnplug.core import BuilderConfig, LayerSpec, LayerTensors
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.errors import BatchError
from attnplug.ops.reach import Reach
from attnplug.ops.triton.launch import BoundKernel
from attnplug.testing import Batch, paged_batch, run_batch
from attnplug.testing.conformance.harness import Output, blank_output, make_impl
from attnplug.testing.conformance.mistakes.expectations import difference
from attnplug.testing.conformance.numbers.common_prefix import share_prefix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=16, needs_lse=True)


@pytest.fixture
def small(monkeypatch):
    """`small(programs)`: tiles of 16 rows and keys, and a GPU that runs so many programs."""

    def shrink(programs: int, ahead: int = 0) -> None:
        monkeypatch.setattr(bindings, "gpu_of", lambda device: Gpu(programs, 1 << 18))
        launch = ShareLaunch(16, 16, 4, 1, 1, 1, ahead)
        monkeypatch.setattr(bindings, "share_launch", lambda *sizes: launch)

    return shrink


def builder_of(spec: LayerSpec = SPEC, **limits: int) -> TritonMetadataBuilder:
    """A builder of one layer."""
    plain = spec.replace(has_sinks=False, has_alibi=False)
    impl = make_impl(TritonBackend, plain, LayerTensors())
    config = BuilderConfig(layers={"layer": SimpleNamespace(impl=impl)}, **limits)
    cache = kv_cache_spec_for(spec, spec.block_size)
    return TritonBackend.get_builder_cls()(cache, ["layer"], config, torch.device(DEVICE))


def check(spec: LayerSpec, new: list[int], tokens: list[int], **fields) -> None:
    batch = paged_batch(spec, new, tokens, device=DEVICE, **fields)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None


def slow_here(is_quick: bool, in_ci: bool) -> Sequence[pytest.MarkDecorator]:
    """The marks of a case where Triton's interpreter runs it."""
    return () if ON_GPU or is_quick else [pytest.mark.slow, *[pytest.mark.rare] * (not in_ci)]


STEPS = {
    "one": ([1], [300]),
    "ragged": ([1] * 6, [40, 7, 129, 64, 1, 300]),
    "idle": ([1, 0, 1, 1, 0], [33, 50, 0, 16, 1]),
    "drafts": ([3, 1, 8, 0, 2], [3, 70, 131, 9, 64]),
    "rows": ([16, 9, 1], [210, 9, 30]),
}
QUICK = [("ragged", 48, 7), ("idle", 1, 80), ("drafts", 1, 2)]


@pytest.mark.parametrize(
    ("step", "block_size", "programs"),
    [
        # CI has each step with each block size and each number of programs.
        pytest.param(*case, marks=slow_here(case in QUICK, in_ci=case[1:] in ((16, 2), (48, 80))))
        for case in [*QUICK, *itertools.product(STEPS, [16, 48], [2, 80])]
    ],
)
def test_shares_of_programs(step, block_size, programs, small):
    small(programs)
    check(SPEC.replace(block_size=block_size), *STEPS[step])


@pytest.mark.parametrize("invariance", [(), ("batch",)], ids=["any", "fixed"])
@pytest.mark.parametrize(
    ("new", "tokens", "programs", "each"),
    [
        # 12 tiles of keys and 3 ahead in 4 parts of 3, so none is ahead; one less is.
        ([1] * 2, [192, 192], 8, 12),
        ([1] * 2, [192, 170], 8, 12),
        # Of 13, 12 and 11 tiles, in 4 parts of 4 each, as many are ahead as the parts have more.
        pytest.param([1] * 3, [200, 190, 172], 13, 16, marks=slow_here(is_quick=False, in_ci=True)),
        # Two streams of rows for each request.
        pytest.param([9, 9], [192, 190], 16, 12, marks=slow_here(is_quick=False, in_ci=True)),
    ],
)
def test_parts_of_streams_that_begin_with_fewer_tiles_ahead_have_all_keys(
    new, tokens, programs, each, invariance, small, monkeypatch
):
    small(2 * programs, ahead=3)
    plans, make = [], shares._Plan.make
    monkeypatch.setattr(shares._Plan, "make", lambda plan, step: (make(plan, step), plans.append(plan.tiles)))
    check(SPEC.replace(invariance=invariance), new, tokens)
    streams = -(-new[0] * 2 // 16)
    assert int(plans[-1][1]) == each * streams


FEATURES = {
    "window": {"window": (37, 0)},
    "chunk": {"chunk_size": 48},
    "cap": {"logits_soft_cap": 3.0},
    "slopes-sinks": {"has_alibi": True, "has_sinks": True},
    "window-sinks": {"window": (20, 0), "has_sinks": True},
    "sizes": {"head_size": 24, "head_size_v": 40},
    "wide": {"head_size": 320, "head_size_v": 512, "dtype": "float16", "needs_lse": True},
    "both-sides": {"causal": False, "window": (19, 7)},
    "cross": {"attn_type": "encoder_decoder"},
    "spans": {"mm_prefix": True, "window": (30, 0)},
    "group": {"num_heads": 14},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "fp8-e5m2": {"dtype": "float16", "kv_cache_dtype": "fp8_e5m2", "head_size": 32},
}


QUICK_FEATURES = ("window-sinks", "chunk", "slopes-sinks", "sizes", "spans", "fp8")


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(name, marks=() if ON_GPU or name in QUICK_FEATURES else pytest.mark.slow)
        for name in FEATURES
    ],
)
def test_features(feature, small):
    small(6)
    scales = {"k_scale": 0.4, "v_scale": 1.7} if "kv_cache_dtype" in FEATURES[feature] else {}
    check(SPEC.replace(**FEATURES[feature]), [2, 1, 0, 5], [90, 33, 4, 110], **scales)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if ON_GPU else pytest.mark.slow) for layout in ("NHD", "HND")]
)
def test_launches_of_every_size(layout):
    """Tiles as large as on a GPU, in both layouts."""
    check(SPEC, [1, 4], [130, 300], layout=layout)


# ---- graphs

LENGTHS = ([2, 60, 3, 119], [90, 2, 2, 2], [90, 60, 33, 120], [44, 45, 17, 16])


def attend_of(batch: Batch):
    """A builder, and a function that attends its metadata on the batch's tensors."""
    impl = make_impl(TritonBackend, batch.spec, batch.tensors)
    builder = builder_of(batch.spec, max_num_seqs=4, num_speculative_tokens=1)

    def attend(metadata, into: Output) -> Output:
        given = batch.query, batch.key, batch.value, batch.kv_cache
        impl.forward(None, *given, metadata, into.output, output_lse=into.lse)
        return into

    return builder, attend


def equal_to_eager(batch: Batch, found: Output) -> bool:
    builder, attend = attend_of(batch)
    eager = attend(builder.build(0, batch.common), blank_output(batch))
    return torch.equal(found.output, eager.output) and torch.equal(found.lse, eager.lse)


def test_the_launches_of_a_step_serve_later_steps_of_any_lengths(small, monkeypatch):
    """As a graph replays them: with the same grids and memory, after its builder built the later step."""
    small(6)
    launches, call = [], BoundKernel.__call__

    def recorded(kernel: BoundKernel, grid, *given) -> None:
        launches.append((kernel, grid, *given))
        call(kernel, grid, *given)

    monkeypatch.setattr(BoundKernel, "__call__", recorded)
    batch = paged_batch(SPEC, [2] * 4, [90, 60, 33, 120], device=DEVICE)
    builder, attend = attend_of(batch)
    attend(builder.build(0, batch.common), blank_output(batch))
    metadata, found = builder.build(0, batch.common), blank_output(batch)
    launches.clear()
    attend(metadata, found)
    graph = list(launches)
    # The plan is the builder's, outside of graphs.
    assert len(graph) == 3
    for lens in LENGTHS[:2]:
        batch.common.seq_lens.copy_(torch.tensor(lens))
        builder.build(0, batch.common)
        found.output.fill_(torch.nan)
        found.lse.fill_(torch.nan)
        for kernel, grid, *tensors in graph:
            call(kernel, grid, *tensors)
        assert equal_to_eager(batch, found)


def test_the_first_call_compiles_all_forms_of_the_merge_and_later_ones_run_one(small, monkeypatch):
    """A warm-up with one request has a merge of few rows; a graph's capture may be the first to need another one."""
    small(6)
    launches, call = [], BoundKernel.__call__

    def recorded(kernel: BoundKernel, grid, *given) -> None:
        launches.append((kernel, grid))
        call(kernel, grid, *given)

    monkeypatch.setattr(BoundKernel, "__call__", recorded)
    batch = paged_batch(SPEC, [1], [300], device=DEVICE)
    builder, attend = attend_of(batch)
    metadata = builder.build(0, batch.common)
    attend(metadata, blank_output(batch))
    (merge, _), *empty = launches[-4:]
    assert [grid for _, grid in empty] == [(0, 1, 1)] * 3
    assert len({kernel for kernel, _ in empty}) == 3
    assert merge in {kernel for kernel, _ in empty}
    launches.clear()
    attend(metadata, blank_output(batch))
    assert launches[-1][0] is merge
    assert all(0 not in grid for _, grid in launches)


NEVER = 1 << 30
# The limits of many parts and of rows at once, and the form that is then the only one.
MERGES = {"few-rows": (NEVER, NEVER, 0), "many-parts": (0, NEVER, 1), "many-rows": (NEVER, 0, 2)}


@pytest.fixture
def forms(monkeypatch):
    """The forms of the merge that ran, by their number in `ShareDecode.merges`."""
    found, made, bind, call = set(), [], share_bindings.bind_shares, BoundKernel.__call__

    def bound(*given):
        made.append(bind(*given))
        return made[-1]

    def recorded(kernel: BoundKernel, grid, *given) -> None:
        if 0 not in grid:
            found.update(
                at for each in made for at, merge in enumerate(each.merges) if merge.kernel is kernel
            )
        call(kernel, grid, *given)

    monkeypatch.setattr(bindings, "bind_shares", bound)
    monkeypatch.setattr(BoundKernel, "__call__", recorded)
    return found


@pytest.mark.parametrize("prefix", [0, 32])
@pytest.mark.parametrize("form", MERGES)
def test_each_form_of_the_merge_merges_any_rows(form, prefix, small, forms, monkeypatch):
    small(11)
    *limits, number = MERGES[form]
    for name, limit in zip(("_MANY_PARTS", "_AT_ONCE"), limits, strict=True):
        monkeypatch.setattr(share_bindings, name, limit)
    cascade = Cascade(SPEC.replace(head_size=24, head_size_v=40))
    batch = cascade.batch([1, 3, 0, 9], [97, 140, 96, 106], prefix)
    assert difference(batch, cascade.run(batch, prefix)) is None
    assert forms == {number}


@pytest.mark.parametrize("prefix", [0, 320])
def test_one_warp_merges_a_row_of_many_parts_beside_rows_of_few(prefix, small, forms, monkeypatch):
    small(240)
    monkeypatch.setattr(share_bindings, "_AT_ONCE", 0)
    cascade = Cascade(SPEC.replace(head_size=24, head_size_v=40))
    batch = cascade.batch([1, 2, 1], [1500, 340, 330], prefix)
    assert difference(batch, cascade.run(batch, prefix)) is None
    assert forms == {2}


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 2])
def test_a_captured_graph_serves_any_lengths(new):
    spec = SPEC.replace(head_size=128, dtype="bfloat16")
    batch = paged_batch(spec, [new] * 4, [9000, 6000, 3300, 12_000], device=DEVICE)
    builder, attend = attend_of(batch)
    found = attend(builder.build(0, batch.common), blank_output(batch))
    graph, metadata = torch.cuda.CUDAGraph(), builder.build(0, batch.common)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attend(metadata, found)
    for lens in LENGTHS:
        batch.common.seq_lens.copy_(torch.tensor(lens) * 100)
        builder.build(0, batch.common)
        found.output.fill_(torch.nan)
        graph.replay()
        assert equal_to_eager(batch, found)


# ---- prefixes


class Cascade:
    """A layer over steps whose requests share their first tokens."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec

    def batch(self, new: list[int], tokens: list[int], shared: int) -> Batch:
        size = self.spec.block_size
        batch = paged_batch(self.spec, new, tokens, device=DEVICE, padding=2)
        return share_prefix(batch, shared // size, size)

    def run(self, batch: Batch, prefix: int, impl=None) -> Output:
        impl = impl or make_impl(TritonBackend, batch.spec, batch.tensors)
        builder = builder_of(self.spec)
        into = blank_output(batch)
        given = batch.query, batch.key, batch.value, batch.kv_cache
        impl.forward(None, *given, builder.build(prefix, batch.common), into.output, output_lse=into.lse)
        return into


PREFIXED = {
    "plain": {},
    "sinks-slopes": {"has_sinks": True, "has_alibi": True},
    "window": {"window": (400, 0)},
    "cap": {"logits_soft_cap": 3.0},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "pages-of-24": {"block_size": 24},
}
QUICK_PREFIXED = [("sinks-slopes", 2), ("pages-of-24", 11)]


@pytest.mark.parametrize(
    ("feature", "programs"),
    [
        # CI has each feature once, and half of them with each number of programs.
        pytest.param(*case, marks=slow_here(case in QUICK_PREFIXED, in_ci=index % 4 in (0, 3)))
        for index, case in enumerate(itertools.product(PREFIXED, [2, 11]))
    ],
)
def test_a_prefix_is_attended_once_and_changes_no_number(feature, programs, small):
    small(programs)
    cascade = Cascade(SPEC.replace(**PREFIXED[feature]))
    batch = cascade.batch([1, 3, 0, 1, 2, 9], [97, 140, 96, 97, 130, 106], 96)
    assert difference(batch, cascade.run(batch, 96)) is None


def test_keys_of_a_prefix_are_read_through_the_first_table_only():
    """So the prefix is really attended once: the other tables may be wrong there."""
    cascade = Cascade(SPEC)
    batch = cascade.batch([0, 1, 2, 1], [128, 170, 200, 129], 128)
    table = batch.common.block_table_tensor.clone()
    table[2:, :8] = table[2:, 8:9]
    table[0] = 0
    wrong = dataclasses.replace(batch, common=dataclasses.replace(batch.common, block_table_tensor=table))
    assert difference(wrong, cascade.run(wrong, 128)) is None
    assert difference(wrong, cascade.run(wrong, 0)) is not None


def test_a_prefix_that_no_request_can_share_is_refused():
    cascade = Cascade(SPEC)
    batch = cascade.batch([1, 1], [40, 33], 32)
    for prefix in (-16, 48):
        with pytest.raises(BatchError, match=f"common_prefix_len={prefix} must be in 0 .. 32"):
            cascade.run(batch, prefix)


def test_tables_of_another_group_share_no_prefix():
    cascade = Cascade(SPEC)
    batch, other = (cascade.batch([1, 1], [140, 133], shared) for shared in (128, 0))
    builder = builder_of()
    made = builder.build(128, batch.common)
    swapped = builder.update_block_table(made, other.common.block_table_tensor, other.common.slot_mapping)
    for step, metadata in ((batch, made), (other, swapped), (batch, made)):
        impl, into = make_impl(TritonBackend, SPEC, step.tensors), blank_output(step)
        given = step.query, step.key, step.value, step.kv_cache
        impl.forward(None, *given, metadata, into.output, output_lse=into.lse)
        assert difference(step, into) is None


@pytest.mark.parametrize(
    ("prefix", "lens", "ranks", "wanted"),
    [
        (16_384, [1] * 64, 1, True),
        (16_384, [1, 4, 2], 1, True),
        (8192, [1, 4, 2], 1, False),
        (16_384, [1], 1, False),
        (16_384, [1, 0, 0], 1, False),
        (16_384, [1, 900, 900], 1, False),
        (256, [1] * 256, 1, False),
        (1024, [1] * 24, 1, False),
        (1024, [1] * 25, 1, True),
        (16_384, [1] * 64, 2, False),
    ],
)
def test_a_prefix_is_wanted_where_it_spares_many_keys(prefix, lens, ranks, wanted):
    found = builder_of().use_cascade_attention(
        prefix, np.array(lens, dtype=np.int32), 32, 8, False, False, False, 132, ranks
    )
    assert found is wanted


# ---- which steps are divided in shares


def _said(kind: str, is_followed: bool = False, is_next: bool = False) -> str:
    return kind + " followed" * is_followed + " next" * is_next


@pytest.fixture
def served(monkeypatch):
    """The kernels that serve a step: "shares" and "prefill"."""
    found: list[str] = []
    for name, kind in (("_by_shares", "shares"), ("_prefill", "prefill")):
        monkeypatch.setattr(
            triton_impl, name, lambda *_, kind=kind, **flags: found.append(_said(kind, **flags))
        )
    monkeypatch.setattr(bindings, "gpu_of", lambda device: Gpu(132, 227 << 10))

    def run(new, tokens, prefix=0, spec=SPEC, **limits):
        found.clear()
        batch = paged_batch(spec, new, tokens, device=DEVICE)
        impl = make_impl(TritonBackend, spec, batch.tensors)
        into = blank_output(batch)
        builder = builder_of(spec, **limits)
        given = batch.query, batch.key, batch.value, batch.kv_cache
        impl.forward(None, *given, builder.build(prefix, batch.common), into.output, output_lse=into.lse)
        return list(found)

    return run


@pytest.mark.parametrize("queries", [1, 3, 16])
def test_keys_of_few_queries_are_divided_whether_they_are_drafts_or_not(served, queries):
    assert served([queries, 1], [40, 90]) == ["shares"]
    assert served([queries, 1], [40, 90], num_speculative_tokens=2) == ["shares"]


def test_steps_with_a_shared_prefix_are_divided(served):
    assert served([1, 1], [40, 90], prefix=32) == ["shares"]
    assert served([1, 60], [40, 90], prefix=16) == ["shares", "shares"]


def test_longer_queries_are_divided_where_their_tiles_would_leave_most_of_the_gpu_idle(served):
    assert served([60], [90]) == ["shares"]
    assert served([1, 60], [90, 90]) == ["shares", "shares"]
    assert served([60] * 70, [90] * 70) == ["prefill"]
    # A prefill behind a decode does not wait for it, and one alone waits for what came before.
    assert served([1] + [60] * 70, [90] * 71) == ["shares followed", "prefill next"]
    # Prompts see each other's keys only: there are few keys to divide.
    assert served([60], [60]) == ["prefill"]


def test_steps_of_both_kinds_are_right():
    check(SPEC, [1, 20, 33], [70, 90, 33])


@settings(max_examples=25)
@given(
    reach=st.sampled_from([Reach(-1, 0, 0), Reach(31, 0, 0), Reach(-1, 0, 64), Reach(-1, -1, 0)]),
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), min_size=1, max_size=9),
    programs=st.integers(1, 20),
    prefix=st.integers(0, 3),
    ahead=st.integers(0, 3),
)
def test_a_plan_has_all_tiles_of_all_rows(reach, lens, programs, prefix, ahead):
    new = [count for count, _ in lens]
    lengths = [prefix * 16 + count + before for count, before in lens]
    starts = torch.tensor(np.cumsum([0, *new]), dtype=torch.int32, device=DEVICE)
    step = SharesStep(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        num_reqs=len(new),
        max_query_len=max(new),
        number=1,
        prefix=prefix * 16 + 7,
    )
    plan = SharesPlan(16, programs, 2, ahead, 3, 16, reach.left, reach.right, reach.chunk)
    tiles = Shares(9, torch.device(DEVICE)).tiles(step, plan).tolist()
    streams, blocks = [], [-(-count * 3 // 16) for count in new]
    for count, length in zip(new, lengths, strict=True):
        positions = np.arange(length - count, length)
        low, high = reach.bounds(positions, np.zeros(count, int), np.full(count, length))
        begin = max(int(low.min()) // 16, prefix) if count else 0
        streams.append(max(-(-int(high.max()) // 16) - begin, 1) + ahead if count else 0)
    others, longest = prefix * -(-sum(new) * 3 // 16), max(streams)
    total, size = tiles[len(new) + 1], tiles[len(new) + 2]
    exact = max(-(-(sum(map(operator.mul, streams, blocks)) + others) // programs), 2)
    assert total <= programs * size
    assert size <= exact + max(4, exact // 32)
    ends = np.cumsum([0, *map(operator.mul, streams, blocks)]).tolist()
    if tiles[: len(new) + 1] == ends:
        assert size >= exact or size % max(longest, 1) == 0, "shares are whole streams"
    else:
        each = next(end // count for end, count in zip(tiles[1:], blocks, strict=False) if count)
        assert tiles[: len(new) + 1] == np.cumsum([0, *blocks] * np.array(each)).tolist()
        assert others or (size % each if size > each else each % size) == 0, "streams are cut in equal parts"
        assert each - longest < size
    assert total == tiles[len(new)] + others
    # The entry of a share is the last one that begins at its first tile or before, and has tiles.
    entries = np.searchsorted(tiles[1 : len(new) + 1], np.arange(programs) * size, side="right")
    assert tiles[len(new) + 3 : len(new) + 3 + programs] == entries.tolist()


@pytest.mark.parametrize(("count", "length", "size"), [(39, 640, 80), (12, 320, 20), (4, 640, 20)])
def test_requests_that_are_alike_are_cut_evenly_or_not_at_all(count, length, size):
    step = SharesStep(
        query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.full((count,), length, dtype=torch.int32, device=DEVICE),
        num_reqs=count,
        max_query_len=1,
        number=1,
    )
    # 39 x 40 tiles are 78 for each of 20 programs: 80 are two requests. 12 x 20 are 19 for 13. 4 x 40 are 18 for 9.
    programs = {39: 20, 12: 13, 4: 9}[count]
    tiles = Shares(64, torch.device(DEVICE)).tiles(step, SharesPlan(16, programs, 1))
    assert int(tiles[count + 2]) == size


@pytest.mark.parametrize(
    ("lengths", "size", "each"),
    [
        # 3, 2 and 3 tiles are 2 for each of 4 programs, but 3 cut none of them.
        ([40, 30, 48], 3, 3),
        # 20, 19 and 20 tiles are 6 for each of 10: 7 cut each in three, with one tile more at the end.
        ([320, 300, 310], 7, 21),
        # 30 and 60 tiles differ too much.
        ([480, 960], 23, 0),
    ],
)
def test_requests_that_are_nearly_alike_are_cut_like_the_longest(lengths, size, each):
    count = len(lengths)
    step = SharesStep(
        query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        num_reqs=count,
        max_query_len=1,
        number=1,
    )
    programs = {3: 4, 7: 10, 23: 4}[size]
    tiles = Shares(64, torch.device(DEVICE)).tiles(step, SharesPlan(16, programs, 1)).tolist()
    assert tiles[count + 2] == size
    expected = [each] * count if each else [length // 16 for length in lengths]
    assert tiles[: count + 1] == [0, *itertools.accumulate(expected)]


@pytest.mark.parametrize(("length", "each"), [(2048, 128), (2040, 128), (2000, 128), (1985, 128)])
def test_equal_parts_have_equal_numbers_of_keys(length, each):
    """The first part of a stream begins like the others, so it has no tiles without keys."""
    count, programs, ahead = 4, 16, 3
    step = SharesStep(
        query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([2048] + [length] * (count - 1), dtype=torch.int32, device=DEVICE),
        num_reqs=count,
        max_query_len=1,
        number=1,
    )
    tiles = Shares(64, torch.device(DEVICE)).tiles(step, SharesPlan(16, programs, 1, ahead)).tolist()
    assert tiles[: count + 1] == [each * at for at in range(count + 1)]
    assert tiles[count + 2] == 32


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_requests_numbered_in_turns_have_the_plan_of_requests_numbered_at_once(at_once, monkeypatch):
    new, tokens = [1, 0, 3, 1, 9, 1, 0], [40, 70, 3, 129, 64, 1, 5]
    for plan in (
        SharesPlan(16, 3, 1),
        SharesPlan(16, 40, 2, 3, group=4, block_m=16),
        SharesPlan(16, 200, 1, 1, left=30),
    ):
        for query_lens, seq_lens, prefix in ((new, tokens, 0), ([1] * 7, [64] * 7, 32)):
            made = []
            for width in (at_once, 1024):
                monkeypatch.setattr(shares, "_AT_ONCE", width)
                step = SharesStep(
                    query_start_loc=torch.tensor(
                        [0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=DEVICE
                    ),
                    seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
                    num_reqs=7,
                    max_query_len=9,
                    prefix=prefix,
                )
                made.append(Shares(7, torch.device(DEVICE)).tiles(step, plan)[: 10 + plan.programs])
            assert made[0].equal(made[1])


def test_a_plan_has_few_requests_in_a_tile_however_many_a_sparse_prefill_has(monkeypatch):
    """Tiles as wide as 8192 queries took most of a minute to compile, and Triton refuses those of 131072."""
    sizes = []
    monkeypatch.setattr(shares, "BoundKernel", lambda kernel, given, values: sizes.append(values))
    for reqs in (1, 1024, 1025, 131072):
        shares._Plan(SharesPlan(64, 132, 1), reqs, torch.device("cpu"))
    assert [(each["REQS"], each["MANY"]) for each in sizes] == [
        (1, False), (1024, False), (1024, True), (1024, True),
    ]  # fmt: skip


@pytest.mark.parametrize("gpu", [Gpu(132, 227 << 10, False, True), Gpu(108, 163 << 10), Gpu(128, 99 << 10)])
@pytest.mark.parametrize(
    ("head_size", "itemsize"), [*itertools.product([16, 80, 128, 256, 320, 512], [1, 2, 4])]
)
def test_all_programs_of_a_launch_fit_the_gpu_at_once(head_size, itemsize, gpu):
    for rows in (1, 16, 17, 64, 65, 2048):
        rows = min(rows, most_rows(head_size, itemsize, gpu))
        launch = share_launch(head_size, itemsize, rows, gpu)
        tiles = 2 * launch.block_n * launch.num_stages + launch.block_m
        assert launch.waves * tiles * tile_side(head_size) * itemsize <= gpu.shared_memory
        threads = launch.waves * launch.num_warps * 32
        assert threads * (launch.max_registers or 255) <= 1 << 16
        assert launch.block_m == 16 if itemsize == 4 else launch.block_m >= min(tile_side(rows), 128)
