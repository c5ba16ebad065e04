"""`attnplug matrix`: shows the cells that backends claim, and runs them here."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnplug.cli.arguments import (
    Quiet,
    complete_backends,
    complete_devices,
    complete_features,
    jobs_option,
    memory_option,
    timeout_option,
)
from attnplug.cli.commands.conformance import require_the_extra
from attnplug.cli.commands.matrix_files import Outputs, diff, merge, show
from attnplug.cli.output.help import HelpfulCommand, HelpfulGroup
from attnplug.cli.output.output import echo, error
from attnplug.cli.output.own_output import apart_from_plugins, is_quiet
from attnplug.core.errors import PolicyError
from attnplug.matrix.model import Cell, Matrix, Run

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.plugins.records import Offer


_FAILED = 1
_RUN = "Running them"
_which = functools.partial(typer.Option, rich_help_panel="Which cells")
_run = functools.partial(typer.Option, rich_help_panel=_RUN)
_out = functools.partial(typer.Option, rich_help_panel="Output")

matrix_app = typer.Typer(
    cls=HelpfulGroup,
    add_completion=False,
    subcommand_metavar="[COMMAND]",
    epilog="Example: attnplug matrix --backend TRITON --device h100 --html matrix.html",
    rich_markup_mode=None,
)


@matrix_app.callback(invoke_without_command=True)
@apart_from_plugins
def matrix(
    context: typer.Context,
    backend: Annotated[
        list[str] | None,
        _which(
            metavar="NAME",
            autocompletion=complete_backends,
            help="A backend, a family or A+B; may be repeated \\[default: all of attnplug list]",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        _which(
            metavar="DEVICE",
            autocompletion=complete_devices,
            help="cpu, sm90, rocm:9.4, ...; may be repeated \\[default: the current one]",
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        _which(
            metavar="NAME",
            autocompletion=complete_features,
            help="Only cells of this feature, such as plain or sinks; may be repeated.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        _which(
            metavar="PATTERN",
            help="Only cells whose id matches, such as 'sinks/decode/d128/*'; may be repeated.",
        ),
    ] = None,
    compile_kernels: Annotated[
        bool,
        _run("--compile", help="Compile the kernels of the claimed cells of TRITON; no GPU is needed."),
    ] = False,
    known: Annotated[
        Path | None,
        _run(metavar="FILE", help="With --compile: results in which kernels are that need no compiling."),
    ] = None,
    verify: Annotated[bool, _run("--verify", help="Run the claimed cells on this machine.")] = False,
    unclaimed: Annotated[bool, _run("--unclaimed", help="Run the refused cells too.")] = False,
    compile_limit: Annotated[
        int | None,
        _run(
            min=1,
            metavar="N",
            help="If a backend compiles kernels, run only the cells of the N kernels that most cells need.",
        ),
    ] = None,
    resume: Annotated[
        bool, _run("--resume", help="Continue an interrupted run: verified cells are not run again.")
    ] = False,
    timeout: Annotated[float, timeout_option(_RUN, "Time limit of a cell, with compilation.")] = 120.0,
    jobs: Annotated[int | None, jobs_option(_RUN)] = None,
    memory: Annotated[str | None, memory_option(_RUN)] = None,
    json_file: Annotated[
        Path | None,
        _out("--json", metavar="FILE", help="Write JSON, for merge and diff; - is standard output."),
    ] = None,
    html: Annotated[
        Path | None, _out(metavar="FILE", help="Write a page that needs no network; - is standard output.")
    ] = None,
    markdown: Annotated[
        Path | None, _out(metavar="FILE", help="Write Markdown; - is standard output.")
    ] = None,
    commit: Annotated[
        str | None, _out(metavar="SHA", help="Commit of the results \\[default: that of attnplug's checkout]")
    ] = None,
    verbose: Annotated[bool, _out("--verbose", "-v", help="Show each cell that is run.")] = False,
    _quiet: Quiet = False,
) -> None:
    """Show the cells that backends claim to serve, for any device; with --verify, run them here; with --compile, compile.

    A cell combines a feature, phase, head size, dtype, KV dtype, block size and layout. Each two values are together in some cell. Cells run in worker processes: if a cell hangs, crashes or runs out of memory, the others still run. After a refutation, attnplug select refuses the cell.

    Exit codes: 0 done, 4 a claim is refuted or cannot fit, 1 a backend could not be run, 2 bad usage, 130 interrupted (the results are written).
    """
    # typer calls this function before `merge` and `diff` too.
    if context.invoked_subcommand is not None:
        return
    outputs = Outputs(json_file, html, markdown)
    outputs.check()
    pairs = pairs_of(backend, device, verify=verify)
    declared, notes = declared_cells(pairs, feature or (), only or (), commit, sampled_only=verify)
    if known is not None and not compile_kernels:
        raise PolicyError("--known", str(known), "has kernels that are compiled", "add --compile")
    if compile_kernels:
        if verify:
            raise PolicyError("--compile", True, "excludes --verify", "leave one out")
        from attnplug.cli.commands.matrix_compile import compile_runs

        raise typer.Exit(compile_runs(pairs, declared, known, jobs, outputs))
    if not verify:
        given = {"--unclaimed": unclaimed, "--resume": resume, "--compile-limit": compile_limit}
        for name, value in {**given, "--jobs": jobs, "--memory": memory}.items():
            if value:
                raise PolicyError(name, value, "says how cells are run", "add --verify")
        found = Matrix(tuple(declared))
        outputs.write(found, with_models=True)
        if not outputs.to_stdout:
            show(found)
        for note in () if is_quiet() else notes:
            echo(f"attnplug: {note}", err=True)
        return
    # Only a run needs the extra `testing`; a display of the cells does not.
    require_the_extra("matrix --verify")
    from attnplug.cli.commands.matrix_verify import RunOptions, run_cells
    from attnplug.cli.own_process import interrupt_on_sigterm
    from attnplug.matrix.verify import RunScope
    from attnplug.runtime.plan.budget import parse_memory

    allowed = None if memory is None else parse_memory(memory)
    options = RunOptions(RunScope(unclaimed, compile_limit), resume, jobs, timeout, allowed)
    with interrupt_on_sigterm():
        code, cannot = run_cells(pairs, declared, options, outputs, verbose)
    # A backend that cannot run here is an error only if the user asked for it by name.
    for why in cannot if backend else ():
        error(why, _FAILED)
        code = code or _FAILED
    raise typer.Exit(code)


_MERGE = "Example: attnplug matrix merge h100.json a100.json --html matrix.html"
_DIFF = "Example: attnplug matrix diff before.json after.json"
matrix_app.command("merge", cls=HelpfulCommand, epilog=_MERGE)(apart_from_plugins(merge))
matrix_app.command("diff", cls=HelpfulCommand, epilog=_DIFF)(apart_from_plugins(diff))


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One backend on one device."""

    name: str
    offer: Offer
    asked: str | None
    device: Device

    def __str__(self) -> str:
        return f"{self.offer.name} on {self.device}"


