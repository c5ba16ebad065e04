"""The progress that `attnplug tune` prints."""

from __future__ import annotations

import dataclasses
import io
import types

import pytest
from fake_plugins import CPU, backend, registry
from rich.console import Console

from attnplug import LayerSpec
from attnplug.cli.output import run_report, tune_report
from attnplug.cli.output.tune_report import TuneReport, print_outcome
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import RowStatus, TimedRow, TunedLayer, TunedTable
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.tuning.cells import Outcome, TuneCell
from attnplug.tuning.session import Tuner

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32)


def cells(count: int) -> list[TuneCell]:
    return [TuneCell(0, SPEC, StepShape.parse(f"decode {1 + n} x 64"), 1.0, ()) for n in range(count)]


def measure(report: TuneReport, cell: TuneCell, clock: dict[str, float], seconds: float) -> None:
    report.started(cell)
    clock["now"] += seconds
    report.finished(cell, [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    found = {"now": 100.0}
    for module in (run_report, tune_report):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: found["now"]))
    return found


def test_the_time_left_is_that_of_cells_without_their_checks(
    clock: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    report = TuneReport()
    every = cells(5)
    for batch in (every[:3], every[3:]):  # mixed steps come in a batch of their own
        report.planned(0, len(batch))
        clock["now"] += 600.0  # checks
        for cell in batch:
            measure(report, cell, clock, 20.0)
    said = [line.partition("about ")[2] for line in capsys.readouterr().err.splitlines() if "decode" in line]
    assert said == ["40 s left", "20 s left", "", "20 s left", ""]


def test_a_terminal_shows_how_many_cells_there_are(clock: dict[str, float]) -> None:
    report = TuneReport()
    screen = io.StringIO()
    report._live, report._progress = True, Console(file=screen, force_terminal=True, width=100)
    with report.bar():
        report.planned(2, 3)
        measure(report, cells(3)[0], clock, 1.0)
        assert report._bar is not None
        task = report._bar.tasks[0]
        assert (task.completed, task.total) == (1, 3)


def test_crashes_are_told_once_and_not_those_of_other_models(capsys: pytest.CaptureFixture[str]) -> None:
    shape = StepShape.parse("decode 8 x 1k")
    crash = TimedRow(
        BackendVersions("B", None, None, CPU, ()), shape, (16, "NHD"), RowStatus.CRASHED, why="SIGSEGV"
    )
    specs = [SPEC, SPEC.replace(sliding_window=64), SPEC.replace(num_heads=8)]
    layers = [TunedLayer(spec, 1, ((shape, 1.0),), (crash,)) for spec in specs]
    layers[2] = TunedLayer(
        specs[2], 1, ((shape, 1.0),), (dataclasses.replace(crash, why="of another model"),)
    )
    tuner = Tuner(registry(backend("A", 90)), CPU, {spec: ["0"] for spec in specs[:2]}, ((shape, 1.0),))
    report, outcome = TuneReport(), Outcome(TunedTable(CPU, tuple(layers)), [], [], [], {}, {})
    capsys.readouterr()
    print_outcome(tuner, outcome, report)
    assert capsys.readouterr().err.splitlines() == ["B at decode 8 x 1k: SIGSEGV"]
