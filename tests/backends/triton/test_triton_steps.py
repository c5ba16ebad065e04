"""TRITON over several steps: speculation, steps that overlap, graphs, very large caches, and a builder that never waits."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

import attnplug
from attnplug.backends.triton import TritonBackend, bindings
from attnplug.backends.triton.launch import is_one_range
from attnplug.core import BuilderConfig, Device, LayerSpec, LayerTensors, MLADims
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata
from attnplug.errors import BatchError, LayoutError
from attnplug.runtime import AttentionRuntime, GraphState
from attnplug.testing import Batch, assert_close, paged_batch, run_batch, tolerance
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.mistakes.expectations import difference
from attnplug.testing.conformance.target import Target

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype="float16", block_size=16)


class Layer:
    """One layer and its builder, over steps of any batches."""

    def __init__(self, spec: LayerSpec, device: str = DEVICE, **limits: int) -> None:
        self.impl = TritonBackend.get_impl_cls().from_spec(spec, backend=TritonBackend, layer_name="layer")
        cache = kv_cache_spec_for(spec, spec.block_size or 16)
        config = BuilderConfig(**limits)
        self.builder = TritonBackend.get_builder_cls()(cache, ["layer"], config, torch.device(device))

    def build(self, batch: Batch) -> AttentionMetadata:
        return self.builder.build(0, batch.common)

    def run(self, batch: Batch, metadata: AttentionMetadata, output: torch.Tensor | None = None):
        output = torch.full_like(batch.query, torch.nan) if output is None else output
        given = batch.query, batch.key, batch.value, batch.kv_cache
        return self.impl.forward(None, *given, metadata, output)

    def check(self, batch: Batch, found: torch.Tensor) -> None:
        tokens = batch.common.num_actual_tokens
        assert_close(found[:tokens], batch.oracle().output, tolerance(batch.spec).output)


@pytest.mark.parametrize(
    "limit", [{"window": (100, 0)}, {"window": (300, 0)}, {"chunk_size": 200}, {}], ids=str
)
@pytest.mark.parametrize("queries", [1, 6])
def test_keys_are_right_in_one_range_and_in_three(queries, limit):
    """One query has 4 rows, whose keys are one range; 6 have 24, where windows of few tiles are."""
    spec = SPEC.replace(**limit)
    one = is_one_range(*((16, 64) if queries == 1 else (64, 64)), spec.window[0], pairs=False)
    assert one == (queries == 1 or spec.window == (100, 0))
    layer = Layer(spec, num_speculative_tokens=5)
    batch = paged_batch(spec, [queries] * 3, [700, 401, 64], device=DEVICE)
    layer.check(batch, layer.run(batch, layer.build(batch)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("strange", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_query_without_a_size_spoils_no_row_beside_it(monkeypatch, queries, strange):
    """Over 8-bit keys a GPU multiplies in float16, after it has divided all rows of a tile by their largest element."""
    if DEVICE == "cpu":
        monkeypatch.setattr(bindings, "_computed", lambda spec, device: tl.float16)
    spec = SPEC.replace(dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    layer = Layer(spec, num_speculative_tokens=3)
    batch = paged_batch(spec, [queries] * 2, [40, 70], device=DEVICE)
    right = layer.run(batch, layer.build(batch))
    batch.query[0, 1, 5] = strange
    found = layer.run(batch, layer.build(batch))
    there = torch.ones(found.shape[:2], dtype=torch.bool, device=found.device)
    there[0, 1] = there[2 * queries :] = False
    assert right[there].isfinite().all()
    assert torch.equal(found[there], right[there])


@pytest.mark.parametrize("group", [4, 24])
def test_drafts_are_verified_as_decodes_whatever_part_of_them_a_request_has(group):
    """With a group of 24, six queries fill more than one tile of rows."""
    spec = SPEC.replace(num_heads=2 * group)
    layer = Layer(spec, num_speculative_tokens=5)
    batch = paged_batch(spec, [6, 1, 3, 6, 0, 2, 19], [300, 33, 3, 6, 9, 200, 40], device=DEVICE)
    metadata = layer.build(batch)
    assert (metadata.num_decodes, metadata.max_decode_len, metadata.max_query_len) == (6, 6, 19)
    layer.check(batch, layer.run(batch, metadata))


def test_two_steps_may_be_built_before_either_runs():
    """Micro-batches are: the plan of splits of one must not serve the other."""
    layer = Layer(SPEC)
    batches = [paged_batch(SPEC, [1, 1], lens, device=DEVICE) for lens in ([700, 20], [16, 900])]
    layer.check(batches[0], layer.run(batches[0], layer.build(batches[0])))
    built = [layer.build(batch) for batch in batches]
    for batch, metadata in zip(batches, built, strict=True):
        layer.check(batch, layer.run(batch, metadata))


def test_a_call_unlike_the_last_is_checked_anew():
    layer = Layer(SPEC)
    batch = paged_batch(SPEC, [1, 1], [40, 20], device=DEVICE)
    metadata = layer.build(batch)
    layer.check(batch, layer.run(batch, metadata))
    for change in (
        {"query": batch.query[:1]},
        {"query": batch.query.float()},
        {"query": batch.query[:, :4]},
        {"key": batch.key[:, :1]},
        {"key": batch.key[:1]},
        {"value": batch.value.bfloat16()},
    ):
        with pytest.raises(BatchError, match=next(iter(change))):
            layer.run(dataclasses.replace(batch, **change), metadata, torch.empty_like(batch.query))
    with pytest.raises(LayoutError, match="kv_cache"):
        layer.run(dataclasses.replace(batch, kv_cache=batch.kv_cache.bfloat16()), metadata)
    layer.check(batch, layer.run(batch, metadata))


def test_a_cache_whose_memory_was_exchanged_is_split_anew():
    layer = Layer(SPEC)
    batch = paged_batch(SPEC, [1, 1], [40, 20], device=DEVICE)
    first = batch.kv_cache.clone()
    layer.run(dataclasses.replace(batch, kv_cache=first), layer.build(batch))
    first.set_(batch.kv_cache.clone())
    layer.check(batch, layer.run(dataclasses.replace(batch, kv_cache=first), layer.build(batch)))


def test_a_layer_does_not_keep_the_memory_of_a_cache_that_is_given_up():
    layer = Layer(SPEC)
    batch = paged_batch(SPEC, [1], [20], device=DEVICE)
    cache = batch.kv_cache.clone()
    layer.run(dataclasses.replace(batch, kv_cache=cache), layer.build(batch))
    pages = weakref.ref(layer.impl._last_pages.k)
    del cache
    assert pages() is None
    assert layer.impl._last_pages is None


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[1] * 256, [1] * 200 + [40] * 3, [4] * 256])
def test_a_builder_allocates_nothing_and_never_waits(query_lens, sync_errors):
    layer = Layer(SPEC, num_speculative_tokens=3)
    batch = paged_batch(SPEC, query_lens, [64] * len(query_lens), device=DEVICE)
    for _ in range(2):
        layer.run(batch, layer.build(batch))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with sync_errors():
        layer.build(batch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_a_graph_is_right_after_steps_that_were_too_large_for_its_buffers():
    layer = Layer(SPEC, max_num_seqs=2)
    batch = paged_batch(SPEC, [1, 1], [900, 33], device=DEVICE)
    output = torch.empty_like(batch.query)
    layer.run(batch, layer.build(batch), output)
    graph, metadata = torch.cuda.CUDAGraph(), layer.build(batch)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        layer.run(batch, metadata, output)
    for count in (3, 300):
        large = paged_batch(SPEC, [1] * count, [70] * count, device=DEVICE)
        layer.check(large, layer.run(large, layer.build(large)))
    # Whatever was freed is taken again, by something that a replay must not spoil.
    others = [torch.full((1 << size,), 7.0, device=DEVICE) for size in range(8, 22) for _ in range(4)]
    for _ in range(3):
        output.fill_(torch.nan)
        layer.build(batch)
        graph.replay()
        layer.check(batch, output)
    assert all((other == 7.0).all() for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("query_lens", [[1] * 4, [1, 1, 70, 300]])
def test_pages_past_2_to_the_31_elements_are_written_and_read(query_lens, layout):
    spec = SPEC.replace(num_kv_heads=8, head_size=128)
    batch = paged_batch(spec, query_lens, [500, 33, 400, 300], layout=layout, device=DEVICE)
    small, common = batch.kv_cache, batch.common
    blocks = 2**31 // small[0].numel() + 2 * small.shape[0]
    needed = blocks * small[0].nbytes
    if torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free device memory")
    swapped = small.shape if layout == "NHD" else small.transpose(2, 3).shape
    large = torch.empty(blocks, *swapped[1:], dtype=small.dtype, device=DEVICE)
    large = large if layout == "NHD" else large.transpose(2, 3)
    shift = blocks - small.shape[0]
    large[shift:] = small
    slots = common.slot_mapping
    common = dataclasses.replace(
        common,
        block_table_tensor=common.block_table_tensor + shift,
        slot_mapping=torch.where(slots < 0, slots, slots + shift * 16),
    )
    found, _ = run_batch(TritonBackend, dataclasses.replace(batch, kv_cache=large, common=common))
    tokens = common.num_actual_tokens
    assert_close(found[:tokens], batch.oracle().output, tolerance(spec).output)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="the kit captures real graphs; here only what they read is looked at"
)
def test_groups_that_are_updated_in_a_step_are_in_a_capture_too():
    """What a captured layer reads is planned by the builder that each step before a replay builds with."""
    specs = {"full": SPEC, "a": SPEC.replace(sliding_window=20), "b": SPEC.replace(sliding_window=20)}
    config = BuilderConfig(max_num_seqs=2, max_model_len=64, cudagraph_batch_sizes=(2,))
    plan = attnplug.plan(specs, device=DEVICE, backend="TRITON", num_blocks=9)
    state = GraphState(AttentionRuntime(plan, config=config))
    metadata = state.metadata_for_capture(2)
    assert metadata["a"].block_table.data_ptr() != metadata["b"].block_table.data_ptr()
    assert metadata["a"].workspace is metadata["b"].workspace


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with other numbers between the elements of a row."""
    return torch.stack([tensor, torch.full_like(tensor, -7)], -1)[..., 0]


