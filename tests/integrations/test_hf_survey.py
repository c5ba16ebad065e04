"""Every model class of transformers that can be built small: eager attention's numbers, or an error of attnplug."""

from __future__ import annotations

from typing import Any

import huggingface_hub
import pytest
import torch
from tiny_models import first_tensor, is_tiny, model_class, tiny_config, tiny_inputs, tiny_model
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from attnplug.errors import AttnplugError
from attnplug.integrations.attention.class_code import Kind, attention_kind
from attnplug.integrations.transformers import attention_decisions, register, set_attention

NAMES = sorted({name if isinstance(name, str) else name[0] for name in MODEL_MAPPING_NAMES.values()})
QUICK = (
    "AlbertModel",
    "CLIPVisionModel",
    "DistilBertModel",
    "GPT2Model",
    "Qwen3MoeModel",
    "WhisperModel",
    "XLMModel",
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some default configurations name a backbone on the hub.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.rare])
        for name in NAMES
    ],
)
@torch.no_grad()
def test_a_class_gives_eagers_numbers_or_is_refused(name: str) -> None:
    register()
    try:
        cls = model_class(name)
        config = tiny_config(cls)
        is_small = is_tiny(cls, config)
    except Exception as error:  # a class may build no model from its defaults
        pytest.skip(f"cannot be built: {error}")
    if not is_small:
        pytest.skip("small numbers do not make it small")
    try:
        eager = tiny_model(cls, config, "eager")
        inputs = tiny_inputs(eager)
        expected, again = first_tensor(eager(**inputs)), first_tensor(eager(**inputs))
    except Exception as error:  # a default configuration with small numbers may fit no model
        pytest.skip(f"cannot be built small: {error}")
    if not torch.equal(expected, again):
        pytest.skip("its output is not a function of its input")
    assert_equal_or_refused(lambda: tiny_model(cls, config, "attnplug"), inputs, expected)
    assert_equal_or_refused(lambda: set_on(eager), inputs, expected)


def set_on(model: Any) -> Any:
    set_attention(model)
    return model


def assert_equal_or_refused(make: Any, inputs: dict[str, torch.Tensor], expected: torch.Tensor) -> None:
    ran: list[str] = []
    try:
        model = make()
        for path, module in model.named_modules():
            if attention_kind(module) is Kind.DISPATCHES:
                module.register_forward_hook(lambda *_, path=path: ran.append(path))
        found = first_tensor(model(**inputs))
    except AttnplugError:
        return
    error = (found - expected).abs() / expected.abs().clamp(min=1)
    assert error.max() <= 1e-3
    assert set(ran) == set(attention_decisions(model))
    if ran:
        with pytest.raises(AttnplugError, match="output_attentions"):
            model(**inputs, output_attentions=True)
        model.set_attn_implementation("eager")
        assert attention_decisions(model) == {}
