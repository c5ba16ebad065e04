"""Encoders and encoder-decoders of transformers on attnplug against their own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import ENCODERS, WHISPER, Family, assert_same_logits, prompts
from transformers.generation import GenerationMixin

from attnplug.integrations.transformers import attention_decisions

pytestmark = pytest.mark.usefixtures("no_grad")

Pair = tuple[Any, Any]

BART = Family(
    "Bart",
    {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    },
    auto="AutoModelForSeq2SeqLM",
)


@pytest.fixture(scope="module")
def whisper() -> Pair:
    return WHISPER.pair()


@pytest.fixture(scope="module")
def bart() -> Pair:
    return BART.pair()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_an_encoder_gives_eagers_logits(name: str, side: str) -> None:
    ours, eager = ENCODERS[name].pair()
    ids, mask = prompts(side=side)
    found, expected = (model(ids, attention_mask=mask).logits for model in (ours, eager))
    assert_same_logits(found, expected, mask)
    found, expected = (model(ids[:1]).logits for model in (ours, eager))
    assert_same_logits(found, expected)


@pytest.mark.parametrize(
    ("name", "windows"),
    [("bert", {(-1, -1)}), ("modernbert", {(-1, -1), (4, 4)})],
    ids=["bert", "modernbert"],
)
def test_an_encoder_layer_asks_for_both_sides(name: str, windows: set[tuple[int, int]]) -> None:
    ours, _ = ENCODERS[name].pair()
    ours(prompts()[0])
    specs = [decision.spec for decision in attention_decisions(ours).values()]
    assert len(specs) == 4
    assert {spec.window for spec in specs} == windows
    assert {str(spec.attn_type) for spec in specs} == {"encoder_only"}


def test_whisper_gives_eagers_logits(whisper: Pair) -> None:
    features = torch.randn(3, 8, 60, generator=torch.Generator().manual_seed(2))
    ids, mask = prompts()
    found, expected = (
        model(features, decoder_input_ids=ids, decoder_attention_mask=mask).logits for model in whisper
    )
    assert_same_logits(found, expected, mask)


def test_whisper_decoder_tokens_as_many_as_encoder_frames_are_no_padding(whisper: Pair) -> None:
    features = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(2))
    ids, mask = prompts(rows=2, length=30)
    found, expected = (
        model(features, decoder_input_ids=ids, decoder_attention_mask=mask).logits for model in whisper
    )
    assert_same_logits(found, expected, mask)


def test_whisper_greedy_tokens_are_eagers(whisper: Pair) -> None:
    features = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(3))
    start = torch.tensor([[1, 5, 9], [1, 7, 4]])
    found, expected = (
        # Whisper's own generate() cuts audio into segments; this is the loop below it.
        GenerationMixin.generate(model, features, decoder_input_ids=start, max_new_tokens=24, do_sample=False)
        for model in whisper
    )
    assert found.shape == (2, 27)
    assert found.tolist() == expected.tolist()


def test_whisper_layers_are_told_apart(whisper: Pair) -> None:
    ours, _ = whisper
    ours(torch.zeros(1, 8, 60), decoder_input_ids=prompts(rows=1)[0])
    kinds = {name: str(d.spec.attn_type) for name, d in attention_decisions(ours).items()}
    assert kinds == {
        f"model.{part}.layers.{i}.{attention}": kind
        for i in (0, 1)
        for part, attention, kind in (
            ("encoder", "self_attn", "encoder"),
            ("decoder", "self_attn", "decoder"),
            ("decoder", "encoder_attn", "encoder_decoder"),
        )
    }


@pytest.mark.parametrize("length", [21, 13], ids=["as many keys", "fewer queries"])
def test_bart_padding_of_encoder_keys_hides_no_decoder_query(bart: Pair, length: int) -> None:
    ids, mask = prompts()
    decoder_ids, _ = prompts(length=length)
    found, expected = (
        model(ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits for model in bart
    )
    assert_same_logits(found, expected)


def test_bart_greedy_tokens_are_eagers(bart: Pair) -> None:
    ids, mask = prompts(side="right")
    arguments: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "num_beams": 1}
    found, expected = (model.generate(ids, attention_mask=mask, **arguments) for model in bart)
    assert found.tolist() == expected.tolist()
