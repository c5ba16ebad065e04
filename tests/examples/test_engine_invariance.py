"""The logits of the example engine have the same bits whatever else is in a step, where its layers ask for that."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine import Engine
from small_models import MODELS, random_prompts, small_model
from tiny import load_config, shrink
from transformers import AutoModelForCausalLM

from attnplug.errors import ModelConfigError


def run(engine, prompts, max_tokens, last=1):
    """The tokens of each prompt's request, and the logits of the last `last` rows of each of its steps."""
    rows = {}
    step, draw = engine.builder.step, engine._draw

    def ask(counts, wanted, trees):
        return step(counts, {name: min(last, counts[name]) for name in wanted}, trees)

    def keep(ready, logits, counts):
        ends = list(itertools.accumulate(min(last, counts[request.name]) for request in ready))
        for request, begin, end in zip(ready, [0, *ends], ends, strict=False):
            rows.setdefault(request.name, []).append(logits[begin:end].clone())
        return draw(ready, logits[[end - 1 for end in ends]], counts)

    engine.builder.step, engine._draw = ask, keep
    requests = [engine.add(prompt, max_tokens=max_tokens) for prompt in prompts]
    for _ in engine.stream():
        pass
    engine.builder.step, engine._draw = step, draw
    return [request.tokens for request in requests], [torch.cat(rows[request.name]) for request in requests]


def has_equal_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("family", ["Llama", pytest.param("Gemma3", marks=pytest.mark.slow)])
def test_logits_of_a_request_have_the_same_bits_beside_others(family):
    prompts = random_prompts(9, 40, 3, 38, 41, 100, 7)
    settings = {"num_blocks": 256, "invariance": ("batch",)}
    _, together = run(Engine(small_model(family), **settings), prompts, 12)
    for prompt, beside in zip(prompts, together, strict=True):
        _, [alone] = run(Engine(small_model(family), **settings), [prompt], 12)
        assert has_equal_bits(alone, beside)


def test_a_step_of_a_long_prompt_that_wants_no_logits_has_none():
    prompts = random_prompts(50)
    engine = Engine(small_model("Llama"), num_blocks=256, max_num_batched_tokens=20, invariance=("batch",))
    [tokens], [rows] = run(engine, prompts, 3)
    assert len(tokens) == 53
    assert rows.shape[0] == 3


def test_a_model_whose_other_layers_may_have_other_bits_is_refused():
    with pytest.raises(ModelConfigError, match=r"router.*its sums may depend on the number of tokens"):
        Engine(small_model("GptOss"), invariance=("batch",))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3-8b", "gemma-3-27b-text"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_256_decodes_have_the_bits_of_one_prefill_alone_and_beside_63_others(family, dtype):
    config = shrink(load_config(MODELS / f"{family}.json"), window=128, vocab_size=4096)
    sizes = {"hidden_size": 1024, "head_dim": 128, "intermediate_size": 2048, "num_attention_heads": 8}
    for name, value in sizes.items():
        setattr(config, name, value)

    def engine(tokens):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval().cuda()
        words = ("batch", "rows", "heads")
        return Engine(
            model, num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=tokens, invariance=words
        )

    prompts = random_prompts(*(1 + 13 * index % 97 for index in range(63)), 300, seed=5)
    counts = 256
    _, [alone] = run(engine(2048), prompts[-1:], counts)
    tokens, beside = run(engine(500), prompts, counts)
    assert has_equal_bits(alone, beside[-1])
    # All rows of one prompt that has the drawn tokens, but for the last: those that drew them, and 44 before.
    for request, rows in zip(tokens[-8:], beside[-8:], strict=True):
        _, [whole] = run(engine(2048), [request[:-1]], 1, last=len(request) - 1)
        assert has_equal_bits(whole[-counts:], rows)
        _, [cut] = run(engine(100), [request[:-1]], 1, last=50)
        assert has_equal_bits(cut[-1:], rows[-1:])
