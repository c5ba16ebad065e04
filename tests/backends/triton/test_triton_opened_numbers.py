"""Pages with scales of rows are opened as float16 numbers for the prefill kernel with specialised warps, emulated on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gluon_emulation import emulated

from attnplug.backends.triton import TritonBackend, bindings, opened
from attnplug.backends.triton.impl import TritonImpl
from attnplug.backends.triton.launch import Gpu, PrefillLaunch, Specialized
from attnplug.backends.triton.opened import Opened, PageOpener
from attnplug.core import LayerSpec
from attnplug.core.kv_format import kv_format
from attnplug.ops.kv_codec import page_planes
from attnplug.testing import Batch, paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

FORMATS = ("int8_token_head", "rotated4")
EXTENDS = [1, 20, 3, 30, 17], [33, 64, 130, 101, 17]
PROMPTS = [20, 30, 17], [64, 30, 19]
_OPEN = PageOpener.__call__


def layer(name: str, **fields: Any) -> LayerSpec:
    sizes = {"num_heads": 32, "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
    return LayerSpec(**{**sizes, "kv_cache_dtype": name, **fields})


class Seen:
    """The launches of the kernel, and the pages that were opened."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.opened: list[Opened] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    kernel, found = emulated("specialized_prefill")["specialized_prefill"], Seen()

    class Counted:
        fn = staticmethod(kernel.fn)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            found.grids.append(grid)
            return kernel[grid]

    def kept(self: PageOpener, *args: Any) -> Any:
        found.opened.append(_OPEN(self, *args))
        return found.opened[-1]

    both = Specialized(64, 2, 3, 1.4, in_turn=True, held=True), Specialized(128, 2, 2)
    chosen = PrefillLaunch(128, 64, 8, 2, *both)
    monkeypatch.setattr(bindings, "specialized_kernel", lambda device: Counted())
    monkeypatch.setattr(bindings, "prefill_launch", lambda *_: chosen)
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: True)
    monkeypatch.setattr(PageOpener, "__call__", kept)
    return found


def check(batch: Batch, seen: Seen) -> None:
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert seen.grids
    assert all(each.powers is not None for each in seen.opened)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("step", "fields", "given"),
    [
        (EXTENDS, {"needs_lse": True}, {"padding": 3, "skip_blocks": 2}),
        (PROMPTS, {"has_sinks": True, "needs_lse": True}, {"numbers": "wide", "block_size": 128}),
        (EXTENDS, {"sliding_window": 40, "has_sinks": True}, {"block_size": 24, "skip_blocks": 2}),
        (EXTENDS, {"chunk_size": 24}, {"layout": "HND", "numbers": "sharp"}),
        (PROMPTS, {"num_heads": 64, "num_kv_heads": 2, "head_size": 96}, {"layout": "HND"}),
        (
            PROMPTS,
            {"num_heads": 64, "num_kv_heads": 2, "head_size": 80, "has_sinks": True, "needs_lse": True},
            {},
        ),
        (PROMPTS, {"causal": False}, {"numbers": "far"}),
        (([70, 150], [200, 700]), {}, {"block_size": 1}),
        (([90, 150], [90, 200]), {"num_heads": 14, "num_kv_heads": 2, "needs_lse": True}, {"skip_blocks": 1}),
    ],
    ids=["mixed", "prompts", "window", "chunk", "96", "80", "all", "many pages", "groups of 7"],
)
def test_prompts_and_extends(
    name: str,
    step: tuple[list[int], list[int]],
    fields: dict[str, Any],
    given: dict[str, Any],
    seen: Seen,
) -> None:
    check(paged_batch(layer(name, **fields), *step, **given), seen)


def scales_of(batch: Batch, name: str) -> list[torch.Tensor]:
    """The scales of keys and of values of the one KV head, `[num_blocks, block_size]`, in the cache's memory."""
    assert batch.kv_cache is not None
    form = kv_format(name)
    planes = [page_planes(batch.kv_cache[:, part], form, 64)[1] for part in range(2)]
    return [each.view(getattr(torch, form.planes[1].dtype))[..., 0, 0] for each in planes]


