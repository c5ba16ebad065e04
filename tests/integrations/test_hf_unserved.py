"""A layer or a request that attnplug would not serve is an error, at set_attention or at the model's forward."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from hf_models import DECODERS, ENCODERS, SIZES, Family, assert_same_logits, prompts
from torch.nn import functional

from attnplug.errors import BatchError, ModelConfigError
from attnplug.integrations.transformers import attention_decisions, set_attention

VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
BARE = {
    "cpmant": Family("CpmAnt", {"dim_head": 16, "dim_ff": 64}, auto="AutoModel"),
    "deberta": Family("Deberta", auto="AutoModel"),
    "funnel": Family(
        "Funnel",
        {"d_model": 64, "n_head": 4, "d_head": 16, "block_sizes": [1, 1]},
        auto="AutoModelForMaskedLM",
    ),
    "openai": Family("OpenAIGPT"),
    "prophetnet": Family(
        "ProphetNet",
        {
            f"num_{part}_{what}": 2
            for part in ("encoder", "decoder")
            for what in ("layers", "attention_heads")
        },
        auto="AutoModel",
    ),
    "xlnet": Family("XLNet", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 64}),
}
"""Classes with attention of their own, which transformers builds with any implementation."""
WITH_WEIGHTS = {
    "gpt2": Family("GPT2"),
    "gpt_bigcode": Family("GPTBigCode"),
    "llama": DECODERS["llama"],
    "nemotron": Family("Nemotron"),
    "opt": Family("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "persimmon": Family("Persimmon"),
    "stablelm": Family("StableLm"),
    "bert": ENCODERS["bert"],
}
PEGASUS = {
    "d_model": 64,
    **{
        f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))
    },
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    "block_size": 8,
    "num_global_tokens": 4,
}
TABLES = {
    "git": Family("Git", {"vision_config": VISION}, auto="AutoModel"),
    "gptj": Family("GPTJ", {"rotary_dim": 8}),
    "sam": Family("SamVision", VISION, auto="AutoModel"),
}

# Some modelling files still script functions when they are imported.
pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize("name", sorted(BARE))
def test_a_forward_with_unserved_self_attention_names_the_layer(name: str) -> None:
    model = BARE[name].build(BARE[name].make_config(), "attnplug")
    with pytest.raises(ModelConfigError, match=r"^\S+\.\S+ \(\w+\) computes attention of its own") as caught:
        model(prompts(rows=2, length=8)[0])
    path, cls = str(caught.value).split(" (")[0], str(caught.value).split("(")[1].split(")")[0]
    assert type(model.get_submodule(path)).__name__ == cls
    assert attention_decisions(model) == {}


@pytest.mark.parametrize("name", ["sam", "pegasus_x"])
def test_set_attention_judges_a_class_not_its_file(name: str) -> None:
    family = {"sam": TABLES["sam"], "pegasus_x": Family("PegasusX", PEGASUS, auto="AutoModel")}[name]
    model = family.build(family.make_config(), "eager")
    with pytest.raises(
        ModelConfigError,
        match=r"its (SamVision|PegasusXGlobalLocal)Attention \(.*encoder\.layers\.0\..* of its own",
    ):
        set_attention(model)
    assert model.config._attn_implementation == "eager"


def test_a_layer_beside_served_ones_is_named_when_it_runs() -> None:
    family = Family("PegasusX", PEGASUS, auto="AutoModel")
    model = family.build(family.make_config(), "attnplug")
    ids, _ = prompts(rows=2, length=16)
    with pytest.raises(
        ModelConfigError, match=r"^encoder\.layers\.0\.self_attn \(PegasusXGlobalLocalAttention\)"
    ):
        model(ids, decoder_input_ids=ids)
    states = transformers.modeling_outputs.BaseModelOutput(torch.randn(2, 16, 64))
    # The decoder alone runs no such layer.
    eager = family.build(family.make_config(), "eager")
    eager.load_state_dict(model.state_dict())
    found, expected = (
        m(encoder_outputs=states, decoder_input_ids=ids[:, :5]).last_hidden_state for m in (model, eager)
    )
    assert_same_logits(found, expected)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_class_that_is_picked_by_implementation_is_refused_when_it_is_built(name: str) -> None:
    with pytest.raises(ModelConfigError, match=r"picks its attention classes from \w+, which has none"):
        TABLES[name].build(TABLES[name].make_config(), "attnplug")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            torch.nn.Sequential(torch.nn.Linear(2, 2)),
            r"model=Sequential: must be a transformers\.PreTrainedModel",
        ),
        (
            transformers.MambaConfig(
                **{k: SIZES[k] for k in ("hidden_size", "vocab_size")}, num_hidden_layers=1
            ),
            "no layer",
        ),
    ],
    ids=["Sequential", "Mamba"],
)
def test_a_model_without_layers_to_serve_is_refused(model: Any, words: str) -> None:
    if isinstance(model, transformers.PreTrainedConfig):
        model = transformers.AutoModel.from_config(model)
    with pytest.raises(ModelConfigError, match=words):
        set_attention(model)


def test_an_error_of_transformers_becomes_one_of_attnplug(monkeypatch: pytest.MonkeyPatch) -> None:
    family = DECODERS["llama"]
    model = family.build(family.make_config(), "eager")

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError("not supported for text_config")

    monkeypatch.setattr(type(model), "set_attn_implementation", failing)
    with pytest.raises(ModelConfigError, match=r"LlamaForCausalLM: .*not supported for text_config"):
        set_attention(model)
    assert model.config._attn_implementation == "eager"


def test_a_module_that_skips_the_interface_is_named() -> None:
    ours, eager = DECODERS["llama"].pair()
    ids, mask = prompts()
    attention = ours.model.layers[2].self_attn
    attention.__class__ = type("Own", (type(attention),), {"forward": _either})
    attention.own = False
    assert_same_logits(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask)
    attention.own = True
    with pytest.raises(
        ModelConfigError, match=r"^model\.layers\.2\.self_attn \(Own\) computes attention of its own"
    ):
        ours(ids, attention_mask=mask)


def _either(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    if self.own:
        return hidden_states, None
    return super(type(self), self).forward(hidden_states, **kwargs)


class Mixer(torch.nn.Module):
    """Self-attention in a class that is not named so."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        weights = functional.softmax(self.q(x) @ self.k(x).transpose(1, 2), dim=-1)
        return weights @ self.v(x), None