def pairs_of(backends: Sequence[str] | None, devices: Sequence[str] | None, *, verify: bool) -> list[Pair]:
    """Each backend with each device; None for all backends, and for the current device.

    Raises:
        PolicyError: no backend has a name, or `verify` is set and this machine lacks a device.
        PluginError: the plugin of a backend did not load.
        SpecError: a text names no device.
    """
    from attnplug.registry.default import get_registry
    from attnplug.registry.devices import is_here, resolve_device
    from attnplug.registry.selection.policy import Rule

    plugins = get_registry().plugins
    offers: dict[str, tuple[str, Offer]] = {}
    for name in backends or [offer.name for offer in plugins.offers]:
        found = plugins.resolve(Rule(name, "default", "*", "--backend"))
        for offer in found:
            offers.setdefault(offer.full_name, (name if len(found) == 1 else offer.name, offer))
    where: dict[str, tuple[str | None, Device]] = {}
    asked: Sequence[str | None] = devices or [None]
    for text in asked:
        device = resolve_device(text)
        if verify and not is_here(device):
            remedy = f"leave it out, or name {resolve_device(None)}; without --verify any device is accepted"
            raise PolicyError("--device", text, "is not on this machine, so nothing can run on it", remedy)
        where.setdefault(str(device), (text, device))
    return [
        Pair(name, offer, text, device) for text, device in where.values() for name, offer in offers.values()
    ]


