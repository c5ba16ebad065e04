"""Requests without any key: FlashAttention 2 must never meet one over pages, and is given a key in their place."""

from __future__ import annotations

import flash_attn_2_fakes
import flash_attn_cpu_impls
import pytest
import torch
from flash_attn_on_cpu import FlashAttn2OnCpu

from attnplug.backends.flash_attn.builder import FlashAttnMetadataBuilder
from attnplug.backends.flash_attn.fa2 import num_splits
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.errors import BatchError
from attnplug.testing import assert_close, assert_lse_close, paged_batch, run_batch, tolerance

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float16", needs_lse=True)
CROSS = SPEC.replace(attn_type="encoder_decoder", causal=False)
LENS = ([2, 70, 1, 3], [0, 300, 9, 0])


@pytest.fixture
def given(monkeypatch):
    """The lengths and tables that `varlen_fwd` was given."""
    made = []

    def record(*args):
        made.append((args[6], args[8]))
        return flash_attn_2_fakes.varlen_fwd(*args)

    monkeypatch.setattr(flash_attn_cpu_impls, "varlen_fwd", record)
    return made


def batch_of(spec, lens, **options):
    return paged_batch(spec, *lens, block_size=256, backend=FlashAttn2OnCpu, **options)


def metadata_of(batch, spec=SPEC, captured=False):
    cache = kv_cache_spec_for(spec, 256)
    builder = FlashAttnMetadataBuilder(cache, ["layer"], BuilderConfig(), torch.device("cpu"))
    return builder.build_for_cudagraph_capture(batch.common) if captured else builder.build(0, batch.common)


def attend(batch, metadata):
    spec = batch.spec
    impl = flash_attn_cpu_impls.Impl2.from_spec(
        spec, backend=FlashAttn2OnCpu, layer_name="layer", tensors=batch.tensors
    )
    output = torch.full_like(batch.query, torch.nan)
    lse = torch.full(output.shape[:2], torch.nan)
    impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output, output_lse=lse)
    return output, lse


def expect(batch, output, lse):
    expected, bound = batch.oracle(), tolerance(batch.spec)
    tokens = batch.common.num_actual_tokens
    assert_close(output[:tokens], expected.output, bound.output)
    assert_lse_close(lse[:tokens], expected.lse, bound.lse)


