"""`attnplug tune`: measures the backends of a model's layers, and writes the times for selections."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnplug.cli.arguments import (
    AsJson,
    BlockSize,
    ConfigPath,
    DeviceText,
    KVCacheDtype,
    ModelDtype,
    Quiet,
    TensorParallel,
    complete_backends,
)
from attnplug.cli.output.output import check_output, print_json
from attnplug.cli.output.run_report import waiting
from attnplug.cli.own_process import interrupt_on_sigterm
from attnplug.core.errors import NoBackendError, PolicyError

if TYPE_CHECKING:
    from attnplug.cli.output.tune_report import TuneReport
    from attnplug.core.device import Device
    from attnplug.registry.measured.tuned import TunedTable
    from attnplug.tuning.session import Tuner
    from attnplug.tuning.workloads import Workload

_WRONG, _INTERRUPTED = 4, 130
_what = functools.partial(typer.Option, rich_help_panel="What is measured")
_out = functools.partial(typer.Option, rich_help_panel="Output")


def tune(
    config: ConfigPath,
    device: DeviceText = "current",
    workload: Annotated[
        str | None,
        _what(
            metavar="NAME|SHAPES",
            help="chat, long or batch, or shapes such as 'decode 64 x 8k, prefill 4 x 4k' \\[default: chat]",
        ),
    ] = None,
    batch: Annotated[
        str | None, _what(metavar="N,...", help="Decodes of these batches, such as 1,8,64.")
    ] = None,
    context: Annotated[
        str | None, _what(metavar="TOKENS,...", help="Decodes with these contexts, such as 1k,8k.")
    ] = None,
    prefill: Annotated[
        str | None, _what(metavar="NxTOKENS,...", help="Prefills, such as 4x4k, or '4x1k of 9k'.")
    ] = None,
    backends: Annotated[
        str | None,
        _what(
            metavar="NAMES",
            autocompletion=complete_backends,
            help="Measure only these and the default; commas between names. \\[default: all]",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        _what(
            metavar="TIME",
            help="Stop after this time, such as 300s or 5m; a cell that has begun is finished.",
        ),
    ] = None,
    tp: TensorParallel = 1,
    dtype: ModelDtype = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: BlockSize = None,
    fresh: Annotated[bool, _what("--fresh", help="Measure again what an earlier run has measured.")] = False,
    prices: Annotated[
        bool,
        _what(
            help="Measure the prices by which steps decide whether requests read shared prefixes together."
        ),
    ] = True,
    regret: Annotated[
        bool,
        _out(
            "--regret",
            help="Measure how much slower the chosen backends are than the fastest, by priorities and by tables.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        _out(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the times here \\[default: your table for the device, which attnplug select reads]",
        ),
    ] = None,
    as_json: AsJson = False,
    _quiet: Quiet = False,
) -> None:
    """Measure which backend is fastest for each layer of a model on this machine.

    Each backend is first compared with a float64 reference, in a process of its own: a wrong output becomes a refuted cell, and a crash costs one row. Backends then take turns. Times are written after each cell, so the same command continues an interrupted run.

    Exit codes: 0 done, 4 a backend gave a wrong output, 3 no backend serves a layer, 2 bad usage, 130 interrupted (the times so far are written).
    """
    from attnplug.cli.output.tune_report import TuneReport
    from attnplug.integrations.transformers import read_config
    from attnplug.registry.default import get_registry
    from attnplug.tuning.session import Tuner
    from attnplug.tuning.workloads import layers_of

    # The budget covers the reading of the model too.
    began = time.monotonic()
    shapes = _workload(workload, batch, context, prefill)
    seconds = None if budget is None else _seconds(budget)
    where = _device_here(device)
    if regret:
        work = functools.partial(_regret, path=None if output is None else _file(output, where))
    else:
        work = functools.partial(_tune, path=_file(output, where), fresh=fresh, prices=prices)
    registry = get_registry()
    names = None if backends is None else _known(backends, registry.plugins.find)
    with waiting(f"Running {config} once without weights, to see each layer's attention"):
        model = read_config(config, tensor_parallel_size=tp, kv_cache_dtype=kv_cache_dtype, dtype=dtype)
    tuner = Tuner(registry, where, layers_of(model.layers, block_size), shapes, backends=names)
    if not tuner.cells:
        why = "".join(f"; layer {name} {why}" for name, why in tuner.left_out.items())
        raise NoBackendError(f"no backend serves a layer that can be measured with this workload{why}")
    report = TuneReport()
    for note in model.notes:
        report.tell(note)
    with interrupt_on_sigterm():
        try:
            left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
            work(tuner, report, budget=left, as_json=as_json)
        except KeyboardInterrupt:
            is_kept = output is not None or not regret
            report.say("interrupted; the same command continues" if is_kept else "interrupted")
            raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(_WRONG if report.wrong_outputs else 0)


def _tune(
    tuner: Tuner,
    report: TuneReport,
    *,
    path: Path,
    budget: float | None,
    fresh: bool,
    prices: bool,
    as_json: bool,
) -> None:
    from attnplug.cli.output.tune_report import print_outcome
    from attnplug.registry.measured.tuned_files import table_to_update, update_table
    from attnplug.tuning.price_runs import measure_prices

    old = table_to_update(path, tuner.device)
    save, began = functools.partial(update_table, path), time.monotonic()
    with report.bar():
        outcome = tuner.run(None if fresh else old, report, save, budget)
        if prices:
            late = (lambda: False) if budget is None else (lambda: time.monotonic() - began >= budget)
            priced = measure_prices(tuner, outcome.table, save, late, fresh=fresh)
            outcome.table = priced.table
            for line in priced.lines:
                report.tell(line)
            if priced.left:
                report.say(f"prices of {priced.left} left out; the same command continues")
    if as_json:
        print_json(outcome.table.to_dict())
    else:
        print_outcome(tuner, outcome, report)
    report.tell(f"wrote {path} ({outcome.table.digest})")


def _regret(
    tuner: Tuner, report: TuneReport, *, path: Path | None, budget: float | None, as_json: bool
) -> None:
    from attnplug.cli.output.run_report import counted
    from attnplug.cli.output.tune_report import print_regret, print_step_regret
    from attnplug.registry.measured.tuned_files import table_to_update, update_table
    from attnplug.registry.measured.tuned_lookup import tables_by_source
    from attnplug.tuning.regret import regrets, summaries
    from attnplug.tuning.step_regret import step_regrets

    if path is not None:
        table_to_update(path, tuner.device)
    # Read before minutes are spent, because one may be damaged.
    tables = tables_by_source(tuner.device)
    kept: list[TunedTable] = []

    def keep_in_memory(change: Callable[[TunedTable | None], TunedTable]) -> TunedTable:
        kept[:] = [change(kept[-1] if kept else None)]
        return kept[0]

    save = keep_in_memory if path is None else functools.partial(update_table, path)
    with report.bar():
        outcome = tuner.run(None, report, save, budget)
    cells = regrets(tuner.registry, outcome.table, tables)
    found = summaries(cells)
    steps = step_regrets(tuner.registry, outcome.table, tables)
    if len(cells) < len(tuner.cells):
        left = counted(len(tuner.cells) - len(cells), "cell")
        report.say(f"{left} left out: not measured, or a choice has no time")
    if not as_json:
        print_regret(found, outcome.table)
        print_step_regret(steps, report)
        return
    data: dict[str, Any] = {
        "device": tuner.device.to_dict(),
        "policies": [dataclasses.asdict(each) for each in found],
        "cells": [
            {
                "layer": cell.layer,
                "shape": str(cell.shape),
                "best": cell.best,
                "us": dict(cell.costs),
                "chosen": dict(cell.chosen),
                "regret": {policy: cell.regret(policy) for policy in cell.chosen},
            }
            for cell in cells
        ],
        "steps": [{**dataclasses.asdict(each), "shape": str(each.shape)} for each in steps],
    }
    print_json(data, "attnplug.regret")


def _workload(name: str | None, batch: str | None, context: str | None, prefill: str | None) -> Workload:
    from attnplug.tuning.workloads import DEFAULT, workload_from_lists, workload_of

    lists = {"--batch": batch, "--context": context, "--prefill": prefill}
    given = next(((option, text) for option, text in lists.items() if text is not None), None)
    if given is None:
        return workload_of(DEFAULT if name is None else name)
    if name is not None:
        raise PolicyError(*given, "cannot be combined with --workload", "give one of the two")
    return workload_from_lists(batch, context, prefill)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|m|h)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise PolicyError("--budget", text, "must be a time above 0", "write 300s, 5m or 1h")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2] or "s"]


def _device_here(text: str) -> Device:
    from attnplug.registry.devices import is_here, resolve_device

    device = resolve_device(text)
    if not is_here(device):
        limit = "is not a device of this machine, so nothing can be measured on it"
        raise PolicyError("--device", text, limit)
    return device


def _file(output: Path | None, device: Device) -> Path:
    from attnplug.registry.measured.tuned_lookup import table_file, user_folder

    path = table_file(user_folder(), device) if output is None else output
    if path is None:
        raise PolicyError("--output", None, f"is required: {device} has no name for a table of yours")
    if output is not None:
        check_output("--output", path)
    return path


def _known(text: str, find: Callable[[str], Sequence[object]]) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if not find(name):
            raise PolicyError("--backends", name, "is not a backend", "attnplug list shows the names")
    return names
