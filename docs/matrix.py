"""Writes the page of compatibility and the README's table from the results of runs: `python docs/matrix.py`."""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
from pathlib import Path

from attnplug.core import AttentionBackend
from attnplug.matrix import Matrix, Run, Status
from attnplug.matrix.design import declare
from attnplug.matrix.markdown import markdown_row, markdown_text, render_markdown
from attnplug.matrix.merging import TRIED, join
from attnplug.matrix.results import read_matrix
from attnplug.matrix.summary import CLAIMED, RunSummary, ValueSummary, summarise, values_of
from attnplug.matrix.words import AXIS_NAMES, MARKS, MEANINGS, list_in_words, value_in_words
from attnplug.registry import Registry
from attnplug.registry.plugins.records import Offer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples" / "plugins"
BEGIN, END = "<!-- The table is written by docs/matrix.py. -->", "<!-- End of the table. -->"

DEVICES = ("cpu", "sm80", "sm90", "sm100", "rocm:9.4")
"""The page has the declarations of the built-in backends for these devices, where nothing was run."""
SHOWN = ("TORCH", "TRITON", "FLASHINFER", "FLASH_ATTN_4", "FLASH_ATTN_3", "FLASH_ATTN_2")
"""The backends of the README's table, in its order."""

INTRODUCTION = """# Compatibility

This page lists the features that each built-in backend serves on each device. It also has `FLA` of the
[example package](../concepts/state-layers.md) `attnplug-fla`, on the device where it ran. *Verified* cells ran on the device, and
were right compared with the [oracle](../concepts/tolerances.md). *Sampled* answers are of several cells: those that were run are
right, and other combinations were not run. *Compiled* cells were not run, and their kernels fit the device. *Declared* cells are
claims of the classes that nobody has run there yet.

A backend may have several runs on a device, on other cards or with other versions of libraries. The first row of a backend is
the run with the most cells. Each row with "also" is another run, with the cells that it adds. An answer that has cells of
another run names its card or its versions. In lists of sizes and types, a value names them if all of its cells are of that run.

[Kernel libraries](kernel-libraries.md) lists the versions of the libraries, with their features and GPUs.

[Open the whole matrix](matrix.html){ .md-button } [Which backend for my model?](../which-backend.html){ .md-button }

That page has every cell with its reasons or evidence, and filters. It works without a network.
`attnplug matrix --html FILE` writes the same page for your machine and your backends.

![The page: features by backends, each answer with a mark and a word](../assets/matrix-1280-light.png#only-light)
![The page: features by backends, each answer with a mark and a word](../assets/matrix-1280-dark.png#only-dark)

On a phone, with the page of models:

![The page on a phone](../assets/matrix-390-light.png#only-light){ width="300" }
![The page on a phone](../assets/matrix-390-dark.png#only-dark){ width="300" }
![The answer for a model on a phone](../assets/model-390-light.png#only-light){ width="300" }
![The answer for a model on a phone](../assets/model-390-dark.png#only-dark){ width="300" }

This page is written by `docs/matrix.py`, from the declarations of the classes and from the files
`benchmarks/results/matrix-*.json`. `attnplug matrix --verify --json` writes these files.

"""


def docs_matrix(results: Path = RESULTS) -> Matrix:
    """The runs, and for the built-in backends on the other `DEVICES` their declarations."""
    # Only the backends of attnplug: other plugins may be installed where this runs.
    offers = [offer for offer in Registry().plugins.offers if offer.distribution == "attnplug"]
    by_name = {offer.name: offer for offer in offers}
    joined = join([read_matrix(path) for path in sorted(results.glob("matrix-*.json"))])
    ran = Matrix(
        tuple(with_todays_claims(run, by_name.get(run.backend) or example_of(run)) for run in joined.runs)
    )
    known = {run.key for run in ran.runs}
    declared = [
        # Without a date and a commit: the page changes when a declaration does, and not each day.
        dataclasses.replace(declare(offer, device), date="", commit=None)
        for device in DEVICES
        for offer in offers
        if (offer.name, device) not in known
    ]
    # Where something was run comes first, then as in DEVICES.
    devices = list(dict.fromkeys([*(run.device for run in ran.runs), *DEVICES]))
    runs = sorted([*ran.runs, *declared], key=lambda run: (devices.index(run.device), *_place(run)))
    return Matrix(tuple(runs))


def example_of(run: Run) -> type[AttentionBackend] | None:
    """The class of a run of an example package of this repository, which need not be installed; else None."""
    name = str(run.distribution)
    path = EXAMPLES / name / name.replace("-", "_") / "__init__.py"
    found = runpy.run_path(str(path))["attnplug_backends"]() if path.is_file() else ()
    return next((backend for backend in found if backend.get_name() == run.backend), None)


