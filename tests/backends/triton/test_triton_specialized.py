"""The prefill kernel with specialised warps has right numbers, emulated on a CPU, and serves what it can alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from given_keys import new_prompts
from gluon_emulation import emulated, placed

from attnplug.backends.triton import TritonBackend, bindings, specialized
from attnplug.backends.triton.launch import Gpu, PrefillLaunch, Specialized, prefill_launch
from attnplug.backends.triton.specialized import (
    is_near,
    launch_for,
    programs,
    serves,
    specialized_kernel,
    tiles,
)
from attnplug.core import LayerSpec
from attnplug.testing import direct_batch, paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

LAUNCH = Specialized(64, 2, 2)
VALUES = dict.fromkeys(("stride_qt", "stride_qh", "stride_ot", "stride_oh"), 64)
VALUES |= {"GROUP": 2, "COMPUTE": None, "NUMBERS": 0}
"""The arguments of the kernel that `serves` looks at, for `layer()`."""


def layer(heads: tuple[int, int, int] = (4, 2, 64), **fields: Any) -> LayerSpec:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": heads[2], "dtype": "float16"}
    return LayerSpec(**sizes | fields)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids of the kernel's launches."""
    kernel, grids = emulated("specialized_prefill")["specialized_prefill"], []

    class Counted:
        fn = staticmethod(kernel.fn)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(bindings, "specialized_kernel", lambda device: Counted())
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: True)
    return grids


