"""How steps become calls: what is called apart, where the libraries' conventions would mislead."""

from __future__ import annotations

import dataclasses

import flash_attn_2_fakes
import flash_attn_cpu_impls
import flash_attn_fakes
import numpy as np
import pytest
import torch
from flash_attn_on_cpu import FlashAttn2OnCpu, FlashAttn3OnCpu, FlashAttn4OnCpu

from attnplug.backends.flash_attn import fa2
from attnplug.backends.flash_attn.builder import FlashAttnMetadataBuilder
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionCGSupport
from attnplug.errors import BatchError
from attnplug.testing import (
    assert_close,
    assert_lse_close,
    direct_batch,
    paged_batch,
    run_batch,
    tolerance,
)

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float16"}
BLOCKS = {FlashAttn2OnCpu: 256, FlashAttn3OnCpu: 32, FlashAttn4OnCpu: 16}
MIXED = ([1, 1, 5, 9], [7, 30, 5, 40])


@pytest.fixture
def calls(monkeypatch):
    """The calls of FlashAttention 2, by name of argument."""
    made = []

    def recording(function, names):
        def record(*args):
            made.append({"function": function.__name__, **dict(zip(names, args, strict=True))})
            return function(*args)

        return record

    for function, names in (
        (flash_attn_2_fakes.varlen_fwd, fa2.VARLEN_FWD),
        (flash_attn_2_fakes.fwd_kvcache, fa2.FWD_KVCACHE),
    ):
        monkeypatch.setattr(flash_attn_cpu_impls, function.__name__, recording(function, names))
    return made


def check(backend, spec, lens, **options):
    batch = (
        direct_batch(spec, *lens, **options)
        if spec.direct_kv
        else paged_batch(spec, *lens, block_size=BLOCKS[backend], backend=backend, **options)
    )
    output, lse = run_batch(backend, batch)
    expected, bound = batch.oracle(), tolerance(spec)
    tokens = batch.common.num_actual_tokens
    assert_close(output[:tokens], expected.output, bound.output)
    if lse is not None:
        assert_lse_close(lse[:tokens], expected.lse, bound.lse)
    return batch


def builder_for(spec, block_size=256):
    cache = kv_cache_spec_for(spec, block_size)
    return FlashAttnMetadataBuilder(cache, ["layer"], BuilderConfig(), torch.device("cpu"))


def test_decodes_beside_longer_queries_are_a_call_of_their_own_that_packs_heads_in_place(calls):
    check(FlashAttn2OnCpu, LayerSpec(**SIZES), MIXED)
    decodes, others = calls
    assert (decodes["function"], others["function"]) == ("fwd_kvcache", "varlen_fwd")
    assert decodes["q"].shape == (2, 1, 4, 16)
    assert decodes["out"].shape == (2, 2, 2, 16)
    assert (others["max_seqlen_q"], others["q"].shape[0]) == (9, 16)
    assert others["cu_seqlens_q"].tolist() == [2, 7, 16]
    assert others["out"] is not None


def test_what_comes_whole_is_one_call_over_the_keys_given(calls):
    check(FlashAttn2OnCpu, LayerSpec(**SIZES), ([3, 9], [3, 9]))
    (call,) = calls
    assert call["block_table"] is None
    assert call["k"].ndim == 3
    assert torch.equal(call["cu_seqlens_k"], call["cu_seqlens_q"])


def test_a_request_without_new_tokens_is_not_taken_for_the_next_row(calls):
    check(FlashAttn2OnCpu, LayerSpec(**SIZES), ([1, 0, 1], [9, 12, 30]))
    (call,) = calls
    assert call["max_seqlen_q"] == 2


def test_a_window_keeps_flash_attn_2_from_packing(calls):
    check(FlashAttn2OnCpu, LayerSpec(**SIZES, sliding_window=8, needs_lse=True), ([1, 1], [9, 30]))
    check(FlashAttn2OnCpu, LayerSpec(**SIZES, sliding_window=8, direct_kv=True), ([1, 1], [9, 30]))
    assert calls[0]["out"].shape == (2, 1, 4, 16)
    assert calls[1]["out"].shape == (2, 4, 16)


def test_one_query_over_keys_that_come_with_the_call_is_packed_beside_the_output(calls):
    check(FlashAttn2OnCpu, LayerSpec(**SIZES, direct_kv=True, needs_lse=True), ([1, 1, 1], [9, 700, 30]))
    assert (calls[0]["function"], calls[0]["max_seqlen_q"], calls[0]["out"]) == ("varlen_fwd", 1, None)