def with_todays_claims(run: Run, backend: Offer | type[AttentionBackend] | None) -> Run:
    """The run with today's declaration of each cell that it has not tried, or that the class refuses today."""
    if backend is None:
        return run
    today = {finding.cell: finding for finding in declare(backend, run.device).findings}
    before = {finding.cell: finding for finding in run.findings}
    findings = []
    for cell in {**before, **today}:
        found, now = before.get(cell), today.get(cell)
        tried = found is not None and found.status in TRIED and (now is None or now.status in CLAIMED)
        findings += [each for each in (found if tried else now,) if each is not None]
    return dataclasses.replace(run, findings=tuple(findings))


def page(matrix: Matrix) -> str:
    """The whole page as Markdown."""
    return INTRODUCTION + render_markdown(matrix)


def readme(matrix: Matrix, text: str) -> str:
    """The README with the table of this matrix in it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md lacks {BEGIN!r} or {END!r}, between which its table stands")
    return f"{before}{BEGIN}\n\n{table(matrix)}\n{END}{after}"


def table(matrix: Matrix) -> str:
    """Each backend of `SHOWN` where most of it was run: features by marks, and the values that it serves."""
    best = [summarise(max(runs, key=_weight)) for name in SHOWN if (runs := _runs_of(matrix, name))]
    lines = [
        markdown_row(("", *(f"`{summary.run.backend}`<br>on {_device(summary.run)}" for summary in best))),
        f"|---|{'---|' * len(best)}\n",
    ]
    for value in values_of(best, "feature"):
        marks = (_mark(summary.answers["feature"].get(value)) for summary in best)
        lines.append(markdown_row((markdown_text(value_in_words("feature", value)), *marks)))
    # Sizes of states say nothing about attention, which readers look for.
    attention = [summarise(_without_states(summary.run)) for summary in best]
    for axis, name in list(AXIS_NAMES.items())[1:]:
        lines.append(markdown_row((f"{name}s", *(_served(summary, axis) for summary in attention))))
    shown = {answer.status for summary in best for answer in summary.answers["feature"].values()}
    legend = [f"{MARKS[each]} {each} ({meaning})" for each, meaning in MEANINGS.items() if each in shown]
    few = ""
    if any(answer.restriction for summary in best for answer in summary.answers["feature"].values()):
        few = " The values beside a mark are the only ones that are served with this feature."
    if any(answer.elsewhere for summary in best for answer in summary.answers["feature"].values()):
        few += " A card or a version beside a mark is that of another run than the column's."
    return f"{''.join(lines)}\n{'; '.join(legend)}.{few}\n"


def _runs_of(matrix: Matrix, name: str) -> list[Run]:
    return [run for run in matrix.runs if run.backend == name]


def _without_states(run: Run) -> Run:
    findings = tuple(each for each in run.findings if not each.cell.feature.startswith("state"))
    return dataclasses.replace(run, findings=findings)


def _weight(run: Run) -> tuple[int, int]:
    """The number of verified cells, then of claimed cells."""
    statuses = [finding.status for finding in run.findings]
    return statuses.count(Status.VERIFIED), sum(status in CLAIMED for status in statuses)


def _place(run: Run) -> tuple[bool, int, str]:
    return bool(run.plugin), SHOWN.index(run.backend) if run.backend in SHOWN else len(SHOWN), run.backend


def _device(run: Run) -> str:
    return markdown_text(run.device_name or run.device)


def _mark(answer: ValueSummary | None) -> str:
    if answer is None:
        return ""
    only = f" {markdown_text(str(answer.restriction))}" if answer.restriction else ""
    where = f" {markdown_text(answer.elsewhere)}" if answer.elsewhere else ""
    return f"{MARKS[answer.status]}{only}{where}"


def _served(summary: RunSummary, axis: str) -> str:
    values = [
        (value, "")
        for value, answer in summary.answers[axis].items()
        if answer.status in CLAIMED and value is not None
    ]
    return markdown_text(list_in_words(axis, values))


def stale(matrix: Matrix) -> list[Path]:
    """The files that do not say what this matrix does."""
    made = {PAGE: page(matrix), README: readme(matrix, README.read_text(encoding="utf-8"))}
    return [
        path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str]) -> int:
    """Write both files; with `--check` only say which are stale, and fail where one is."""
    matrix = docs_matrix()
    if "--check" in arguments:
        old = stale(matrix)
        for path in old:
            print(f"{path.relative_to(ROOT)} is stale; run: python docs/matrix.py")
        return 1 if old else 0
    PAGE.write_text(page(matrix), encoding="utf-8")
    README.write_text(readme(matrix, README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    # TRITON on a CPU is for tests; the variable that turns it on says nothing of the backend.
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main(sys.argv[1:]))
