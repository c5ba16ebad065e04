"""Files that are no configuration: one sentence each."""

from __future__ import annotations

import json
import sys

import pytest

from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config


@pytest.fixture
def written(tmp_path):
    """Writes text, or anything else as JSON, to a file."""

    def write(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def refusal(source):
    with pytest.raises(ModelConfigError) as caught:
        read_config(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_file_is_named(tmp_path):
    assert refusal(tmp_path / "none.json").startswith(f"{tmp_path / 'none.json'}: no such file")


def test_a_name_of_the_hub_is_not_downloaded():
    assert "nothing is downloaded" in refusal("some-organisation/some-model")


def test_a_folder_without_a_configuration(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path}: the folder has no config.json"


def test_a_folder_with_a_configuration_is_read(small, tmp_path):
    small("Llama").save_pretrained(tmp_path)

    assert read_config(tmp_path) == read_config(str(tmp_path / "config.json"))


def test_an_empty_file(written):
    assert "the file is empty" in refusal(written(" \n"))


def test_text_that_is_not_json(written):
    assert "not JSON" in refusal(written("{model_type"))


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")

    assert "cannot be read as text" in refusal(path)


@pytest.mark.parametrize(
    ("content", "kind"), [([], "list"), ("3", "number"), ("null", "null"), ('"a"', "string")]
)
def test_json_of_something_else(content, kind, written):
    assert f"contains a JSON {kind}; a model configuration is a JSON object" in refusal(written(content))


def test_an_object_without_a_model_type_is_told_the_field(written):
    assert "has no field model_type" in refusal(written({"hidden_size": 8}))


def test_a_model_type_that_is_no_name(written):
    assert "has model_type=7, not a name" in refusal(written({"model_type": 7}))


def test_an_unknown_model_type_gets_near_names(written):
    message = refusal(written({"model_type": "lama"}))

    assert "model_type 'lama' is unknown to transformers" in message
    assert "llama" in message.partition("near names are")[2]
    assert "a newer transformers may know it" in message


def test_remote_code_is_not_run(written):
    content = {"model_type": "my_own", "auto_map": {"AutoConfig": "configuration.MyConfig"}}

    message = refusal(written(content))

    assert "models of remote code cannot be read" in message
    assert "set model_type to that family" in message
    assert "`attnplug explain`" in message


def test_a_missing_size_is_named(written):
    assert "lacks the field num_attention_heads" in refusal(
        written({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2})
    )


def test_a_size_under_a_name_that_the_family_does_not_have_is_missing(written):
    content = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_layers": 2}

    assert "lacks the field num_hidden_layers" in refusal(written(content))


def test_a_missing_size_is_named_as_the_family_stores_it(written):
    assert "lacks the field n_head" in refusal(written({"model_type": "gpt2", "n_embd": 64, "n_layer": 2}))


def test_a_value_of_the_wrong_kind(written):
    assert "cannot read this llama configuration" in refusal(
        written(
            {"model_type": "llama", "hidden_size": "big", "num_hidden_layers": 2, "num_attention_heads": 2}
        )
    )


def test_sizes_that_do_not_fit_together(written):
    content = {"model_type": "falcon", "hidden_size": 65, "num_hidden_layers": 1, "num_attention_heads": 4}

    assert "cannot build FalconForCausalLM" in refusal(written(content))


def test_a_field_that_the_class_needs_is_named(small, monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(modeling.LlamaMLP, "__init__", lambda self, config: config.expansion_rate)

    assert refusal(small("Llama")) == (
        "the llama configuration lacks the field expansion_rate, which LlamaForCausalLM needs"
    )


def test_a_dictionary_is_no_configuration():
    assert "a path or a PreTrainedConfig is needed, not dict" in refusal({"model_type": "llama"})


def test_without_transformers_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "a_field_of_its_own": 1}')

    assert refusal(path).endswith("pip install 'transformers>=5.15'")
    assert "no such file" in refusal(tmp_path / "absent.json")


def test_sizes_on_which_attention_fails_give_the_error_of_the_model(small):
    """A class that uses the attention interface is not accused of attention of its own."""
    message = refusal(small("Llama", head_dim=3))

    assert message.startswith("model.layers.0.self_attn: LlamaAttention fails before it attends")
    assert "of its own" not in message


def test_a_model_without_kv_heads_is_refused(small):
    message = refusal(small("Phi3", num_key_value_heads=-1))

    assert "Phi3Attention has a dimension of size 0 (query" in message


def test_a_scale_that_is_no_real_number_is_refused(small):
    message = refusal(small("Gemma2", query_pre_attn_scalar=-4))

    assert "Gemma2Attention scales its logits by" in message
    assert "not a real number" in message


def test_a_name_of_the_hub_is_read_from_the_local_cache(small, tmp_path, monkeypatch):
    folder = tmp_path / "models--some-organisation--some-model"
    small("Llama").save_pretrained(folder / "snapshots" / "0123")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert read_config("some-organisation/some-model") == read_config(folder / "snapshots" / "0123")


def test_a_name_that_is_not_cached_has_the_command_for_its_configuration_alone():
    assert refusal("some-organisation/some-model").endswith(
        "to get its configuration alone, run: hf download some-organisation/some-model config.json"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "none.safetensors"])
def test_a_file_of_weights_is_no_configuration(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 16)
    assert refusal(tmp_path / name).endswith("a file of weights; give the config.json beside it")


def test_a_family_whose_layers_have_windows_of_their_own_is_refused(written):
    neomme = pytest.importorskip("transformers.models.neomme.configuration_neomme")

    message = refusal(written(neomme.NeoMMEConfig().to_dict()))

    assert "per_layer_config has values of single layers for sliding_window" in message