@pytest.mark.parametrize("window", [None, 8, 4000])
@pytest.mark.parametrize("lens", [MIXED, ([1, 1], [1, 30]), ([4], [4])], ids=str)
def test_causal_alibi_is_the_distance_and_its_lse_is_not_shifted(calls, lens, window):
    spec = LayerSpec(**SIZES, has_alibi=True, needs_lse=True, sliding_window=window)
    check(FlashAttn2OnCpu, spec, lens)
    for call in calls:
        assert call["is_causal"] is False
        if call["function"] == "varlen_fwd":
            assert 0 <= call["window_size_left"] < call["max_seqlen_k"]


def test_alibi_of_a_layer_that_is_not_causal_is_given_as_it_is(calls):
    check(FlashAttn2OnCpu, LayerSpec(**SIZES, has_alibi=True, causal=False, needs_lse=True), MIXED)
    assert [call["window_size_left"] for call in calls] == [-1, -1]


@pytest.mark.parametrize("backend", BLOCKS)
@pytest.mark.parametrize(
    "asked",
    [
        {"needs_lse": True},
        {"chunk_size": 512, "needs_lse": True},
        {"causal": False, "window": (3, 2), "needs_lse": True},
        {"logits_soft_cap": 5.0, "sliding_window": 6},
        {"attn_type": "encoder_decoder", "needs_lse": True},
        {"direct_kv": True, "needs_lse": True},
    ],
    ids=str,
)
def test_all_generations_give_the_oracles_numbers(backend, asked):
    lens = ([1, 3, 20, 0, 6], [600, 3, 530, 9, 0 if asked.get("attn_type") else 6])
    check(backend, LayerSpec(**SIZES, **asked), lens, padding=3)


@pytest.mark.parametrize("backend", BLOCKS)
def test_with_chunks_a_query_of_a_request_of_length_0_sees_nothing(backend):
    check(backend, LayerSpec(**SIZES, chunk_size=512, needs_lse=True), ([1, 1, 20], [600, 0, 530]))


@pytest.mark.parametrize("backend", BLOCKS)
def test_an_encoders_layer_needs_room_in_the_table_only_where_it_reads_pages(backend):
    spec, size = LayerSpec(**SIZES, attn_type="encoder"), BLOCKS[backend]
    lens = [3, size + 9]
    batch = direct_batch(spec, lens, lens)
    output, _ = run_batch(backend, batch)
    assert_close(output, batch.oracle().output, tolerance(spec).output)
    paged = paged_batch(spec, lens, lens, block_size=size, backend=backend)
    narrow = dataclasses.replace(paged.common, block_table_tensor=paged.common.block_table_tensor[:, :1])
    # Without the call's keys, all are read from pages.
    unwritten = dataclasses.replace(paged, common=narrow, key=None, value=None)
    limit = f"seq_lens={size + 9} is past the {size} tokens of 1 pages"
    with pytest.raises(BatchError, match=limit):
        run_batch(backend, unwritten)


def test_sinks_enter_once_and_an_empty_row_has_the_sinks_lse():
    spec = LayerSpec(**SIZES, has_sinks=True, needs_lse=True, causal=False, attn_type="encoder_decoder")
    batch = check(FlashAttn4OnCpu, spec, ([2, 3], [0, 9]))
    _, lse = run_batch(FlashAttn4OnCpu, batch)
    torch.testing.assert_close(lse[0], batch.tensors.sinks)
    _, without = run_batch(FlashAttn4OnCpu, batch, use_sinks=False)
    assert without[0].isneginf().all()


def test_the_kernels_computed_here_are_poisoned_by_pages_of_a_key_tile():
    """The trap that the refused page sizes avoid: without it the tests above would prove nothing."""
    spec = LayerSpec(**SIZES)
    batch = paged_batch(spec, [2], [100], block_size=128, backend=FlashAttn4OnCpu)
    output, _ = run_batch(FlashAttn4OnCpu, batch)
    assert output.isnan().any()


def test_flash_attn_3_plans_once_per_step_for_layers_alike():
    spec = LayerSpec(**SIZES)
    batch = paged_batch(spec, *MIXED, block_size=32, backend=FlashAttn3OnCpu)
    metadata = builder_for(spec, 32).build(0, batch.common)
    flash_attn_fakes.SCHEDULES.clear()
    for layer in (spec, spec, spec.replace(window=(5, 0))):
        impl = flash_attn_cpu_impls.Impl3.from_spec(
            layer, backend=FlashAttn3OnCpu, layer_name="layer", tensors=batch.tensors
        )
        impl.attend(None, batch.query, None, None, batch.kv_cache, metadata, torch.empty_like(batch.query))
    assert [made["window_size_left"] for made in flash_attn_fakes.SCHEDULES] == [-1, 5]
    assert flash_attn_fakes.SCHEDULES[0]["max_seqlen_k"] == batch.common.block_table_tensor.shape[1] * 32


