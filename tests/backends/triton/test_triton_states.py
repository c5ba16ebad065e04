"""State layers on TRITON, interpreted where there is no GPU, against TORCH: sizes, tiles, pools and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.triton import TritonBackend
from attnplug.backends.triton.backend import TritonStateBackend
from attnplug.backends.triton.state import impl as impls
from attnplug.core import AttentionCGSupport, BuilderConfig, Device, LayerSpec, Phase, StateDims
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.interface.impl_and_builder import make_builder, make_impl
from attnplug.core.state.caches import state_cache_for
from attnplug.runtime.states.state_step import StateStep, batch_of
from attnplug.testing.conformance import conformance_checks
from attnplug.testing.conformance.states.state_cases import draw_inputs, state_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = "layer"


def recurrent(rule: str, decay: str, heads: int, keys: int, k: int, v: int, **fields: Any) -> LayerSpec:
    dims = StateDims(rule=rule, decay=decay, drafts=3)
    sizes = {"num_heads": heads, "num_kv_heads": keys, "head_size": k, "head_size_v": v}
    return LayerSpec(**sizes, state=dims, **{"dtype": "float32", **fields})


def conv(width: int, channels: int, activation: str | None = "silu", **fields: Any) -> LayerSpec:
    dims = StateDims(rule="conv", width=width, activation=activation)
    sizes = {"num_heads": channels, "num_kv_heads": channels, "head_size": 1}
    return LayerSpec(**sizes, state=dims, **{"dtype": "float32", **fields})


LAYERS = {
    "gdn": recurrent("delta", "head", 4, 2, 16, 32),
    "kda": recurrent("delta", "row", 2, 2, 8, 8),
    "mamba2": recurrent("linear", "head", 6, 2, 16, 24, scale=1.0),
    "mamba": recurrent("linear", "row", 70, 1, 8, 1, scale=1.0),
    "one head": recurrent("linear", "head", 1, 1, 4, 40),
    "odd rows": recurrent("delta", "row", 3, 1, 20, 17),
    "odd packed": recurrent("delta", "head", 6, 3, 12, 3, scale=0.3),
    "one row": recurrent("linear", "row", 2, 2, 1, 5),
    "bfloat16": recurrent("delta", "head", 4, 2, 16, 32, dtype="bfloat16", kv_cache_dtype="bfloat16"),
    "conv": conv(4, 37),
    "conv of 2": conv(2, 8, None),
    "conv of 16": conv(16, 9, None),
    "conv float16": conv(3, 40, dtype="float16", kv_cache_dtype="float32"),
}
# A tile of few elements divides the columns of heads; the other packs heads.
TILES = (256, 1 << 12)
READS = (2, -1, 3, 3, -1, 5)
COUNTS = (1, 5, 0, 2, 19, 1)
SLOTS = (2, -1, 7, -1, -1, 8, -1, 9, *(-1,) * 14, 10, -1, -1, 11, 4, 6)
"""Pages after each token: the first request overwrites its own, and the third reads that of the fourth."""


class Layer:
    """A layer on one backend."""

    def __init__(self, backend: type, spec: LayerSpec) -> None:
        self.spec, serving = spec, backend.for_layer(spec)
        tensors = state_weights(spec, DEVICE)
        self.impl = make_impl(serving, spec, layer_name=NAME, tensors=tensors)
        page: Any = state_cache_for(spec)
        self.builder = make_builder(serving, page, [NAME], BuilderConfig(), torch.device(DEVICE))

    def run(self, step: StateStep, states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """The output of a step; its rows of padding are NaN before."""
        like = given["query"] if given["value"] is None else given["value"]
        output = torch.full(like.shape, torch.nan, dtype=like.dtype, device=DEVICE)
        metadata = self.builder.build(0, step.common)
        call = given["query"], given["key"], given["value"], states, metadata, output
        return self.impl.forward(None, *call, decay=given["decay"], beta=given["beta"])


def step_of(
    counts: tuple[int, ...] = COUNTS, reads: tuple[int, ...] = READS, slots: tuple[int, ...] = SLOTS
) -> StateStep:
    """A step of these requests, on the device."""
    common = batch_of([str(n) for n in range(len(counts))], counts, [0] * len(counts))
    places = {name: getattr(common, name).to(DEVICE) for name in ("query_start_loc", "seq_lens")}
    return StateStep.of(common.changed(**places), reads, slots)


def given_for(spec: LayerSpec, tokens: int) -> dict[str, Any]:
    """Inputs of so many tokens and two rows of padding, which are NaN."""
    found = draw_inputs(spec, tokens + 2, 3).by_token()
    for each in found.values():
        if each is not None:
            each[tokens:] = torch.nan
    return {name: None if each is None else each.to(DEVICE) for name, each in found.items()}


def pages_for(spec: LayerSpec, count: int = 12) -> torch.Tensor:
    """Pages of random numbers; those that no request reads are NaN."""
    cache = state_cache_for(spec)
    assert cache is not None
    generator = torch.Generator().manual_seed(4)
    pages = torch.randn(count, *cache.shape, generator=generator).to(DEVICE, getattr(torch, cache.dtype))
    pages[[page for page in range(count) if page not in READS]] = torch.nan
    return pages


def close(found: torch.Tensor, right: torch.Tensor, spec: LayerSpec) -> bool:
    worst = 2e-2 if "16" in spec.dtype else 1e-5
    return torch.allclose(found.float(), right.float(), rtol=worst, atol=worst, equal_nan=True)


def set_tile(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(impls, "TILES", dict.fromkeys((True, False), (tile, 1)))
    monkeypatch.setattr(impls, "_INTERPRETED_TILE", tile)
    monkeypatch.setattr(impls, "_LEAST_COLUMNS", 4)


def in_torch(spec: LayerSpec, step: StateStep, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the pages of TORCH, in the order of dimensions of the contract."""
    states = states.clone(memory_format=torch.contiguous_format)
    tokens = int(step.common.query_start_loc_cpu[-1])
    return Layer(TorchBackend, spec).run(step, states, given_for(spec, tokens)), states


