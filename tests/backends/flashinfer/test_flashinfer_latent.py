"""FLASHINFER decodes latents by one plan per step, over a FlashInfer in torch that attends what was planned."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.flashinfer.latent import FlashInferMLABuilder, FlashInferMLAImpl
from attnplug.backends.flashinfer.latent_backend import FlashInferMLABackend
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.triton.backend import TritonBackend
from attnplug.core import BuilderConfig, Device, LayerSpec, MLADims, Phase, SparseSpec
from attnplug.core.errors import BackendUnavailableError, BatchError
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.testing import layer_tensors, paged_batch, run_batch
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

pytestmark = pytest.mark.usefixtures("fake_library")

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=12)
HOPPER, CPU = Device("cuda", (9, 0)), torch.device("cpu")


class LatentOnCpu(FlashInferMLABackend):
    """As it is, but on a CPU, where only the FlashInfer of these tests runs."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = ()
    device_types: ClassVar[Sequence[str]] = ("cpu",)

    @classmethod
    def get_impl_cls(cls) -> type[FlashInferMLAImpl]:
        return FlashInferMLAImpl

    @classmethod
    def get_builder_cls(cls) -> type[FlashInferMLABuilder]:
        return FlashInferMLABuilder


BOTH = LatentOnCpu.with_prefill(TorchBackend)


@pytest.fixture
def fake_version() -> str:
    return "0.6.13"


def layer(heads: int = 4, **fields: Any) -> LayerSpec:
    return LayerSpec(**{"num_heads": heads, "num_kv_heads": 1, "head_size": 576, "mla": DIMS} | fields)


def builder_of(*specs: LayerSpec, page: int = 4, **config: Any) -> FlashInferMLABuilder:
    layers = {}
    for index, spec in enumerate(specs):
        name = f"layers.{index}"
        impl = FlashInferMLAImpl.from_spec(spec, backend=BOTH, layer_name=name, tensors=layer_tensors(spec))
        layers[name] = types.SimpleNamespace(impl=impl)
    cache: Any = kv_cache_spec_for(specs[0], page)
    return FlashInferMLABuilder(cache, list(layers), BuilderConfig(layers=layers, **config), CPU)


def attended(builder: FlashInferMLABuilder, batch: Batch, metadata: Any, name: str = "layers.0") -> Output:
    impl = builder.config.layers[name].impl
    output = torch.full((batch.query.shape[0], batch.spec.num_heads, 12), torch.nan, dtype=batch.query.dtype)
    lse = torch.full(output.shape[:2], torch.nan) if batch.spec.needs_lse else None
    impl.forward(None, batch.query, batch.key, None, batch.kv_cache, metadata, output, output_lse=lse)
    return Output(output, lse)


def plans(builder: FlashInferMLABuilder) -> list[dict[str, Any]]:
    return [plan for wrapper in builder._plans._wrappers.values() for plan in wrapper.plans]


