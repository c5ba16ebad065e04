"""One question has one answer: the console, the grid, the page and `attnplug.plan` name the same backends."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import attnplug
from attnplug.cli.output.output import features_in_words
from attnplug.matrix.model_page import ExampleModel, example_models, model_data
from attnplug.registry.default import get_registry

ROOT = Path(__file__).parents[2]
MODELS = {model.name: model for model in example_models()}
GPUS = ("T4", "A100", "L40S", "H100", "B200", "MI300X")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return model_data(get_registry())


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
        halves = [(each["backend"] or "none").split("+") for each in found]
        assert [(half[0], half[-1]) for half in halves] == shown, dtype


def test_gpt_oss_on_an_h100_has_the_same_words_everywhere(
    run: Any, data: dict[str, Any], grid: dict[str, Any]
) -> None:
    out = run("select", ROOT / "examples" / "models" / "gpt-oss-20b.json", "--device", "h100").out
    rows = [line.split()[-3:-1] for line in out.splitlines() if line.split()[-1:] == ["16"]]
    column = grid["GPUS"].index("H100")
    drawn = [list(row.served[column]) for row in grid["rows"]() if row.name.startswith("gpt-oss-20b")]
    _, shown = on_page(data, MODELS["gpt-oss-20b"], "H100", "auto")
    assert rows == drawn == [list(pair) for pair in dict.fromkeys(shown)]
    assert "Assumes every library that such a machine could install." in out
