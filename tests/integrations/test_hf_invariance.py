"""Models of transformers whose attention layers ask for equal bits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hf_models import DECODERS

from attnplug.core.errors import NoBackendError, SpecError
from attnplug.integrations.transformers import attention_decisions, set_attention

pytestmark = pytest.mark.usefixtures("no_grad")


def test_each_layer_asks_for_the_words() -> None:
    model = DECODERS["gemma2"].pair()[0]
    set_attention(model, invariance=["batch"])
    model(torch.arange(3, 9)[None])
    decisions = attention_decisions(model).values()
    assert {each.spec.invariance for each in decisions} == {("batch",)}
    # It decides anew, and asks for nothing any more.
    set_attention(model)
    model(torch.arange(3, 9)[None])
    assert {each.spec.invariance for each in attention_decisions(model).values()} == {()}


def test_words_that_no_backend_keeps_here_are_refused_with_a_reason() -> None:
    model = DECODERS["llama"].pair()[0]
    set_attention(model, invariance=("batch", "rows"))
    with pytest.raises(NoBackendError, match=r"invariance batch\+rows not supported: kind rows is not batch"):
        model(torch.arange(3, 9)[None])


def test_an_unknown_word_leaves_the_model_as_it_was() -> None:
    model = DECODERS["llama"].pair()[1]
    before = model.config._attn_implementation
    with pytest.raises(SpecError, match="batches"):
        set_attention(model, invariance=("batches",))
    assert model.config._attn_implementation == before


def test_copies_and_pickles_ask_for_the_same() -> None:
    model = DECODERS["llama"].pair()[0]
    set_attention(model, invariance=("batch", "rows"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(NoBackendError, match="invariance"):
            copied(torch.arange(3, 9)[None])