@pytest.mark.parametrize("heads", [1, 4, 12, 16, 20, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_absorbed_equals_expanded(heads: int, dtype: str) -> None:
    batch = paged_batch(
        layer(heads, needs_lse=True, dtype=dtype), [1, 3, 2], [40, 7, 2], block_size=16, padding=2
    )
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


@pytest.mark.parametrize(
    ("new", "tokens"),
    [
        ([1] * 5, [1, 17, 64, 150, 3]),
        ([1, 0, 1, 1], [40, 30, 5, 0]),
        ([4] * 3, [4, 33, 90]),
        ([2, 8, 1, 5], [9, 90, 3, 2]),
        ([5, 3], [2, 0]),
        ([3, 2], [0, 0]),
        ([1, 2, 40, 20], [70, 9, 100, 20]),
    ],
    ids=["decode", "idle", "uniform", "before-0", "blind", "all-blind", "mixed"],
)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_steps(new: list[int], tokens: list[int], page: int) -> None:
    batch = paged_batch(layer(needs_lse=True), new, tokens, block_size=page, padding=3)
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


def test_a_step_is_planned_once_for_all_layers_and_each_has_its_scale() -> None:
    specs = layer(needs_lse=True), layer(needs_lse=True, scale=0.3)
    builder = builder_of(*specs)
    batches = [paged_batch(spec, [1, 1, 3], [9, 30, 17], block_size=4) for spec in specs]
    metadata = builder.build(0, batches[0].common)
    for index, batch in enumerate(batches):
        assert difference(batch, attended(builder, batch, metadata, f"layers.{index}")) is None
    (plan,) = plans(builder)
    assert plan == {
        "causal": True,
        "num_heads": 4,
        "page_size": 4,
        "requests": 3,
        "queries": [1, 1, 3],
        "lengths": [9, 30, 17],
    }
    assert builder.plan_costs["decode"].plans == 1
    # Decodes of one query see all their keys.
    builder.build(0, paged_batch(specs[0], [1, 1], [9, 30], block_size=4).common)
    assert [each["causal"] for each in plans(builder)] == [True, False]


def test_a_step_that_was_built_before_another_is_planned_again() -> None:
    builder = builder_of(layer())
    batches = [
        paged_batch(layer(), [1, 1], tokens, block_size=4, seed=seed)
        for seed, tokens in enumerate(([9, 30], [50, 2]))
    ]
    built = [builder.build(0, batch.common) for batch in batches]
    for batch, metadata in zip(batches, built, strict=True):
        assert difference(batch, attended(builder, batch, metadata)) is None
    assert [plan["lengths"] for plan in plans(builder)] == [[9, 30], [50, 2], [9, 30], [50, 2]]


def test_the_engine_may_change_its_arrays_after_a_build() -> None:
    builder, batch = builder_of(layer()), paged_batch(layer(), [1, 1], [9, 30], block_size=4)
    first = builder.build(0, batch.common)
    host, starts = batch.common.seq_lens_host, batch.common.query_start_loc_cpu
    assert host is not None
    kept = host.copy(), starts.clone()
    builder.build(0, paged_batch(layer(), [1], [3], block_size=4).common)
    host[:] = 1
    starts[1] = 2
    found = attended(builder, batch, first)
    host[:] = kept[0]
    starts.copy_(kept[1])
    assert difference(batch, found) is None


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 0, 4], [2, 3, 1]])
def test_a_plan_reads_the_pages_where_they_are_unless_the_kernel_cannot(new: list[int]) -> None:
    builder, batch = builder_of(layer()), paged_batch(layer(), new, [9, 30, 2], block_size=4)
    table = batch.common.block_table_tensor
    wide = torch.full((3, 2 * table.shape[1]), -1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    for given, is_read in (
        (table, True),
        (wide, True),
        (wide[:, : table.shape[1]], False),
        (table.long(), False),
    ):
        metadata = builder.build(0, dataclasses.replace(batch.common, block_table_tensor=given))
        assert difference(batch, attended(builder, batch, metadata)) is None
        (wrapper,) = builder._plans._wrappers.values()
        assert (wrapper._kv_indices_buf.data_ptr() == given.data_ptr()) is is_read


@pytest.mark.parametrize(("rows", "is_read"), [(1023, True), (1024, False)])
def test_pages_are_gathered_where_the_kernel_would_count_past_32_bits(rows: int, is_read: bool) -> None:
    plans = builder_of(layer(), page=16)._plans
    table = torch.empty(rows, 1 << 17, dtype=torch.int32, device="meta")
    assert (plans.in_place(table) is not None) is is_read


def test_a_build_of_decodes_makes_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an array would pay for the memory that FlashInfer's planner freed."""
    count, peaks = 4096, []
    builder = builder_of(layer())
    batch = paged_batch(layer(), [1] * count, [3] * count, block_size=4)
    builder.build(0, batch.common)
    (wrapper,) = builder._plans._wrappers.values()
    monkeypatch.setattr(wrapper, "plan", lambda *arrays: None)
    # Every second build makes the block of the next ones.
    for _ in range(3):
        tracemalloc.start()
        builder.build(0, batch.common)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < count, "less than a byte for each request"


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_captured_step_keeps_its_buffers_and_is_planned_anew_for_each_replay(query_len: int) -> None:
    spec = layer()
    builder = builder_of(spec, num_speculative_tokens=query_len - 1)
    bound = paged_batch(spec, [query_len] * 2, [60, 60], block_size=4)
    common = dataclasses.replace(bound.common, seq_lens_host_exact=False)
    builder.build_for_cudagraph_capture(common)
    wrapper = builder._plans._wrappers[2, query_len]
    read = wrapper._kv_indices_buf.data_ptr(), wrapper._int_workspace_buffer.data_ptr()
    assert wrapper._use_cuda_graph
    for seed, tokens in enumerate(([7, 41], [33, 3], [59, 60])):
        batch = paged_batch(spec, [query_len] * 2, tokens, block_size=4, seed=seed)
        builder.build(0, batch.common)
        assert difference(batch, replayed(builder, batch, wrapper)) is None
        assert (wrapper._kv_indices_buf.data_ptr(), wrapper._int_workspace_buffer.data_ptr()) == read
    # Steps of other sizes leave the buffers of the graph alone.
    before = wrapper._kv_indices_buf.clone()
    other = paged_batch(spec, [1] * 3, [9, 8, 7], block_size=4)
    metadata = builder.build(0, other.common)
    assert difference(other, attended(builder, other, metadata)) is None
    assert torch.equal(before, wrapper._kv_indices_buf)
    long = paged_batch(spec, [query_len] * 2, [90, 90], block_size=4)
    with pytest.raises(BatchError, match="pages=46 are more than the 30 that graphs were captured for"):
        builder.build(0, long.common)


def test_padding_of_a_graph_stays_in_its_plan() -> None:
    builder = builder_of(layer(), num_speculative_tokens=2)
    builder.build_for_cudagraph_capture(paged_batch(layer(), [3] * 4, [60] * 4, block_size=4).common)
    common = paged_batch(layer(), [3] * 4, [40, 9, 3, 3], block_size=4).common

    def planned(lens: list[int]) -> tuple[Any, Any]:
        host = np.array(lens, dtype=np.int32)
        step = dataclasses.replace(common, seq_lens=torch.from_numpy(host), seq_lens_host=host)
        builder.build(0, step)
        captured = builder._plans._planned.captured  # type: ignore[union-attr]
        return captured, builder._plans._wrappers[captured].plans[-1]["lengths"]

    assert planned([40, 9, 1, 1]) == ((4, 3), [40, 9, 3, 3])
    assert planned([40, 9, 7, 1]) == ((4, 3), [40, 9, 7, 3])
    # A request that is no padding has queries without keys, which this kernel cannot serve in a graph.
    assert planned([40, 1, 7, 9]) == (None, [40, 1, 7, 9])


def replayed(builder: FlashInferMLABuilder, batch: Batch, wrapper: Any) -> Output:
    """The answer of a step that was just built, by the wrapper of the graph alone."""
    assert builder._plans._planned is not None
    assert builder._plans._wrappers[builder._plans._planned.captured] is wrapper
    cut = batch.common.num_actual_tokens
    metadata = types.SimpleNamespace(
        slot_mapping=batch.common.slot_mapping[:cut],
        num_actual_tokens=cut,
        num_decode_tokens=cut,
        decode=builder._plans._planned,
        prefill=None,
        selected=None,
    )
    return attended(builder, batch, metadata)


def test_a_captured_step_has_queries_of_one_length_that_are_decoded() -> None:
    builder = builder_of(layer())
    for new in ([1, 2], [20, 20]):
        batch = paged_batch(layer(), new, [30, 30], block_size=4)
        with pytest.raises(BatchError, match="must be that of every request, and at most 8"):
            builder.build_for_cudagraph_capture(batch.common)


def test_lengths_that_the_host_does_not_know_are_refused() -> None:
    batch = paged_batch(layer(), [1], [9], block_size=4)
    with pytest.raises(BatchError, match="must be the exact lengths of the requests"):
        builder_of(layer()).build(0, dataclasses.replace(batch.common, seq_lens_host=None))
    narrow = dataclasses.replace(batch.common, block_table_tensor=batch.common.block_table_tensor[:, :2])
    with pytest.raises(BatchError, match="has no room for a request of 3 pages"):
        builder_of(layer()).build(0, narrow)


def test_more_decodes_than_the_work_list_has_room_for_are_refused() -> None:
    count = 8193
    ones = np.ones(count, dtype=np.int32)
    batch = paged_batch(layer(), [1], [3], block_size=4)
    starts = torch.arange(count + 1, dtype=torch.int32)
    common = dataclasses.replace(
        batch.common,
        num_reqs=count,
        num_actual_tokens=count,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(ones),
        seq_lens_host=ones,
        block_table_tensor=torch.ones(count, 1, dtype=torch.int32),
        slot_mapping=torch.full((count,), -1),
    )
    with pytest.raises(BatchError, match="queries are 8193 tiles of FlashInfer's work list, more than 8192"):
        builder_of(layer()).build(0, common)


def test_a_flashinfer_without_the_wrapper_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["flashinfer.mla"], "BatchMLAPagedAttentionWrapper")
    batch = paged_batch(layer(), [1], [9], block_size=4)
    with pytest.raises(BackendUnavailableError, match="has no BatchMLAPagedAttentionWrapper; pip install"):
        builder_of(layer()).build(0, batch.common)