def launch(monkeypatch: pytest.MonkeyPatch, chosen: Specialized) -> None:
    monkeypatch.setattr(
        bindings, "prefill_launch", lambda *_: PrefillLaunch(128, 64, 8, 2, specialized=chosen)
    )


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("ordered", [False, True], ids=["", "in turn, held"])
@pytest.mark.parametrize(
    "spec",
    [
        layer(),
        layer((8, 1, 64), sliding_window=40, has_sinks=True, needs_lse=True),
        layer((7, 1, 64), chunk_size=100, needs_lse=True),
        layer((2, 2, 128), causal=False),
        layer((12, 1, 64), sliding_window=90, has_sinks=True, needs_lse=True),
        layer((4, 2, 80), has_sinks=True, needs_lse=True),
        layer((4, 1, 224), sliding_window=40),
        layer((4, 2, 96), logits_soft_cap=5.0, sliding_window=90, needs_lse=True),
        layer((4, 2, 160), causal=False, has_sinks=True),
        layer((4, 2, 192), logits_soft_cap=30.0, needs_lse=True),
        layer((4, 2, 64), sliding_window=140, has_sinks=True, needs_lse=True, invariance=("batch", "rows")),
        layer((4, 2, 80), chunk_size=100, needs_lse=True, invariance=("batch",)),
        layer((4, 2, 224), logits_soft_cap=5.0, needs_lse=True, invariance=("batch", "rows")),
    ],
    ids=[
        "causal",
        "window",
        "chunk",
        "all",
        "a group of 12",
        "80 elements",
        "224 elements",
        "96 elements, cap",
        "160 elements",
        "192 elements, cap",
        "equal bits",
        "even splits",
        "equal bits of 224 elements",
    ],
)
def test_prompts_and_extends(
    spec: LayerSpec,
    ordered: bool,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
    used: list[tuple[int, ...]],
) -> None:
    # Larger tiles of 256 columns have no room.
    small = groups == 3 or spec.head_size > 128 or spec.invariance
    launch(monkeypatch, Specialized(64 if small else 128, 2, groups, in_turn=ordered, held=ordered))
    batch = paged_batch(spec, [70, 0, 5, 131], [70, 3, 200, 300], block_size=16, skip_blocks=2, padding=2)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert used


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The strides of keys of which whole tiles were copied as blocks."""
    found: list[tuple[int, ...]] = []
    make = specialized.CallTiles.__call__

    def noted(self: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        found.append(given[1].stride())
        return make(self, given)

    monkeypatch.setattr(specialized.CallTiles, "__call__", noted)
    return found


@pytest.mark.parametrize(("groups", "stages"), [(2, 2), (2, 3), (3, 4)])
@pytest.mark.parametrize("apart", [0, 320])
@pytest.mark.parametrize(
    "spec",
    [
        layer((4, 2, 64), needs_lse=True),
        layer((4, 2, 80), sliding_window=150, has_sinks=True),
        layer((2, 2, 96), causal=False),
        layer((4, 1, 128), logits_soft_cap=5.0),
        layer((3, 1, 160)),
    ],
    ids=["64", "80, window", "96, all", "128, cap", "160"],
)
def test_keys_of_the_call_in_blocks(
    spec: LayerSpec,
    apart: int,
    groups: int,
    stages: int,
    monkeypatch: pytest.MonkeyPatch,
    used: list[tuple[int, ...]],
    copied: list[tuple[int, ...]],
) -> None:
    launch(monkeypatch, Specialized(32 if spec.head_size == 160 else 64, stages, groups))
    # Whole tiles alone, one key more or less, and requests of one tile.
    batch = new_prompts(spec, [128, 70, 64, 0, 257, 1, 191], apart)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert used
    assert copied == [(spec.num_kv_heads * spec.head_size + apart, spec.head_size, 1)]


@pytest.mark.parametrize(
    "spec",
    [layer((4, 2, 112)), layer((4, 2, 64), invariance=("batch", "rows"))],
    ids=["columns past the head", "equal bits"],
)
def test_other_keys_of_the_call_are_copied_by_rows(
    spec: LayerSpec,
    monkeypatch: pytest.MonkeyPatch,
    used: list[tuple[int, ...]],
    copied: list[tuple[int, ...]],
) -> None:
    launch(monkeypatch, Specialized(64, 2, 2))
    batch = new_prompts(spec, [128, 70, 64, 257])
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert used
    assert not copied


def test_steps_without_any_key_are_named_too(
    monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, ...]], copied: list[tuple[int, ...]]
) -> None:
    launch(monkeypatch, Specialized(64, 3, 2))
    spec = layer(attn_type="encoder_decoder", causal=False, direct_kv=True)
    for keys in ([0, 0], [130, 0]):
        batch = direct_batch(spec, [5, 70], keys, key_lens=keys)
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert len(used) == len(copied) == 2


def test_heads_that_share_rows_are_no_blocks() -> None:
    serve, by_heads = specialized.CallTiles.serve, torch.empty(2, 300, 64).transpose(0, 1)
    k = torch.empty(300, 2, 64)
    assert serve(LAUNCH, 64, (64, 0), k, k)
    assert not serve(LAUNCH, 64, (64, 0), k, by_heads)
    assert not serve(LAUNCH, 64, (64, 0), torch.empty(9, 16, 2, 64), torch.empty(9, 16, 2, 64)), "pages"
    assert not serve(LAUNCH, 112, (64, 64), torch.empty(300, 2, 112), torch.empty(300, 2, 112))


@pytest.mark.parametrize("block_size", [1, 256])
def test_pages_of_any_size(
    block_size: int, monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, ...]]
) -> None:
    launch(monkeypatch, LAUNCH)
    batch = paged_batch(layer(), [100, 64], [330, 64], block_size=block_size)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert used


@pytest.mark.parametrize(
    "spec",
    [
        layer(has_alibi=True),
        layer(head_size_v=32),
        layer((4, 2, 72)),
        layer(kv_cache_dtype="fp8"),
        layer(dtype="float32"),
    ],
    ids=["slopes", "smaller values", "72 elements", "fp8", "float32"],
)
def test_the_other_kernel_serves_the_rest(
    spec: LayerSpec, monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, ...]]
) -> None:
    launch(monkeypatch, LAUNCH)
    batch = paged_batch(spec, [70, 3], [70, 90], block_size=16)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert not used


def test_queries_apart_from_16_bytes_have_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, ...]]
) -> None:
    launch(monkeypatch, LAUNCH)
    batch = paged_batch(layer(), [70, 3], [70, 90], block_size=16)
    moved = torch.empty(batch.query.numel() + 4, dtype=batch.query.dtype)[4:].view(batch.query.shape)
    batch = dataclasses.replace(batch, query=moved.copy_(batch.query))
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert not used


def test_strides_and_room_are_looked_at() -> None:
    spec, k = layer(), torch.empty(8, 16, 2, 64, dtype=torch.float16)
    assert serves(spec, VALUES, k, k, LAUNCH)
    assert not serves(spec, VALUES | {"stride_qt": 72}, k, k, LAUNCH)
    apart = torch.empty(8, 16, 2, 72, dtype=torch.float16)[..., :64]
    assert not serves(spec, VALUES, apart, k, LAUNCH)
    assert not serves(spec, VALUES, k, k, Specialized(128, 9, 2)), "too many tiles"
    assert not serves(spec, VALUES | {"GROUP": 129}, k, k, LAUNCH)
    unlike = torch.empty(8, 16, 4, 64, dtype=torch.float16)[:, :, :2]
    assert not serves(spec, VALUES, k, unlike, LAUNCH), "values are where the keys are"
    assert serves(spec, VALUES, k[0], unlike[0], LAUNCH), "those of a call need not be"


def test_pages_past_32_bits_have_the_other_kernel() -> None:
    step = 16 * 2 * 64
    assert is_near(torch.empty_strided(((16 << 32) // step, 16, 2, 64), (step, 128, 64, 1), device="meta"))
    far = torch.empty_strided(((16 << 32) // step + 1, 16, 2, 64), (step, 128, 64, 1), device="meta")
    assert not is_near(far)


def test_heads_of_whole_16_elements_are_served() -> None:
    k = torch.empty(8, 16, 2, 256, dtype=torch.float16)
    sizes = [
        size for size in range(8, 520, 8) if serves(layer((4, 2, size)), VALUES, k[..., :size], k, LAUNCH)
    ]
    assert sizes == list(range(64, 257, 16))


@pytest.mark.parametrize(
    ("lens", "group", "rows", "found"),
    [
        # Equal lengths have no tiles without rows, though each request begins one before the division of all rows.
        ([64] * 16, 4, 128, (32, 2)),
        ([128] * 64, 4, 128, (256, 4)),
        # A tile may end between the heads of a token.
        ([16384], 7, 128, (896, 896)),
        ([1], 4, 128, (1, 1)),
        ([33, 33], 4, 128, (4, 2)),
        ([50, 3000], 4, 128, (97, 0)),
        ([300, 0, 300], 1, 128, (7, 0)),
        ([300, 0, 300, 41], 5, 128, (29, 0)),
        ([300, 0, 300, 41], 5, 192, (20, 0)),
    ],
)
def test_every_row_has_a_tile(lens: list[int], group: int, rows: int, found: tuple[int, int]) -> None:
    lens = [group * each for each in lens]
    count, each = tiles(sum(lens), len(lens), max(lens), rows)
    assert (count, each) == found
    starts = [sum(lens[:request]) for request in range(len(lens))]
    firsts = [request * each if each else start // rows + request for request, start in enumerate(starts)]
    for first, behind, asked in zip(firsts, [*firsts[1:], count], lens, strict=True):
        assert (behind - first) * rows >= asked


def test_tiles_of_many_keys_are_left_to_the_gpu() -> None:
    for most_keys, has_limit, count, by_place in (
        (None, False, 500, False),
        (16384, False, 500, False),
        (16384, True, 132, False),
        (300, True, 132, False),
        (300, False, 132, True),
    ):
        assert programs(500, 88, 132, has_limit, most_keys) == (count, by_place)
        assert programs(100, 88, 132, has_limit, most_keys) == (100, by_place)
        assert programs(500, 89, 132, has_limit, most_keys) == (count, False), "many requests"


@pytest.mark.parametrize("groups", [2, 3])
def test_first_tiles_of_all_requests_come_last_where_programs_take_several(
    groups: int, monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, ...]]
) -> None:
    launch(monkeypatch, Specialized(64, 2, groups))
    given: list[int] = []
    programs_of = bindings.BoundLayer.programs

    def counted(*arguments: Any) -> tuple[int, bool]:
        found = programs_of(*arguments)
        given.append(found[1])
        return found

    monkeypatch.setattr(bindings.BoundLayer, "programs", counted)
    # A CPU has four multiprocessors, of which the tiles of a place have two.
    batch = paged_batch(layer((4, 1, 64)), [560, 550], [560, 550], padding=2)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert given == [True]
    assert used == [(4,)]


@pytest.mark.parametrize("works", [1, 7, 132, 133, 264, 1000, 1024])
@pytest.mark.parametrize("programs", [1, 4, 132])
@pytest.mark.parametrize("request_tiles", [-8, 8, 0])
def test_each_program_has_some_of_the_first_and_of_the_last(
    request_tiles: int, works: int, programs: int
) -> None:
    """By the kernel's own `work_of`."""
    kernel = emulated("specialized_prefill")["specialized_prefill"]
    work_of = kernel.fn.__globals__["copy_tiles"].__globals__["work_of"]
    programs = min(works, programs)
    taken = []
    for program in range(programs):
        with placed(program, programs):
            mine = [int(work_of(turn, request_tiles)) for turn in range(-(-works // programs))]
        taken.append([each for each in mine if each < works])
    assert sorted(each for mine in taken for each in mine) == list(range(works))
    if request_tiles < 0:
        # Work that is a little shorter each time is shared evenly.
        loads = [sum(works - each for each in mine) for mine in taken]
        assert max(loads) - min(loads) <= works


H200 = Gpu(132, 227 << 10)


@pytest.mark.parametrize(
    ("size", "rows", "reqs", "kv_heads", "is_new", "groups"),
    [
        # One turn of tiles of 128 rows, and one of tiles of 192 rows, which take longer.
        (128, [2048], 1, 8, False, 2),
        (64, [2048], 1, 8, False, 2),
        (96, [256] * 16, 16, 8, False, 2),
        # Four turns, and three.
        (96, [2800] * 3, 3, 8, False, 3),
        (128, [2800] * 3, 3, 8, False, 2),
        (128, [20000], 1, 8, True, 3),
        (128, [16000], 1, 2, True, 2),
        # One turn is enough for tiles of 192 rows alone.
        (64, [2400], 1, 8, False, 3),
    ],
)
def test_tiles_have_fewer_rows_where_some_would_wait(
    size: int, rows: list[int], reqs: int, kv_heads: int, is_new: bool, groups: int
) -> None:
    found = prefill_launch(size, 2, 1 << 16, H200)
    assert found.specialized is not None
    assert found.fewer_rows is not None
    sizes = sum(rows), reqs, max(rows)
    chosen = launch_for(found.specialized, found.fewer_rows, sizes, kv_heads, 132, is_new)
    assert chosen.groups == groups


def test_kernels_of_both_launches_are_compiled_together(
    monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, ...]]
) -> None:
    both = Specialized(64, 2, 3, 1.4), Specialized(64, 2, 2)
    monkeypatch.setattr(bindings, "prefill_launch", lambda *_: PrefillLaunch(128, 64, 8, 2, *both))
    bound: list[Any] = []
    bind = bindings.BoundLayer._specialized
    monkeypatch.setattr(
        bindings.BoundLayer, "_specialized", lambda *given: bound.append(bind(*given)) or bound[-1]
    )
    batch = paged_batch(layer(), [70, 5], [70, 200])
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    kernels = [each.kernel for each in bound]
    assert [kernel.siblings for kernel in kernels] == [tuple(kernels)] * 2
    assert len(set(kernels)) == 2


@pytest.mark.parametrize(
    ("size", "tokens", "overlaps"), [(64, 300, False), (64, 600, True), (128, 300, True)]
)
def test_short_prompts_with_heads_of_64_wait_for_the_kernel_before(
    monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, ...]], size: int, tokens: int, overlaps: bool
) -> None:
    found: list[tuple[bool, bool]] = []

    def keep(make: Any) -> Any:
        def kept(kernel: Any, given: int, *rest: Any, **options: Any) -> Any:
            *others, values = rest
            found.append((values["PDL"], options.pop("launch_pdl", False)))
            return make(kernel, given, *others, values | {"PDL": False}, **options)

        return kept

    monkeypatch.setattr(bindings, "can_overlap", lambda device: True)
    monkeypatch.setattr(bindings, "gpu_of", lambda device: H200)
    for name in ("BoundKernel", "DerivingKernel"):
        monkeypatch.setattr(bindings, name, keep(getattr(bindings, name)))
    batch = paged_batch(layer((2, 1, size)), [tokens], [tokens])
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert found
    assert set(found) == {(overlaps, overlaps)}