@pytest.mark.parametrize("lens", [LENS, ([1, 1, 1], [0, 9, 0]), ([3], [0]), ([0, 2], [0, 0])], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_queries_that_see_nothing_give_nothing_and_leave_others_alone(lens, exact):
    batch = batch_of(CROSS, lens, padding=2)
    batch.common.seq_lens_host_exact = exact
    expect(batch, *run_batch(FlashAttn2OnCpu, batch))


@pytest.mark.parametrize("captured", [False, True])
def test_an_idle_requests_table_is_not_followed(given, captured):
    batch = batch_of(SPEC, ([2, 5, 2], [0, 30, 2]))
    batch.common.seq_lens_host_exact = not captured
    expect(batch, *attend(batch, metadata_of(batch, captured=captured)))
    ((lens, table),) = given
    assert lens.tolist() == [1, 30, 2]
    assert table[0].eq(0).all()
    assert torch.equal(table[1:], batch.common.block_table_tensor[1:])


def test_lengths_that_the_host_knows_cost_nothing(given):
    batch = batch_of(SPEC, ([2, 5, 0], [2, 30, 0]))
    expect(batch, *attend(batch, metadata_of(batch)))
    ((lens, table),) = given
    assert lens.data_ptr() == batch.common.seq_lens.data_ptr()
    assert table.data_ptr() == batch.common.block_table_tensor.data_ptr()


def test_layers_of_a_step_share_what_stands_in_for_missing_keys(given):
    batch = batch_of(SPEC, ([2, 5], [0, 30]))
    metadata = metadata_of(batch)
    attend(batch, metadata)
    attend(batch, metadata)
    assert given[0][0] is given[1][0]
    assert given[0][1] is given[1][1]


def test_another_groups_table_is_not_taken_for_the_first_ones(given):
    batch = batch_of(SPEC, ([2, 5], [0, 30]))
    metadata = metadata_of(batch)
    attend(batch, metadata)
    builder = FlashAttnMetadataBuilder(
        kv_cache_spec_for(SPEC, 256), ["layer"], BuilderConfig(), torch.device("cpu")
    )
    table = batch.common.block_table_tensor.clone()
    table[1, 0] += 1
    attend(batch, builder.update_block_table(metadata, table, batch.common.slot_mapping))
    assert torch.equal(given[1][1][1], table[1])


def test_in_a_graph_nothing_that_an_earlier_call_made_is_read(given):
    batch = batch_of(SPEC, ([2, 2], [4, 30]))
    metadata = metadata_of(batch, captured=True)
    attend(batch, metadata)
    # As a replay finds it: the second request is padding now, without a key.
    batch.common.seq_lens[1] = 0
    attend(batch, metadata)
    assert [lens.tolist() for lens, _ in given] == [[4, 30], [4, 1]]


def test_blocks_of_queries_before_the_first_key_are_refused():
    batch = batch_of(SPEC, ([66, 2], [66, 4]))
    batch.common.seq_lens_host[0] = batch.common.seq_lens[0] = 2
    metadata = metadata_of(batch)
    with pytest.raises(BatchError, match="query_len - seq_len=64 must be at most 63"):
        attend(batch, metadata)
    batch.common.seq_lens_host[0] = batch.common.seq_lens[0] = 3
    metadata = metadata_of(batch)
    attend(batch, metadata)
    batch = batch_of(SPEC, ([65, 65], [65, 65]))
    with pytest.raises(BatchError, match=r"max_query_len - 1=64 .* may become padding"):
        attend(batch, metadata_of(batch, captured=True))


def test_the_kernels_computed_here_write_out_of_bounds_where_a_request_has_no_key():
    """The traps that requests without keys would fall into: without them the tests above would prove nothing."""
    query = torch.randn(5, 4, 16, dtype=torch.float16)
    pages = torch.randn(3, 256, 2, 16, dtype=torch.float16)
    table = torch.tensor([[1], [2]], dtype=torch.int32)

    def lse_of(starts, lens, longest):
        starts, lens = (torch.tensor(each, dtype=torch.int32) for each in (starts, lens))
        places = (query[: starts[-1]], pages, pages, None, starts, starts, lens, None, table, None)
        limits = (longest, 256, 0.0, 0.25, False, False, -1, -1, 0.0, False, None)
        return flash_attn_2_fakes.varlen_fwd(*places, *limits)[1]

    with pytest.raises(IndexError, match="out of bounds"):
        lse_of([0, 4, 5], [9, 0], 4)
    lse = lse_of([0, 1, 5], [0, 9], 4)
    assert lse[:, 0].isnan().any()
    assert lse[:, 1:].isposinf().any()
    whole, packed = (lse_of([0, 1, 2], [9, 7], longest) for longest in (2, 1))
    assert not torch.allclose(whole, packed)


def test_keys_are_split_as_the_gpu_has_room_and_not_as_the_context_is_long():
    assert num_splits(units=240, slots=264, key_blocks=1000) == 1
    assert num_splits(units=8, slots=264, key_blocks=1000) == 29
    assert num_splits(units=8, slots=264, key_blocks=4) == 4
    assert num_splits(units=1, slots=264, key_blocks=1000) <= 128
    assert num_splits(units=8, slots=264, key_blocks=0) == 1


def test_more_parts_that_are_no_shorter_are_not_made():
    # 29 parts of 64 blocks are as long as 22, which leave room; 32 are shorter.
    assert num_splits(units=8, slots=264, key_blocks=64) == 32
    for blocks in range(2, 400):
        parts = num_splits(units=8, slots=264, key_blocks=blocks)
        assert parts == 1 or -(-blocks // parts) < -(-blocks // (parts - 1))


def test_decodes_take_memory_by_the_tables_width(monkeypatch):
    made = []

    def record(*args):
        made.append(args[-1])
        return flash_attn_2_fakes.fwd_kvcache(*args)

    monkeypatch.setattr(flash_attn_cpu_impls, "fwd_kvcache", record)
    for length in (40, 1500):
        batch = batch_of(SPEC, ([1], [length]))
        table = batch.common.block_table_tensor
        batch.common.block_table_tensor = torch.cat([table, table.new_zeros(1, 16 - table.shape[1])], 1)
        expect(batch, *run_batch(FlashAttn2OnCpu, batch))
    assert made[0] == made[1] > 1
