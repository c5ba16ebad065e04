"""The example engine runs models of latent attention absorbed on latent pages, with the tokens that `generate` draws."""

from __future__ import annotations

import pytest
import torch
from engine import Engine
from model import KeptLatents
from small_models import LATENT_FAMILIES, check_greedy, generated, random_prompts, small_model

from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.core.kv_cache_spec import MLAAttentionSpec

QUICK = ("DeepseekV3",)
FAMILIES = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in (*LATENT_FAMILIES, "DeepseekV3:halves")
]


def serve(engine: Engine, prompts: list[list[int]], **sampling) -> list[list[int]]:
    requests = [engine.add(prompt, **sampling) for prompt in prompts]
    for _ in engine.stream():
        pass
    assert engine.runtime.block_pool.num_free == engine.runtime.plan.num_blocks - 1
    return [request.output for request in requests]


@pytest.fixture
def calls(monkeypatch) -> dict[str, list[int]]:
    """Query lengths of absorbed decodes, and the sizes of expanded latents, call by call."""
    seen: dict[str, list[int]] = {"decoded": [], "expanded": []}
    decode, expand = TorchMLAImpl.decode, TorchMLAImpl._expand

    def noted_decode(self, q_nope, q_pe, kv_cache, metadata, *rest):
        assert q_nope.shape[2] == self.dims.kv_lora_rank
        seen["decoded"].append(q_nope.shape[0])
        decode(self, q_nope, q_pe, kv_cache, metadata, *rest)

    def noted_expand(self, kv_c, *rest):
        seen["expanded"].append(kv_c.shape[0])
        expand(self, kv_c, *rest)

    monkeypatch.setattr(TorchMLAImpl, "decode", noted_decode)
    monkeypatch.setattr(TorchMLAImpl, "_expand", noted_expand)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family, calls):
    prompts = random_prompts(3, 69)
    engine = Engine(small_model(family), num_blocks=256)
    [group] = engine.runtime.kv_cache_config.kv_cache_groups
    assert isinstance(group.kv_cache_spec, MLAAttentionSpec)
    # One latent of 48 + 16 float32 for each token, whatever the number of heads.
    assert group.kv_cache_spec.page_size_bytes == group.kv_cache_spec.block_size * 64 * 4

    outputs = serve(engine, prompts, max_tokens=64)

    for prompt, output in zip(prompts, outputs, strict=True):
        check_greedy(family, prompt, output)
    assert 69 in calls["expanded"], "the long prompt is prefilled with expanded keys"
    assert calls["decoded"].count(2) >= 2 * 63, "each layer decodes both requests on latents"


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_preempted_shared_and_chunked_requests_equal_generate(family, calls):
    prefix = random_prompts(40, seed=1)[0]
    prompts = random_prompts(1, 90, 17, 16, seed=2) + random_prompts(5, 60, 30, 1, prefix=prefix, seed=3)
    engine = Engine(
        small_model(family),
        num_blocks=14,
        max_num_batched_tokens=40,
        max_num_seqs=6,
        context_chunk_rows=32,
    )

    outputs = serve(engine, prompts, max_tokens=64)

    assert engine.preemptions > 0
    assert engine.pages.shared > 0
    assert 32 in calls["expanded"], "computed tokens are expanded 32 at a time"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_greedy(family, prompt, output)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_drafts_are_verified_on_latents_with_the_same_tokens(family, calls):
    prompts = random_prompts(1, 7, 50, 33, vocab_size=16)
    sampling = {"max_tokens": 64, "temperature": 0.5, "seed": 5}
    expected = serve(Engine(small_model(family, 16)), prompts, **sampling)
    calls["decoded"].clear()
    drafting = Engine(small_model(family, 16), draft_tokens=4)

    assert serve(drafting, prompts, **sampling) == expected

    assert 0 < drafting.accepted < drafting.drafted
    assert max(calls["decoded"]) > 4, "four requests have more than a query each"


def test_the_other_rotation_and_a_dropped_factor_of_the_scale_would_be_seen():
    [prompt] = random_prompts(69)
    expected = generated("DeepseekV2", prompt, 32)
    assert generated("DeepseekV3", prompt, 32) != generated("DeepseekV3:halves", prompt, 32)
    model = small_model("DeepseekV2")
    for layer in model.model.layers:
        # The scale of a head without the factor for long contexts.
        layer.self_attn.scaling = 40**-0.5

    assert serve(Engine(model), [prompt], max_tokens=32) != [expected]


def test_a_model_is_served_by_one_engine_after_another():
    [prompt] = random_prompts(30)
    model = small_model("DeepseekV3")
    first = serve(Engine(model), [prompt], max_tokens=8)
    weights = [layer.self_attn.kv_b_proj.weight for layer in model.model.layers]

    assert serve(Engine(model), [prompt], max_tokens=8) == first

    assert all(isinstance(layer.self_attn.kv_b_proj, KeptLatents) for layer in model.model.layers)
    assert [layer.self_attn.kv_b_proj.weight for layer in model.model.layers] == weights


def test_kept_latents_replace_a_product_by_zeros_of_its_shape():
    linear = torch.nn.Linear(6, 8, bias=False)
    kept = KeptLatents(linear)
    latents = torch.randn(1, 1, 5, 6)

    assert torch.equal(kept(latents), torch.zeros(1, 1, 5, 8))
    assert kept.kept is latents
    assert kept(latents).view(1, 5, 2, 4).untyped_storage().nbytes() == 4
