"""Builders and impls called by an engine itself: sizes that contradict each other are refused, and none is read past."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from model_layers import layer

from attnplug import plan
from attnplug.core import BuilderConfig, CommonAttentionMetadata
from attnplug.core.batch import UBatchSlice, split_attn_metadata
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.interface.impl_and_builder import make_builder, make_impl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.runtime import AttentionRuntime, StepBatchBuilder
from attnplug.runtime.steps.attention_groups import cross_metadata
from attnplug.testing import assert_close, attention_oracle, direct_batch, paged_batch, tolerance
from attnplug.testing.batches import Batch

FULL = layer(head_size=16, dtype="float32")
DIRECT = FULL.replace(direct_kv=True)
CROSS = layer(head_size=16, dtype="float32", attn_type="encoder_decoder")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
BACKENDS = ["TORCH", pytest.param("TRITON", marks=needs_triton)]


def by_hand(backend: str, batch: Batch, common: CommonAttentionMetadata) -> torch.Tensor:
    spec = batch.spec
    made = plan({"0": spec}, "cpu", num_blocks=8, backend=backend).decisions["0"]
    served = made.get_backend_cls()
    impl = make_impl(served, spec, layer_name="0", tensors=batch.tensors)
    config = BuilderConfig(layers={"0": types.SimpleNamespace(impl=impl)})
    cache: Any = kv_cache_spec_for(spec.replace(direct_kv=False), 16)
    metadata = make_builder(served, cache, ["0"], config, torch.device("cpu")).build(0, common)
    given = batch.query, batch.key, batch.value, batch.kv_cache
    return impl.forward(None, *given, metadata, torch.full_like(batch.query, torch.nan))


PAGED: dict[str, tuple[Callable[[CommonAttentionMetadata], dict[str, Any]], str]] = {
    "fewer slots": (lambda c: {"slot_mapping": c.slot_mapping[:5]}, r"slot_mapping=\(5,\) must have a slot for each of 24"),
    "no starts": (lambda c: {"query_start_loc_cpu": None}, "query_start_loc_cpu=None must be a tensor on the CPU"),
    "few starts": (lambda c: {"query_start_loc_cpu": c.query_start_loc_cpu[:3]}, r"query_start_loc_cpu=\(3,\) must have at least 4 rows"),
    "a short table": (lambda c: {"block_table_tensor": c.block_table_tensor[:2]}, r"block_table_tensor=\(2, 6\) must have at least 3 rows"),
    "a narrow table": (lambda c: {"block_table_tensor": c.block_table_tensor[:, :3].contiguous()}, "seq_lens=50 is past the 48 tokens of 3 pages"),
    "few lengths": (lambda c: {"seq_lens": c.seq_lens[:1]}, r"seq_lens=\(1,\) must have at least 3 rows"),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "message"), PAGED.values(), ids=PAGED)
def test_sizes_that_do_not_fit_are_refused_when_the_step_is_built(
    backend: str, change: Callable[[CommonAttentionMetadata], dict[str, Any]], message: str
) -> None:
    batch = paged_batch(FULL, [1, 3, 20], [40, 3, 50], block_size=16)
    assert_close(by_hand(backend, batch, batch.common), batch.oracle().output, tolerance(FULL).output)
    with pytest.raises(BatchError, match=message):
        by_hand(backend, batch, dataclasses.replace(batch.common, **change(batch.common)))


def test_pages_and_slots_past_the_cache_on_a_cpu() -> None:
    batch = paged_batch(FULL, [1, 3, 20], [40, 3, 50], block_size=16)
    for table in (batch.common.block_table_tensor + 100, -1 - batch.common.block_table_tensor):
        with pytest.raises(
            BatchError, match=r"block_table_tensor=.* has a page that is no block of the cache"
        ):
            by_hand("TORCH", batch, dataclasses.replace(batch.common, block_table_tensor=table))
    slots = batch.common.slot_mapping + 10000
    with pytest.raises(BatchError, match=r"slot_mapping=\d+ is past the \d+ slots of the cache"):
        by_hand("TORCH", batch, dataclasses.replace(batch.common, slot_mapping=slots))


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_of_the_call_start_where_both_sides_say(backend: str) -> None:
    batch = direct_batch(DIRECT, [2, 4], [6, 4], key_lens=[6, 4])
    assert_close(by_hand(backend, batch, batch.common), batch.oracle().output, tolerance(DIRECT).output)
    runtime = AttentionRuntime(plan({"d": DIRECT}, "cpu", backend=backend))
    one_side = dataclasses.replace(batch.common, key_start_loc=None)
    for call in (
        lambda: by_hand(backend, batch, one_side),
        lambda: runtime.begin_step(direct=one_side),
    ):
        with pytest.raises(BatchError, match="key_start_loc=None"):
            call()
    few = dataclasses.replace(batch, key=batch.key[:8], value=batch.value[:8])
    with pytest.raises(BatchError, match=r"key=\(8, 2, 16\) must have the shape \(at least 10"):
        by_hand(backend, few, batch.common)
    runtime.begin_step(direct=dataclasses.replace(batch.common, key_start_loc_cpu=None))
    with pytest.raises(BatchError, match=r"key=\(8, 2, 16\) of layer d must have the shape \(at least 10"):
        runtime.forward("d", few.query, few.key, few.value)
    more = torch.tensor([0, 9, 13], dtype=torch.int32)
    with pytest.raises(BatchError, match="request 0 has more keys than its 6 tokens"):
        by_hand(backend, batch, dataclasses.replace(batch.common, key_start_loc=more, key_start_loc_cpu=more))


def test_a_part_of_a_request_needs_to_know_where_its_keys_start() -> None:
    batch = direct_batch(DIRECT, [8], [8])
    halves = [UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(0, 1), slice(4, 8))]
    runtime = AttentionRuntime(plan({"d": DIRECT}, "cpu"))
    for part in split_attn_metadata(halves, batch.common):
        with pytest.raises(BatchError, match="is_cut=True has a part of a request, whose keys"):
            runtime.begin_step(direct=part)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    known = dataclasses.replace(batch.common, key_start_loc=starts, key_start_loc_cpu=starts)
    expected, rows = batch.oracle().output, 0
    for part in split_attn_metadata(halves, known):
        runtime.begin_step(direct=part)
        keys = int(part.key_start_loc_cpu[-1])  # type: ignore[index]
        found = runtime.forward("d", batch.query[rows : rows + 4], batch.key[:keys], batch.value[:keys])
        assert_close(found, expected[rows : rows + 4], tolerance(DIRECT).output)
        rows += 4


def test_the_batch_of_cross_attention_is_made_from_the_parts_of_the_decoders() -> None:
    batch = paged_batch(FULL, [2, 3], [2, 3], block_size=16)
    lengths = torch.tensor([20, 5], dtype=torch.int32)
    common = dataclasses.replace(batch.common, encoder_seq_lens=lengths, encoder_seq_lens_cpu=lengths.numpy())
    table, slots = torch.ones(2, 2, dtype=torch.int32), torch.arange(25)
    parts = [UBatchSlice(slice(0, 1), slice(0, 2)), UBatchSlice(slice(1, 2), slice(2, 5))]
    with pytest.raises(BatchError, match="slot_mapping=25 are of the encoder's tokens"):
        split_attn_metadata(parts, cross_metadata(common, table, slots))
    made = [cross_metadata(part, table[:1], slots) for part in split_attn_metadata(parts, common)]
    assert [part.seq_lens.tolist() for part in made] == [[20], [5]]


def test_a_fork_shares_the_pages_of_the_encoder() -> None:
    made = plan({"self": FULL, "cross": CROSS}, "cpu", num_blocks=16)
    runtime = AttentionRuntime(made)
    batches: StepBatchBuilder = runtime.step_batch_builder(64, 24)
    (cross,) = batches.cross_groups
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(20, 2, 16, generator=draw) for _ in range(2))
    encoder, own = runtime.block_pool.allocate(2), runtime.block_pool.allocate(1)
    blocks = [encoder if group == cross else own for group in range(2)]
    batches.add_request("a", blocks, encoder_len=20)
    query = torch.randn(16, 4, 16, generator=draw)
    runtime.begin_step(batches.step(16))
    runtime.forward("self", query, k[:16], v[:16])
    runtime.forward("cross", query, k, v)
    batches.finish_step()
    runtime.block_pool.share([*encoder, *own])
    fork = [
        list(encoder) if group == cross else [*own, *runtime.block_pool.allocate(1)] for group in range(2)
    ]
    with pytest.raises(BatchError, match="is a block of request a, and this request writes tokens to it"):
        batches.add_request("b", fork, 16, encoder_len=20)
    batches.add_request("b", fork, 16, encoder_len=20, encoder_computed=True)
    batch = batches.step({"b": 1})
    assert batch.num_slots[cross] == 0
    runtime.begin_step(batch)
    one = torch.randn(1, 4, 16, generator=draw)
    runtime.forward("self", one, k[:1], v[:1])
    expected = attention_oracle(CROSS, [one], [k], [v], [20]).output
    assert_close(runtime.forward("cross", one), expected, tolerance(CROSS).output)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_whose_heads_are_not_contiguous_is_read_right_or_refused(backend: str) -> None:
    batch = paged_batch(FULL, [1, 3, 20], [40, 3, 50], block_size=16)
    cache = batch.kv_cache
    assert cache is not None
    spread = torch.zeros(*cache.shape, 2)[..., 0]
    spread = dataclasses.replace(batch, kv_cache=spread.copy_(cache))
    if backend == "TORCH":
        found = by_hand(backend, spread, batch.common)
        assert_close(found, batch.oracle().output, tolerance(FULL).output)
        return
    with pytest.raises(LayoutError, match=r"kv_cache.stride\(\)=.* must end in 1"):
        by_hand(backend, spread, batch.common)
