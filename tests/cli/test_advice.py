"""Warnings where only the reference serves a layer on a GPU, and the change that would help."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import attnplug
from attnplug import Device, LayerSpec
from attnplug.cli.output.select_report import advice_for
from attnplug.registry.default import get_registry
from attnplug.registry.selection.nearest import nearest_misses, only_reference_serves

MODELS = Path(__file__).parents[2] / "examples" / "models"
GPT_OSS, LLAMA = MODELS / "gpt-oss-20b.json", MODELS / "llama-3.1-8b.json"
TRITON_ALONE = ("--assume-installed", "triton=3.7.1")
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)


def words(text: str) -> str:
    return " ".join(text.split())


def test_fp8_on_an_a100_names_the_fp8_that_triton_serves(run):
    asked = ("select", GPT_OSS, "--device", "a100", "--kv-cache-dtype", "fp8", *TRITON_ALONE)
    outcome = run(*asked)
    assert outcome.code == 0
    assert "warning: only the reference TORCH serves layers 0-23 on A100." in words(outcome.out)
    assert "TRITON serves this with --kv-cache-dtype fp8_e5m2." in words(outcome.out)
    (advice,) = run(*asked, "--json").json["advice"]
    assert (len(advice["layers"]), advice["only_reference"]) == (24, True)
    change = {"field": "kv_cache_dtype", "value": "fp8_e5m2", "command": "--kv-cache-dtype fp8_e5m2"}
    nearest = {"backend": "TRITON", "changes": [change], "words": "with --kv-cache-dtype fp8_e5m2"}
    assert advice["nearest"][0] == nearest


def test_the_nearest_miss_is_the_first_refused_backend(run):
    found = run("explain", "--device", "a100", "--kv-cache-dtype", "fp8", *TRITON_ALONE, "--json").json
    refused = [each["name"] for each in found["candidates"] if not each["accepted"]]
    assert refused[0] == found["advice"][0]["nearest"][0]["backend"] == "TRITON"


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("t4", "TRITON is the nearest: compute capability not supported: 7.5."),
        (
            "rocm",
            "TRITON is the nearest: compute capability not known; name the device with one, such as rocm:9.4.",
        ),
    ],
)
def test_where_no_change_helps_the_reasons_of_the_nearest_backend_are_named(run, device, reason):
    outcome = run("explain", "--device", device, *TRITON_ALONE)
    assert "warning: only the reference TORCH serves this layer" in words(outcome.out)
    assert words(outcome.out).endswith(reason)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_where_no_other_backend_is_for_such_a_device_none_is_called_near(run, device):
    outcome = run("explain", "--device", device)
    assert words(outcome.out).endswith(f"It is slow on a GPU. No other installed backend is for {device}.")
    assert "nearest" not in outcome.out
    assert "pip install" not in outcome.out


@pytest.mark.parametrize(
    ("device", "helps"), [("cpu", False), ("mps", False), ("t4", False), ("cuda", True), ("h100", True)]
)
def test_pip_is_a_remedy_only_where_the_device_may_be_served(run, device, helps):
    found = run("explain", "--device", device, "--assume-installed", "torch=2.13", "--json").json
    (flashinfer,) = [each for each in found["candidates"] if each["name"] == "FLASH_ATTN_3"]
    (missing,) = [each for each in flashinfer["reasons"] if each["code"] == "not_installed"]
    assert ("pip install" in missing["text"], missing["remedy"] is not None) == (helps, helps)


def test_the_version_is_that_of_the_class_that_serves_the_layer(run):
    asked = ("--device", "sm90", "--backend", "FLASHINFER", "--assume-installed", "here")
    outcome = run("select", MODELS / "deepseek-v3.json", *asked)
    assert outcome.code == 3
    assert words(outcome.out).endswith("in decode after pip install 'flashinfer-python<0.7,>=0.6.13'.")


def test_the_change_helps(run):
    outcome = run("select", GPT_OSS, "--device", "a100", "--kv-cache-dtype", "fp8_e5m2", *TRITON_ALONE)
    assert "warning" not in outcome.out
    assert "R = TRITON" in outcome.out


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (("--device", "h100", "--assume-installed", "torch=2.9"), "after pip install 'triton"),
        (
            ("--device", "h100", "--kv-cache-dtype", "float32", *TRITON_ALONE),
            "TRITON serves this with --kv-cache-dtype auto",
        ),
        (
            (
                "--device",
                "h100",
                "--block-size",
                "24",
                "--backend",
                "FLASH_ATTN_3",
                "--assume-installed",
                "all",
            ),
            "FLASH_ATTN_3 serves this layer without --block-size.",
        ),
        (
            (
                "--device",
                "h100",
                "--dtype",
                "float32",
                "--backend",
                "FLASH_ATTN_2",
                "--assume-installed",
                "all",
            ),
            "FLASH_ATTN_2 serves this layer with dtype bfloat16.",
        ),
    ],
)
def test_explain_names_the_nearest_change(run, options, advice):
    text = words(run("explain", *options).out)
    assert advice.replace("serves this with", "serves this layer with") in text or advice in text


@pytest.mark.parametrize("options", [("--device", "cpu"), ("--device", "h100", "--backend", "TORCH")])
def test_the_reference_is_no_warning_on_a_cpu_or_where_it_was_asked_for(run, options):
    outcome = run("explain", *options)
    assert outcome.code == 0
    assert "warning" not in outcome.out
    assert run("explain", *options, "--json").json["advice"] == []


def test_a_decision_with_advice_is_still_read_back(run):
    data = run("explain", "--device", "a100", "--kv-cache-dtype", "fp8", *TRITON_ALONE, "--json").json
    assert len(data["advice"]) == 1
    assert attnplug.Decision.from_dict(data).backend == "TORCH"


def test_every_near_miss_serves_the_layer_once_changed():
    registry = get_registry()
    asked = 0
    for device in ("sm80", "sm90", "sm100", "rocm:9.4"):
        for kv_cache_dtype in ("auto", "fp8", "int8"):
            for fields in (
                {},
                {"block_size": 24},
                {"head_size": 80},
                {"has_sinks": True},
                {"dtype": "float32"},
            ):
                spec = SPEC.replace(kv_cache_dtype=kv_cache_dtype, **fields)
                decision = registry.explain(spec, Device.parse(device))
                for miss in nearest_misses(registry, decision):
                    changed = {each.field: each.value for each in miss.changes if each.field != "requires"}
                    assume = "all" if any(each.field == "requires" for each in miss.changes) else None
                    again = registry.explain(
                        spec.replace(**changed),
                        Device.parse(device),
                        backend=miss.backend,
                        assume_installed=assume,
                    )
                    assert again.backend == miss.backend
                    asked += 1
    assert asked > 50


def test_refused_candidates_are_listed_nearest_first():
    decision = attnplug.explain(SPEC.replace(kv_cache_dtype="int8", has_sinks=True), "rocm:9.4")
    order = [set(candidate.codes) for candidate in decision.refused]
    far = [bool({"device_type", "compute_capability"} & codes) for codes in order]
    assert far == sorted(far)
    assert True in far
    assert False in far


def test_layers_of_one_kind_are_asked_about_once(monkeypatch):
    from attnplug.registry.selection import nearest

    decisions = [
        get_registry().explain(SPEC.replace(kv_cache_dtype="fp8"), "sm80", layer_name=str(n))
        for n in range(9)
    ]
    calls = []
    monkeypatch.setattr(nearest, "nearest_misses", lambda *asked: calls.append(asked) or ())
    monkeypatch.setattr(nearest, "only_reference_serves", lambda decision: True)
    ((_, found),) = advice_for(decisions).items()
    assert (len(found), len(calls)) == (9, 1)


def test_another_accepted_backend_means_no_advice():
    decision = attnplug.explain(SPEC, "sm90", assume_installed={"triton": "3.7.1"})
    assert decision.backend == "TRITON"
    assert not only_reference_serves(decision)
    assert advice_for([decision]) == {}
    assert json.loads(decision.to_json())["backend"] == "TRITON"


@pytest.mark.parametrize("chosen_by", ["priority", "measured", "rank"])
def test_only_a_rule_of_the_user_needs_no_warning(chosen_by):
    decision = attnplug.explain(SPEC, "t4", assume_installed={"triton": "3.7.1"})
    assert only_reference_serves(dataclasses.replace(decision, chosen_by=chosen_by))
    asked = attnplug.explain(SPEC, "t4", backend="TORCH", assume_installed={"triton": "3.7.1"})
    assert asked.backend == "TORCH"
    assert not only_reference_serves(asked)
