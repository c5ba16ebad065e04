"""What the client reads of SGLang's layers, batches, pools and arguments, and refuses; SGLang itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang_stubs import MHATokenToKVPool, Mode, RadixAttention, batch, runner, take_slots

from attnplug.core.errors import BatchError, LayoutError, SpecError
from attnplug.core.metadata import AttentionCGSupport
from attnplug.integrations.sglang.batches import check_fields, lengths_of
from attnplug.integrations.sglang.caches import check_pool, logical, pool_of
from attnplug.integrations.sglang.graphs import check_support
from attnplug.integrations.sglang.layers import Facts, scales_of, spec_of
from attnplug.integrations.sglang.runner import check_runner, drafts_of_runner, facts_of
from attnplug.integrations.sglang.steps import FULL, Rows, Step

FACTS = Facts(dtype=torch.bfloat16, page_size=16)


def read(facts: Facts = FACTS, kv_cache_dtype: str = "auto", **layer: Any) -> Any:
    return spec_of(RadixAttention(**layer), facts, kv_cache_dtype=kv_cache_dtype, has_sinks=False)


def test_a_layer_is_read_whole() -> None:
    spec = read(logit_cap=30.0, sliding_window_size=1023)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size) == (4, 2, 16, 16)
    assert (spec.dtype, spec.scale, spec.logits_soft_cap) == ("bfloat16", 0.3, 30.0)
    assert spec.sliding_window == 1024, "SGLang counts the keys before the query's own"
    assert read(is_cross_attention=True).attn_type == "encoder_decoder"
    encoder = read(attn_type=SimpleNamespace(value="encoder_only"), sliding_window_size=7, v_head_dim=8)
    assert (encoder.direct_kv, encoder.causal, encoder.window, encoder.head_size_v) == (
        True,
        False,
        (7, 7),
        8,
    )


def test_layers_with_chunks_have_those_of_the_model() -> None:
    facts = Facts(dtype=torch.bfloat16, page_size=16, chunk_size=8192)
    assert read(facts, use_irope=True).chunk_size == 8192
    assert read(facts).chunk_size is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_type": "decoder_bidirectional"}, "attn_type.*see later tokens in some steps"),
        ({"v_head_dim": 8}, "v_head_dim=8 must be qk_head_dim=16: SGLang allocates such K and V apart"),
        ({"tp_v_head_num": 1}, "tp_v_head_num=1 must be tp_k_head_num=2"),
        ({"logit_cap": 5.0, "logit_capping_method": "sigmoid"}, "logit_capping_method.*must be tanh"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode.*no positions of its own"),
        ({"xai_temperature_len": 1024}, "xai_temperature_len=1024 is a temperature by length"),
        ({"use_irope": True}, "use_irope.*attention_chunk_size"),
        ({"is_cross_attention": True, "sliding_window_size": 3}, "sliding_window_size.*cross attention"),
        ({"is_cross_attention": True, "attn_type": "encoder_only"}, "attn_type.*must be decoder"),
        ({"new_thing": 2.5}, "new_thing=2.5 is an attribute that attnplug does not know"),
        ({"_kv_scale": 0.5}, "_kv_scale=0.5 is an attribute that attnplug does not know"),
    ],
)
def test_what_a_layer_asks_for_and_nobody_serves_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read(**changes)


def test_attributes_without_a_value_and_wrapped_methods_are_no_questions() -> None:
    assert read(new_thing=None, other=-1, kv_b_proj=None, idx_q_scale_float=2.0) == read()
    assert read(forward=lambda *given: None) == read()
    assert read(_is_hf_initialized=True) == read()


def test_tensors_that_a_model_adds_to_a_layer_are_refused() -> None:
    layer = RadixAttention()
    layer.register_parameter("bias", torch.nn.Parameter(torch.zeros(4)))
    with pytest.raises(SpecError, match=r"bias.*does not know"):
        spec_of(layer, FACTS, kv_cache_dtype="auto", has_sinks=False)


def test_scales_are_those_of_stored_values_alone() -> None:
    layer = RadixAttention(k_scale=torch.tensor([0.5]), v_scale=torch.ones(2), v_scale_float=0.25)
    assert scales_of(layer, read()) == (1.0, 1.0)
    assert scales_of(layer, read(kv_cache_dtype="fp8_e4m3")) == (0.5, 0.25)
    layer = RadixAttention(k_scale=torch.ones(2))
    with pytest.raises(SpecError, match=r"k_scale.*must have one element"):
        scales_of(layer, read(kv_cache_dtype="fp8_e4m3"))


def test_a_cache_is_a_view_of_the_pools_memory() -> None:
    pool = MHATokenToKVPool(64, 16)
    key, value = pool.get_kv_buffer(0)
    view = logical(key, value, 16)
    assert view.shape == (5, 2, 16, 2, 16)
    assert view.data_ptr() == key.data_ptr()
    key[35], value[35] = 1.0, 2.0
    assert view[2, 0, 3].eq(1).all()
    assert view[2, 1, 3].eq(2).all()
    by_head = MHATokenToKVPool(64, 16, layout="hnd")
    key, value = by_head.get_kv_buffer(0)
    key[2, 1, 3], value[2, 1, 3] = 1.0, 2.0
    view = logical(key, value, 16)
    assert view[2, 0, 3, 1].eq(1).all()
    assert view[2, 1, 3, 1].eq(2).all()


def test_k_and_v_in_two_allocations_are_refused() -> None:
    key, value = torch.zeros(2, 32, 2, 16).unbind()
    for pair in ((value, key), (key, torch.zeros_like(key))):
        with pytest.raises(LayoutError, match="two equal parts of one allocation, the keys first"):
            logical(*pair, 16)
    with pytest.raises(SpecError, match="v_head_dim=8 must be head_dim=16"):
        logical(key, value[..., :8], 16)


class MLATokenToKVPool:
    pass


class NewPool:
    pass


class HybridLinearKVPool:
    def __init__(self, pool: Any) -> None:
        self.full_kv_pool = pool


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (MLATokenToKVPool(), "MLATokenToKVPool.*has latents"),
        (NewPool(), "NewPool.*does not know, and may change the result"),
        (HybridLinearKVPool(MLATokenToKVPool()), "MLATokenToKVPool.*has latents"),
    ],
)
def test_other_pools_are_refused_by_name(pool: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        check_pool(pool)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kv_cache_layout", "vectorized_5d", "must be nhd or hnd"),
        ("is_quantized_kv_cache", True, "scales for blocks of values"),
        ("post_capture_active", True, "memory of their own.*SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    ],
)
def test_forms_of_the_pool_that_are_not_served_are_refused(field: str, value: object, words: str) -> None:
    pool = MHATokenToKVPool(64, 16)
    check_pool(HybridLinearKVPool(pool))
    setattr(pool, field, value)
    with pytest.raises(SpecError, match=words):
        check_pool(pool)


def test_stored_types_are_the_layers_own_or_8_bits() -> None:
    assert pool_of(MHATokenToKVPool(64, 16), 0).kv_cache_dtype(torch.float32) == "auto"
    stored = pool_of(MHATokenToKVPool(64, 16, dtype=torch.float8_e4m3fn), 0)
    assert stored.kv_cache_dtype(torch.bfloat16) == "fp8_e4m3"
    with pytest.raises(SpecError, match=r"kv_cache_dtype=torch.float32 must be the layer's torch.bfloat16"):
        pool_of(MHATokenToKVPool(64, 16), 0).kv_cache_dtype(torch.bfloat16)


RUN = runner(MHATokenToKVPool(64, 4))
take_slots(RUN, [20, 20, 20])


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("cross_attention_custom_mask", "masks of cross attention are not served"),
        ("multi_item_delimiter_indices", "several items in one prompt"),
        ("attn_cp_metadata", "context parallelism is not served"),
        ("mha_return_lse", "log-sum-exp"),
        ("hisparse_coordinator", "sparse attention"),
        ("new_field", "a field that attnplug does not know, and may change the result"),
    ],
)
def test_what_a_batch_asks_for_and_nobody_serves_is_refused(field: str, words: str) -> None:
    for unset in (None, False):
        check_fields(batch("EXTEND", RUN, [3], [4], **{field: unset}), False)
    with pytest.raises(BatchError, match=f"{field}.*{words}"):
        check_fields(batch("EXTEND", RUN, [3], [4], **{field: object()}), False)


def test_images_are_refused_where_sglang_would_drop_their_masks() -> None:
    given = batch("EXTEND", RUN, [3], [4], mm_inputs=[None])
    check_fields(given, True)
    given.mm_inputs = [object()]
    check_fields(given, False)
    with pytest.raises(BatchError, match=r"mm_inputs.*--attention-backend triton"):
        check_fields(given, True)


@pytest.mark.parametrize("mode", ["PREBUILT", "DLLM_EXTEND"])
def test_other_modes_are_refused(mode: str) -> None:
    given = batch("EXTEND", RUN, [3], [4])
    given.forward_mode = Mode(mode)
    with pytest.raises(BatchError, match=f"forward_mode='{mode}' is not served"):
        lengths_of(given)


def test_a_verifications_keys_are_more_than_its_lengths_say() -> None:
    drafts = SimpleNamespace(draft_token_num=4, topk=1, custom_mask=None)
    found = lengths_of(batch("TARGET_VERIFY", RUN, [3, 9], [4, 4], spec_info=drafts))
    assert found.queries.tolist() == [4, 4]
    assert found.keys.tolist() == [7, 13]
    assert found.keys_host is not None
    assert found.keys_host.tolist() == [7, 13]


class EagleVerifyInput(SimpleNamespace):
    pass


class NgramVerifyInput(SimpleNamespace):
    pass


def test_masks_of_drafts_are_causal_where_they_have_no_branches() -> None:
    mask = torch.ones(9, dtype=torch.bool)
    chain = EagleVerifyInput(draft_token_num=2, topk=1, custom_mask=mask)
    assert lengths_of(batch("TARGET_VERIFY", RUN, [3], [2], spec_info=chain)).is_uniform
    branched = [
        EagleVerifyInput(draft_token_num=2, topk=2, custom_mask=mask),
        NgramVerifyInput(draft_token_num=2, custom_mask=mask),
    ]
    for info in branched:
        with pytest.raises(
            BatchError, match="branches, which is not served; pass --speculative-eagle-topk 1"
        ):
            lengths_of(batch("TARGET_VERIFY", RUN, [3], [2], spec_info=info))
    ragged = EagleVerifyInput(draft_token_num=2, topk=1, custom_mask=None, ragged_verify_layout=object())
    with pytest.raises(BatchError, match="drafts of unlike numbers"):
        lengths_of(batch("TARGET_VERIFY", RUN, [3], [2], spec_info=ragged))


def test_a_draft_that_decodes_is_refused_outside_of_its_backend() -> None:
    with pytest.raises(BatchError, match="a draft that decodes"):
        lengths_of(batch("DECODE", RUN, [3], [1], spec_info=SimpleNamespace()))


def test_pages_are_the_slots_of_their_first_tokens() -> None:
    rows = Rows(RUN.req_to_token_pool.req_to_token, 4, RUN.token_to_kv_pool)
    step = Step(batch("EXTEND", RUN, [3, 9], [4, 1]), rows)
    common = step.common(FULL)
    assert common.query_start_loc_cpu.tolist() == [0, 4, 5]
    assert common.seq_lens.tolist() == [7, 10]
    assert (common.max_query_len, common.max_seq_len, step.tokens) == (4, 10, 5)
    assert torch.equal(common.block_table_tensor, rows.table[:2, 0:10:4] // 4)
    table, slots = common.block_table_tensor[1], common.slot_mapping
    assert slots[4] == table[9 // 4] * 4 + 9 % 4
    assert np.array_equal(common.seq_lens_host, [7, 10])


def test_lengths_that_only_the_device_has_are_bounded_by_the_rows() -> None:
    rows = Rows(RUN.req_to_token_pool.req_to_token, 4, RUN.token_to_kv_pool)
    given = batch("DECODE", RUN, [3, 9], [1, 1], seq_lens_cpu=None)
    common = Step(given, rows).common(FULL)
    assert common.seq_lens_host is None
    assert common.max_seq_len == rows.table.shape[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_mis": True}, "enable_mis.*several items in one prompt"),
        ({"dllm_algorithm": "LowConfidence"}, "dllm_algorithm.*diffusion model"),
        ({"dcp_size": 2}, "dcp_size=2 shares the keys of a request between ranks"),
        ({"attn_cp_size": 2}, "attn_cp_size=2 shares the queries"),
        ({"speculative_eagle_topk": 4}, "speculative_eagle_topk=4 gives drafts branches.*use 1"),
        ({"use_mla_backend": True}, "use_mla_backend.*latent attention"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "moves its pages"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "page_size=4 must be 1.*--page-size 1"),
    ],
)
def test_arguments_that_nobody_serves_are_refused(changes: dict[str, Any], words: str) -> None:
    check_runner(runner(MHATokenToKVPool(64, 4), speculative_eagle_topk=1, dcp_size=1))
    with pytest.raises(SpecError, match=words):
        check_runner(runner(MHATokenToKVPool(64, 4), **changes))


def test_deterministic_inference_asks_for_equal_bits() -> None:
    assert facts_of(RUN).invariance == ()
    asked = runner(MHATokenToKVPool(64, 4), enable_deterministic_inference=True, attention_chunk_size=64)
    facts = facts_of(asked)
    assert (facts.invariance, facts.chunk_size) == (("batch", "rows"), 64)
    assert read(facts).invariance == ("batch", "rows")


def test_drafts_are_those_beside_a_requests_own_token() -> None:
    assert drafts_of_runner(RUN) == 0
    assert drafts_of_runner(runner(MHATokenToKVPool(64, 4), speculative_num_draft_tokens=4)) == 3


def test_backends_without_graphs_are_refused_where_one_is_captured() -> None:
    check_support(AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "X", 1)
    check_support(AttentionCGSupport.UNIFORM_BATCH, "X", 3)
    for support, queries, words in (
        (AttentionCGSupport.NEVER, 1, "does not run decodes in CUDA graphs; pass --disable-cuda-graph"),
        (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, 3, "does not run steps of 3 tokens a request"),
    ):
        with pytest.raises(BatchError, match=words):
            check_support(support, "X", queries)
