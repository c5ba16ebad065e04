"""The page "Which backend for my model?": its answers are the selector's, and one sentence tells each."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from attnplug.cli import main
from attnplug.integrations.transformers import read_config
from attnplug.matrix.model_page import ExampleModel, example_models, models_text
from attnplug.matrix.which_backend import KV_CHOICES, answers_for
from attnplug.matrix.words import COLOURS, letters
from attnplug.registry import Registry
from attnplug.registry.devices import resolve_device

ROOT = Path(__file__).parents[2]
MODELS = {model.name: model for model in example_models()}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


@pytest.fixture
def data(models_data: dict[str, Any]) -> dict[str, Any]:
    return models_data


def text_of(data: dict[str, Any], model: str, gpu: str, dtype: str) -> dict[str, Any]:
    """The text that the page shows for three choices, found as the page finds it."""
    (chosen,) = (each for each in data["gpus"] if each["key"] == gpu)
    row = data["answers"][[each["name"] for each in data["models"]].index(model)]
    number = row[data["devices"].index(chosen["device"])][
        [each["key"] for each in data["dtypes"]].index(dtype)
    ]
    return {**data["texts"][number], "said": data["texts"][number]["sentence"].format(gpu=chosen["said"])}


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "sentence"),
    [
        (
            "gpt-oss-20b",
            "a100",
            "fp8",
            (
                "On an A100 with an fp8 cache, gpt-oss-20b runs on TRITON with e5m2; "
                "e4m3 is refused: fp8_e4m3 needs compute capability 8.9."
            ),
        ),
        (
            "gpt-oss-20b",
            "h100",
            "auto",
            (
                "On an H100 with a bfloat16 cache, gpt-oss-20b runs on TRITON (12 sliding layers) and "
                "FLASH_ATTN_4 in prefill and TRITON in decode (12 full layers)."
            ),
        ),
        (
            "gpt-oss-20b",
            "a100",
            "fp8_e4m3",
            (
                "On an A100 with an fp8_e4m3 cache, only the reference TORCH serves gpt-oss-20b; TRITON would serve it "
                "with fp8_e5m2, and refuses e4m3: fp8_e4m3 needs compute capability 8.9."
            ),
        ),
        (
            "gpt-oss-20b",
            "b200",
            "fp8",
            "On a B200 with an fp8 cache, gpt-oss-20b runs on TRITON with e4m3 or e5m2.",
        ),
        (
            "qwen3-8b",
            "t4",
            "auto",
            (
                "On a T4 with a bfloat16 cache, only the reference TORCH serves qwen3-8b; "
                "no other backend supports sm75."
            ),
        ),
        (
            "llama-3.1-8b",
            "cpu",
            "auto",
            "On a CPU with a bfloat16 cache, llama-3.1-8b runs on the reference TORCH.",
        ),
        ("bert-base-uncased", "rtx4090", "fp8", "On an RTX 4090, bert-base-uncased runs on TRITON."),
        (
            "whisper-large-v3",
            "a100",
            "fp8",
            (
                "On an A100 with an fp8 cache, whisper-large-v3 runs on FLASH_ATTN_2 (32 encoder layers) and TRITON "
                "(32 full and 32 cross layers) with e5m2; e4m3 is refused: fp8_e4m3 needs compute capability 8.9."
            ),
        ),
    ],
)
def test_one_sentence_is_the_answer(
    data: dict[str, Any], model: str, gpu: str, dtype: str, sentence: str
) -> None:
    assert text_of(data, model, gpu, dtype)["said"] == sentence


def test_every_sentence_names_the_model_the_cache_and_the_backends_of_the_strip(data: dict[str, Any]) -> None:
    for text in data["texts"]:
        sentence = text["sentence"]
        assert re.fullmatch(r"On \{gpu\}( with an? \w+ cache)?, [^\n]+[^.]\.", sentence)
        assert len(sentence.split()) <= 40
        named = set(re.findall(r"[A-Z_0-9]{5,}", sentence))
        assert named >= {name for kind in text["kinds"] for name in kind["backends"]}
        ends = [rf"(?<![\w.-]){re.escape(model['name'])}(?![\w-]|\.\w)" for model in data["models"]]
        assert sum(re.search(end, sentence) is not None for end in ends) == 1
        reference = any(kind["reference"] for kind in text["kinds"])
        assert ("the reference" in sentence) is reference


@pytest.mark.parametrize("device", ["sm75", "sm80", "sm90", "sm100", "rocm:9.4", "cpu"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_answer_is_the_selectors(
    data: dict[str, Any], registry: Registry, model: ExampleModel, device: str
) -> None:
    for place, dtype in enumerate(KV_CHOICES):
        row = data["answers"][list(MODELS).index(model.name)][data["devices"].index(device)]
        text = data["texts"][row[place]]
        assert text["dtype"] in KV_CHOICES[dtype]
        specs = model.with_kv_cache_dtype(text["dtype"])
        numbers = data["models"][list(MODELS).index(model.name)]["layers"]
        shown = [text["kinds"][number]["backends"] for number in numbers]
        phases = {
            phase: registry.decide_layers(specs, device, (phase,), assume_installed="all")[phase]
            for phase in (None, "prefill", "decode")
        }
        for each, (name, spec) in zip(shown, specs.items(), strict=True):
            # An encoder computes all its tokens at once.
            asked = ("prefill", "prefill" if spec.is_encoder else "decode")
            alone = [str(phases[phase][name].backend) for phase in asked]
            assert each in (alone, [*phases[None][name].members.values()])


@pytest.mark.parametrize("choice", [("gpt-oss-20b", "a100", "fp8"), ("deepseek-v3", "h100", "auto")])
def test_the_command_of_an_answer_gives_the_answer(
    data: dict[str, Any], choice: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(data, *choice)
    program, *arguments = text["command"].format(gpu=choice[1]).split()
    assert program == "attnplug"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [program, *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code in (0, None)
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    numbers = data["models"][list(MODELS).index(choice[0])]["layers"]
    shown = ["+".join(dict.fromkeys(text["kinds"][number]["backends"])) for number in numbers]
    # The answer has the backends of the phases; after these come others that serve ranges of steps.
    found = [(decision["backend"].split("+"), decision["steps"]) for decision in decisions]
    assert ["+".join(names[:2]) for names, _ in found] == shown
    assert all({*names[2:]} <= {step["backend"] for step in steps} for names, steps in found)


def test_fp8_takes_the_format_that_a_kernel_serves(registry: Registry) -> None:
    for model in MODELS.values():
        for device in ("sm80", "sm89"):
            answers = answers_for(registry, model, resolve_device(device))
            exact = [answers[name] for name in KV_CHOICES["fp8"]]
            best = next((each for each in exact if each.outcome.is_served), exact[0])
            assert answers["fp8"].outcome.kv_cache_dtype == best.outcome.kv_cache_dtype


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_are_those_of_the_configuration(name: str) -> None:
    read = read_config(ROOT / "examples" / "models" / f"{name}.json")
    assert MODELS[name] == ExampleModel(name, read.model_type, read.layers)
    stored = read_config(ROOT / "examples" / "models" / f"{name}.json", kv_cache_dtype="fp8_e5m2")
    assert MODELS[name].with_kv_cache_dtype("fp8_e5m2") == stored.layers


def test_every_example_is_there_and_the_file_is_the_one_that_is_written() -> None:
    assert set(MODELS) == {path.stem for path in (ROOT / "examples" / "models").glob("*.json")}
    path = ROOT / "attnplug" / "matrix" / "example_models.json"
    assert path.read_text(encoding="utf-8") == models_text(example_models())


def test_each_backend_has_the_letter_that_select_shows(data: dict[str, Any], registry: Registry) -> None:
    assert data["letters"] == letters(registry.backends())
    assert data["letters"]["TRITON"] == "R"
    assert data["colours"]["TRITON"] == COLOURS["TRITON"][0]
