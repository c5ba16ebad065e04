"""The progress and the results of `attnplug tune`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnplug._system.terminal_tables import WrappedTable
from attnplug.cli.output.output import console, features_in_words, layers_in_words
from attnplug.cli.output.run_report import RunReport, counted, in_words
from attnplug.core.errors import MatrixFileError
from attnplug.registry.measured.tuned import RowStatus, TimedRow, layer_key
from attnplug.tuning.timers import COPY, MATMUL, share_of_ceiling

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec
    from attnplug.registry.measured.tuned import TunedTable
    from attnplug.tuning.cells import Contender, Outcome, TuneCell
    from attnplug.tuning.regret import Summary
    from attnplug.tuning.session import Tuner
    from attnplug.tuning.step_regret import StepRegret

_MOST_LEFT = 5
_LOST = 0.05
"""The regret above which the rule of a choice is printed."""


class TuneReport(RunReport):
    """Prints a tuning to standard error: cells as they are measured, and the time left; it records wrong outputs."""

    def __init__(self) -> None:
        super().__init__(verbose=False, err=True)
        self.wrong_outputs = 0
        """Number of wrong outputs."""
        self._environment: Mapping[str, str] = {}

    def planned(self, kept: int, pending: int) -> None:
        """Say how much there is to do; mixed steps are planned after the others."""
        self._kept = len(self._verdicts)
        self._total = self._kept + pending
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)
        more = f", {kept} kept from an earlier run" if kept else ""
        self.tell(f"{counted(pending, 'cell')} to measure{more}")

    def checking(self, backend: str, cells: int) -> None:
        """A backend is about to be compared with the oracle."""
        self.tell(f"checking {backend} in {counted(cells, 'cell')}")

    def machine(self, environment: Mapping[str, str]) -> None:
        """Print the ceilings of the device, and who else uses it."""
        self._environment = environment
        if COPY in environment:
            self.tell(f"copy {environment[COPY]} GB/s, matmul {environment[MATMUL]} TFLOP/s")
        if others := environment.get("held by other processes"):
            self.tell(f"other processes hold {others} of the device: times may be noisy", "red")

    def started(self, cell: TuneCell) -> None:  # type: ignore[override]
        """A cell is about to be measured."""
        # The checks before the first one take a time that says nothing about cells.
        if len(self._verdicts) == self._kept:
            self._start = time.monotonic()
        super().started(_id(cell))

    def finished(self, cell: TuneCell, rows: Sequence[TimedRow]) -> None:
        """Print the times of a cell."""
        self._under_way.pop(_id(cell), None)
        self._verdicts[_id(cell)] = RowStatus.MEASURED
        timed = sorted((row for row in rows if row.is_measured), key=lambda row: row.us)
        words = []
        for row in timed:
            found = share_of_ceiling(cell.spec, row.shape, row.us, self._environment)
            share = "" if found is None else f" ({100 * found[1]:.0f} % of {found[0]})"
            words.append(f"{row.subject.backend} {row.us:.1f} us{share}")
        words += [f"{row.subject.backend} {row.status}" for row in rows if not row.is_measured]
        self.tell(f"{_id(cell)}: {', '.join(words)}{self._time_left()}")
        for why in dict.fromkeys(row.why for row in timed if row.why):
            self.tell(f"{_id(cell)}: {why}")
        self._tell_how_far()

    def wrong(self, contender: Contender, spec: LayerSpec, row: TimedRow, feature: str | None) -> None:
        """Print a wrong output, and remember one that a check has found for selections."""
        from attnplug.tuning.cells import record_wrong

        self.wrong_outputs += 1
        self.say(f"{contender.offer.name} is wrong at {row.shape}: {row.why.splitlines()[0]}", "red")
        if feature is None:
            # Other backends ran in its process, so the fault may be theirs.
            self.say("its output was right in a process of its own, so attnplug select does not refuse it")
            return
        try:
            recorded = record_wrong(contender, spec, row, feature)
        except MatrixFileError as problem:
            self.say(f"attnplug select will not refuse it: {problem}", "red")
            return
        if recorded.refuted:
            self.tell(f"attnplug select refuses what was refuted ({recorded.path})")


def _id(cell: TuneCell) -> str:
    return f"layer kind {cell.layer + 1}, {cell.shape}"


def print_outcome(tuner: Tuner, outcome: Outcome, report: TuneReport) -> None:
    """Print the choices as a table on standard output, and what was not measured."""
    shown = WrappedTable(
        ("kind", "layers", "which", "asks for", "phase", "chosen", "why"),
        right=("kind", "layers"),
        fixed=("kind", "layers", "phase", "chosen"),
        heading="kind {kind}  {phase}  {chosen}",
    )
    numbers = {id(kind): number for number, kind in enumerate(tuner.kinds, 1)}
    for kind, phase, decision in tuner.decisions(outcome.table):
        shown.add_row(
            str(numbers[id(kind)]),
            str(len(kind.names)),
            layers_in_words(kind.names, 3),
            features_in_words(kind.spec),
            str(phase or "both"),
            decision.backend or "none",
            str(decision.measured or "no times of the default: chosen by priority"),
        )
    console().print(shown)
    for name, why in outcome.left_out.items():
        report.say(f"layer {name} {why}")
    if outcome.compiled:
        slow = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in outcome.compiled.items())
        report.tell(f"first calls, with compilation: {slow}")
    # The file may have layers of other models too.
    layers = [outcome.table.by_key.get(layer_key(kind.spec)) for kind in tuner.kinds]
    rows = [row for layer in layers if layer is not None for row in layer.rows]
    crashed = [row for row in rows if row.status is RowStatus.CRASHED]
    for line in dict.fromkeys(f"{row.subject.backend} at {row.shape}: {row.why}" for row in crashed):
        report.say(line)
    if outcome.left:
        listed = ", ".join(map(_id, outcome.left[:_MOST_LEFT]))
        more = len(outcome.left) - _MOST_LEFT
        also = f" and {more} more" if more > 0 else ""
        remedy = "the same command continues" if outcome.measured else "give a longer --budget"
        report.say(f"not measured: {listed}{also}; {remedy}")


def print_step_regret(cells: Sequence[StepRegret], report: TuneReport) -> None:
    """Print the regret of plans by kind of step on standard output, and the rules that lost most."""
    from attnplug.tuning.step_regret import kinds

    shown = WrappedTable(
        ("plan by", "steps", "cells", "mean", "worst"),
        right=("cells", "mean", "worst"),
        fixed=("cells", "mean", "worst"),
        heading="{plan by}: {steps}",
    )
    for each in kinds(cells):
        shares = [f"{100 * value:.1f} %" for value in (each.mean, each.worst)]
        shown.add_row(each.policy, each.kind, str(each.cells), *shares)
    console().print(shown)
    lost = sorted((cell for cell in cells if cell.regret > _LOST), key=lambda cell: -cell.regret)
    for cell in lost[:_MOST_LEFT]:
        report.say(str(cell))


def print_regret(found: Sequence[Summary], table: TunedTable) -> None:
    """Print the regret of each policy on standard output."""
    shown = WrappedTable(
        ("policy", "cells", "mean", "p95", "worst", "against priorities"),
        right=("cells", "mean", "p95", "worst", "against priorities"),
        fixed=("cells", "mean", "p95", "worst"),
        heading="{policy}",
    )
    for each in found:
        shares = [f"{100 * value:.1f} %" for value in (each.mean, each.p95, each.worst)]
        shown.add_row(each.policy, str(each.cells), *shares, f"{100 * each.over_default:+.1f} %")
    console().print(shown)
