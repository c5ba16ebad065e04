"""Small random models of the families that the engine serves, and what transformers generates with them."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path

import torch
from tiny import load_config, shrink
from transformers import AutoModelForCausalLM, PreTrainedModel

MODELS = Path(__file__).parents[2] / "examples" / "models"
FAMILIES = {
    "Llama": "llama-3.1-8b",
    "Qwen3": "qwen3-8b",
    "Mistral": "mistral-7b-v0.1",
    "Gemma2": "gemma-2-9b",
    "Gemma3": "gemma-3-27b-text",
    "GptOss": "gpt-oss-20b",
}
LATENT_FAMILIES = {
    "DeepseekV2": "deepseek-v2-lite",
    "DeepseekV3": "deepseek-v3",
    "KimiK2": "kimi-k2",
    "Glm47Flash": "glm-4.7-flash",
}
"""Those with latent attention; of DeepseekV2 the queries are not compressed."""
WINDOW = 32


@functools.cache
def _model(family: str, vocab_size: int = 512) -> PreTrainedModel:
    file = (FAMILIES | LATENT_FAMILIES)[family.partition(":")[0]]
    config = load_config(MODELS / f"{file}.json")
    config = shrink(config, vocab_size=vocab_size)
    if family.endswith(":halves"):
        config.rope_interleave = False
    if family == "Gemma2":
        config.attn_logit_softcapping = 2.0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.uniform_(parameter, 0.0, 3.0)
    # The model's own attention: of transformers' functions, the one that honours soft caps and sinks.
    model.set_attn_implementation("eager")
    return model


def small_model(family: str, vocab_size: int = 512) -> PreTrainedModel:
    """A model of its own to change; with few tokens it repeats itself.

    With ":halves" after its name, a latent family rotates the halves of a head instead of pairs of neighbours.
    """
    return copy.deepcopy(_model(family, vocab_size))


def random_prompts(
    *lengths: int, seed: int = 0, prefix: list[int] | None = None, vocab_size: int = 512
) -> list[list[int]]:
    """Random tokens of these lengths, each after `prefix`."""
    draw = random.Random(seed)
    return [(prefix or []) + [draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def generated(family: str, prompt: list[int], count: int) -> list[int]:
    """What `generate` draws greedily."""
    ids = torch.tensor([prompt])
    output = _model(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def check_greedy(family: str, prompt: list[int], output: list[int], count: int = 64) -> None:
    """`output` is what `generate` gives, up to a place where the reference's two best logits are as good as equal."""
    assert len(output) == count
    expected = generated(family, prompt, count)
    if output == expected:
        return
    place = next(i for i, pair in enumerate(zip(output, expected, strict=True)) if pair[0] != pair[1])
    with torch.no_grad():
        logits = _model(family)(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert best - second < 1e-4, f"token {place} is {output[place]}, not {expected[place]}"