def test_in_a_graph_flash_attn_3_plans_inside_the_call():
    spec = LayerSpec(**SIZES)
    batch = paged_batch(spec, [1, 1], [4, 40], block_size=32, backend=FlashAttn3OnCpu)
    metadata = builder_for(spec, 32).build_for_cudagraph_capture(batch.common)
    flash_attn_fakes.SCHEDULES.clear()
    impl = flash_attn_cpu_impls.Impl3.from_spec(
        spec, backend=FlashAttn3OnCpu, layer_name="layer", tensors=batch.tensors
    )
    impl.attend(None, batch.query, None, None, batch.kv_cache, metadata, torch.empty_like(batch.query))
    assert flash_attn_fakes.SCHEDULES == []


def test_another_groups_table_stands_in_for_a_second_build():
    spec = LayerSpec(**SIZES, chunk_size=512)
    for lens in (MIXED, ([1, 600], [700, 600])):
        common = paged_batch(spec, *lens, block_size=256, backend=FlashAttn2OnCpu).common
        builder = builder_for(spec)
        table = common.block_table_tensor + 3
        moved = builder.update_block_table(builder.build(0, common), table, common.slot_mapping)
        common.block_table_tensor = table
        built = builder.build(0, common)
        assert torch.equal(moved.all_requests.block_table, built.all_requests.block_table)
        for one, other in zip(moved.calls, built.calls, strict=True):
            assert torch.equal(one.block_table, other.block_table)


def test_chunks_need_exact_host_lengths_and_stay_out_of_graphs():
    spec = LayerSpec(**SIZES, chunk_size=512)
    builder, plain = builder_for(spec), builder_for(LayerSpec(**SIZES))
    assert (builder.needs_host_seq_lens, plain.needs_host_seq_lens) == ("exact", "none")
    assert builder.get_cudagraph_support(builder.config, builder.kv_cache_spec) is AttentionCGSupport.NEVER
    common = paged_batch(spec, *MIXED, block_size=256, backend=FlashAttn2OnCpu).common
    common.seq_lens_host = np.asarray(common.seq_lens_host)
    common.seq_lens = common.seq_lens.to("meta")
    common.seq_lens_host_exact = False
    with pytest.raises(BatchError, match="give the batch exact seq_lens_host"):
        builder.build(0, common)


def test_metadata_that_was_cut_for_another_layer_is_refused():
    spec = LayerSpec(**SIZES)
    batch = paged_batch(spec, *MIXED, block_size=256, backend=FlashAttn2OnCpu)
    metadata = builder_for(spec.replace(chunk_size=512)).build(0, batch.common)
    impl = flash_attn_cpu_impls.Impl2.from_spec(
        spec, backend=FlashAttn2OnCpu, layer_name="layer", tensors=batch.tensors
    )
    with pytest.raises(BatchError, match=r"attn_metadata\.chunk=512 is not the layer's 0"):
        impl.attend(None, batch.query, None, None, batch.kv_cache, metadata, torch.empty_like(batch.query))


@pytest.mark.parametrize("backend", BLOCKS)
def test_queries_and_outputs_at_odd_addresses_are_served(backend):
    spec = LayerSpec(**SIZES, needs_lse=True)
    batch = paged_batch(spec, *MIXED, block_size=BLOCKS[backend], backend=backend)
    wide = torch.full((batch.query.numel() + 1,), torch.nan, dtype=torch.float16)
    batch.query = wide[1:].view_as(batch.query).copy_(batch.query)
    expected, _ = run_batch(backend, batch)
    odd = torch.full_like(wide, torch.nan)[1:].view_as(batch.query)
    impl = backend.get_impl_cls().from_spec(spec, backend=backend, layer_name="layer", tensors=batch.tensors)
    metadata = builder_for(spec, BLOCKS[backend]).build(0, batch.common)
    impl.attend(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata, odd)
    assert torch.equal(odd, expected)


def test_an_output_whose_heads_are_spread_is_refused():
    spec = LayerSpec(**SIZES)
    batch = paged_batch(spec, *MIXED, block_size=256, backend=FlashAttn2OnCpu)
    impl = flash_attn_cpu_impls.Impl2.from_spec(
        spec, backend=FlashAttn2OnCpu, layer_name="layer", tensors=batch.tensors
    )
    spread = torch.empty(*batch.query.shape[:2], 32, dtype=torch.float16)[..., ::2]
    with pytest.raises(BatchError, match=r"output\.stride\(2\)=2 must be 1"):
        impl.attend(
            None, batch.query, None, None, batch.kv_cache, builder_for(spec).build(0, batch.common), spread
        )


def test_a_step_without_new_tokens_calls_nothing(calls):
    spec = LayerSpec(**SIZES)
    batch = paged_batch(spec, [0, 0], [5, 9], block_size=256, backend=FlashAttn2OnCpu)
    output, _ = run_batch(FlashAttn2OnCpu, batch)
    assert output.isnan().all()
    assert calls == []