def check_powers(batch: Batch, name: str, lows: list[int], seen: Seen) -> None:
    """Each request's powers are those of its largest scales, of keys from `lows` on."""
    table, powers = batch.common.block_table_tensor, seen.opened[-1].powers
    assert powers is not None
    for request, (low, length) in enumerate(zip(lows, batch.seq_lens, strict=True)):
        positions = torch.arange(low, length)
        for part, each in enumerate(scales_of(batch, name)):
            size = each.shape[1]
            top = each[table[request, positions // size].long(), positions % size].float().max()
            bits = 7 if name == "int8_token_head" else 3
            assert powers[part, request, 0] == 2.0 ** (top.log2().floor() + bits - 14)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "fields", [{}, {"sliding_window": 40}, {"chunk_size": 24}], ids=["all", "window", "chunk"]
)
def test_rows_that_no_query_sees_do_not_count(
    name: str, fields: dict[str, Any], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "_SCALES", 16)
    new, lens = [20, 30, 17], [64, 101, 99]
    batch = paged_batch(layer(name, **fields), new, lens, block_size=16, skip_blocks=2)
    table, scales, lows = batch.common.block_table_tensor, scales_of(batch, name), []
    kept = torch.zeros(scales[0].shape, dtype=torch.bool)
    for request, (queries, length) in enumerate(zip(new, lens, strict=True)):
        first = length - queries
        lows.append(max(first - 39, 0) if "sliding_window" in fields else first // 24 * 24 if fields else 0)
        positions = torch.arange(lows[-1], first)
        kept[table[request, positions // 16].long(), positions % 16] = True
    for each in scales:
        each[~kept] = 6e4
    check(batch, seen)
    check_powers(batch, name, lows, seen)


@pytest.mark.parametrize("name", FORMATS)
def test_many_spans_of_scales(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "_SCALES", 16)
    batch = paged_batch(layer(name), [17, 20], [100, 2300], block_size=128)
    check(batch, seen)
    check_powers(batch, name, [0, 0], seen)
    for each in scales_of(batch, name):
        # One row of a page that only the last spans have.
        each[batch.common.block_table_tensor[1, 17].long(), 50] *= 16.0
    run_batch(TritonBackend, batch)
    check_powers(batch, name, [0, 0], seen)


def scaled(batch: Batch, name: str, factors: torch.Tensor) -> None:
    """Multiply all new keys or values, which are all that there are, by powers of two, one for each token."""
    rows = getattr(batch, name)
    rows[: len(factors)] *= factors[:, None, None].to(rows.dtype)
    at = 0
    for each in getattr(batch, f"{name}s"):
        each *= factors[at : at + len(each), None, None].to(each.dtype)
        at += len(each)


def powers_of_two(count: int, low: int, high: int) -> torch.Tensor:
    return 2.0 ** torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_very_unlike_scales(name: str, seen: Seen) -> None:
    low = -20 if name == "int8_token_head" else -12  # of scales in float16
    batch = paged_batch(layer(name, needs_lse=True), [40, 64], [40, 64])
    scaled(batch, "value", powers_of_two(104, low, 13))
    check(batch, seen)
    scaled(batch, "key", powers_of_two(104, low, 2))
    check(batch, seen)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_zeros(name: str, seen: Seen) -> None:
    batch = paged_batch(layer(name, needs_lse=True), [40, 64], [40, 64])
    factors = torch.ones(104)
    factors[:40] = 0.0
    factors[50:80] = 0.0
    scaled(batch, "key", factors)
    scaled(batch, "value", factors)
    check(batch, seen)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_size", [96, 64])
def test_queries_of_any_size(name: str, head_size: int, seen: Seen) -> None:
    batch = paged_batch(layer(name, head_size=head_size, needs_lse=True), [40, 64], [40, 64])
    # Both parts of a head have sizes of their own.
    sizes = powers_of_two(104 * 32 * 2, -60, 1).view(104, 32, 2)
    sizes = sizes.repeat_interleave(torch.tensor([64, head_size - 64]), -1)
    sizes[7] = 0.0
    batch.query[:104] *= sizes.to(batch.query.dtype)
    at = 0
    for each in batch.queries:
        each *= sizes[at : at + len(each)].to(each.dtype)
        at += len(each)
    check(batch, seen)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("factor", [2.0**12, float("inf"), float("nan")])
def test_keys_of_a_request_do_not_change_another_one(name: str, factor: float, seen: Seen) -> None:
    batch = paged_batch(layer(name), [40, 64], [40, 64])
    before = run_batch(TritonBackend, batch)[0].clone()
    columns = slice(None) if factor == 2.0**12 else 5
    batch.key[30:40, :, columns] *= factor
    batch.value[30:40, :, columns] *= factor
    after = run_batch(TritonBackend, batch)[0]
    assert torch.equal(before[40:104], after[40:104])
    assert len(seen.grids) == 2
    if factor == 2.0**12:
        assert torch.isfinite(after).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "fields",
    [{"dtype": "float16"}, {"dtype": "float32"}, {"logits_soft_cap": 20.0}, {"has_alibi": True}],
    ids=str,
)
def test_other_layers_have_codes_and_scales(name: str, fields: dict[str, Any], seen: Seen) -> None:
    batch = paged_batch(layer(name, **fields), *PROMPTS)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert not seen.grids
    assert all(each.form is not None for each in seen.opened)
    assert bool(seen.opened) == (fields.get("dtype") != "float32")


@pytest.mark.parametrize("name", FORMATS)
def test_queries_apart_from_16_bytes(name: str, seen: Seen) -> None:
    batch = paged_batch(layer(name), *PROMPTS)
    moved = torch.empty(batch.query.numel() + 4, dtype=batch.query.dtype)[4:].view(batch.query.shape)
    batch = dataclasses.replace(batch, query=moved.copy_(batch.query))
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert not seen.grids


def test_rotated_rows_of_more_columns_have_codes_and_scales(seen: Seen) -> None:
    batch = paged_batch(layer("rotated4", head_size=144), *PROMPTS)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert not seen.grids
    assert all(each.form is not None for each in seen.opened)
    assert seen.opened


@pytest.mark.parametrize(("name", "columns"), [("int8_token_head", 80), ("rotated4", 128)])
def test_rotated_rows_have_launches_of_whole_tiles(
    name: str, columns: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, asked = bindings.prefill_launch(80, 2, 128, Gpu(132, 227 << 10)), []
    monkeypatch.setattr(bindings, "prefill_launch", lambda size, *_: asked.append(size) or chosen)
    check(paged_batch(layer(name, head_size=80), [20], [40]), seen)
    assert asked[-1] == columns


@pytest.mark.parametrize("name", FORMATS)
def test_keys_far_below_a_sink_keep_their_outputs(name: str, seen: Seen) -> None:
    """Weights of float16 would be 0 beside a sink of e**60."""
    batch = paged_batch(layer(name, has_sinks=True, needs_lse=True), *PROMPTS)
    sinks = torch.full_like(batch.tensors.sinks, 60.0)
    batch = dataclasses.replace(batch, tensors=dataclasses.replace(batch.tensors, sinks=sinks))
    check(batch, seen)
    assert 0 < float(run_batch(TritonBackend, batch)[0][:67].abs().max()) < 1e-20


@pytest.mark.parametrize("fields", [{"head_size": 32}, {"has_alibi": True}, {"head_size": 64}], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_is_bound_once(
    name: str, fields: dict[str, Any], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the kernel does not serve, whose pages are opened as codes and scales."""
    made: list[object] = []
    bind = bindings.BoundLayer.__init__

    def counted(self: object, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        bind(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(bindings.BoundLayer, "__init__", counted)
    batch = paged_batch(layer(name, **fields), *PROMPTS)
    impls = []
    make = TritonImpl.from_spec.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        TritonImpl,
        "from_spec",
        classmethod(
            lambda cls, *args, **kwargs: (
                impls[0] if impls else impls.append(make(cls, *args, **kwargs)) or impls[0]
            )
        ),
    )
    run_batch(TritonBackend, batch)
    first = len(made)
    run_batch(TritonBackend, batch)
    assert len(made) == first
    assert all((each.powers is not None) == (fields == {"head_size": 64}) for each in seen.opened)
