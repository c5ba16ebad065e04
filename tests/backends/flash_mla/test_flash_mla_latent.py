"""FLASH_MLA decodes latents by one schedule per step, over a FlashMLA in torch that checks what it is given."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from flash_mla_on_cpu import FlashMLAOnCpu, layer

from attnplug.backends.flash_mla.builder import FlashMLABuilder
from attnplug.backends.flash_mla.impl import FlashMLAImpl, rounded
from attnplug.backends.flash_mla.library import Library
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, LayerSpec, MLADims, SparseSpec
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.testing import layer_tensors, paged_batch, run_batch
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

pytestmark = pytest.mark.usefixtures("fake_flash_mla")

BOTH = FlashMLAOnCpu.with_prefill(TorchBackend)
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1] * 5, [1, 17, 64, 150, 3]),
    "idle": ([1, 0, 1, 1], [40, 30, 5, 0]),
    "uniform": ([4] * 3, [4, 33, 90]),
    "not-uniform": ([2, 8, 1, 5], [9, 90, 3, 5]),
    "blind": ([5, 5], [2, 0]),
    "all-blind": ([3, 3], [0, 0]),
    "mixed": ([2, 2, 40, 20], [70, 9, 100, 20]),
}


def builder_of(*specs: LayerSpec, **config: Any) -> FlashMLABuilder:
    layers = {}
    for index, spec in enumerate(specs):
        name = f"layers.{index}"
        impl = FlashMLAImpl.from_spec(spec, backend=BOTH, layer_name=name, tensors=layer_tensors(spec))
        layers[name] = types.SimpleNamespace(impl=impl)
    cache: Any = kv_cache_spec_for(specs[0], 64)
    return FlashMLABuilder(cache, list(layers), BuilderConfig(layers=layers, **config), torch.device("cpu"))


def attended(builder: FlashMLABuilder, batch: Batch, metadata: Any, name: str = "layers.0") -> Output:
    impl = builder.config.layers[name].impl
    output = torch.full((batch.query.shape[0], batch.spec.num_heads, 12), torch.nan, dtype=batch.query.dtype)
    lse = torch.full(output.shape[:2], torch.nan) if batch.spec.needs_lse else None
    impl.forward(None, batch.query, batch.key, None, batch.kv_cache, metadata, output, output_lse=lse)
    return Output(output, lse)


@pytest.mark.parametrize("heads", [1, 4, 12, 16, 20, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_absorbed_equals_expanded(heads: int, dtype: str) -> None:
    batch = paged_batch(
        layer(heads, needs_lse=True, dtype=dtype), [2, 2, 2], [40, 70, 2], block_size=64, padding=2
    )
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_steps(name: str, kind: str) -> None:
    new, tokens = STEPS[name]
    spec = layer(needs_lse=True, kv_cache_dtype=kind)
    batch = paged_batch(spec, new, tokens, block_size=64, padding=3, k_scale=0.7, backend=BOTH)
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


def test_latents_without_a_rope_part() -> None:
    dims = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=0, v_head_dim=12)
    batch = paged_batch(layer(mla=dims, head_size=512), [1, 1], [40, 130], block_size=64)
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


def test_a_step_has_one_schedule_for_all_layers_and_each_has_its_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []
    schedule = Library.schedule

    def counted(library: Library, lens: torch.Tensor, *args: Any) -> Any:
        made.append(args)
        return schedule(library, lens, *args)

    monkeypatch.setattr(Library, "schedule", counted)
    specs = layer(needs_lse=True), layer(needs_lse=True, scale=0.3)
    builder = builder_of(*specs)
    batches = [paged_batch(spec, [2, 2, 2], [9, 130, 17], block_size=64) for spec in specs]
    metadata = builder.build(0, batches[0].common)
    for index, batch in enumerate(batches):
        assert difference(batch, attended(builder, batch, metadata, f"layers.{index}")) is None
    assert made == [(2 * 4, False)]


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("other", [[150, 2], [150, 2, 70]], ids=["same-shape", "more-requests"])
def test_a_step_that_was_built_before_another_is_scheduled_again(kind: str, other: list[int]) -> None:
    spec = layer(kv_cache_dtype=kind)
    builder = builder_of(spec)
    batches = [
        paged_batch(spec, [1] * len(tokens), tokens, block_size=64, seed=seed, backend=BOTH)
        for seed, tokens in enumerate(([9, 130], other))
    ]
    built = [builder.build(0, batch.common) for batch in batches]
    for batch, metadata in zip(batches, built, strict=True):
        assert difference(batch, attended(builder, batch, metadata)) is None


def test_a_later_step_of_a_shape_fills_the_schedule_that_a_graph_reads() -> None:
    builder = builder_of(layer())
    steps = [paged_batch(layer(), [1, 1], tokens, block_size=64) for tokens in ([9, 130], [150, 2])]
    first = builder.build_for_cudagraph_capture(steps[0].common).decode
    kept = builder._schedules.of(first, 4)
    addresses = [each.data_ptr() for each in kept._kept or ()]
    second = builder.build(0, steps[1].common).decode
    assert builder._schedules.of(second, 4) is kept
    assert [each.data_ptr() for each in kept._kept or ()] == addresses
    assert kept.scheduled.num_splits.tolist() == [0, 151, 154]


def test_rows_of_padding_do_not_take_the_precision_of_others() -> None:
    query = torch.randn(4, 2, 576).to(torch.bfloat16)
    query[1], query[2] = torch.nan, torch.inf
    values, scale = rounded(query)
    finite = query[[0, 3]].float()
    assert float(scale) == pytest.approx(float(finite.abs().amax()) / 448)
    found = values[[0, 3]].float() * scale
    assert torch.allclose(found, finite, rtol=2**-4, atol=float(scale) * 2**-9)
    assert rounded(torch.zeros(1, 1, 576))[0].float().abs().amax() == 0


def test_more_requests_than_flash_mla_schedules_are_refused() -> None:
    builder = builder_of(layer())
    builder._most = 1
    batch = paged_batch(layer(), [1, 1], [9, 30], block_size=64)
    with pytest.raises(BatchError, match="more than the 1 that FlashMLA schedules"):
        builder.build(0, batch.common)


def test_pages_that_are_not_aligned_are_refused() -> None:
    builder = builder_of(layer())
    batch = paged_batch(layer(), [1, 1], [9, 130], block_size=64)
    metadata = builder.build(0, batch.common)
    pages = batch.kv_cache
    assert pages is not None
    wide = torch.zeros(pages.shape[0], 64 * 576 + 4, dtype=pages.dtype)
    odd = wide[:, : 64 * 576].view(pages.shape)
    with pytest.raises(LayoutError, match="multiples of 16 bytes"):
        attended(builder, types.SimpleNamespace(**vars_of(batch), kv_cache=odd), metadata)  # type: ignore[arg-type]


def vars_of(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("query", "key", "spec")}


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("sparse", [SparseSpec("token_topk", 24), SparseSpec("block", 8, 16)], ids=str)
def test_chosen_latents(page: int, sparse: SparseSpec) -> None:
    spec = layer(needs_lse=True, sparse=sparse)
    batch = paged_batch(spec, [1, 3, 40, 2], [200, 9, 300, 0], block_size=page, padding=2)
    backend = FlashMLAOnCpu.for_layer(spec)
    assert difference(batch, Output(*run_batch(backend, batch))) is None