def test_attention_in_a_class_of_another_name_is_named() -> None:
    family = DECODERS["llama"]
    model = family.build(family.make_config(), "attnplug")
    model.model.layers[1].self_attn = Mixer(64)
    with pytest.raises(ModelConfigError, match=r"^model\.layers\.1\.self_attn \(Mixer\)"):
        model(prompts()[0])


@pytest.mark.parametrize("name", sorted(WITH_WEIGHTS))
def test_attention_weights_are_refused_at_the_models_forward(name: str) -> None:
    model = WITH_WEIGHTS[name].build(WITH_WEIGHTS[name].make_config(), "attnplug")
    ids, _ = prompts(rows=1, length=5)
    with pytest.raises(BatchError, match=rf"output_attentions=True .*\(asked of {type(model).__name__}\)"):
        model(ids, output_attentions=True)
    model(ids, output_attentions=False)


def test_attention_weights_of_an_image_are_refused() -> None:
    model = transformers.Dinov2Model._from_config(
        transformers.Dinov2Config(**VISION), attn_implementation="attnplug"
    ).eval()
    pixels = torch.randn(1, 3, 16, 16)
    assert model(pixels).last_hidden_state.shape == (1, 5, 64)
    with pytest.raises(BatchError, match="asked of Dinov2Model"):
        model(pixels, output_attentions=True)


def test_a_configuration_that_asks_for_attention_weights_is_refused() -> None:
    config = DECODERS["llama"].make_config(output_attentions=True)
    with pytest.raises(ModelConfigError, match=r"config\.output_attentions=True"):
        DECODERS["llama"].build(config, "attnplug")
    model = DECODERS["llama"].build(config, "eager")
    with pytest.raises(ModelConfigError, match=r"config\.output_attentions=True"):
        set_attention(model)
    assert model.config._attn_implementation == "eager"


def test_a_configuration_changed_later_is_refused_at_the_forward() -> None:
    model = DECODERS["llama"].build(DECODERS["llama"].make_config(), "attnplug")
    model.config._output_attentions = True
    with pytest.raises(BatchError, match="output_attentions=True"):
        model(prompts()[0])


def test_decisions_are_empty_after_another_implementation_is_set() -> None:
    model = DECODERS["llama"].build(DECODERS["llama"].make_config(), "attnplug")
    ids, _ = prompts()
    model(ids)
    assert len(attention_decisions(model)) == 4
    model.set_attn_implementation("eager")
    assert attention_decisions(model) == {}
    assert model(ids, output_attentions=True).attentions[3].shape == (3, 4, 21, 21)
    model.set_attn_implementation("attnplug")
    assert attention_decisions(model) == {}
    model(ids)
    assert len(attention_decisions(model)) == 4


def llava() -> Any:
    text = DECODERS["llama"].make_config()
    vision = transformers.CLIPVisionConfig(**VISION, intermediate_size=64)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=95)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()


def with_image(rows: int = 2) -> dict[str, torch.Tensor]:
    ids, _ = prompts(rows=1, length=12)
    ids = ids.expand(rows, -1).clone()
    ids[:, 2:6] = 95
    return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, 16, 16)}


def test_the_text_part_of_a_multimodal_model_is_set_alone() -> None:
    model = llava()
    given = with_image()
    expected = model(**given).logits
    set_attention(model.model.language_model)
    assert model.model.vision_tower.config._attn_implementation == "eager"
    assert_same_logits(model(**given).logits, expected)
    assert list(attention_decisions(model)) == [
        f"model.language_model.layers.{i}.self_attn" for i in range(4)
    ]


def test_both_parts_of_a_multimodal_model_are_set() -> None:
    model = llava()
    given = with_image()
    expected = model(**given).logits
    set_attention(model)
    assert_same_logits(model(**given).logits, expected)
    assert len(attention_decisions(model)) == 6
    # A part that does not run has nothing to be served.
    assert model(prompts()[0]).logits.shape == (3, 21, 96)


def test_a_copied_or_pickled_model_is_still_checked() -> None:
    model = BARE["openai"].build(BARE["openai"].make_config(), "attnplug")
    served = DECODERS["llama"].build(DECODERS["llama"].make_config(), "attnplug")
    ids, _ = prompts()
    served(ids)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ModelConfigError, match=r"h\.0\.attn"):
            again(ids)
    for again in (copy.deepcopy(served), pickle.loads(pickle.dumps(served))):
        again(ids)
        assert [
            len(part._forward_hooks) for part in (again, again.model, again.model.layers[0].self_attn)
        ] == [1] * 3


def test_a_model_whose_configuration_was_assigned_is_watched_too() -> None:
    model = DECODERS["llama"].build(DECODERS["llama"].make_config(), "eager")
    model.config._attn_implementation = "attnplug"
    ids, _ = prompts()
    model(ids)
    assert {decision.layer_name for decision in attention_decisions(model).values()} == {
        f"model.layers.{i}.self_attn" for i in range(4)
    }
    with pytest.raises(BatchError, match="asked of LlamaForCausalLM"):
        model(ids, output_attentions=True)
