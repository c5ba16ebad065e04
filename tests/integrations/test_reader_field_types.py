"""A value of a wrong type in a configuration is refused by the name of its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512}
VISION = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "projection_dim": 32}
VISION |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def refused(folder: Path, data: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ModelConfigError) as raised:
        read_config(folder)
    return str(raised.value)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("value", [[8, 8, 8, 8], [[]], {"0": 8}, "8"])
def test_a_window_is_one_number(tmp_path: Path, model_type: str, value: Any) -> None:
    assert "sliding_window" in refused(tmp_path, {"model_type": model_type, **SMALL, "sliding_window": value})


@pytest.mark.parametrize("value", [[], [[]], {"a": 1}])
def test_the_length_of_a_source_is_one_number(tmp_path: Path, value: Any) -> None:
    data = {"model_type": "llama", **SMALL, "max_source_positions": value}
    assert "max_source_positions=" in refused(tmp_path, data)


@pytest.mark.parametrize("name", ["layer_types", "layers_block_type", "attn_type_list", "architectures"])
@pytest.mark.parametrize("value", [8, True, {"0": "full_attention"}])
def test_kinds_of_layers_are_a_list(tmp_path: Path, name: str, value: Any) -> None:
    assert name in refused(tmp_path, {"model_type": "llama", **SMALL, name: value})


@pytest.mark.parametrize("name", ["sub_configs", "attribute_map", "get_text_config", "to_dict", "validate"])
@pytest.mark.parametrize("value", [8, None, [[]], {"a": 1}])
def test_an_entry_replaces_no_attribute_of_the_class(tmp_path: Path, name: str, value: Any) -> None:
    assert f"{name}=" in refused(tmp_path, {"model_type": "llama", **SMALL, name: value})
    text = {"model_type": "llama", **SMALL, name: value}
    data = {"model_type": "llava", "text_config": text, "vision_config": VISION}
    assert f"text_config.{name}=" in refused(tmp_path, data)


@pytest.mark.parametrize("name", ["text_config", "vision_config"])
@pytest.mark.parametrize("value", [8, "llama", [1, 2], True])
def test_a_part_is_an_object(tmp_path: Path, name: str, value: Any) -> None:
    data = {"model_type": "llava", "text_config": {"model_type": "llama", **SMALL}, "vision_config": VISION}
    assert name in refused(tmp_path, {**data, name: value})


def test_the_window_of_a_part_comes_before_other_reasons(tmp_path: Path) -> None:
    text = {"model_type": "llama", **SMALL, "sliding_window": [1, 2]}
    data = {"model_type": "llava", "text_config": text, "vision_config": VISION, "image_token_index": 511}
    assert "json: text_config.sliding_window=[1, 2]: must be one number of tokens" in refused(tmp_path, data)


def test_a_configuration_in_memory(small: Any) -> None:
    config = small("Llama")
    config.sliding_window = [8, 8]
    with pytest.raises(ModelConfigError, match="sliding_window="):
        read_config(config)