def declared_cells(
    pairs: Sequence[Pair],
    features: Sequence[str],
    only: Sequence[str],
    commit: str | None,
    *,
    sampled_only: bool = False,
) -> tuple[list[Run], list[str]]:
    """The cells of each backend with one of `features` and an id that matches a pattern of `only`; empty for all.

    They are declared or refused. If a pattern matches no sampled cell of a backend, the backend's class answers
    for the combinations that the pattern names.

    Args:
        pairs: the backends and devices.
        features: of FEATURES.
        only: patterns of ids.
        commit: that of the results; None for that of attnplug's checkout.
        sampled_only: whether combinations that are not sampled are left out.

    Returns:
        A run for each pair, and a sentence for each pattern that a backend was asked about.

    Raises:
        PolicyError: a feature is unknown, or a pattern matches no cell.
    """
    from attnplug.matrix.axes import FEATURES
    from attnplug.matrix.design import declare, evaluate

    for name in features:
        if name not in FEATURES:
            raise PolicyError("--feature", name, f"must be one of {', '.join(FEATURES)}")
    runs = [declare(pair.offer, pair.device) for pair in pairs]

    def is_chosen(cell: Cell, patterns: Sequence[str]) -> bool:
        matches = not patterns or any(fnmatch.fnmatchcase(cell.id, pattern) for pattern in patterns)
        return matches and (not features or cell.feature in features)

    chosen = [[each for each in run.findings if is_chosen(each.cell, only)] for run in runs]
    notes = []
    for pattern in only:
        lacking = [
            number
            for number, findings in enumerate(chosen)
            if not any(is_chosen(each.cell, [pattern]) for each in findings)
        ]
        if not lacking:
            continue
        cells, number = ([], 0) if sampled_only else _named_by(pattern, pairs, features)
        if not cells and len(lacking) == len(runs):
            ids = dict.fromkeys(finding.cell.id for run in runs for finding in run.findings)
            raise _unmatched(pattern, number, list(ids), sampled_only)
        for place in lacking if cells else ():
            chosen[place] += evaluate(pairs[place].offer.backend, pairs[place].device, cells)
            what = "this combination" if len(cells) == 1 else f"its {len(cells):,} combinations"
            notes.append(
                f"{pairs[place]}: {pattern} is not sampled; the answer is what the class says of {what}"
            )
    found = [
        dataclasses.replace(run, findings=tuple(findings), commit=commit or run.commit)
        for run, findings in zip(runs, chosen, strict=True)
    ]
    return found, notes


def _named_by(pattern: str, pairs: Sequence[Pair], features: Sequence[str]) -> tuple[list[Cell], int]:
    """The result of `combinations` for the values of all backends together."""
    from attnplug.matrix.axes import axes_of, own_latents
    from attnplug.matrix.design import combinations

    axes: dict[str, list[Any]] = {}
    latents: set[int] = set()
    for backend in dict.fromkeys(pair.offer.backend for pair in pairs):
        latents |= own_latents(backend)
        for axis, values in axes_of(backend).items():
            axes[axis] = list(dict.fromkeys([*axes.get(axis, ()), *values]))
    if features:
        axes["feature"] = [name for name in axes["feature"] if name in features]
    return combinations(pattern, axes, frozenset(latents))


def _unmatched(pattern: str, number: int, ids: Sequence[str], sampled_only: bool) -> PolicyError:
    from attnplug.matrix.design import MOST_COMBINATIONS

    if number > MOST_COMBINATIONS:
        limit = f"names {number:,} combinations, none of them sampled; at most {MOST_COMBINATIONS:,} are evaluated"
        return PolicyError("--only", pattern, limit, "name more of the values")
    if number:
        remedy = "fp8 storage is the feature fp8_kv, and no plain layer has it"
        return PolicyError("--only", pattern, "names values that no layer has together", remedy)
    near = difflib.get_close_matches(pattern, ids, 1, 0.0)
    limit = "matches no sampled cell, and only these are run" if sampled_only else "matches no cell"
    return PolicyError("--only", pattern, limit, f"an id is {near[0]}" if near else None)
