"""What a plan says of itself: a table, a log line, and JSON that gives it back."""

from __future__ import annotations

import dataclasses
import io
import json
import logging

import pytest
from fake_backends import backend, layouts, offered
from model_layers import FULL, SLIDING, gemma_3, layer, model, whisper
from rich.console import Console

from attnplug import Phase, plan
from attnplug.core.errors import PluginError
from attnplug.registry import get_registry
from attnplug.runtime import AttentionRuntime, ModelPlan


def test_a_plan_prints_a_row_for_each_kind_of_layer():
    title, header, *rows = str(plan(gemma_3(), "cpu", num_blocks=16)).splitlines()
    assert title == "62 layers on cpu, 16 blocks of 10,240 bytes, one sequence of 32 tokens fits"
    assert header.split() == ["layers", "first", "kind", "backend", "block", "layout", "KV", "groups"]
    assert [row.split()[:6] for row in rows] == [
        ["52", "layers.0", "sliding", "TORCH", "16", "NHD"],
        ["10", "layers.5", "full", "TORCH", "16", "NHD"],
    ]


def test_a_plan_without_blocks_has_a_short_title():
    assert str(plan(model([FULL]), "cpu")).splitlines()[0] == "1 layers on cpu"


def test_layers_without_pages_have_dashes():
    rows = str(plan(whisper(), "cpu")).splitlines()[2:]
    assert rows[0].split() == ["4", "encoder.layers.0.self_attn", "encoder", "TORCH", "-", "-", "-"]


def test_windows_alone_fit_any_length():
    assert "one sequence of any number of tokens fits" in str(plan(model([SLIDING]), "cpu", num_blocks=50))


def test_direct_layers_alone_have_no_blocks_to_print():
    direct = {"a": layer(direct_kv=True)}
    assert str(plan(direct, "cpu", memory="1GiB")).splitlines()[0] == "1 layers on cpu"


def test_sharing_layers_are_counted():
    made = plan(model([FULL] * 3), "cpu", kv_sharing={"layers.2": "layers.0"})
    assert "3 layers on cpu, 1 read another's pages" in str(made)


def test_brackets_in_a_layer_name_are_no_markup():
    console = Console(width=100, file=io.StringIO())
    console.print(plan({"model[red].0": layer()}, "cpu"))
    assert "model[red].0" in console.file.getvalue()


def test_the_plan_is_logged_once_at_info(caplog):
    with caplog.at_level(logging.INFO, "attnplug"):
        made = plan(model([FULL]), "cpu")
    assert [record.getMessage() for record in caplog.records].count(str(made)) == 1


@pytest.mark.parametrize(
    "asked",
    [{}, {"num_blocks": 7}, {"memory": "3MiB"}, {"per_phase": True}, {"uniform": True}],
    ids=lambda asked: next(iter(asked), "plain"),
)
def test_json_gives_back_an_equal_plan(asked):
    made = plan(
        whisper(), "cpu", kv_sharing={"decoder.layers.3.self_attn": "decoder.layers.1.self_attn"}, **asked
    )
    again = ModelPlan.from_json(made.to_json(indent=2))
    assert again == made
    assert again.kv_cache_config == made.kv_cache_config
    assert again.budget == made.budget
    assert str(again) == str(made)


def test_a_plan_by_phases_has_a_column_for_each_of_them():
    with offered(backend("DECODER", 90, supported_phases=(Phase.DECODE,))):
        made = plan(model([FULL, {"direct_kv": True}]), "cpu", per_phase=True)
    _, header, *rows = str(made).splitlines()
    assert header.split() == [
        "layers",
        "first",
        "kind",
        "prefill",
        "decode",
        "block",
        "layout",
        "KV",
        "groups",
    ]
    assert rows[0].split()[3:5] == ["TORCH", "DECODER"]
    assert rows[1].split()[3:5] == ["TORCH", "TORCH"]


def test_json_says_who_serves_which_phase():
    with offered(backend("DECODER", 90, supported_phases=(Phase.DECODE,))):
        made = plan(model([FULL]), "cpu", per_phase=True)
        again = ModelPlan.from_json(made.to_json())
    assert made.to_dict()["members"] == {"layers.0": {"prefill": "TORCH", "decode": "DECODER"}}
    assert again.members == {"layers.0": {Phase.PREFILL: "TORCH", Phase.DECODE: "DECODER"}}


def test_a_plan_of_composites_read_from_json_runs_where_both_halves_are_loaded():
    with offered(backend("DECODER", 90, supported_phases=(Phase.DECODE,))):
        text = plan(model([FULL]), "cpu", per_phase=True, num_blocks=4).to_json()
        assert AttentionRuntime(ModelPlan.from_json(text, get_registry())).kv_caches["layers.0"].shape[0] == 4
    again = ModelPlan.from_json(text, get_registry())
    assert again.backends == ("TORCH+DECODER",)
    with pytest.raises(PluginError, match=r"TORCH\+DECODER"):
        AttentionRuntime(again)


def test_json_keeps_what_phases_would_have_chosen_and_the_notes():
    alone = {"supported_phases": (Phase.DECODE,), "supported_kv_cache_layouts": layouts("HND")}
    with offered(
        backend("DECODER", 90, **alone), backend("BOTH", 60, supported_kv_cache_layouts=layouts("NHD"))
    ):
        made = plan(model([FULL]), "cpu", per_phase=True)
        again = ModelPlan.from_json(made.to_json())
    assert again.by_phase == made.by_phase
    assert again.notes == made.notes != ()


def test_a_plan_read_from_json_runs_where_its_backends_are_loaded():
    text = plan(model([FULL]), "cpu", num_blocks=4).to_json()
    again = ModelPlan.from_json(text, get_registry())
    assert AttentionRuntime(again).kv_caches["layers.0"].shape[0] == 4


def test_a_plan_read_without_a_registry_can_be_printed_only():
    made = plan(model([FULL]), "cpu", num_blocks=4)
    again = ModelPlan.from_json(made.to_json())
    assert str(again) == str(made)
    with pytest.raises(PluginError, match=r"TORCH only; .*ModelPlan\.from_json takes a registry"):
        AttentionRuntime(again)


def test_a_plan_read_where_a_backend_is_not_loaded_names_it_when_run():
    with offered(backend("ELSEWHERE")):
        text = plan(model([FULL]), "cpu", num_blocks=4).to_json()
    again = ModelPlan.from_json(text, get_registry())
    assert again.backends == ("ELSEWHERE",)
    with pytest.raises(PluginError, match="ELSEWHERE"):
        AttentionRuntime(again)


def test_json_of_another_schema_is_refused():
    data = plan(model([FULL]), "cpu").to_dict() | {"schema": 99}
    with pytest.raises(
        ValueError, match=r"schema=99, version=1: this attnplug reads attnplug\.plan, version 1"
    ):
        ModelPlan.from_json(json.dumps(data))


def test_a_plan_is_a_value():
    made = plan(model([FULL]), "cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.num_blocks = 3  # type: ignore[misc]
