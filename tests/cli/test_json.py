"""The JSON of each command is as docs/reference/json.md says, errors included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_page import DOCS, check_document, described, json_schemas
from jsonschema import Draft202012Validator

import attnplug
from attnplug.core import ContextParallel
from attnplug.integrations.transformers import read_config
from attnplug.registry.selection.evidence import record

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
GPT = MODELS / "gpt-oss-20b.json"
CELLS = ("--backend", "TORCH", "--device", "cpu", "--only", "sinks/decode/d128/*")
CHECKS = ("conformance", "TORCH", "--device", "cpu", "--only", "declaration/b*")
STEP = ("--device", "cpu", "--workload", "decode 1 x 16")
DOCUMENTS = {
    ("list", "--json"): "attnplug.list",
    ("list", "--no-load", "--json"): "attnplug.plugins",
    ("list", "--known", "--json"): "attnplug.known-plugins",
    ("show", "TRITON", "--json"): "attnplug.show",
    ("select", GPT, "--device", "h100", "--memory", "80GiB", "--json"): "attnplug.select",
    ("select", GPT, "--device", "h100", "--per-phase", "--json"): "attnplug.select",
    ("select", MODELS / "deepseek-v3.json", "--device", "a100", "--json"): "attnplug.select",
    ("select", MODELS / "qwen3-next-80b.json", "--device", "h100", "--memory", "40GiB", "--json"): "attnplug.select",
    ("explain", "--state", "delta,head", "--device", "h100", "--json"): "attnplug.decision",
    ("explain", "--device", "h100", "--json"): "attnplug.decision",
    ("explain", "--device", "h100", "--assume-installed", "triton=3.6", "--sinks", "--json"): "attnplug.decision",
    ("explain", "--mla", "1536,512,128,64,128", "--sinks", "--device", "h100", "--json"): "attnplug.decision",
    ("explain-code", "head_size", "--json"): "attnplug.explain-code",
    ("explain-code", "--json"): "attnplug.reason-codes",
    ("matrix", *CELLS, "--json", "-"): "attnplug.matrix",
    ("matrix", "--json", *CELLS): "attnplug.matrix",
    ("list", "--json", "-"): "attnplug.list",
    ("show", "--json=-", "TORCH"): "attnplug.show",
}  # fmt: skip
MODEL = "a model of few heads"
SLOW = {
    (*CHECKS, "--list", "--json"): "attnplug.checks",
    (*CHECKS, "--json"): "attnplug.conformance",
    ("doctor", "TORCH", "--json"): "attnplug.doctor",
    ("tune", MODEL, *STEP, "--json", "--output", "../t.json"): "attnplug.tuned",
    ("tune", MODEL, *STEP, "--json", "--regret"): "attnplug.regret",
}


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        *DOCUMENTS.items(),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW.items()),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(map(str, each[:2])),
)
def test_the_json_of_a_command_is_as_described(run, few_heads, tmp_path, monkeypatch, arguments, schema):
    monkeypatch.chdir(tmp_path)
    outcome = run(*(few_heads if each == MODEL else each for each in arguments))
    assert outcome.code in (0, 3), outcome.err
    assert outcome.json["schema"] == schema
    check_document(outcome.json)
    assert not list(tmp_path.iterdir()), "a file was written"


def test_the_json_of_a_family_is_a_list(run):
    data = run("show", "FLASH_ATTN", "--json").json
    assert (data["schema"], data["version"]) == ("attnplug.show", 1)
    check_document(data)
    for each in data["backends"]:
        check_document({"schema": "attnplug.show", "version": 1, **each})


def test_a_new_package_is_described(run, tmp_path):
    check_document(run("new-backend", "acme", "--path", tmp_path, "--json").json)
    check_document(run("new-format", "acme6", "--path", tmp_path, "--json").json)


def test_a_file_and_standard_output_have_the_same_matrix(run, tmp_path):
    file = tmp_path / "matrix.json"
    assert run("matrix", *CELLS, "--json", file).code == 0
    written, printed = json.loads(file.read_text()), run("matrix", *CELLS, "--json", "-").json
    check_document(written)
    for each in (*written["runs"], *printed["runs"]):
        each.pop("date")
    assert written == printed
    assert run("matrix", "merge", file, "--output", "-").json["schema"] == "attnplug.matrix"


def test_the_changes_of_two_matrices_are_json_too(run, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    fp8 = ("matrix", "--backend", "TRITON", "--only", "fp8_kv/decode/d128/*")
    assert run(*fp8, "--device", "h100", "--json", old).code == 0
    assert run(*fp8, "--device", "a100", "--json", new).code == 0
    new.write_text(new.read_text().replace("sm80", "sm90"))
    for options in (("--json",), ("--json", "-")):
        outcome = run("matrix", "diff", old, new, *options)
        assert outcome.code == 4
        check_document(outcome.json)
        assert outcome.json["counts"]["no longer claimed"] == len(outcome.json["changes"]) > 0
    assert (
        run("matrix", "diff", old, new, "--json", tmp_path / "changes.json").out.count("no longer claimed")
        > 1
    )
    assert json.loads((tmp_path / "changes.json").read_text()) == outcome.json
    assert run("matrix", "merge", old, new, "--json").json["schema"] == "attnplug.matrix"


# The page has the selections of all example models, whichever cells are asked for.
@pytest.mark.parametrize("option", [pytest.param("--html", marks=pytest.mark.slow), "--markdown"])
def test_pages_may_go_to_standard_output(run, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    outcome = run("matrix", *CELLS, option, "-")
    assert outcome.code == 0
    assert outcome.out.startswith({"--html": "<!", "--markdown": "#"}[option])
    assert not list(tmp_path.iterdir())


def test_only_one_file_is_standard_output(run):
    outcome = run("matrix", *CELLS, "--json", "-", "--html", "-")
    assert outcome.code == 2
    assert outcome.json["error"]["argument"] == "--html"


@pytest.mark.slow
def test_junit_may_go_to_standard_output(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run(*CHECKS, "--junit", "-")
    assert outcome.code == 0
    assert outcome.out.startswith("<?xml")
    assert not list(tmp_path.iterdir())


ERRORS = {
    ("explain", "--head-size", "0"): (2, "invalid_layer", "head_size", 0),
    ("explain", "--head-size", "x"): (2, "usage", "--head-size", "x"),
    ("explain", "--heads", "3"): (2, "usage", "--heads", "3"),
    ("explain", "--kv-cache-dtype", "fp9"): (2, "invalid_option", "--kv-cache-dtype", "fp9"),
    ("explain", "--device", "gpu9"): (2, "invalid_layer", "device", "gpu9"),
    ("explain", "--backend", "NONE"): (2, "unknown_backend", None, None),
    ("select", "missing.json"): (2, "invalid_config", "CONFIG", "missing.json"),
    ("select", GPT, "--tp", "3"): (2, "invalid_config", "tensor_parallel_size", "3"),
    ("show", "TROCH"): (2, "unknown_backend", "BACKEND", "TROCH"),
    ("show",): (2, "usage", "BACKEND", None),
    ("doctor", "NONE"): (2, "unknown_backend", "BACKEND", "NONE"),
    ("explain-code", "haed_size"): (2, "invalid_option", "CODE", "haed_size"),
    ("new-format", "1"): (2, "invalid_option", "NAME", "1"),
    ("new-backend", "1"): (2, "invalid_option", "NAME", "1"),
    ("matrix", "--feature", "none"): (2, "invalid_option", "--feature", "none"),
    ("matrix", "--only", "none"): (2, "invalid_option", "--only", "none"),
    ("conformance", "TORCH", "--level", "all"): (2, "invalid_option", "--level", "all"),
    ("tune", GPT, "--workload", "talk"): (2, "invalid_option", "--workload", "talk"),
    ("tune", GPT, "--device", "h100"): (2, "invalid_option", "--device", "h100"),
}


@pytest.mark.parametrize(("arguments", "expected"), ERRORS.items(), ids=lambda each: " ".join(map(str, each)))
def test_an_error_is_json_too(run, arguments, expected):
    plain, outcome = run(*arguments), run(*arguments, "--json")
    assert outcome.err, "the message is on standard error too"
    check_document(outcome.json)
    error = outcome.json["error"]
    assert outcome.err == f"attnplug: {error['message']}\n", "both have the same sentence"
    code, kind, argument, value = expected
    assert (plain.code, outcome.code, error["exit_code"], error["code"]) == (code, code, code, kind)
    assert plain.out == ""
    if argument is not None:
        assert (error["argument"], error["value"]) == (argument, value)
        assert error["limit"]


def test_every_described_schema_is_tested():
    tested = {
        *DOCUMENTS.values(),
        *SLOW.values(),
        "attnplug.new-backend",
        "attnplug.new-format",
        "attnplug.error",
        "attnplug.matrix-changes",
        "attnplug.engines",
        "attnplug.plan",
        "attnplug.refuted",
    }
    assert {name for name in described() if name.startswith("attnplug.")} == tested


@pytest.mark.parametrize("name", json_schemas.documents())
def test_the_schema_in_the_package_is_written_from_the_page(name):
    file = json_schemas.FOLDER / f"{name}.json"
    text = file.read_text(encoding="utf-8")
    assert text == json_schemas.text_of(json_schemas.schema_of(name)), "python docs/json_schemas.py writes it"
    Draft202012Validator.check_schema(json.loads(text))


def test_the_package_has_no_other_schema():
    assert {file.stem for file in json_schemas.FOLDER.iterdir()} == set(json_schemas.documents())
    assert json_schemas.PAGE.is_relative_to(DOCS)


def test_a_schema_allows_new_fields_and_no_other_types(run):
    data = run("list", "--json").json
    validator = Draft202012Validator(json.loads((json_schemas.FOLDER / "attnplug.list.json").read_text()))
    assert validator.is_valid({**data, "new": 1})
    assert not validator.is_valid({**data, "backends": {}})
    assert not validator.is_valid({**data, "version": 2})
    with pytest.raises(AssertionError, match="new"):
        check_document({**data, "new": 1})


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("gpt-oss-20b.json", {"per_phase": True, "memory": "80GiB"}),
        ("deepseek-v3.json", {"num_blocks": 64}),
        ("qwen3-next-80b.json", {"memory": "80GiB"}),
        ("nemotron-3-nano-30b.json", {"num_blocks": 64, "num_states": 8}),
        ("qwen3-8b.json", {"context_parallel": ContextParallel(2, 0)}),
    ],
)
def test_a_plan_is_as_described(model, settings):
    plan = attnplug.plan(read_config(MODELS / model), "h100", assume_installed="all", **settings)
    check_document(json.loads(plan.to_json()))


def test_the_file_of_refuted_cells_is_as_described(tmp_path, monkeypatch, run):
    file = tmp_path / "evidence.json"
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(file))
    matrix = run("matrix", *CELLS, "--json", "-").json["runs"][0]
    for cell in matrix["cells"]:
        cell |= {"status": "refuted", "why": ["its numbers are wrong"]}
    assert record(matrix).refuted
    check_document(json.loads(file.read_text()))
