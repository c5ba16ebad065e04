"""Decoders of transformers on attnplug against their own eager attention: logits, caches and greedy tokens."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hf_models import DECODERS, WINDOW, Family, assert_same_logits, prompts
from transformers import DynamicCache, StaticCache, masking_utils

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.transformers import attention_decisions

pytestmark = pytest.mark.usefixtures("no_grad")

Pair = tuple[Any, Any]

# What a layer of each family must ask of its backend, so that nothing is honoured by not being asked.
ASKED = {
    "llama": {"full"},
    "qwen3": {"full"},
    "mistral": {"window"},
    "gemma2": {"full cap", "window cap"},
    "gemma3": {"full", "window"},
    "gpt_oss": {"full sinks", "window sinks"},
    "llama4": {"full", "chunk"},
    "phi3": {"window"},
}


@pytest.fixture(scope="module", params=sorted(DECODERS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(family: str) -> Pair:
    return DECODERS[family].pair()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_longer_than_window_and_chunk_give_eagers_logits(pair: Pair, side: str) -> None:
    ours, eager = pair
    ids, mask = prompts(side=side)
    found, expected = (model(ids, attention_mask=mask).logits for model in (ours, eager))
    assert_same_logits(found, expected, mask)


def test_prompts_without_padding_give_eagers_logits(pair: Pair) -> None:
    ids, _ = prompts(rows=2)
    found, expected = (model(ids).logits for model in pair)
    assert_same_logits(found, expected)


def test_each_layer_asks_for_what_its_model_has(family: str, pair: Pair) -> None:
    ours, _ = pair
    ours(prompts()[0])
    decisions = attention_decisions(ours)
    assert list(decisions) == [f"model.layers.{i}.self_attn" for i in range(ours.config.num_hidden_layers)]
    asked = set()
    for name, decision in decisions.items():
        assert decision.layer_name == name
        spec = decision.spec
        words = ["window"] if spec.is_windowed else ["chunk"] if spec.chunk_size else ["full"]
        words += ["cap"] if spec.logits_soft_cap else []
        words += ["sinks"] if spec.has_sinks else []
        asked.add(" ".join(words))
    assert asked == ASKED[family]


@pytest.mark.parametrize("side", ["left", None], ids=["padded", "whole"])
def test_a_prompt_in_pieces_gives_eagers_logits(pair: Pair, side: str | None) -> None:
    ids, mask = prompts(side="left")
    mask = mask if side else torch.ones_like(ids)
    caches = [DynamicCache(config=model.config) for model in pair]
    end = 0
    for count in (3, WINDOW + 2, 1, 4, 1, 2):
        start, end = end, end + count
        found, expected = (
            model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for model, cache in zip(pair, caches, strict=True)
        )
        assert_same_logits(found, expected, mask[:, start:end])
    assert end == ids.shape[1]


def test_a_static_cache_longer_than_the_prompt_gives_eagers_logits(pair: Pair) -> None:
    ids, mask = prompts()
    caches = [StaticCache(config=model.config, max_cache_len=32) for model in pair]
    end = 0
    for count in (5, 12, 1, 2, 1):
        start, end = end, end + count
        found, expected = (
            model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for model, cache in zip(pair, caches, strict=True)
        )
        assert_same_logits(found, expected, mask[:, start:end])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_of_generate_are_eagers(family: str, pair: Pair, cache: str) -> None:
    if (
        family == "llama4"
        and cache == "static"
        and not _takes_spans(masking_utils.create_chunked_causal_mask)
    ):
        pytest.skip("generate() with a static cache calls create_chunked_causal_mask with a keyword it lacks")
    ids, mask = prompts()
    arguments: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "attention_mask": mask}
    if cache == "static":
        arguments["cache_implementation"] = "static"
    found, expected = (model.generate(ids, **arguments) for model in pair)
    assert found.shape == (3, ids.shape[1] + 24)
    assert found.tolist() == expected.tolist()


def _takes_spans(function: Any) -> bool:
    return "block_sequence_ids" in inspect.signature(function).parameters


def test_beams_reorder_the_cache_as_eager_does() -> None:
    ids, mask = prompts(rows=2)
    arguments: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    found, expected = (
        model.generate(ids, attention_mask=mask, **arguments) for model in DECODERS["mistral"].pair()
    )
    assert found.tolist() == expected.tolist()


def test_padding_between_the_tokens_of_a_row_is_skipped_without_a_window() -> None:
    ours, eager = DECODERS["llama"].pair()
    ids, mask = prompts()
    mask[0, 4:7] = 0
    found, expected = (model(ids, attention_mask=mask).logits for model in (ours, eager))
    assert_same_logits(found, expected, mask)


def test_a_row_without_any_token_disturbs_no_other() -> None:
    ours, eager = DECODERS["mistral"].pair()
    ids, mask = prompts()
    mask[1] = 0
    found, expected = (model(ids, attention_mask=mask).logits for model in (ours, eager))
    assert_same_logits(found, expected, mask)


def test_a_decoder_asked_to_see_both_ways_does() -> None:
    ours, eager = DECODERS["llama"].pair(is_causal=False)
    ids, mask = prompts(side="right")
    found, expected = (model(ids, attention_mask=mask).logits for model in (ours, eager))
    assert_same_logits(found, expected, mask)
    assert not any(decision.spec.causal for decision in attention_decisions(ours).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_stays_near_float32(dtype: torch.dtype) -> None:
    ours, eager = Family("Llama", {"num_hidden_layers": 1}).pair()
    ids, mask = prompts()
    expected = eager(ids, attention_mask=mask).logits
    found = ours.to(dtype)(ids, attention_mask=mask).logits
    assert found.dtype == dtype
    assert {d.spec.dtype for d in attention_decisions(ours).values()} == {str(dtype).removeprefix("torch.")}
    error = (found.float() - expected)[mask.bool()]
    assert error.norm() / expected[mask.bool()].norm() < (0.01 if dtype == torch.float16 else 0.06)


def test_decisions_of_no_model_are_refused() -> None:
    with pytest.raises(ModelConfigError, match=r"model=NoneType: must be a torch\.nn\.Module"):
        attention_decisions(None)  # type: ignore[arg-type]
