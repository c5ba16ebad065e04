"""Plans beside evidence: what was refuted serves no layer, no phase and no pages, unless the user has it so."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence_runs import cell, run
from fake_backends import backend, offered, reads
from model_layers import FULL, SLIDING, model

from attnplug import Phase, plan
from attnplug.core.errors import BackendUnavailableError, LayoutError
from attnplug.registry.selection.evidence import record
from attnplug.runtime import ModelPlan

LAYERS = model([FULL, SLIDING])
SPEC = LAYERS["layers.0"]
LIAR = backend("LIAR", 90)


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path / "evidence.json"))


def refute(name: str, feature: str = "plain", **values) -> None:
    record(run(name, cell(feature, head_size=SPEC.head_size, dtype=SPEC.dtype, **values)))


def served(made: ModelPlan) -> list[str | None]:
    return [decision.backend for decision in made.decisions.values()]


def test_only_the_layers_that_meet_a_refuted_cell_are_served_by_another():
    refute("LIAR", "sliding_window")
    with offered(LIAR):
        assert served(plan(LAYERS, "cpu")) == ["LIAR", "TORCH"]


def test_one_backend_throughout_is_one_that_was_right_in_every_layer():
    refute("LIAR", "sliding_window")
    with offered(LIAR):
        assert served(plan(LAYERS, "cpu", uniform=True)) == ["TORCH", "TORCH"]


def test_what_the_user_has_all_the_same_is_noted_by_the_plan():
    refute("LIAR")
    with offered(LIAR):
        made = plan(LAYERS, "cpu", allow_refuted="LIAR")
        again = ModelPlan.from_json(made.to_json())
    assert served(made) == ["LIAR", "LIAR"]
    (note,) = made.notes
    assert note.startswith("allowed by allow_refuted: refuted when LIAR was run here")
    assert note in str(made).replace("\n", " ")
    assert again.notes == made.notes


def test_a_phase_is_served_by_another_where_one_was_wrong_in_it():
    refute("LIAR", phase="decode")
    with offered(LIAR):
        assert served(plan(LAYERS, "cpu", per_phase=True)) == ["LIAR+TORCH"] * 2
        assert served(plan(LAYERS, "cpu", per_phase=False)) == ["TORCH"] * 2


def test_what_was_wrong_in_mixed_batches_does_not_serve_both_phases():
    refute("LIAR", phase="mixed")
    with offered(LIAR):
        made = plan(LAYERS, "cpu", per_phase=True)
        assert made.by_phase["layers.0"][Phase.DECODE].backend == "LIAR"
        assert served(made) == ["TORCH"] * 2
        with pytest.raises(BackendUnavailableError, match="LIAR: refuted when LIAR was run here"):
            plan(LAYERS, "cpu", backend="prefill=LIAR,decode=LIAR")
        asked = plan(LAYERS, "cpu", backend="prefill=LIAR,decode=LIAR", allow_refuted="all")
        assert served(asked) == ["LIAR"] * 2


def test_pages_that_layers_agree_on_and_that_were_refuted_are_an_error():
    wide = backend("WIDE", 60, get_supported_kernel_block_sizes=reads(32))
    refute("LIAR", block_size=32)
    with offered(LIAR, wide), pytest.raises(LayoutError, match=r"does not serve layer layers\.1 on LIAR"):
        plan(LAYERS, "cpu", backend="WIDE,sliding=LIAR")
