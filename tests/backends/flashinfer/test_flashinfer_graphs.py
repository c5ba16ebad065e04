"""Captured steps: over buffers that stay, in a workspace that holds them, planned by the builder that is captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flashinfer_builders import PAGE, builder_of, common_of, layer, run, wrappers
from flashinfer_on_cpu import FlashInferOnCpu

from attnplug.core import LayerSpec
from attnplug.errors import BatchError
from attnplug.testing import paged_batch

pytestmark = pytest.mark.usefixtures("fake_library")


def test_a_captured_step_keeps_its_buffers_and_other_steps_do_not_touch_them() -> None:
    builder = builder_of({"0": layer()}, cudagraph_batch_sizes=(2,), max_model_len=16)
    capture = dataclasses.replace(
        common_of([1, 1], [16, 16]),
        max_seq_len=16,
        seq_lens_host_exact=False,
        slot_mapping=torch.tensor([-1, -1]),
    )
    group = next(iter(builder._groups))
    kept = wrappers(builder.build_for_cudagraph_capture(capture), group)[0]
    names = ("_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")
    places = [getattr(kept, name).data_ptr() for name in names]
    for new, tokens in (([1, 1], [3, 14]), ([1, 4], [9, 4]), ([1], [5]), ([1, 1], [16, 1])):
        batch = paged_batch(layer(), new, tokens, block_size=PAGE, seed=tokens[0])
        batch.common.max_seq_len = 16
        run(builder, batch)
        metadata = builder.build(0, batch.common)
        assert (wrappers(metadata, group)[0] is kept) == (new == [1, 1])
        assert [getattr(kept, name).data_ptr() for name in names] == places
    with pytest.raises(BatchError, match="more than the 8"):
        builder.build(0, common_of([1, 1], [30, 30]))
    with pytest.raises(BatchError, match="max_query_len=3"):
        builder.build_for_cudagraph_capture(common_of([3], [3]))


@pytest.mark.parametrize(
    "specs", [{"0": layer(chunk_size=8)}, {"0": layer(has_sinks=True)}], ids=["chunk", "sinks"]
)
def test_captured_steps_of_chunked_layers_and_of_sinks_answer_right(specs: dict[str, LayerSpec]) -> None:
    builder = builder_of(specs, cudagraph_batch_sizes=(2,), max_model_len=16)
    capture = dataclasses.replace(common_of([1, 1], [16, 16]), max_seq_len=16)
    assert builder.build_for_cudagraph_capture(capture).captured == 2
    batch = paged_batch(specs["0"], [1, 1], [3, 14], block_size=PAGE)
    metadata = builder.build(0, batch.common)
    assert metadata.captured == 2
    run(builder, batch, metadata)


def test_a_twin_of_a_captured_step_is_planned_in_its_own_graph() -> None:
    one, other = (builder_of({"0": layer()}, cudagraph_batch_sizes=(2,), max_model_len=16) for _ in range(2))
    for builder in (one, other):
        builder.build_for_cudagraph_capture(dataclasses.replace(common_of([1, 1], [16, 16]), max_seq_len=16))
    batch = paged_batch(layer(), [1, 1], [5, 9], block_size=PAGE)
    updated = other.update_block_table(
        one.build(0, batch.common), batch.common.block_table_tensor, batch.common.slot_mapping
    )
    assert updated.captured == 2
    assert updated.wrappers is other._wrappers
    run(other, batch, updated)


def test_groups_that_are_updated_in_a_capture_are_captured_too() -> None:
    builders = [
        builder_of({"0": layer()}, cudagraph_batch_sizes=(2,), max_model_len=16),
        builder_of({"1": layer()}, cudagraph_batch_sizes=(2,), max_model_len=16),
    ]
    capture = dataclasses.replace(common_of([1, 1], [16, 16]), max_seq_len=16)
    tables = capture.block_table_tensor, capture.slot_mapping
    first = builders[0].build_for_cudagraph_capture(capture)
    second = builders[1].update_block_table(first, *tables)
    groups = [next(iter(builder._groups)) for builder in builders]
    kept = [wrappers(metadata, group)[0] for metadata, group in zip((first, second), groups, strict=True)]
    assert all(wrapper._graph for wrapper in kept)
    places = [wrapper._paged_kv_indices_buf.data_ptr() for wrapper in kept]
    assert places[0] != places[1]
    batches = [paged_batch(layer(), [1, 1], [5, 9], block_size=PAGE, seed=seed) for seed in (0, 1)]
    built = builders[0].build(0, batches[0].common)
    own = batches[1].common
    updated = builders[1].update_block_table(built, own.block_table_tensor, own.slot_mapping)
    for wrapper, metadata, group, place in zip(kept, (built, updated), groups, places, strict=True):
        assert wrappers(metadata, group)[0] is wrapper
        assert wrapper._paged_kv_indices_buf.data_ptr() == place
    run(builders[1], batches[1], updated, "1")


def test_a_capture_without_a_warm_up_says_what_it_compiles() -> None:
    builder = builder_of({"0": layer()}, cudagraph_batch_sizes=(2,), max_model_len=16)
    capture = dataclasses.replace(common_of([1, 1], [16, 16]), max_seq_len=16)
    with FlashInferOnCpu.watch_compiling() as compiled:
        builder.build_for_cudagraph_capture(capture)
    assert len(compiled) == 1


def test_batch_sizes_to_be_captured_have_room_in_the_workspace() -> None:
    # 64 heads, 599 tiles of 16 rows, 257 numbers of 4 bytes each.
    fields = {"num_heads": 64, "num_kv_heads": 4, "head_size": 256}
    specs = {"0": layer(**fields)}
    common = dataclasses.replace(
        paged_batch(specs["0"], [1] * 300, [8] * 300, block_size=PAGE).common, max_seq_len=8
    )
    with pytest.raises(BatchError, match=r"batch size=300.*cudagraph_batch_sizes"):
        builder_of(specs).build_for_cudagraph_capture(common)
    builder = builder_of(specs, cudagraph_batch_sizes=(8, 300))
    assert builder.workspace_bytes == 64 * 599 * 16 * 257 * 4 + (1 << 20)
    assert builder.build_for_cudagraph_capture(common).captured == 300
