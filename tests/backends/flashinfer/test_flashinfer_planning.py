"""Layers are planned in groups of equal hyperparameters, once per step, and only where something changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer_builders import PAGE, builder_of, common_of, costs, layer, run, wrappers
from flashinfer_on_cpu import FlashInferFa3OnCpu, FlashInferOnCpu
from flashinfer_signatures import VERSIONS

from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.backends.flashinfer.impl import FlashInferImpl
from attnplug.backends.flashinfer.options import Options
from attnplug.backends.flashinfer.planned_wrapper import workspace_bytes
from attnplug.core import Device, LayerSpec
from attnplug.errors import BatchError, PolicyError
from attnplug.runtime.steps.attention_groups import share_workspace
from attnplug.testing import assert_close, paged_batch, run_batch, tolerance

pytestmark = pytest.mark.usefixtures("fake_library")

GEMMA_2 = {
    str(i): layer(logits_soft_cap=50.0, scale=0.0625, **({"sliding_window": 4096} if i % 2 == 0 else {}))
    for i in range(4)
}
GEMMA_3 = {str(i): layer(scale=0.0625, **({} if i % 6 == 5 else {"sliding_window": 1024})) for i in range(12)}
GPT_OSS = {str(i): layer(has_sinks=True, **({"sliding_window": 128} if i % 2 == 0 else {})) for i in range(4)}


def parameters(builder: FlashInferMetadataBuilder) -> list[tuple[Any, ...]]:
    found = []
    for group, names in builder._groups.items():
        asked = group.parameters
        found.append((asked.window_left, asked.logits_soft_cap, asked.sm_scale, asked.has_sinks, len(names)))
    return found


def test_gemma_2_has_two_groups_of_one_cap() -> None:
    assert parameters(builder_of(GEMMA_2)) == [(4095, 50.0, 0.0625, False, 2), (-1, 50.0, 0.0625, False, 2)]


def test_gemma_3_has_two_groups_five_to_one() -> None:
    assert parameters(builder_of(GEMMA_3)) == [(1023, None, 0.0625, False, 10), (-1, None, 0.0625, False, 2)]


def test_gpt_oss_has_two_groups_with_sinks() -> None:
    assert parameters(builder_of(GPT_OSS)) == [(127, None, 0.125, True, 2), (-1, None, 0.125, True, 2)]


@pytest.mark.parametrize("fake_version", VERSIONS)
@pytest.mark.parametrize("specs", [GEMMA_2, GEMMA_3, GPT_OSS], ids=["gemma-2", "gemma-3", "gpt-oss"])
def test_each_group_is_planned_once_and_with_its_own_values(specs: dict[str, LayerSpec]) -> None:
    builder = builder_of(specs)
    builder.warm_up()
    metadata = builder.build(0, common_of([1, 1, 5], [5, 9, 6]))
    for group, names in builder._groups.items():
        spec = specs[names[0]]
        decode, prefill = (wrapper.planned for wrapper in wrappers(metadata, group))
        for planned in (decode, prefill):
            assert planned["window_left"] == spec.window[0]
            assert planned["logits_soft_cap"] == spec.logits_soft_cap
            assert planned["sm_scale"] == spec.scale
            assert (planned["num_qo_heads"], planned["num_kv_heads"], planned["page_size"]) == (4, 2, PAGE)
            assert planned["q_data_type"] == planned["kv_data_type"] == torch.float16
        assert prefill["causal"]
    assert {name: cost.plans for name, cost in builder.plan_costs.items()} == dict.fromkeys(
        builder.plan_costs, 1
    )
    assert len(builder.plan_costs) == 2 * len(builder._groups)


def test_the_arrays_given_to_plan_are_those_made_by_hand() -> None:
    builder = builder_of({"0": layer()})
    common = common_of([1, 1, 3], [4, 9, 6])
    table = torch.tensor([[7, -1, -1], [3, 1, 9], [5, 2, -1]], dtype=torch.int32)
    metadata = builder.build(0, dataclasses.replace(common, block_table_tensor=table))
    decode, prefill = wrappers(metadata, next(iter(builder._groups)))
    assert decode._paged_kv_indptr_buf.tolist() == [0, 1, 4]
    assert decode._paged_kv_indices_buf.tolist()[:4] == [7, 3, 1, 9]
    assert decode._paged_kv_last_page_len_buf.tolist() == [4, 1]
    assert prefill._qo_indptr_buf.tolist() == [0, 3]
    assert prefill._paged_kv_indptr_buf.tolist() == [0, 2]
    assert prefill._paged_kv_indices_buf.tolist()[:2] == [5, 2]
    assert prefill._paged_kv_last_page_len_buf.tolist() == [2]


def test_chunked_layers_are_planned_over_the_chunks_of_requests() -> None:
    builder = builder_of({"0": layer(chunk_size=8)})
    common = common_of([1, 6], [11, 12])
    table = torch.tensor([[4, 5, 6], [1, 2, 3]], dtype=torch.int32)
    metadata = builder.build(0, dataclasses.replace(common, block_table_tensor=table))
    decode, prefill = wrappers(metadata, next(iter(builder._groups)))
    # Positions 10, then 6 and 7 of the first chunk and 8 to 11 of the second.
    assert decode._paged_kv_indices_buf.tolist()[:1] == [6]
    assert decode._paged_kv_last_page_len_buf.tolist() == [3]
    assert prefill._qo_indptr_buf.tolist() == [0, 2, 6]
    assert prefill._paged_kv_indices_buf.tolist()[:3] == [1, 2, 3]
    assert prefill._paged_kv_last_page_len_buf.tolist() == [4, 4]


def test_layers_of_unlike_chunks_stand_beside_others_in_one_builder() -> None:
    specs = {"a": layer(), "b": layer(chunk_size=8), "c": layer(chunk_size=16)}
    metadata = builder_of(specs).build(0, common_of([1, 3], [9, 30]))
    assert list(metadata.pages) == [None, 8, 16]


@pytest.mark.parametrize(("backend", "planned"), [(FlashInferOnCpu, 1), (FlashInferFa3OnCpu, 2)])
def test_a_plan_is_skipped_where_nothing_it_depends_on_changed(
    backend: type[FlashInferOnCpu], planned: int
) -> None:
    builder = builder_of({"0": layer()}, backend)
    for tokens in ([6], [6], [7]):
        builder.build(0, common_of([3], tokens, seed=tokens[0]))
    # The fa2 planner counts pages only, and 6 and 7 tokens have as many; fa3's counts keys.
    assert costs(builder)[-1] == (planned, 3 - planned)
    builder.build(0, common_of([3], [9]))
    assert costs(builder)[-1] == (planned + 1, 3 - planned)


def test_lengths_within_a_page_reach_a_plan_that_is_kept() -> None:
    builder, spec = builder_of({"0": layer()}), layer()
    for tokens in (5, 6, 7, 8, 9):
        batch = paged_batch(spec, [1], [tokens], block_size=PAGE, seed=tokens)
        run(builder, batch)
    assert costs(builder) == [(2, 3)]


def test_a_step_that_another_was_planned_after_is_planned_again() -> None:
    builder, spec = builder_of({"0": layer()}), layer()
    batches = [paged_batch(spec, [1, 4], [tokens, 9], block_size=PAGE, seed=tokens) for tokens in (7, 21, 7)]
    built = [builder.build(0, batch.common) for batch in batches]
    for batch, metadata in zip(batches, built, strict=True):
        run(builder, batch, metadata)


@pytest.mark.parametrize("slots", [1, 2])
def test_arrays_of_the_batch_may_be_written_anew_for_the_next(slots: int) -> None:
    builder = builder_of({"0": layer()})
    kept = [torch.zeros(3, dtype=torch.int32) for _ in range(slots)]
    for step, (new, tokens) in enumerate(
        (([2, 4], [6, 6]), ([1, 1], [7, 7]), ([4, 2], [6, 6]), ([2, 4], [6, 6]))
    ):
        batch = paged_batch(layer(), new, tokens, block_size=PAGE)
        starts = kept[step % slots].copy_(batch.common.query_start_loc_cpu)
        common = dataclasses.replace(batch.common, query_start_loc_cpu=starts)
        run(builder, batch, builder.build(0, common))


def test_pinned_work_lists_alternate() -> None:
    builder = builder_of({"0": layer()})
    used = []
    for tokens in (5, 9, 13, 17):
        metadata = builder.build(0, common_of([1], [tokens]))
        wrapper = wrappers(metadata, next(iter(builder._groups)))[0]
        used.append(wrapper._pin_memory_int_workspace_buffer.data_ptr())
    assert used[0] != used[1]
    assert used[0] == used[2]
    assert used[1] == used[3]


def test_batches_larger_than_announced_grow_the_staging() -> None:
    builder = builder_of({"0": layer()}, max_num_seqs=1)
    run(builder, paged_batch(layer(), [1] * 9, list(range(1, 10)), block_size=PAGE))


def test_another_kv_groups_table_needs_no_plan() -> None:
    one, other = builder_of({"0": layer()}), builder_of({"0": layer()})
    first, second = (paged_batch(layer(), [1, 3], [6, 9], block_size=PAGE, seed=seed) for seed in (0, 1))
    metadata = one.build(0, first.common)
    updated = other.update_block_table(metadata, second.common.block_table_tensor, second.common.slot_mapping)
    assert other.plan_costs == {}
    run(other, second, updated)
    run(one, first, metadata)
    assert costs(one) == [(1, 0), (1, 0)]


def test_layers_told_to_leave_their_sinks_out_do_so_whatever_torchs_default_dtype_is() -> None:
    spec = layer(has_sinks=True)
    batch = paged_batch(spec, [1, 3], [6, 9], block_size=PAGE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        output, _ = run_batch(FlashInferOnCpu, batch, use_sinks=False)
    finally:
        torch.set_default_dtype(before)
    assert_close(output, batch.oracle(use_sinks=False).output, tolerance(spec).output)


def test_decodes_may_leave_tensor_cores() -> None:
    options = Options(tensor_cores=False)
    builder = builder_of({"0": layer()}, options=options)
    group = next(iter(builder._groups))
    assert [group.module(phase, Device("cpu")).template for phase in ("decode", "prefill")] == [
        "cuda-cores",
        "fa2",
    ]
    run(builder, paged_batch(layer(), [1, 1], [5, 9], block_size=PAGE))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"has_sinks": True}, "no kernel with sinks"),
        ({"num_heads": 12, "num_kv_heads": 2}, "these layers have 6"),
    ],
)
def test_decodes_without_tensor_cores_are_refused_where_no_kernel_is(
    fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(PolicyError, match=rf"tensor_cores.*False.*{why}.*leave it True"):
        builder_of({"0": layer(**fields)}, options=Options(tensor_cores=False))


@pytest.mark.parametrize(
    ("asked", "device", "fields", "template"),
    [
        ("auto", "sm90", {}, "fa3"),
        ("auto", "sm90", {"kv_cache_dtype": "fp8"}, "fa2"),
        ("auto", "sm80", {}, "fa2"),
        ("auto", "sm100", {}, "fa2"),
        ("fa2", "sm90", {}, "fa2"),
        ("fa3", "sm90", {}, "fa3"),
        ("fa3", "sm80", {}, None),
        ("fa3", "sm90", {"kv_cache_dtype": "fp8"}, None),
    ],
)
def test_prefill_runs_on_fa3_where_it_can_and_where_it_is_asked(
    asked: Any, device: str, fields: dict[str, Any], template: str | None
) -> None:
    impl = FlashInferImpl.from_spec(
        layer(**fields), backend=FlashInferOnCpu, layer_name="0", options=Options(prefill_backend=asked)
    )
    if template is not None:
        assert impl.plan_group.module("prefill", Device.parse(device)).template == template
        return
    with pytest.raises(PolicyError, match=r"prefill_backend.*'fa3'.*'auto' or 'fa2'"):
        impl.plan_group.module("prefill", Device.parse(device))


def test_one_workspace_serves_all_builders_and_is_the_largest_that_any_needs() -> None:
    small, large = builder_of({"0": layer()}), builder_of({"0": layer(num_heads=64, num_kv_heads=1)})
    large._wrappers.workspace_bytes = 200 << 20
    share_workspace([small, large])
    assert small.get_workspace_buffer() is large.get_workspace_buffer()
    assert small.get_workspace_buffer().numel() == 200 << 20
    metadata = small.build(0, common_of([1, 3], [5, 9]))
    for wrapper in wrappers(metadata, next(iter(small._groups))):
        assert wrapper._float_workspace_buffer is large.get_workspace_buffer()


def test_a_workspace_that_is_set_late_replaces_the_wrappers() -> None:
    builder = builder_of({"0": layer()})
    before = builder.build(0, common_of([1], [5]))
    buffer = torch.zeros(builder.workspace_bytes, dtype=torch.uint8)
    builder.set_workspace_buffer(buffer)
    assert wrappers(before, next(iter(builder._groups)))[0]._float_workspace_buffer is buffer


def test_a_workspace_that_is_too_small_is_refused_when_it_is_given() -> None:
    with pytest.raises(PolicyError, match=r"workspace_bytes.*4096.*bytes that split attention"):
        builder_of({"0": layer()}, options=Options(workspace_bytes=4096))
    with pytest.raises(BatchError, match="workspace=16"):
        builder_of({"0": layer()}).set_workspace_buffer(torch.zeros(16, dtype=torch.uint8))


def test_work_lists_of_fa3_have_room_for_all_heads() -> None:
    """The planner lists up to 4096 tiles of each, in seven arrays; the library's own list has 8 MiB."""
    builder = builder_of({"0": layer(num_heads=128)}, FlashInferFa3OnCpu)
    group = next(iter(builder._groups))
    sizes: dict[str, set[int]] = {"decode": set(), "prefill": set()}
    for tokens in (9, 17, 33):
        metadata = builder.build(0, common_of([1, 3], [tokens, tokens]))
        for phase, wrapper in zip(sizes, wrappers(metadata, group), strict=True):
            sizes[phase] |= {
                each.numel()
                for each in (wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
            }
    (decode,), (prefill,) = sizes["decode"], sizes["prefill"]
    assert prefill >= 4096 * 7 * 4 * 128 > 8 << 20 > decode


def test_the_workspace_holds_every_part_of_split_requests() -> None:
    def group(heads: int, kv_heads: int, size: int, **options: Any) -> PlanGroup:
        spec = layer(num_heads=heads, num_kv_heads=kv_heads, head_size=size)
        return FlashInferImpl.from_spec(
            spec, backend=FlashInferOnCpu, layer_name="0", options=Options(**options)
        ).plan_group

    assert builder_of({"0": layer()})._wrappers._multiprocessors == 1
    assert workspace_bytes([group(32, 8, 128)], 132) == 128 << 20
    # 8 heads, 264 tiles of 128 rows, 129 numbers of 4 bytes each.
    assert workspace_bytes([group(8, 1, 128)], 132) == 8 * 264 * 128 * 129 * 4 + (1 << 20)
    assert workspace_bytes([group(32, 8, 128, workspace_bytes=1 << 28)], 132) == 1 << 28


@pytest.mark.parametrize("fake_version", VERSIONS)
def test_scales_so_small_that_masks_leak_are_refused_by_versions_that_do(fake_version: str) -> None:
    spec = layer(kv_cache_dtype="fp8_e4m3")
    batch = paged_batch(spec, [1, 3], [6, 9], block_size=PAGE, k_scale=1e-4)
    if fake_version == "0.7.2":
        output, _ = run_batch(FlashInferOnCpu, batch)
        assert_close(output, batch.oracle().output, tolerance(spec).output)
        return
    with pytest.raises(BatchError, match=r"k_scale=0\.0001.*sees masked keys.*>=0\.7\.2"):
        run_batch(FlashInferOnCpu, batch)


def test_a_layer_that_the_builder_was_not_told_of_is_refused() -> None:
    builder = builder_of({"0": layer()})
    metadata = builder.build(0, common_of([1], [5]))
    for stranger, fields in (
        (layer(scale=1.0), "not among the builder"),
        (layer(chunk_size=8), "was not planned for"),
    ):
        impl = FlashInferImpl.from_spec(stranger, backend=FlashInferOnCpu, layer_name="x")
        with pytest.raises(BatchError, match=fields):
            metadata.planned(impl.plan_group)


def test_what_no_plan_can_be_made_of_is_refused() -> None:
    builder = builder_of({"0": layer()})
    common = common_of([1, 3], [5, 9])
    unlike = {
        "seq_lens_host": dataclasses.replace(
            common,
            seq_lens_host_exact=False,
            seq_lens=common.seq_lens.to("meta"),
            seq_lens_host=np.array([9, 9]),
        ),
        "key_start_loc": dataclasses.replace(common, key_start_loc=common.query_start_loc),
        "causal": dataclasses.replace(common, causal=False),
        "block_table": dataclasses.replace(common, block_table_tensor=common.block_table_tensor[:, :1]),
    }
    for field, batch in unlike.items():
        with pytest.raises(BatchError, match=field):
            builder.build(0, batch)


def test_run_batch_tells_the_builder_of_its_layer() -> None:
    batch = paged_batch(layer(sliding_window=5), [1, 3], [9, 12], block_size=PAGE)
    output, _ = run_batch(FlashInferOnCpu, batch)
    assert_close(output, batch.oracle().output, tolerance(batch.spec).output)
