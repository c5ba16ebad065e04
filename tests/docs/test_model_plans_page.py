"""The page of model plans is what the backends say today, and its layers are those of the example models."""

from __future__ import annotations

import json
from pathlib import Path
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


def test_times_over_latents_say_so_and_are_only_where_they_were_taken(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decode = {"requests": 64, "length": 8192, "queries": 1}
    cells = [
        {**decode, "heads": 128, "us": {"FlashMLA": 249.4, "TRITON": 300.0}},
        {**decode, "heads": 16, "us": {"FlashMLA": 150.6, "FlashInfer fa3": 149.0}},
        {**decode, "heads": 16, "page": 1, "us": {"TRITON": 7.0}},
        {**decode, "heads": 16, "stored": "fp8", "us": {"TRITON": 8.0}},
        {**decode, "heads": 64, "queries": 4, "us": {"FLASH_MLA": 9.0}},
    ]
    report = {
        "cells": cells,
        "selection": [{"requests": 64, "heads": 128, "topk": 2048, "us": {"dense": 40.0, "8192": 51.0}}],
        "prefill": [
            {"requests": 1, "new": 8192, "heads": 128, "us": {"FLASH_ATTN_4": 4321.4, "product": 5.0}},
            {"requests": 4, "new": 4096, "heads": 16, "us": {"FLASH_ATTN_4": 6.0}},
        ],
    }
    monkeypatch.setattr(script, "LATENTS", tmp_path / "mla.json")
    script.LATENTS.write_text(json.dumps(report))
    rows = [row for row in script.make_plan().rows if row.spec.mla is not None]
    lines = script.table(rows, None).splitlines()[2:]
    found = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[7:9] for line in lines}
    assert found == {
        "deepseek-v2-lite": ["151 (latents)", "-"],
        "deepseek-v3": ["249 (latents)", "4321 (expanded)"],
        "deepseek-v3.2": ["51 (latents)", "-"],
        "glm-4.7-flash": ["-", "-"],
        "kimi-k2": ["-", "-"],
        "kimi-linear-48b": ["-", "-"],
    }


def test_decodes_of_real_batches_stand_in_the_row_of_their_layer(script: ModuleType) -> None:
    batches, rows = script.model_batches, script.make_plan().rows
    sliding, full = (
        next(row for row in rows if row.model == "mistral-7b-v0.1"),
        next(row for row in rows if row.model == "qwen3-8b"),
    )
    taken = {"row": batches.key(sliding), "drafts_us": 123.4}
    assert batches.table([sliding, full], {"rows": [taken]}).splitlines()[2:] == [
        "| mistral-7b-v0.1 | 32/8/128 | sliding 4096 | `TRITON` | - | 123 | - |",
    ]


def test_each_kind_of_layer_is_timed_once(script: ModuleType) -> None:
    rows = script.make_plan().rows
    kinds = [json.dumps(script.model_batches.key(row)) for row in rows]
    timed = [json.dumps(script.model_batches.key(row)) for row in script.model_batches.distinct(rows)]
    assert timed == list(dict.fromkeys(kinds))
    assert len(timed) < len(kinds)


def test_a_batch_is_timed_with_its_lengths_in_its_storage(script: ModuleType) -> None:
    row = next(row for row in script.make_plan().rows if row.model == "llama-3.1-8b")
    asked = []

    def timed(phase, spec, lens, decision):
        asked.append((spec.resolved_kv_cache_dtype, set(lens[0]), len(set(lens[1])) > 1))
        raise ValueError("error 1 is above 0.01")

    found = script.model_batches.measured(row, timed)
    if "ragged_refused" in found:  # nothing here serves the layer
        assert found["fp8_refused"]
    else:
        assert asked == [("bfloat16", {1}, True), ("bfloat16", {4}, False), ("fp8_e4m3", {1}, False)]
        assert found["ragged_not_measured"] == "error 1 is above 0.01"


@pytest.mark.slow
def test_the_layers_planned_are_those_of_the_configurations(script: ModuleType) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    read = json.loads(json.dumps(script.read_layers()))
    assert json.loads(script.LAYERS.read_text()) == read, (
        "run: python benchmarks/model_plans.py --read --write"
    )
