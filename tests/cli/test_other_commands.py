"""`list`, `show`, `explain` and `doctor`: their words, their JSON and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnplug import Decision, LayerSpec
from attnplug.cli.output.output import features_in_words, indices, layers_in_words
from attnplug.core import SparseSpec

COMMANDS = ("list", "show", "select", "explain", "doctor")
LATENT = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "attnplug-latent"


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS)], ids=lambda c: " ".join(c) or "attnplug"
)
def test_help_fits_80_columns(run, command):
    outcome = run(*command, "--help")
    assert outcome.code == 0
    assert "Usage" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_the_help_of_explain_names_defaults_that_depend_on_the_layer(run):
    words = " ".join(run("explain", "--help").out.replace("│", " ").split())
    assert "[default: as num-heads]" in words
    assert "[default: causal for a decoder]" in words


def test_the_version_is_printed(run):
    assert run("--version").out.startswith("attnplug 0.")


def test_list_names_each_backend_with_who_ships_it(run):
    assert "TORCH" in run("list").out
    data = run("list", "--json").json
    (torch,) = (row for row in data["backends"] if row["name"] == "TORCH")
    assert (torch["distribution"], torch["priority"], torch["unmet"]) == ("attnplug", 0, [])
    assert {record["status"] for record in data["plugins"]} == {"loaded"}


def test_list_no_load_shows_modules_and_what_would_be_left_out(run, run_with_plugins):
    assert "attnplug.backends.torch_native" in run("list", "--no-load").out
    done = run_with_plugins(
        ["attnplug-bad-exit"],
        ["-m", "attnplug", "list", "--no-load", "--json"],
        env={"ATTNPLUG_BLOCK_PLUGINS": "bad-exit"},
    )
    rows = {row["plugin"]: row["blocked_by"] for row in json.loads(done.stdout)["plugins"]}
    assert rows["attnplug-bad-exit:bad-exit"] == "ATTNPLUG_BLOCK_PLUGINS"
    assert rows["attnplug:torch"] is None


def test_list_known_says_what_is_installed_here_and_how_to_install_the_rest(run, run_with_plugins):
    done = run_with_plugins([LATENT], ["-m", "attnplug", "list", "--known", "--json"])
    known = {row["package"]: row for row in json.loads(done.stdout)["known"]}
    assert (known["attnplug-latent"]["installed"], known["attnplug-flex"]["installed"]) == ("0.1.0", None)
    shown = run("list", "--known").out
    for name, row in known.items():
        assert name in shown
        assert f"pip install {row['install']}" in shown


def test_list_says_what_a_plugin_did_wrong(run_with_plugins):
    done = run_with_plugins(["attnplug-bad-import"], ["-m", "attnplug", "list"])
    assert done.returncode == 0
    assert "attnplug-bad-import:bad-import raised ImportError" in " ".join(done.stdout.split())


def test_show_prints_everything_declared(run):
    outcome = run("show", "TORCH")
    assert "sinks" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert run("show", "TORCH", "--json").json["name"] == "TORCH"


def test_show_of_an_unknown_backend_suggests_one(run):
    outcome = run("show", "TROCH")
    assert (outcome.code, outcome.out) == (2, "")
    assert "did you mean TORCH or TRITON?" in outcome.err


def test_explain_takes_a_layer_by_flags(run):
    flags = ("--num-heads", 8, "--num-kv-heads", 2, "--head-size", 80, "--sinks", "--soft-cap", 30)
    outcome = run("explain", *flags, "--window", "5,0", "--device", "sm75", "--json")
    decision = Decision.from_dict(outcome.json)
    assert decision.spec == LayerSpec(
        num_heads=8, num_kv_heads=2, head_size=80, has_sinks=True, logits_soft_cap=30, window=(5, 0)
    )
    assert str(decision.device) == "sm75"
    assert (outcome.code, decision.backend) == (0, "TORCH")


def test_explain_without_a_backend_exits_with_3(run):
    outcome = run("explain", "--mla", "1536,512,128,64,128", "--sinks", "--device", "sm90")
    assert outcome.code == 3
    assert "MLA not supported" in outcome.out


@pytest.mark.parametrize(
    ("text", "sparse"),
    [
        ("token_topk,2048", SparseSpec("token_topk", 2048)),
        ("block,16,64", SparseSpec("block", 16, 64)),
        ("token_topk, 8", SparseSpec("token_topk", 8)),
    ],
)
def test_explain_asks_for_chosen_keys(run, text, sparse):
    outcome = run("explain", "--sparse", text, "--device", "sm90", "--json")
    decision = Decision.from_dict(outcome.json)
    assert decision.spec.sparse == sparse
    reasons = {name: next(c for c in decision.refused if c.name == name).reasons for name in ("TRITON",)}
    assert reasons["TRITON"] == (f"sparse {sparse} not supported",)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--window", "3"), "--window='3' must be 2 integers"),
        (("--sparse", "2048"), "--sparse='2048' must have the form KIND,TOPK[,BLOCK] with commas between them"),
        (("--sparse", "token_topk,many"), "--sparse='token_topk,many' must have the form"),
        (("--sparse", "block,16,64,2"), "--sparse='block,16,64,2' must have the form"),
        (("--sparse", "tokens,16"), "sparse.kind='tokens' must be one of token_topk, block"),
        (("--num-heads", "7", "--num-kv-heads", "2"), "num_heads=7 must be a multiple of num_kv_heads=2"),
        (("--mla", "0,512,128,64,128", "--head-size", "128"), "head_size=128 must be kv_lora_rank + qk_rope_head_dim = 576 with mla"),
        (("--soft-cap", "-1"), "logits_soft_cap=-1.0 must be a finite number above 0"),
        (("--attn-type", "encoder_only", "--sliding-window", "8"), "sliding_window=8 is for causal layers"),
        (("--assume-installed", "flash-attn"), "must be all, here, or DISTRIBUTION=VERSION"),
        (("--assume-installed", "flashinfer=0.6.13"), "did you mean flashinfer-python"),
        (("--assume-installed", "nosuch=1"), "a distribution that no backend requires; they require flash-attn"),
        (("--dtype", "bf16"), "must be one of float16, bfloat16, float32"),
    ],
)  # fmt: skip
def test_bad_flags_exit_with_2_and_say_the_limit(run, flags, said):
    outcome = run("explain", *flags, "--device", "cpu")
    assert outcome.code == 2
    assert said in outcome.err


@pytest.mark.slow
def test_doctor_opens_the_doors_of_a_backend(run):
    outcome = run("doctor", "TORCH")
    assert outcome.code == 0
    assert "ok" in outcome.out
    assert "kernel library" not in outcome.out
    report = run("doctor", "--json").json
    assert report["environment"]["torch"]
    states = {finding["what"].split()[0]: finding["state"] for finding in report["findings"]}
    assert (states["TORCH"], states["TRITON"]) == ("ok", "ok")
    assert set(states.values()) <= {"ok", "lacking"}


def test_doctor_for_an_unknown_backend_is_bad_usage(run):
    outcome = run("doctor", "NONE")
    assert outcome.code == 2
    assert "loaded are FLASHINFER, FLASH_ATTN_2" in outcome.err


def test_layer_names_become_runs_of_numbers():
    assert layers_in_words([f"model.layers.{i}.self_attn" for i in (0, 1, 2, 5, 7, 8)]) == "0-2, 5, 7-8"
    assert layers_in_words([f"layers.{i}" for i in (0, 2, 4, 6, 8)], 2) == "0, 2, ..."
    assert layers_in_words(["encoder"]) == "encoder"
    assert layers_in_words(["a.b", "c.d"]) == "a.b, ..."
    assert indices(["model.layers.3.heads.4"]) is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "full"),
        ({"sliding_window": 128, "has_sinks": True}, "sliding 128, sinks"),
        ({"logits_soft_cap": 50.0}, "full, soft cap 50"),
        ({"attn_type": "encoder_only", "window": (64, 64), "direct_kv": True}, "window 64,64, encoder-only"),
        ({"attn_type": "encoder_decoder"}, "cross"),
        ({"kv_cache_dtype": "fp8"}, "full, fp8 KV"),
        ({"chunk_size": 8192}, "chunk 8192"),
    ],
)
def test_a_spec_in_few_words(asked, words):
    assert features_in_words(LayerSpec(num_heads=8, num_kv_heads=8, head_size=64, **asked)) == words


@pytest.mark.parametrize(
    ("dtype", "meant"), [("FP8", "fp8"), ("half", "float16"), ("fp16", "float16"), ("e5m2", "fp8_e5m2")]
)
def test_an_unknown_cache_dtype_names_the_one_that_is_meant(run, dtype, meant):
    outcome = run("explain", "--kv-cache-dtype", dtype)
    assert outcome.code == 2
    assert outcome.err == f"attnplug: --kv-cache-dtype='{dtype}' is an unknown dtype; did you mean {meant}?\n"
