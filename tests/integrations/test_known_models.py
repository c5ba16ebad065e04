"""The rules of known model types: each answer equals the full reader's, and all else is left to that reader."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
from known_models import SMALL, configurations, values_of
from transformers import CONFIG_MAPPING

from attnplug.errors import ModelConfigError
from attnplug.integrations.known import reading
from attnplug.integrations.known.reading import FAMILIES, read_known
from attnplug.integrations.model_spec import Client, ModelSpec
from attnplug.integrations.reader.config_file import load_config
from attnplug.integrations.reader.model_reading import read_model
from attnplug.integrations.transformers import read_config

HYBRIDS = {"kimi-linear-48b", "nemotron-3-nano-30b", "qwen3-next-80b"}
"""Examples that the full reader reads: the sizes of states come from a run."""
MODELS = (Path(__file__).parents[2] / "examples" / "models").glob("*.json")
EXAMPLES = sorted(path for path in MODELS if path.stem not in HYBRIDS)
TYPES = sorted(FAMILIES)


def known(data: dict[str, Any], ranks: int = 1, client: Client = Client.ENGINE) -> ModelSpec | str | None:
    """The rule's answer, its error, or None."""
    try:
        return read_known(data, ranks, "auto" if client is Client.TRANSFORMERS else "fp8", client)
    except ModelConfigError as error:
        return str(error)


def full(path: Path, data: dict[str, Any], ranks: int = 1, client: Client = Client.ENGINE) -> ModelSpec | str:
    """The full reader's answer, or its error."""
    path.write_text(json.dumps(data))
    try:
        return read_model(
            load_config(path)[0], ranks, "auto" if client is Client.TRANSFORMERS else "fp8", client
        )
    except ModelConfigError as error:
        return str(error)


def assert_same(path: Path, data: dict[str, Any], ranks: int = 1, client: Client = Client.ENGINE) -> None:
    answer = known(data, ranks, client)
    if answer is None:
        return
    expected = full(path, data, ranks, client)
    assert answer == expected
    if isinstance(answer, ModelSpec) and isinstance(expected, ModelSpec):
        assert list(answer.layers) == list(expected.layers)


def small(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **SMALL[model_type]}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_known_in_an_engine(path: Path) -> None:
    assert known(json.loads(path.read_text())) is not None


@pytest.mark.parametrize("client", Client)
def test_a_type_of_remote_code_is_read_as_the_class_that_it_names(client: Client) -> None:
    data = json.loads((EXAMPLES[0].parent / "kimi-k2.json").read_text())
    found = known(data, client=client)
    assert isinstance(found, ModelSpec)
    alike = known({**data, "model_type": "deepseek_v3"}, client=client)
    assert isinstance(alike, ModelSpec)
    assert (found.model_type, found.name, found.layers) == ("kimi_k2", "DeepseekV3ForCausalLM", alike.layers)
    (note,) = found.notes
    assert "it is read as 'deepseek_v3', the family of DeepseekV3ForCausalLM in its architectures" in note
    assert note.startswith("model_type 'kimi_k2' is unknown to transformers ")
    assert not alike.notes
    for architectures in (None, [], ["KimiForCausalLM"]):
        assert known({**data, "architectures": architectures}, client=client) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "client"),
    [
        # CI has each example for one client, and both clients by varied models of each type.
        pytest.param(
            path, client, marks=[pytest.mark.rare] * (index % 4 in (1, 2)), id=f"{path.stem}-{client}"
        )
        for index, (path, client) in enumerate(itertools.product(EXAMPLES, Client))
    ],
)
def test_each_example_reads_as_by_the_full_reader(path: Path, client: Client, tmp_path: Path) -> None:
    data = json.loads(path.read_text())
    if data["model_type"] in reading.ALIKE:  # transformers does not have the type, but the class
        data["model_type"] = reading.ALIKE[data["model_type"]]
    assert_same(tmp_path / "config.json", data, 2, client)


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "whisper"])
def test_a_small_model_reads_as_by_the_full_reader(model_type: str, tmp_path: Path) -> None:
    data = small(model_type)
    assert isinstance(known(data), ModelSpec)
    assert_same(tmp_path / "config.json", data)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("model_type", TYPES)
