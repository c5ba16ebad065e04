"""One question has one answer: the console, the grid, the page and `attnplug.plan` name the same backends."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import attnplug
from attnplug.cli.output.output import features_in_words
from attnplug.matrix.model_page import ExampleModel, example_models
from attnplug.registry.devices import resolve_device

ROOT = Path(__file__).parents[2]
MODELS = {model.name: model for model in example_models()}
GPT, LLAMA = (ROOT / "examples" / "models" / f"{name}.json" for name in ("gpt-oss-20b", "llama-3.1-8b"))
GPUS = ("T4", "A100", "L40S", "H100", "B200", "MI300X")


@pytest.fixture
def data(models_data: dict[str, Any]) -> dict[str, Any]:
    return models_data


@pytest.fixture(scope="module")
def grid() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "model_grid.py"))


def planned(specs: Any, gpu: str) -> list[tuple[str, str]] | None:
    """By layer, what `attnplug.plan` says of prefill and decode; None if it refuses the model."""
    try:
        plan = attnplug.plan(specs, gpu, assume_installed="all")
    except attnplug.NoBackendError:
        return None
    return [tuple(members.values()) for members in plan.members.values()]


def on_page(
    data: dict[str, Any], model: ExampleModel, gpu: str, dtype: str
) -> tuple[str, list[tuple[str, str]]]:
    """The storage that the page recommends, and by layer the backends of prefill and decode."""
    place = list(MODELS).index(model.name)
    device = next(each["device"] for each in data["gpus"] if each["name"] == gpu)
    row = data["answers"][place][data["devices"].index(device)]
    text = data["texts"][row[[each["key"] for each in data["dtypes"]].index(dtype)]]
    kinds = [tuple(each["backends"]) or ("none",) for each in text["kinds"]]
    return text["dtype"], [(kinds[n][0], kinds[n][-1]) for n in data["models"][place]["layers"]]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e5m2"])
def test_page_and_plan_agree(data: dict[str, Any], gpu: str, dtype: str) -> None:
    for model in MODELS.values():
        stored, shown = on_page(data, model, gpu, dtype)
        plan = planned(model.with_kv_cache_dtype(stored), gpu)
        assert plan == shown or (plan is None and ("none", "none") in shown), model.name


@pytest.mark.parametrize("gpu", GPUS)
def test_the_grid_has_what_the_page_has(data: dict[str, Any], grid: dict[str, Any], gpu: str) -> None:
    for model in MODELS.values():
        _, shown = on_page(data, model, gpu, "auto")
        specs = {str(n): spec for n, spec in enumerate(dict.fromkeys(model.layers.values()))}
        served = grid["_served"](specs, gpu)
        by_spec = {spec: served[name] for name, spec in specs.items()}
        assert [by_spec[spec] for spec in model.layers.values()] == shown, model.name


def test_the_grid_is_drawn_from_the_same_layers(grid: dict[str, Any], data: dict[str, Any]) -> None:
    for row in grid["rows"]():
        name, _, kinds = row.name.partition(" (")
        model = MODELS[name]
        for gpu, pair in zip(grid["GPUS"], row.served, strict=True):
            _, shown = on_page(data, model, gpu, "auto")
            words = [features_in_words(spec) for spec in model.layers.values()]
            mine = {
                each
                for each, said in zip(shown, words, strict=True)
                if not kinds or said in kinds.rstrip(")")
            }
            assert pair in mine, (row.name, gpu)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_the_console_says_what_the_page_says(run: Any, data: dict[str, Any], model: str, gpu: str) -> None:
    for dtype in ("auto", "fp8", "fp8_e5m2"):
        stored, shown = on_page(data, MODELS[model], gpu, dtype)
        path = ROOT / "examples" / "models" / f"{model}.json"
        found = run("select", path, "--device", gpu, "--kv-cache-dtype", stored, "--json").json["decisions"]
        # Behind the halves a name has the members of ranges of steps.
        halves = [(each["backend"] or "none").split("+")[:2] for each in found]
        assert [(half[0], half[-1]) for half in halves] == shown, dtype


def test_gpt_oss_on_an_h100_has_the_same_words_everywhere(
    run: Any, data: dict[str, Any], grid: dict[str, Any]
) -> None:
    out = run("select", GPT, "--device", "h100").out
    rows = [line.split()[-3:-1] for line in out.splitlines() if line.split()[-1:] == ["16"]]
    column = grid["GPUS"].index("H100")
    drawn = [list(row.served[column]) for row in grid["rows"]() if row.name.startswith("gpt-oss-20b")]
    _, shown = on_page(data, MODELS["gpt-oss-20b"], "H100", "auto")
    assert rows == drawn == [list(pair) for pair in dict.fromkeys(shown)]
    assert "Assumes every library that such a machine could install." in out


def test_the_first_answer_without_a_gpu_says_what_the_reference_is(run: Any) -> None:
    out = run("select", GPT).out
    assert "TORCH is the reference: right and slow, on any machine." in out
    assert out.endswith("gpt-oss-20b.json --device h100\n")
    assert "is the reference" not in run("select", GPT, "--device", "cpu").out


def test_libraries_of_another_machine_are_assumed_and_named(run: Any) -> None:
    asked = ("select", LLAMA, "--device", "h100")
    out = run(*asked).out
    assert "Assumes every library that such a machine could install." in out
    assert "Missing here: FLASH_ATTN_4 (pip install 'flash-attn-4<5,>=4.0.0b26')." in out
    both = run(*asked, "--backend", "FLASH_ATTN_4+TRITON").out
    assert "Missing here: FLASH_ATTN_4 (pip install 'flash-attn-4<5,>=4.0.0b26')." in both
    here = run(*asked, "--assume-installed", "here")
    assert "Assumes" not in here.out
    assert "Missing" not in here.out
    assert {each["assumed"] for each in run(*asked, "--json").json["decisions"]} == {"all"}
    joint = run(*asked, "--one-backend", "--json").json
    assert "by_phase" not in joint
    assert {each["backend"] for each in joint["decisions"]} == {"TRITON"}


@pytest.mark.parametrize(("device", "same"), [("9.0", "sm90"), ("gpu", "current"), ("GPU", "cuda")])
def test_other_words_for_a_device(device: str, same: str) -> None:
    current, wanted = resolve_device("current"), resolve_device(same)
    if device.lower() == "gpu":
        wanted = resolve_device("cuda") if current.type == "cpu" else current
    assert resolve_device(device) == wanted


def test_memory_without_a_unit_has_a_near_value(run: Any) -> None:
    outcome = run("select", LLAMA, "--device", "h100", "--memory", "80")
    assert (outcome.code, "did you mean 80GiB?" in outcome.err) == (2, True)
