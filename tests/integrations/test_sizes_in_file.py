"""Sizes that the file of a model with parts lacks: named in a note, or refused; no default is read in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from attnplug.errors import ModelConfigError
from attnplug.integrations.model_spec import ModelSpec
from attnplug.integrations.reader.config_file import load_config
from attnplug.integrations.transformers import read_config

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
SMALL = {**SIZES, "intermediate_size": 64, "vocab_size": 512, "num_key_value_heads": 2}
VISION = {"model_type": "siglip_vision_model", **SIZES, "intermediate_size": 64, "image_size": 28}
VISION |= {"patch_size": 14}
TEXT = {"model_type": "qwen2", **SMALL}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Reads a file with these fields."""

    def call(**fields: Any) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_config(tmp_path)

    return call


def without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


def llava(**fields: Any) -> dict[str, Any]:
    return {"model_type": "llava", "vision_config": VISION, "image_token_index": 511, **fields}


def test_a_file_with_all_sizes_has_no_note(read: Any) -> None:
    assert read(**llava(text_config=TEXT)).notes == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (llava(text_config=without(TEXT, "num_hidden_layers")), "text_config.num_hidden_layers=32"),
        (
            llava(text_config=TEXT, vision_config=without(VISION, "hidden_size")),
            "vision_config.hidden_size=768",
        ),
        (
            {
                "model_type": "dbrx",
                "d_model": 64,
                "n_heads": 4,
                "attn_config": {"rope_theta": 1e4, "clip_qkv": 8},
            },
            "read: n_layers=24",
        ),
        ({"model_type": "mpt", "n_heads": 4, "n_layers": 2}, "read: d_model=2048"),
    ],
)
def test_a_size_that_a_part_lacks_is_named_with_the_default(
    read: Any, fields: dict[str, Any], words: str
) -> None:
    (note,) = read(**fields).notes
    assert note.startswith("the file lacks sizes, for which transformers' defaults were read: ")
    assert words in note


@pytest.mark.parametrize("beside", [{}, {"txt_config": TEXT}])
def test_a_model_without_the_part_of_its_text_is_refused(read: Any, beside: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match="this llava configuration lacks the part text_config"):
        read(**llava(**beside))


def test_a_file_without_any_size_is_refused(read: Any) -> None:
    with pytest.raises(ModelConfigError, match="this mpt configuration lacks the field n_layers"):
        read(model_type="mpt")


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (SMALL, "num_hidden_layers=2 is not read outside text_config, which has transformers' default 32"),
        ({"hidden_size": 4096, "num_key_value_heads": 8}, "num_key_value_heads=8 is not read outside"),
    ],
)
def test_sizes_of_the_text_where_its_class_does_not_read_them_are_refused(
    read: Any, beside: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelConfigError, match=words):
        read(**llava(**beside))


def test_sizes_that_older_files_have_outside_the_part_are_read(read: Any) -> None:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    model = read(model_type="qwen2_vl", **SMALL, rope_scaling=rope, vision_config=vision)
    assert model.notes == ()
    assert {spec.num_heads for spec in model.layers.values()} == {4, 2}


def test_a_saved_file_whose_parts_equal_the_defaults_is_read_with_a_note(read: Any) -> None:
    # google/siglip-base-patch16-224 has no more than this.
    parts = {name: {"model_type": f"siglip_{name}_model"} for name in ("text", "vision")}
    model = read(model_type="siglip", **{f"{name}_config": part for name, part in parts.items()})
    (note,) = (note for note in model.notes if note.startswith("the file lacks sizes"))
    assert "text_config.num_hidden_layers=12" in note
    assert "vision_config.hidden_size=768" in note


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("clap", {"hidden_size": 768, "num_hidden_layers": 16}),
        ("bridgetower", {"hidden_size": 768, "num_hidden_layers": 6}),
    ],
)
def test_a_size_of_the_model_itself_is_none_of_its_text(tmp_path: Path, family: str, own: Any) -> None:
    fields = {"model_type": family, **own, "text_config": {"vocab_size": 512}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (note,) = load_config(tmp_path)[1]
    assert "text_config.num_hidden_layers=12" in note