def test_launches_that_a_gpu_has_shown_to_be_faster_are_specialized() -> None:
    h200, short_prompt = Gpu(132, 227 << 10), Specialized(64, 3, 2, by_blocks=False)
    for size in range(33, 257):
        launch = prefill_launch(size, 2, 1 << 16, h200, 4096)
        found = launch.specialized
        assert found is not None
        assert found.held == found.in_turn == (64 < size <= 96 or 128 < size <= 192)
        assert (launch.fewer_rows is not None) == (size <= 128)
        if size > 128:
            assert found[:3] == (64, 3 if size <= 192 else 2, 2)
        else:
            assert found[:3] == (64, 4 if size <= 96 else 3, 3)
            assert found.pace > 1.0
        assert prefill_launch(size, 2, 1 << 16, h200, left=256).specialized == found
        short = prefill_launch(size, 2, 1 << 16, h200, left=255).specialized
        assert short == (found if size > 128 else short_prompt)
        many = prefill_launch(size, 2, 1 << 16, h200)
        assert many == prefill_launch(size, 2, 1 << 16, h200, 4097)
        assert (many != launch) == (size <= 64)
        assert prefill_launch(size, 2, 1 << 16, h200, plain=False).specialized == found
    assert prefill_launch(64, 2, 1 << 16, h200, 512).specialized == short_prompt
    assert prefill_launch(64, 2, 1 << 16, h200, left=100).specialized == short_prompt
    assert prefill_launch(96, 2, 1 << 16, h200, 256).specialized == short_prompt


@pytest.mark.parametrize(("capability", "found"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_it_is_for_hopper(capability: tuple[int, int], found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(specialized, "gpu_of", lambda device: Gpu(132, 227 << 10))
    specialized_kernel.cache_clear()
    assert (specialized_kernel(torch.device("cuda", 0)) is not None) == found
    specialized_kernel.cache_clear()
    assert specialized_kernel(torch.device("cpu")) is None