def as_stored(spec: LayerSpec, states: torch.Tensor) -> torch.Tensor:
    """Pages `[channels, width - 1]` as TRITON has them in whole pages: with the channels of an input side by side."""
    if spec.kinds != ("conv",):
        return states
    return states.mT.reshape(states.shape).contiguous()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_mixed_step_has_the_outputs_and_pages_of_torch(name, tile, monkeypatch):
    set_tile(monkeypatch, tile)
    spec, step, pages = LAYERS[name], step_of(), pages_for(LAYERS[name])
    right, expected = in_torch(spec, step, pages)
    states = as_stored(spec, pages)
    found = Layer(TritonBackend, spec).run(step, states, given_for(spec, sum(COUNTS)))
    assert close(found, right, spec)
    assert close(states, as_stored(spec, expected), spec)
    assert not right[: sum(COUNTS)].isnan().any()


@pytest.mark.parametrize("name", LAYERS)
def test_single_tokens_have_a_kernel_of_their_own(name, monkeypatch):
    set_tile(monkeypatch, 256)
    spec, pages = LAYERS[name], pages_for(LAYERS[name])
    step = step_of((1, 1, 0, 1, 1), (2, -1, 5, 3, 5), (2, 7, -1, 8))
    right, expected = in_torch(spec, step, pages)
    states, layer = as_stored(spec, pages), Layer(TritonBackend, spec)
    assert layer.builder.build(0, step.common).is_single
    assert close(layer.run(step, states, given_for(spec, 4)), right, spec)
    assert close(states, as_stored(spec, expected), spec)


@pytest.mark.parametrize("name", ["gdn", "mamba", "conv"])
def test_pools_and_rows_may_be_parts_of_larger_tensors(name):
    spec, step, pages = LAYERS[name], step_of(), pages_for(LAYERS[name])
    right, expected = in_torch(spec, step, pages)
    wide = torch.full((12, 2, pages.shape[1] + 3, *(size + 2 for size in pages.shape[2:])), 7.0).to(pages)
    places = (slice(None), 1, slice(2, -1), *(slice(1, -1) for _ in pages.shape[2:]))
    wide[places] = pages
    given = given_for(spec, sum(COUNTS))
    for field in ("query", "key", "value", "decay"):
        if given[field] is not None:
            rows = given[field]
            given[field] = torch.stack([rows, rows], -1).flatten(-2)[..., ::2]
    found = Layer(TritonBackend, spec).run(step, wide[places], given)
    assert close(found, right, spec)
    assert close(wide[places], expected, spec)
    wide[places] = 7.0
    assert bool((wide == 7.0).all())


