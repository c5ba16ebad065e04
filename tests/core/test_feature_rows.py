"""The table of features: every row is complete, and everything that deals with features reads it."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.cli.app import app
from attnplug.core import Device, Feature, LayerSpec
from attnplug.core.reasons import REASON_CODES
from attnplug.matrix.words import value_in_words
from attnplug.testing.conformance import ConformanceError, conformance_checks
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.declared import refusals
from attnplug.testing.conformance.numbers import correctness
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import COMPUTED

SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
EVERYTHING = ~Feature(0)
FEATURES = pytest.mark.parametrize("flag", Feature, ids=lambda flag: flag.names()[0])


@functools.cache
def with_a_new_row() -> dict[str, Any]:
    script = Path(__file__).with_name("new_row.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@FEATURES
def test_a_row_names_a_field_and_its_values_ask(flag: Feature) -> None:
    assert flag.ask.field in {field.name for field in dataclasses.fields(LayerSpec)}
    assert flag not in LayerSpec(**SIZES).required_features()
    for head_size in (64, 128, 256):
        asking = LayerSpec(**{**SIZES, "head_size": head_size, **flag.fields(head_size, 16)})
        assert flag in asking.required_features()
        assert flag.shown(asking)


@FEATURES
def test_a_row_has_words_a_code_and_an_option(flag: Feature) -> None:
    assert flag.refusal.endswith("not supported")
    assert value_in_words("feature", flag.names()[0]) == flag.label
    assert flag.code in REASON_CODES or flag.code == f"feature.{flag.names()[0]}"
    explain = get_command(app).commands["explain"]  # type: ignore[attr-defined]
    option = next(each for each in explain.params if flag.ask.option in each.opts)
    assert option.help


@FEATURES
def test_a_row_has_a_refusal_case_in_the_kit(flag: Feature) -> None:
    backend = type("Without", (TorchBackend,), {"features": TorchBackend.features & ~flag})
    checks = refusals.checks(Target(backend, Device("cpu")))
    next(check for check in checks if check.id == f"refused/feature-{flag.names()[0]}")()


@functools.cache
def asked_by_the_cases() -> Feature:
    target = Target(TorchBackend, Device("cpu"))
    latent = dataclasses.replace(target, backend=TorchMLABackend)
    cases = [*designed_cases(target), *designed_cases(latent)]
    return Feature(
        functools.reduce(lambda asked, case: asked | case.spec.required_features(), cases, Feature(0))
    )


@FEATURES
def test_a_row_has_a_numeric_case_or_the_kit_fails_who_declares_it(flag: Feature) -> None:
    if flag in COMPUTED:
        assert flag in asked_by_the_cases()
        return
    backend = type("Boasts", (TorchBackend,), {"features": TorchBackend.features | flag})
    checks = correctness.checks(Target(backend, Device("cpu")))
    check = next(check for check in checks if check.id == f"correct/untried-{flag.names()[0]}")
    with pytest.raises(ConformanceError, match=f"declares {flag.name}, and the kit has no numeric case"):
        check()


def test_what_a_backend_declares_and_the_oracle_knows_has_no_such_check() -> None:
    ids = [check.id for check in conformance_checks(TorchBackend, device="cpu")]
    assert not [name for name in ids if "untried" in name]


class TestANewRow:
    """A row is added to a copy of the table, and nothing else is changed."""

    def test_a_spec_can_ask_for_it(self) -> None:
        found = with_a_new_row()
        assert found["asked"] == ["telepathy"]
        assert found["round trip"] is True
        assert found["unknown"] == "LayerSpec got an unexpected keyword argument 'telepathie'"

    def test_every_built_in_refuses_it_and_who_declares_it_does_not(self) -> None:
        found = with_a_new_row()
        assert {"TORCH", "TRITON", "FLASHINFER", "FLASH_ATTN_2"} <= set(found["reasons"])
        for name, codes in found["reasons"].items():
            assert "feature.telepathy" in codes, name
        assert not [reason for reason in found["believed"] if "telepathy" in reason]

    def test_the_kit_asks_for_it_and_fails_who_declares_it_unproven(self) -> None:
        found = with_a_new_row()
        assert found["kit refuses"] == "passed"
        assert "declares TELEPATHY, and the kit has no numeric case" in found["kit misses"]

    def test_the_matrix_has_its_cells(self) -> None:
        cells = with_a_new_row()["matrix"]
        assert set(cells) == {"mixed", "prefill", "decode"}
        assert all("feature.telepathy" in codes for codes in cells.values())

    def test_explain_has_its_option(self) -> None:
        found = with_a_new_row()
        assert "telepathy not supported" in found["explain"]
        assert "--telepathy" in found["help"]
        assert "Keys not yet" in found["help"]
