"""`attnplug select` on the example models, and what it says of files that are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attnplug import Decision

MODELS = Path(__file__).parents[2] / "examples" / "models"
LLAMA = MODELS / "llama-3.1-8b.json"
LAYERS = {
    "bert-base-uncased": 12,
    "bloom-7b1": 30,
    "deepseek-v2-lite": 27,
    "deepseek-v3": 61,
    "deepseek-v3.2": 61,
    "gemma-2-9b": 42,
    "gemma-3-27b-text": 62,
    "glm-4.7-flash": 47,
    "gpt-oss-20b": 24,
    "kimi-k2": 61,
    "kimi-linear-48b": 47,
    "llama-3.1-70b": 80,
    "llama-3.1-8b": 32,
    "llama-4-scout-text": 48,
    "mistral-7b-v0.1": 32,
    "nemotron-3-nano-30b": 52,
    "phi-3-mini-4k": 32,
    "qwen3-30b-a3b": 48,
    "qwen3-8b": 36,
    "qwen3-next-80b": 84,
    "whisper-large-v3": 96,
}


def test_every_example_model_is_tried_here():
    assert sorted(path.stem for path in MODELS.glob("*.json")) == sorted(LAYERS)


@pytest.mark.parametrize("model", LAYERS)
def test_every_layer_of_a_model_is_listed(run, model):
    outcome = run("select", MODELS / f"{model}.json", "--device", "cpu", "--json")
    decisions = [Decision.from_dict(item) for item in outcome.json["decisions"]]
    assert len({decision.layer_name for decision in decisions}) == LAYERS[model]
    assert outcome.code == 0
    assert {decision.backend for decision in decisions} == {"TORCH"}


def test_the_table_groups_like_layers_and_fits_80_columns(run):
    outcome = run("select", MODELS / "gemma-3-27b-text.json", "--device", "cpu")
    rows = [line.split() for line in outcome.out.splitlines()]
    assert [row[0] for row in rows if row and "TORCH" in row and row[1] != "="] == ["52", "10"]
    assert "sliding 1024" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "\x1b" not in outcome.out


def test_a_refused_layer_shows_its_reasons_without_being_asked(run):
    outcome = run("select", MODELS / "deepseek-v3.json", "--device", "cpu", "--backend", "FLASH_ATTN_2")
    assert outcome.code == 3
    assert "MLA not supported" in outcome.out
    assert "No backend for 61 of 61 layers." in outcome.out


def test_latent_attention_names_the_backends_of_both_phases(run):
    model = MODELS / "deepseek-v3.json"
    rows = [line.split() for line in run("select", model, "--device", "cpu", "--per-phase").out.splitlines()]
    assert ["61", "0-60", "128/1", "576", "MLA", "TORCH", "TORCH", "16"] in rows
    memory = run("select", model, "--device", "cpu", "--memory", "80GiB", "--tensor-parallel-size", 8)
    assert "186,646,528 bytes for 16,384 rows of context." in memory.out
    assert max(map(len, memory.out.splitlines())) <= 80
    sparse = run(
        "select", MODELS / "deepseek-v3.2.json", "--device", "sm90", "--assume-installed", "all", "--tp", "8"
    )
    assert "MLA, sparse token_topk 2048  TRITON   TRITON     16" in sparse.out
    hopper = run("select", model, "--device", "sm90", "--assume-installed", "all")
    assert ["FLASH_ATTN_4", "FLASH_MLA", "64"] in [line.split()[-3:] for line in hopper.out.splitlines()]


@pytest.mark.parametrize("flags", [(), ("--per-phase",)])
def test_the_layout_in_the_environment_is_that_of_the_pages(run, flags, monkeypatch):
    monkeypatch.setenv("ATTNPLUG_KV_CACHE_LAYOUT", "HND")
    decisions = run("select", LLAMA, "--device", "cpu", "--json", *flags).json["decisions"]
    assert {decision["kv_cache_layout"] for decision in decisions} == {"HND"}
    monkeypatch.setenv("ATTNPLUG_KV_CACHE_LAYOUT", "NDH")
    outcome = run("select", LLAMA, "--device", "cpu", *flags)
    assert outcome.code == 2
    assert "ATTNPLUG_KV_CACHE_LAYOUT='NDH' must be NHD or HND" in outcome.err


def test_tensor_parallelism_divides_the_heads(run):
    outcome = run("select", LLAMA, "--device", "cpu", "--tp", 4, "--json")
    spec = outcome.json["decisions"][0]["spec"]
    assert (spec["num_heads"], spec["num_kv_heads"]) == (8, 2)


def test_kv_dtype_and_block_size_reach_the_layers_that_have_pages(run):
    options = ("--kv-cache-dtype", "fp8", "--block-size", 32, "--device", "cpu", "--json")
    decisions = run("select", MODELS / "whisper-large-v3.json", *options).json["decisions"]
    asked = {(d["spec"]["attn_type"], d["spec"]["kv_cache_dtype"], d["block_size"]) for d in decisions}
    assert asked == {("encoder", "auto", None), ("decoder", "fp8", 32), ("encoder_decoder", "fp8", 32)}


@pytest.mark.parametrize("model", ["bloom-7b1", "gpt-oss-20b", "llama-4-scout-text", "whisper-large-v3"])
def test_a_model_is_tried_as_transformers_runs_it(run, model):
    outcome = run("select", MODELS / f"{model}.json", "--device", "cpu", "--for", "transformers", "--json")
    if model == "bloom-7b1":
        assert (outcome.code, outcome.json["error"]["code"]) == (1, "invalid_config")
        assert "transformer.h.0.self_attention: BloomAttention computes attention of its own" in outcome.err
        return
    assert (outcome.code, outcome.json["for"], outcome.json["kv_sharing"]) == (0, "transformers", {})
    decisions = outcome.json["decisions"]
    assert len(decisions) == LAYERS[model]
    assert {(d["backend"], d["spec"]["direct_kv"], d["block_size"]) for d in decisions} == {
        ("TORCH", True, None)
    }


def test_a_backend_without_direct_kv_says_so_for_transformers(run):
    options = ("--device", "sm90", "--assume-installed", "all", "--backend", "FLASHINFER")
    assert run("select", LLAMA, *options).code == 0
    outcome = run("select", LLAMA, *options, "--for", "transformers")
    assert outcome.code == 3
    assert "(llama) in transformers on sm90" in " ".join(outcome.out.split())
    assert "direct_kv not supported" in outcome.out
    assert "No backend for 32 of 32 layers." in outcome.out


def test_latent_attention_is_expanded_by_transformers(run):
    options = ("--device", "cpu", "--for", "transformers", "--json")
    spec = run("select", MODELS / "deepseek-v3.json", *options).json["decisions"][0]["spec"]
    assert (spec["num_kv_heads"], spec["head_size"], spec["head_size_v"], spec["mla"]) == (
        128,
        192,
        128,
        None,
    )


@pytest.mark.parametrize(
    ("option", "value"), [("--block-size", "16"), ("--kv-cache-dtype", "fp8"), ("--memory", "1GiB")]
)
def test_options_of_pages_are_refused_for_transformers(run, option, value):
    outcome = run("select", LLAMA, "--device", "cpu", "--for", "transformers", option, value)
    assert outcome.code == 2
    assert f"{option}=" in outcome.err
    assert "cannot be combined with --for transformers" in outcome.err


def test_an_unknown_program_is_refused_with_the_list(run):
    outcome = run("select", LLAMA, "--for", "vllm")
    assert outcome.code == 2
    words = " ".join(outcome.err.replace("│", " ").split())
    assert "'vllm' is not one of 'engine', 'transformers'" in words


def test_options_reach_the_decisions(run):
    options = ("--device", "sm90", "--assume-installed", "all", "--backend", "FLASHINFER", "--json")
    for command in (("select", LLAMA), ("explain",)):
        given = ("--option", "prefill_backend=fa2", "--option", "FLASHINFER.tensor_cores=false")
        found = run(*command, *options, *given).json
        decision = found["decisions"][0] if "decisions" in found else found
        assert (decision["options"]["prefill_backend"], decision["options"]["tensor_cores"]) == ("fa2", False)
        refused = run(*command, *options, "--option", "nothing=1")
        assert refused.code == 2
        assert "FLASHINFER has no such option" in refused.err


def test_a_rule_for_a_phase_asks_both_phases(run):
    outcome = run("select", LLAMA, "--device", "cpu", "--backend", "decode=TORCH", "--json").json
    asked = list(outcome["by_phase"].values())
    assert len(asked) == 32
    assert {(p, d["phase"], d["chosen_by"]) for phases in asked for p, d in phases.items()} == {
        ("decode", "decode", "backend"),
        ("prefill", "prefill", "priority"),
    }
    assert {(d["phase"], d["backend"]) for d in outcome["decisions"]} == {(None, "TORCH")}


def test_two_backends_for_the_phases_of_a_layer_have_a_column_each(run):
    rules = ("--backend", "TRITON,prefill=TORCH", "--device", "sm90", "--assume-installed", "all")
    outcome = run("select", MODELS / "gpt-oss-20b.json", *rules)
    assert outcome.code == 0
    title, table, strip, why = outcome.out.split("\n\n")
    assert why == "Why this one: asked for by --backend.\n"
    header, *rows = [line.split() for line in table.splitlines()]
    assert "(gpt_oss) on sm90" in title
    assert header[-3:] == ["prefill", "decode", "block"]
    assert [line.split()[0] for line in strip.splitlines()] == ["prefill", "decode", "T"]
    assert {tuple(row[-3:-1]) for row in rows} == {("TORCH", "TRITON")}
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_why_shows_both_phases_and_what_they_come_to(run):
    rules = ("--backend", "TRITON,prefill=TORCH", "--device", "sm90", "--assume-installed", "all", "--why")
    out = run("select", LLAMA, *rules).out
    assert "layers 0-31 (full):\n" in out
    assert "layers 0-31 (full, prefill):\n" in out
    assert "layers 0-31 (full, decode):\n" in out
    assert "TORCH+TRITON" in out


def test_an_encoder_is_left_to_what_prefills(run):
    rules = ("--backend", "prefill=TORCH,decode=TRITON", "--device", "sm90", "--assume-installed", "all")
    decisions = run("select", MODELS / "whisper-large-v3.json", *rules, "--json").json["decisions"]
    assert {(d["spec"]["attn_type"], d["backend"]) for d in decisions} == {
        ("encoder", "TORCH"),
        ("decoder", "TORCH+TRITON"),
        ("encoder_decoder", "TORCH+TRITON"),
    }


def test_each_phase_alone_on_a_device_with_one_backend_is_that_backend(run):
    outcome = run("select", LLAMA, "--per-phase", "--device", "cpu", "--json").json
    assert outcome["notes"] == []
    assert {d["backend"] for d in outcome["decisions"]} == {"TORCH"}


def test_a_composite_is_asked_for_by_name(run):
    rules = ("--backend", "TORCH+TRITON", "--device", "sm90", "--assume-installed", "all", "--json")
    decisions = run("select", LLAMA, *rules).json["decisions"]
    assert {d["backend"] for d in decisions} == {"TORCH+TRITON"}


def test_one_phase_and_each_phase_cannot_both_be_asked(run):
    outcome = run("select", LLAMA, "--per-phase", "--phase", "decode", "--device", "cpu")
    assert outcome.code == 2
    assert "--per-phase=True cannot be combined with --phase decode; give one of the two" in outcome.err


def test_a_rule_that_matches_no_layer_is_bad_usage(run):
    outcome = run("select", LLAMA, "--device", "cpu", "--backend", "sliding=TORCH")
    assert outcome.code == 2
    assert "sliding=TORCH" in outcome.err
    assert "matches none of 32 layers (kinds here: full)" in outcome.err


def test_a_misspelt_backend_is_bad_usage_with_a_suggestion(run):
    outcome = run("select", LLAMA, "--device", "cpu", "--backend", "TROCH")
    assert outcome.code == 2
    assert "did you mean TORCH or TRITON?" in outcome.err


def test_a_bad_variable_is_named(run, monkeypatch):
    monkeypatch.setenv("ATTNPLUG_STRICT", "maybe")
    outcome = run("list")
    assert outcome.code == 2
    assert "ATTNPLUG_STRICT='maybe' must be 1 or 0" in outcome.err


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such"), ("", "empty"), ("{not json", "JSON"), ("[1, 2]", "list"), ('{"a": 1}', "model_type")],
    ids=["missing", "empty", "not JSON", "a list", "an object of something else"],
)
def test_a_file_that_is_no_configuration_is_one_sentence(run, tmp_path, content, said):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    outcome = run("select", path, "--device", "cpu")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert said.lower() in outcome.err.lower()
    assert "Traceback" not in outcome.err


def test_a_device_that_is_none_is_bad_usage(run):
    outcome = run("select", LLAMA, "--device", "gpu9")
    assert outcome.code == 2
    assert "gpu9" in outcome.err


def test_with_two_more_backends_installed_why_shows_the_choice_among_three(run_with_plugins):
    done = run_with_plugins(
        ["attnplug-acme-sm80", "attnplug-acme-decode"],
        ["-m", "attnplug", "select", str(LLAMA), "--device", "sm90", "--assume-installed", "all", "--why"],
        env={"COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    _, _, tables = done.stdout.partition("\nlayers 0-31 (full, decode):\n")
    decodes, _, prefills = tables.partition("\nlayers 0-31 (full, prefill):\n")
    assert [_verdicts(table) for table in (decodes, prefills)] == [
        {"ACME_DECODE": "chosen", "ACME_SM80": "accepted", "TORCH": "accepted"},
        {"ACME_DECODE": "refused", "ACME_SM80": "chosen", "TORCH": "accepted"},
    ]
    assert re.search(r"^ACME_DECODE +300 +refused +phase not supported", prefills, re.MULTILINE)


def _verdicts(table: str) -> dict[str, str]:
    """The verdicts that rows of `select --why` give on the backends of the plugins and on the reference."""
    return dict(re.findall(r"^(ACME_\w+|TORCH) +\d+ +(\w+)", table, re.MULTILINE))


def test_layers_of_one_phase_beside_layers_of_both_are_listed_once(run):
    rules = "FLASH_ATTN_2,sliding=TORCH,decode=FLASH_ATTN_3"
    outcome = run("select", MODELS / "gpt-oss-20b.json", "--device", "cpu", "--backend", rules)
    assert outcome.code == 3
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines if " none " in line or " TORCH " in line][:2] == [
        "both",
        "decode",
    ]
    reasons = [line for line in lines if line.startswith("layers ") and line.endswith(":")]
    assert [line.rpartition(", ")[2] for line in reasons] == ["decode):", "prefill):"]


@pytest.mark.parametrize("command", [(), ("--per-phase",), ("--for", "transformers")])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "whisper-large-v3", "deepseek-v3"])
def test_a_dtype_replaces_the_one_of_the_file(run, model, command):
    options = ("--device", "cpu", "--json", "--dtype", "float32", *command)
    decisions = run("select", MODELS / f"{model}.json", *options).json["decisions"]
    assert {decision["spec"]["dtype"] for decision in decisions} == {"float32"}


def test_a_dtype_replaces_that_of_a_model_without_a_rule_and_of_parts_inside(run, tmp_path):
    text = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "dtype": "float32"}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    data = {"model_type": "llava", "text_config": text, "vision_config": vision, "image_token_index": 511}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**data, "dtype": "float32"}))
    for dtype in ("float16", "float32"):
        outcome = run("select", path, "--device", "cpu", "--json", "--dtype", dtype)
        assert {decision["spec"]["dtype"] for decision in outcome.json["decisions"]} == {dtype}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("half", None),
        ("fp32", None),
        ("float64", "--dtype='float64' must be one of float16, bfloat16, float32"),
    ],
)
def test_the_names_of_dtypes(run, asked, said):
    outcome = run("select", LLAMA, "--device", "cpu", "--dtype", asked)
    assert (outcome.code, said is None or said in outcome.err) == (0 if said is None else 2, True)


def test_it_says_when_the_float32_of_the_file_decided(run):
    options = ("--device", "h100", "--assume-installed", "all")
    bert = MODELS / "bert-base-uncased.json"
    note = "The file's dtype float32 decided against FLASH_ATTN_4, FLASH_ATTN_3, FLASH_ATTN_2 for layers 0-11; --dt"
    assert note in " ".join(run("select", bert, *options).out.split())
    assert any(each.startswith(note) for each in run("select", bert, *options, "--json").json["notes"])
    for silent in (("--dtype", "float32"), ("--dtype", "bfloat16")):
        assert "float32 decided" not in run("select", bert, *options, *silent).out
    assert "float32 decided" not in run("select", LLAMA, *options).out
    assert "float32 decided" not in run("select", bert, "--device", "cpu").out


def test_it_names_the_place_of_the_storage(run, tmp_path):
    (tmp_path / "config.json").write_text(LLAMA.read_text())
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    note = "The checkpoint's KV cache is fp8_e4m3 (hf_quant_config.json: quantization.kv_cache_quant_algo)"
    assert note in " ".join(run("select", tmp_path, "--device", "cpu").out.split())
    assert run("select", tmp_path, "--device", "cpu", "--json").json["notes"] == [note]
    assert note not in " ".join(
        run("select", tmp_path, "--device", "cpu", "--kv-cache-dtype", "bfloat16").out.split()
    )
