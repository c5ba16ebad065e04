"""The page of model plans is what the backends say today, and its layers are those of the example models."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from fences import ROOT
from scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "model_plans.py")


def test_the_page_is_the_one_that_its_script_writes(script: ModuleType) -> None:
    text = script.PAGE.read_text()
    plan, times = script.make_plan(), script.known_times()
    assert text == script.page(text, plan, times), "run: python benchmarks/model_plans.py --write"


def test_every_example_model_is_planned(script: ModuleType) -> None:
    models = dict.fromkeys(row.model for row in script.make_plan().rows)
    assert list(models) == [path.stem for path in script.MODELS]


def test_a_time_stands_in_the_row_that_it_was_taken_of_and_in_no_other(script: ModuleType) -> None:
    first, second = (row for row in script.make_plan().rows if row.model == "gemma-2-9b")
    taken = {"row": first.key, "decode_us": 123.4, "prefill_us": 567.8}
    lines = script.table([first, second], {"rows": [taken]}).splitlines()[2:]
    assert ["| 123 | 568 |" in line for line in lines] == [True, False]


def test_a_decode_over_latents_says_so_and_only_where_it_was_taken(script: ModuleType) -> None:
    rows = {row.model: row for row in script.make_plan().rows if row.spec.mla is not None}
    lines = script.table(list(rows.values()), script.known_times()).splitlines()[2:]
    found = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[7] for line in lines}
    cells = json.loads(script.LATENTS.read_text())["cells"]
    for model, row in rows.items():
        taken = row.spec.sparse is None and [
            cell["us"]["FlashInfer fa3"]
            for cell in cells
            if (cell["requests"], cell["length"], cell["queries"]) == (64, 8192, 1)
            and cell["heads"] == row.spec.num_heads
        ]
        assert found[model] == (f"{taken[0]:.0f} (latents)" if taken else "-")
    assert "(latents)" in found["deepseek-v3"]


@pytest.mark.slow
def test_the_layers_planned_are_those_of_the_configurations(script: ModuleType) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    read = json.loads(json.dumps(script.read_layers()))
    assert json.loads(script.LAYERS.read_text()) == read, (
        "run: python benchmarks/model_plans.py --read --write"
    )
