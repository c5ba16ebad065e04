"""The example engine serves hybrid models: the tokens that transformers generates with its own states."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from engine import Engine
from small_models import random_prompts
from transformers import PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        **MOE,
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "layer_types": LINEAR,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "KimiLinear": {
        **MOE,
        "layer_types": LINEAR,
        "num_key_value_heads": 4,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        # transformers clamps the steps of prompts to this minimum, and those of decodes not.
        "time_step_min": 1e-9,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "head_dim": 16,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
}


@functools.cache
def model_of(family: str, vocab_size: int = 64) -> PreTrainedModel:
    sizes = {**SMALL, **MODELS[family], "vocab_size": vocab_size}
    config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=None)
    config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            # Their own starts are small, so that a wrong state would hardly show.
            torch.nn.init.normal_(parameter, std=0.5 if "conv" in name else parameter.shape[-1] ** -0.5)
    model.set_attn_implementation("eager")
    return model


def expected(family: str, prompt: list[int], count: int, vocab_size: int = 64) -> list[int]:
    ids = torch.tensor([prompt])
    output = model_of(family, vocab_size).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


def check(family: str, prompts: list[list[int]], vocab_size: int = 64, **more: Any) -> Engine:
    engine = Engine(copy.deepcopy(model_of(family, vocab_size)), **more)
    requests = [engine.add(prompt, max_tokens=64) for prompt in prompts]
    for _ in engine.stream():
        pass
    for prompt, request in zip(prompts, requests, strict=True):
        assert not request.error
        assert request.output == expected(family, prompt, 64, vocab_size)
    return engine


@pytest.mark.parametrize("family", MODELS)
def test_tokens_equal_generate(family: str) -> None:
    check(family, random_prompts(3, 70, 1, vocab_size=64))


@pytest.mark.parametrize("family", MODELS)
def test_tokens_with_cut_prompts_a_prefix_hit_and_preemption(family: str) -> None:
    prefix = random_prompts(40, seed=1, vocab_size=64)[0]
    prompts = random_prompts(1, 50, 17, seed=2, vocab_size=64)
    prompts += random_prompts(5, 30, 1, prefix=prefix, seed=3, vocab_size=64)
    engine = check(family, prompts, num_blocks=20, max_num_batched_tokens=24, max_num_seqs=4)
    assert engine.preemptions > 0
    assert engine.states is not None
    assert engine.states.found > 0
    assert engine.pages.shared > 0


@pytest.mark.parametrize("family", MODELS)
def test_tokens_with_drafts(family: str) -> None:
    # A model of few tokens repeats itself, so some guesses are right.
    prompts = random_prompts(40, 30, 2, vocab_size=6, seed=5)
    engine = check(family, prompts, vocab_size=6, draft_tokens=3)
    assert 0 < engine.accepted < engine.drafted


def test_all_pages_of_states_come_back() -> None:
    engine = check("Qwen3Next", random_prompts(40, 9, vocab_size=64), max_num_seqs=2)
    assert engine.states is not None
    pool = engine.runtime.state_pool
    assert pool.num_free == pool.num_blocks - 1 - len(engine.states._kept)


def test_a_step_whose_model_raises_is_run_again() -> None:
    engine = Engine(copy.deepcopy(model_of("Qwen3Next")))
    prompt = random_prompts(20, vocab_size=64)[0]
    request = engine.add(prompt, max_tokens=8)
    head, failing = engine.model.lm_head, [3, 1]

    def fails(*_: Any) -> None:
        failing[0] -= 1
        if failing[0] == 0:
            raise RuntimeError("once")

    handle = head.register_forward_pre_hook(fails)
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="once"):
        engine.step()
    handle.remove()
    for _ in engine.stream():
        pass
    assert request.output == expected("Qwen3Next", prompt, 8)


def test_trees_of_drafts_are_refused() -> None:
    with pytest.raises(Exception, match="it keeps a state, which a chain of tokens has and no tree"):
        Engine(copy.deepcopy(model_of("Lfm2")), draft_tokens=4, draft_branches=2)