@pytest.mark.parametrize("name", ["gdn", "conv"])
def test_pages_may_be_further_apart_than_32_bits_count(name):
    spec, pages = LAYERS[name], pages_for(LAYERS[name])
    step = step_of((1, 3), (2, -1), (2, -1, -1, 4))
    _, expected = in_torch(spec, step, pages)
    apart = 1 << 30
    # Memory that nobody touches is not taken.
    pool = torch.empty(5 * apart, dtype=pages.dtype, device=DEVICE).view(5, apart)
    states = pool[:, : pages[0].numel()].unflatten(1, pages.shape[1:])
    states[2], states[4] = as_stored(spec, pages)[2], torch.nan
    assert states.stride(0) * 4 > 2**31
    Layer(TritonBackend, spec).run(step, states, given_for(spec, 4))
    for page in (2, 4):
        assert close(states[page], as_stored(spec, expected)[page], spec)


def test_rows_that_are_too_far_apart_are_refused():
    states = torch.empty(1, device="meta").as_strided((1, 1, 4, 4), (1, 1, 1 << 30, 1))
    with pytest.raises(LayoutError, match="must have a head within 2,147,483,648 elements"):
        impls.check_near(states)


def test_a_layer_forgets_kinds_of_calls_that_are_too_many():
    spec = LAYERS["gdn"]
    step, layer = step_of((1,), (-1,), (2,)), Layer(TritonBackend, spec)
    for apart in range(1, 12):
        given = given_for(spec, 1)
        rows = torch.zeros(*given["query"].shape[:2], 16 * apart).to(given["query"])
        rows[..., ::apart] = given["query"]
        given["query"] = rows[..., ::apart]
        layer.run(step, pages_for(spec), given)
    assert 0 < len(layer.impl._bound) <= 8


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"state_pages": None}, "state_pages=None is required"),
        ({"state_pages": torch.zeros(3, dtype=torch.int32)}, r"state_pages=\(3,\) must be of the shape"),
        ({"state_pages": torch.zeros(6, dtype=torch.int64)}, "must be torch.int32"),
        ({"slot_mapping": torch.zeros(28, dtype=torch.int32)}, "must be torch.int64 without gaps"),
        ({"slot_mapping": torch.zeros(56, dtype=torch.int64)[::2]}, "must be torch.int64 without gaps"),
        ({"slot_mapping": torch.zeros(27, dtype=torch.int64)}, r"slot_mapping=\(27,\) must be of the shape"),
    ],
)
def test_steps_that_kernels_would_read_wrongly_are_refused(changed, match):
    layer = Layer(TritonBackend, LAYERS["gdn"])
    with pytest.raises(BatchError, match=match):
        layer.builder.build(0, step_of().common.changed(**changed))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (recurrent("delta", "head", 2, 2, 257, 8), "head_size=257 of a state is more than 256"),
        (conv(17, 8), "a convolution of 17 inputs is wider than 16"),
        (LAYERS["gdn"], None),
        (conv(16, 8), None),
    ],
)
def test_sizes_that_no_kernel_has_are_refused(spec, reason):
    found = TritonBackend.for_layer(spec).supports_combination(spec, Device.parse("sm90"))
    assert found == reason


def test_prompts_of_recurrences_are_left_to_kernels_in_chunks():
    device, spec = Device.parse("sm90"), LAYERS["gdn"]
    assert TritonBackend.for_layer(spec) is TritonStateBackend
    ranks = {phase: TritonStateBackend.get_priority(spec, device, phase) for phase in (Phase.DECODE, None)}
    assert ranks[Phase.DECODE] > 50 > ranks[None] > 0
    assert TritonStateBackend.get_priority(LAYERS["conv"], device, None) > 50


def test_the_builder_says_what_graphs_hold():
    layer = Layer(TritonBackend, LAYERS["gdn"])
    assert layer.builder.cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


QUICK = ("states/drafts-delta-head-float32-h", "states/checkpoints-linear-row-float32-h")
CHECKS = [
    check
    for check in conformance_checks(TritonStateBackend, device=DEVICE, only=["states/*"])
    if check.id.startswith("states/")
]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(each, id=each.id, marks=() if each.id.startswith(QUICK) else pytest.mark.slow)
        for each in CHECKS
    ],
)
def test_the_kit_passes(check):
    check()
