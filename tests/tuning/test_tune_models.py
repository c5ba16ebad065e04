"""What benchmarks/tune_models.py makes of one measurement: the table, the steps held back, and two runs compared."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tune_goals
import tune_models
from fake_plugins import CPU, SPEC, backend, registry

from attnplug.registry.default import get_registry
from attnplug.registry.measured.tuned import RowStatus, TimedRow, TunedLayer, TunedTable
from attnplug.registry.measured.tuned_files import read_table, update_table
from attnplug.registry.measured.tuned_lookup import PACKAGED
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.tuning.workloads import workload_of

TABLE, HELD = workload_of("decode 8 x 1k, decode 1 x 8k"), workload_of("decode 4 x 2k")
FAKES = [backend(name, priority) for name, priority in (("A", 90), ("B", 50))]


def measured(**times: float) -> TunedTable:
    """A table of every step, in which each backend takes equally long at all of them."""
    rows = tuple(
        TimedRow(
            BackendVersions(name, None, None, CPU, ()), shape, (16, "NHD"), us=us, rounds=5, date="2026-11-22"
        )
        for name, us in times.items()
        for shape, _ in (*TABLE, *HELD)
    )
    return TunedTable(CPU, (TunedLayer(SPEC, 1, (*TABLE, *HELD), rows),))


def test_a_part_has_its_own_steps_and_weights_only() -> None:
    part = tune_models.part_of(measured(A=10.0, B=20.0), HELD)
    assert part.layers[0].workload == HELD
    assert [(row.subject.backend, str(row.shape)) for row in part.layers[0].rows] == [
        ("A", "decode 4 x 2k"),
        ("B", "decode 4 x 2k"),
    ]
    assert tune_models.part_of(part, TABLE).layers == ()


def test_the_second_run_leaves_out_what_failed_in_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(A=10.0, B=20.0)
    (layer,) = first.layers
    rows = [
        dataclasses.replace(row, status=RowStatus.CRASHED, us=0.0) if row.subject.backend == "B" else row
        for row in layer.rows
    ]
    whole = dataclasses.replace(first, layers=(dataclasses.replace(layer, rows=tuple(rows)),))
    update_table(tmp_path / "all.json", lambda _: whole)
    begun: list[TunedTable] = []
    monkeypatch.setattr(
        tune_models, "run_tuner", lambda options, workload, path, *_, **__: begun.append(read_table(path))
    )
    options = argparse.Namespace(folder=tmp_path, table="decode 8 x 1k", again_budget=None)
    tune_models.measure_again(options)
    assert [(row.subject.backend, row.status) for row in begun[0].layers[0].rows] == [
        ("B", RowStatus.CRASHED)
    ] * 3
    assert tune_models.failures_of(first).layers == ()


def test_the_packaged_choices_are_those_on_the_machine_that_was_measured() -> None:
    """They are written anywhere: the libraries there count, not those of the machine that writes."""
    table = read_table(PACKAGED / "h200.json")
    assert {choice["backend"] for choice in table.choices} >= {"TRITON", "FLASH_ATTN_4"}
    for choice in table.choices:
        spec, phase = table.layers[choice["layer"]].spec, choice["phase"]
        asked: Any = {"assume_installed": tune_models.assumed_of(table)}
        found = get_registry().explain(spec, table.device, phase, tuned=table, **asked)
        assert (found.backend, str(found.measured)) == (choice["backend"], choice["why"])
        assert (
            get_registry().explain(spec, table.device, phase, tuned=False, **asked).backend
            == choice["default"]
        )


@pytest.mark.parametrize(
    ("second", "alike", "gap"),
    [
        ({"A": 11.0, "B": 9.0}, True, 0.2222),
        ({"A": 10.0, "B": 9.9}, False, 0.0101),
        ({"A": 10.0}, False, 0.0),
    ],
)
def test_two_runs_are_compared_cell_by_cell(second: dict[str, float], alike: bool, gap: float) -> None:
    first = measured(A=11.0, B=9.0)
    found: Any = tune_models.agreement(registry(*FAKES), first, measured(**second), None)
    # All three steps are in both tables.
    assert found[0] == [alike] * 3
    assert found[1] == [pytest.approx(gap, abs=1e-4)] * 3
    other = dataclasses.replace(first, layers=())
    assert tune_models.agreement(registry(*FAKES), first, other, None) == ([], [])


def test_the_default_lists_are_workloads_with_no_step_in_common() -> None:
    table, held = workload_of(tune_models.TABLE), workload_of(tune_models.HELD)
    assert not {shape for shape, _ in table} & {shape for shape, _ in held}
    kinds = tune_models.layers_of_models(tune_models.SIX.split(","))
    assert len(kinds) * len(held) >= 60


@dataclasses.dataclass
class Policy:
    """A summary of regret."""

    mean: float
    p95: float = 0.0
    worst: float = 0.0
    over_default: float = 0.0


def verdicts(**changes: Any) -> dict[str, bool | None]:
    """Whether each goal is met, where everything was measured and is fine but for `changes`."""
    held = {
        "cells": 64,
        "models": 6,
        "kinds": [*tune_goals.KINDS],
        "backends": {*tune_goals.BACKENDS},
        "policies": {"priorities": Policy(0.05), "table": Policy(0.01, 0.04, 0.09, 0.02)},
    }
    rows = [{"model": name, "ratio": {"decode": 1.1}} for name in "abc"]
    figures = {"first_s": 299.0, "again_s": 60.0, "warm_us": 7.9, "first_us": 19.0}
    figures |= {"engine": {"models": rows}}
    alike = {"cells": 64, "share": 0.95, "gap": 0.04}
    given = [held, alike, figures]
    for place, each in enumerate(given):
        given[place] = {
            name: changes.get(name, value) for name, value in each.items() if changes.get(name, 1) is not None
        }
    return {goal.name: goal.met for goal in tune_goals.goals(*given)}


def test_every_goal_is_met_missed_or_not_measured() -> None:
    fine = verdicts()
    assert len(fine) == 15
    assert set(fine.values()) == {True}
    for change, name, met in (
        ({"cells": 59}, "cells held back", False),
        ({"models": 5}, "cells held back", False),
        ({"kinds": ["decode"]}, "kinds of cells", False),
        ({"backends": {"TORCH"}}, "backends", False),
        ({"share": 0.949}, "two runs choose alike", False),
        ({"share": None}, "two runs choose alike", None),
        ({"gap": 0.041}, "widest gap where they do not", False),
        ({"first_s": None}, "gemma-3-27b at 1, 8, 64", None),
        ({"again_s": 61.0}, "the same again", False),
        ({"warm_us": 8.1}, "select with a table, warm", False),
        ({"engine": {"models": []}}, "tokens/s end to end, by the table over by priority", None),
        ({"policies": {"priorities": Policy(0.061)}}, "regret of priorities, mean", False),
        ({"policies": {"table": Policy(0.016)}}, "regret of table, mean", False),
        ({"policies": {"table": Policy(0.0, 0.06)}}, "regret of table, p95", False),
        ({"policies": {"table": Policy(0.0, 0.0, 0.11)}}, "regret of table, worst", False),
        ({"policies": {"table": Policy(0.0, 0.0, 0.0, 0.021)}}, "table, slower than the default", False),
    ):
        assert verdicts(**change)[name] is met, change


def test_a_step_may_be_of_several_kinds() -> None:
    shapes = [shape for shape, _ in workload_of(tune_models.HELD)]
    assert tune_goals.kinds_of(shapes) == sorted(tune_goals.KINDS)
    assert tune_goals.kinds_of(shapes[2:3]) == ["decode"]


def test_a_part_that_fails_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fails(options: argparse.Namespace) -> None:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(tune_models, "PARTS", {"cells": fails, "again": ran.append})
    tune_models.measure(argparse.Namespace(folder=tmp_path, parts=["cells", "again"]))
    assert len(ran) == 1
    assert set(json.loads((tmp_path / "seconds.json").read_text())) == {"cells", "again"}


def test_a_measurement_that_was_cut_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_models, "get_registry", lambda: registry(*FAKES))
    update_table(tmp_path / "all.json", lambda _: measured(A=11.0, B=9.0))
    table, held = "decode 8 x 1k, decode 1 x 8k", "decode 4 x 2k, decode 9 x 9k"
    options = argparse.Namespace(folder=tmp_path, table=table, held=held, models="llama-3.1-8b", engine=None)
    assert tune_models.report(options) == 1
    said = capsys.readouterr().out
    assert "MISSED        cells held back: 1 cells of 0 models (at least 60 of 6)" in said
    assert "met           regret of packaged table, mean: 0.0 % (at most 1.5 %)" in said
    assert "MISSED        regret of priorities, mean: 22.2 % (at most 6 %)" in said
    assert "not measured  two runs choose alike" in said
    regret = json.loads((tmp_path / "regret-h200.json").read_text())
    assert [cell["best"] for cell in regret["cells"]] == ["B"]
    assert json.loads((tmp_path / "table.json").read_text())["schema"] == "attnplug.tuned"
