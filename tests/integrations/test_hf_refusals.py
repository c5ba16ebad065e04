"""What attnplug does not serve through transformers is refused by name, never simplified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import DECODERS, ENCODERS, WHISPER, Family, assert_same_logits, prompts
from torch.nn import MultiheadAttention

from attnplug import use
from attnplug.errors import BatchError, ModelConfigError, NoBackendError, SpecError, UnknownBackendError
from attnplug.integrations.transformers import attention_decisions, register, set_attention

OWN_ATTENTION = {
    "bloom": Family("Bloom", {"n_layer": 2}),
    "falcon": Family("Falcon"),
    "mpt": Family("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return DECODERS["llama"].pair()[0]


@torch.no_grad()
def refusal(model: Any, **arguments: Any) -> str:
    with pytest.raises(BatchError) as caught:
        model(**{"input_ids": prompts()[0], **arguments})
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(OWN_ATTENTION))
def test_a_class_that_never_dispatches_is_refused_by_name(name: str) -> None:
    family = OWN_ATTENTION[name]
    model = family.build(family.make_config(), "eager")
    with pytest.raises(ModelConfigError, match=f"^{type(model).__name__}: .* computes attention of its own"):
        set_attention(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", [*sorted({**DECODERS, **ENCODERS}), "whisper"])
def test_a_class_that_dispatches_is_not_refused(name: str) -> None:
    family = {**DECODERS, **ENCODERS, "whisper": WHISPER}[name]
    model = family.build(family.make_config(), "eager")
    set_attention(model)
    assert model.config._attn_implementation == "attnplug"


def test_set_attention_serves_a_model_that_was_built_with_another() -> None:
    family = DECODERS["gemma2"]
    _, eager = family.pair()
    ids, mask = prompts()
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).logits
        set_attention(eager)
        assert attention_decisions(eager) == {}
        assert_same_logits(eager(ids, attention_mask=mask).logits, expected, mask)
    assert len(attention_decisions(eager)) == 4


@pytest.mark.parametrize(
    "part",
    [OWN_ATTENTION["bloom"].build(OWN_ATTENTION["bloom"].make_config(), "eager"), MultiheadAttention(16, 2)],
    ids=lambda part: type(part).__name__,
)
def test_set_attention_refuses_a_part_that_would_ignore_it(part: Any) -> None:
    model = DECODERS["llama"].build(DECODERS["llama"].make_config(), "eager")
    model.extra = part
    with pytest.raises(ModelConfigError, match=rf"LlamaForCausalLM: its {type(part).__name__} \(extra\)"):
        set_attention(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("keyword", "value", "words"),
    [
        ("temperature_of_heads", torch.ones(4), "is not known to attnplug.*torch.float32"),
        ("position_bias", torch.zeros(1, 4, 21, 21), "is added to the logits"),
        ("head_mask", torch.ones(4, 4), "scales the weights of whole heads"),
        ("cu_seq_lens_q", torch.tensor([0, 5, 21]), "sequences are packed in one row"),
        ("softcap", torch.ones(4), "must be a number"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_keyword_that_would_change_the_result_is_refused(
    llama: Any, keyword: str, value: Any, words: str
) -> None:
    message = refusal(llama, **{keyword: value})
    assert message.startswith(f"{keyword}=")
    assert "model.layers.0.self_attn (LlamaAttention)" in message
    assert _finds(words, message)


def _finds(words: str, message: str) -> bool:
    parts = words.split(".*")
    return all(part in message for part in parts)


@torch.no_grad()
def test_keywords_that_say_nothing_are_let_through(llama: Any) -> None:
    ids, _ = prompts()
    plain = llama(ids).logits
    same = llama(ids, head_mask=None, output_attentions=False, token_type_ids=torch.ones_like(ids)).logits
    assert torch.equal(plain, same)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_attention_weights_cannot_be_had(name: str) -> None:
    model = {**DECODERS, **ENCODERS}[name].pair()[0]
    assert "attention weights are never computed" in refusal(model, output_attentions=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_matrix_of_a_mask_is_refused(llama: Any, dtype: torch.dtype) -> None:
    message = refusal(llama, attention_mask=torch.ones(3, 1, 21, 21, dtype=dtype))
    assert message.startswith(f"attention_mask='{dtype} (3, 1, 21, 21)'")
    assert "2-D padding mask" in message


def test_a_padding_mask_of_the_new_tokens_alone_is_refused(llama: Any) -> None:
    ids, mask = prompts()
    with torch.no_grad():
        cache = llama(ids, attention_mask=mask).past_key_values
    message = refusal(llama, input_ids=ids[:, :2], attention_mask=mask[:, :2], past_key_values=cache)
    assert "must cover all 23 positions" in message


@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_padding_between_tokens_is_refused_where_distances_count(name: str) -> None:
    _, mask = prompts()
    mask[2, 13:15] = 0
    message = refusal(DECODERS[name].pair()[0], attention_mask=mask)
    assert "2 runs of tokens in row 2" in message


def test_training_with_dropout_is_refused() -> None:
    family = DECODERS["llama"]
    model = family.build(family.make_config(attention_dropout=0.25), "attnplug").train()
    assert refusal(model).startswith("dropout=0.25")


@torch.no_grad()
def test_training_mode_without_dropout_is_served() -> None:
    ours, eager = DECODERS["llama"].pair()
    ids, _ = prompts()
    assert_same_logits(ours.train()(ids).logits, eager(ids).logits)


def test_gradients_are_refused(llama: Any) -> None:
    with pytest.raises(BatchError, match=r"no backward pass; run the model under torch\.no_grad"):
        llama(prompts()[0])


def test_frozen_weights_need_no_gradient() -> None:
    ours, eager = DECODERS["llama"].pair()
    ids, _ = prompts()
    assert_same_logits(ours.requires_grad_(False)(ids).logits, eager.requires_grad_(False)(ids).logits)


def test_gradients_of_sinks_alone_are_refused_too() -> None:
    ours, _ = DECODERS["gpt_oss"].pair()
    for name, weight in ours.named_parameters():
        weight.requires_grad_("sinks" in name)
    with pytest.raises(BatchError, match=r"requires_grad=\['s_aux'\].*no backward pass"):
        ours(torch.arange(3, 9)[None])


def test_a_scale_that_means_nothing_is_refused(llama: Any) -> None:
    from attnplug.integrations.attention.registration import attention

    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    tensors = (torch.zeros(1, 2, 3, 8) for _ in range(3))
    with pytest.raises(SpecError, match="scale"):
        attention(module, *tensors, None, scaling=-1.0)


@torch.no_grad()
def test_a_backend_that_does_not_exist_is_refused(llama: Any) -> None:
    with use("NOSUCH"), pytest.raises(UnknownBackendError, match="NOSUCH"):
        llama(prompts()[0])


@torch.no_grad()
def test_a_layer_that_no_backend_serves_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnplug.backends.torch_native import TorchBackend
    from attnplug.backends.triton import TritonBackend
    from attnplug.core import Feature
    from attnplug.registry.default import get_registry

    for backend in (TorchBackend, TritonBackend):
        monkeypatch.setattr(backend, "features", Feature.SLIDING_WINDOW)
    get_registry()._cache.clear()
    try:
        with pytest.raises(NoBackendError, match="direct"):
            llama(prompts()[0])
    finally:
        get_registry()._cache.clear()


def test_registering_twice_changes_nothing() -> None:
    register()
    register()
