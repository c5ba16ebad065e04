"""`attnplug select` names parts of a model that are no attention, and parts whose attention was not read."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
VISION = {"hidden_size": 32, "intermediate_size": 32, "attention_heads": 2, "num_hidden_layers": 2}
VISION |= {"num_global_layers": 1, "image_size": 28, "patch_size": 14, "vision_output_dim": 96}
MLLAMA = {
    "model_type": "mllama",
    "text_config": {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1, 3]},
    "vision_config": {**VISION, "model_type": "mllama_vision_model", "intermediate_layers_indices": [0, 1]},
}
JAMBA = {**TEXT, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
MGP_STR = {"model_type": "mgp-str", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
REMOTE = {**TEXT, "model_type": "something_new", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def select(run, tmp_path):
    """Runs the command on a configuration."""

    def on(data, *flags):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(data))
        return run("select", path, "--device", "cpu", *flags)

    return on


def test_a_tower_that_was_not_read_says_so_with_the_reason(select):
    outcome = select(MLLAMA)

    text = " ".join(outcome.out.split())
    assert "not read: 1 x vision encoder (model.vision_model), because model.vision_model.transformer" in text
    assert "alters the mask or adds a bias of its own to it" in text
    assert "not attention" not in text


def test_layers_of_another_kind_are_no_attention(select):
    text = " ".join(select(JAMBA, "--for", "transformers").out.split())

    assert "not attention: 2 x mamba (0, 2) transformers runs 2 layers that keep a state" in text
    assert "not read" not in text


def test_layers_whose_states_attnplug_computes_have_backends(select):
    outcome = select(JAMBA)

    rows = [line.split() for line in outcome.out.splitlines() if line.endswith(" -")]
    assert rows == [
        ["2", "0,", "2", "128/128", "1", "state", "conv", "of", "4", "silu", "TORCH", "-"],
        ["2", "0,", "2", "128/1", "16", "state", "linear,", "decay", "per", "row", "TORCH", "-"],
    ]
    assert "not attention" not in outcome.out


def test_blocks_of_a_sequential_that_is_iterated_are_layers(select):
    outcome = select(MGP_STR, "--json")

    names = [decision["layer_name"] for decision in outcome.json["decisions"]]
    assert names == [f"mgp_str.encoder.blocks.{i}.attn" for i in range(3)]
    assert (outcome.code, outcome.json["other_layers"]) == (0, {})


def test_a_family_found_by_its_architectures_is_noted(select):
    found = select(REMOTE, "--json").json

    assert found["model_type"] == "llama"
    assert found["notes"][0].startswith("model_type 'something_new' is unknown to transformers")
    assert "it is read as 'llama'" in " ".join(select(REMOTE).out.split())


def test_a_refusal_says_what_to_do(select):
    outcome = select({**REMOTE, "architectures": None})

    assert outcome.code == 1
    assert "set model_type to that family" in outcome.err
    assert "`attnplug explain`" in outcome.err