@pytest.mark.parametrize("field", ["sinks", "alibi_slopes"])
def test_sinks_and_slopes_may_be_a_column_of_a_larger_tensor(field):
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", has_sinks=True, has_alibi=True
    )
    batch = paged_batch(spec, [1, 20], [30, 40], device=DEVICE)
    tensors = dataclasses.replace(batch.tensors, **{field: _with_gaps(getattr(batch.tensors, field))})
    batch = dataclasses.replace(batch, tensors=tensors)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None


@pytest.mark.parametrize("field", ["query_start_loc", "seq_lens", "block_table_tensor", "mm_prefix_spans"])
def test_indices_of_other_types_and_with_gaps_are_refused(field):
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", mm_prefix=True)
    batch = paged_batch(spec, [1, 20, 3], [30, 40, 50], device=DEVICE)
    given = getattr(batch.common, field)
    for changed in (given.long(), _with_gaps(given)):
        common = dataclasses.replace(batch.common, **{field: changed})
        with pytest.raises(BatchError, match=field):
            run_batch(TritonBackend, dataclasses.replace(batch, common=common))


def test_indices_of_latent_layers_are_checked_too():
    dims = MLADims(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
    spec = LayerSpec(num_heads=2, num_kv_heads=1, head_size=24, dtype="float32", mla=dims)
    batch = paged_batch(spec, [1, 1], [30, 40], device=DEVICE)
    common = dataclasses.replace(batch.common, seq_lens=batch.common.seq_lens.long())
    with pytest.raises(BatchError, match="seq_lens"):
        run_batch(TritonBackend, dataclasses.replace(batch, common=common))


def test_slopes_of_another_device_are_refused():
    spec = LayerSpec(num_heads=2, num_kv_heads=2, head_size=16, dtype="float16")
    batch = paged_batch(spec, [1], [30], device=DEVICE)
    layer = Layer(spec)
    layer.impl.tensors = LayerTensors(alibi_slopes=torch.ones(2, device="meta"))
    with pytest.raises(BatchError, match=r"alibi_slopes.device='meta' must be c"):
        layer.run(batch, layer.build(batch))


@pytest.mark.parametrize("new", [[1, 1], [1, 20]])
def test_an_lse_may_have_its_tokens_side_by_side(new):
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", needs_lse=True)
    batch = paged_batch(spec, new, [30, 40], device=DEVICE, padding=2)
    output = torch.full_like(batch.query, torch.nan)
    lse = torch.full((4, sum(new) + 2), torch.nan, device=DEVICE).T
    harness = Harness.of(Target(TritonBackend, Device.parse(DEVICE)), batch)
    found = harness.forward(batch, Output(output, lse))
    assert difference(batch, Output(*(each[: sum(new)] for each in found))) is None
    assert lse[sum(new) :].isnan().all()