def test_every_understood_value_reads_as_by_the_full_reader(model_type: str, tmp_path: Path) -> None:
    for name, check in sorted(FAMILIES[model_type].fields.items()):
        if name not in ("model_type", "architectures"):
            understood = [value for value in values_of(model_type, name) if check(value)]
            assert understood, f"no value of {name} is tried"
            for value in understood:
                assert_same(tmp_path / "config.json", {**small(model_type), name: value})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_varied_models_read_as_by_the_full_reader(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    drawn = data.draw(configurations(model_type))
    ranks, client = data.draw(st.sampled_from([1, 1, 2, 3, 8])), data.draw(st.sampled_from(Client))
    assert_same(tmp_path_factory.mktemp("varied") / "config.json", drawn, ranks, client)


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_the_installed_transformers(model_type: str) -> None:
    config_class: Any = CONFIG_MAPPING[model_type]
    for name, default in FAMILIES[model_type].defaults.items():
        declared = getattr(config_class, name, None)
        if name == "partial_rotary_factor":
            declared = config_class().rope_parameters[name]
        assert declared == default, name


@pytest.mark.parametrize("model_type", TYPES)
def test_an_unknown_field_and_an_unknown_value_are_left_to_the_full_reader(model_type: str) -> None:
    data = small(model_type)
    assert known({**data, "a_newer_field": 1}) is None
    assert known({**data, "architectures": ["LlamaForSomethingElse"]}) is None
    for name in (*FAMILIES[model_type].required, "vocab_size", "dtype"):
        assert known({**data, name: "text"}) is None
        assert known({**data, name: True}) is None
        assert known({**data, name: -1}) is None


@pytest.mark.parametrize("model_type", TYPES)
def test_a_required_field_that_is_absent_is_left_to_the_full_reader(model_type: str) -> None:
    for name in FAMILIES[model_type].required:
        data = small(model_type)
        del data[name]
        assert known(data) is None


_WRONG_TYPES: list[Any] = [0, 3, True, False, 1.5, "text", [], [None], {}, {"a": 1}]
_UNDERSTOOD = {
    "architectures": (None, []),
    "auto_map": ({}, {"a": 1}),
    "layer_types": (None,),
    "rope_parameters": (None,),
    "rope_scaling": (None,),
}


@pytest.mark.parametrize("model_type", TYPES)
def test_values_of_wrong_types_are_left_to_the_full_reader(model_type: str) -> None:
    data, fields = small(model_type), FAMILIES[model_type].fields
    for name in _UNDERSTOOD.keys() & fields.keys():
        for value in _WRONG_TYPES:
            if not any(type(value) is type(each) and value == each for each in _UNDERSTOOD[name]):
                assert known({**data, name: value}) is None, (name, value)


def test_another_transformers_is_left_to_the_full_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(small("llama")) is not None
    monkeypatch.setattr(reading.metadata, "version", lambda name: "6.0.0")
    assert known(small("llama")) is None


def test_ranks_that_do_not_divide_the_heads_give_the_same_error(tmp_path: Path) -> None:
    data = small("llama")
    assert known(data, ranks=3) == full(tmp_path / "config.json", data, ranks=3)
    assert "tensor_parallel_size=3 does not divide" in str(known(data, ranks=3))


_ALONE = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
from attnplug.integrations.transformers import read_config
print([len(read_config(path).layers) for path in sys.argv[1:]])
"""


def test_a_known_model_is_read_without_torch_and_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, *map(str, EXAMPLES)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [len(read_config(path).layers) for path in EXAMPLES]


def test_read_config_gives_what_the_rule_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES[0]
    answer = read_known(json.loads(path.read_text()), 1, "auto", Client.ENGINE)
    assert answer is not None
    assert read_config(path) == answer