def test_heads_are_padded_to_a_power_of_two() -> None:
    assert [FlashInferMLABackend.padded_heads(n) for n in (1, 12, 16, 20, 96, 128)] == [
        1,
        16,
        16,
        32,
        128,
        128,
    ]
    assert FlashInferMLABackend.notes(layer(20)) == ("20 heads padded to 32",)
    assert FlashInferMLABackend.notes(layer(16)) == ()


@pytest.mark.parametrize(
    ("spec", "device", "reason"),
    [
        (layer(), HOPPER, None),
        (layer(128), Device("cuda", (8, 0)), None),
        (layer(129), HOPPER, "combination not supported: num_heads=129 is more than 128, the rows of a tile"),
        (layer(), Device("cuda", (8, 9)), "gives zeros for scattered pages on compute capability 8.9"),
        (layer(), Device("cuda", (12, 0)), "gives zeros for scattered pages on compute capability 12.0"),
        (layer(kv_cache_dtype="fp8"), HOPPER, "kv_cache_dtype not supported"),
        (layer(dtype="float32"), HOPPER, "dtype not supported"),
        (
            layer(scale=2.0**-12),
            HOPPER,
            "scale=0.000244141 is below 0.000488281: FlashInfer masks with a finite",
        ),
        (layer(sparse=SparseSpec("token_topk", 8)), HOPPER, "sparse token_topk 8 not supported"),
        (
            layer(head_size=320, mla=dataclasses.replace(DIMS, kv_lora_rank=256)),
            HOPPER,
            "kv_lora_rank + qk_rope_head_dim of 256+64 is not one of 512+64",
        ),
    ],
)
def test_declarations(spec: LayerSpec, device: Device, reason: str | None) -> None:
    reasons = [str(each) for each in FlashInferBackend.validate_configuration(spec, device, Phase.DECODE)]
    assert (not reasons) if reason is None else any(reason in each for each in reasons), reasons


def test_it_decodes_alone_and_comes_after_triton() -> None:
    serving = FlashInferBackend.for_layer(layer())
    assert serving is FlashInferMLABackend
    for device in (HOPPER, Device("cuda", (8, 0))):
        triton = TritonBackend.for_layer(layer()).get_priority(layer(), device, Phase.DECODE)
        assert serving.get_priority(layer(), device, Phase.DECODE) < triton
    assert any(
        "phase" in str(each) for each in serving.validate_configuration(layer(), HOPPER, Phase.PREFILL)
    )
    assert serving.compile_key(layer()) != serving.compile_key(layer(dtype="float16"))
    assert FlashInferBackend.for_layer(layer(mla=None, num_kv_heads=1)) is FlashInferBackend
