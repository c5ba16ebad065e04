"""Choices of an engine's attention, one process after another: options, one table of their speeds, and JSON."""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import importlib.metadata
import json
import math
import random
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from choice_process import run
from choice_run import ENDED, is_waiting
from lookup import BLOCK, FLAG
from rich.console import Console
from rich.table import Table

MODELS = Path(__file__).parents[1] / "models"
PACKAGES = {
    "vllm": ("attnplug", "vllm", "torch", "transformers", "flashinfer-python"),
    "sglang": ("attnplug", "sglang", "sglang-kernel", "torch", "triton", "transformers", "flashinfer-python"),
}
"""The packages of each engine whose versions are reported."""


def parser(about: str) -> argparse.ArgumentParser:
    """The options that all engines have.

    Args:
        about: a sentence on the script.
    """
    found = argparse.ArgumentParser(description=about)
    model = MODELS / "qwen3-8b.json"
    found.add_argument("--model", type=_file, default=model, help="a config.json (default: %(default)s)")
    found.add_argument("--layers", type=count, help="so many layers; by default those of the model")
    found.add_argument(
        "--dense", action="store_true", help="gpt-oss or DeepSeek with dense blocks for their experts"
    )
    found.add_argument(
        "--requests", type=count, default=64, help="requests of a workload (default: %(default)s)"
    )
    found.add_argument(
        "--prompts",
        type=lengths,
        nargs="+",
        default=[(2048, 2048), (100, 14_000)],
        metavar="N|MIN-MAX",
        help="tokens of each prompt, a workload for each value (default: 2048 100-14000)",
    )
    found.add_argument(
        "--max-tokens", type=_several, default=64, help="tokens to draw for each (default: %(default)s)"
    )
    found.add_argument("--rounds", type=count, default=2, help="the best counts (default: %(default)s)")
    found.add_argument(
        "--memory", type=float, default=0.8, help="share of the GPU's memory (default: %(default)s)"
    )
    found.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for each choice (default: %(default)s)"
    )
    found.add_argument(
        "--json", type=Path, help="write the figures here, and beside it what a choice that fails has printed"
    )
    return found


def add_choices(to: argparse.ArgumentParser, default: Sequence[str], about: str) -> None:
    """Add `--choices`, with a sentence on the names."""
    with_settings = "with what ATTNPLUG_BACKEND and ATTNPLUG_OPTIONS shall be"
    to.add_argument(
        "--choices",
        nargs="+",
        default=default,
        metavar="NAME[=BACKEND][:OPTIONS]",
        help=f"{about}, {with_settings} (default: {' '.join(default)})",
    )


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file; give the path of a config.json")
    return path


def count(text: str) -> int:
    """A positive integer in a text.

    Raises:
        argparse.ArgumentTypeError: another text.
    """
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {1 << 20}")
    return int(text)


def lengths(text: str) -> tuple[int, int]:
    """The least and the most tokens in a text such as "2048" or "100-14000".

    Raises:
        argparse.ArgumentTypeError: no such text, or numbers that prompts cannot have.
    """
    if not re.fullmatch(r"\d+(-\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text}: give a number of tokens, or the least and the most as in 100-14000"
        )
    numbers = [count(number) for number in text.split("-")]
    pair = numbers[0], numbers[-1]
    if pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(f"{text}: the least is above the most")
    if not BLOCK <= pair[0] <= pair[1] <= 1 << FLAG:
        raise argparse.ArgumentTypeError(f"{text}: prompts need {BLOCK} to {1 << FLAG} tokens")
    return pair


def _several(text: str) -> int:
    if count(text) < 2:
        raise argparse.ArgumentTypeError(
            "1 token is prefill alone; at least 2 are needed to measure decoding"
        )
    return int(text)


def workloads(requests: int, prompts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """The prompts' lengths for each pair of least and most tokens: all equal, or evenly on a logarithmic scale."""
    found = {}
    for least, most in prompts:
        draw = random.Random(3)  # noqa: S311
        spread = math.log(most / least)
        name = f"{requests} x {least}" if least == most else f"{requests} x {least} to {most}"
        found[name] = [max(least, int(least * math.exp(draw.random() * spread))) for _ in range(requests)]
    return found


def compare(
    engine: str, options: argparse.Namespace, *, run_file: Path, names: Iterable[str], missing: str | None
) -> int:
    """Run all choices and show their table; 2 where nothing can run or no choice did, 1 where a choice failed.

    Args:
        engine: its package, one of `PACKAGES`.
        options: of `parser`, with `choices`.
        run_file: the script that runs one choice.
        names: of the options that the script reads, beside `model` and `workloads`.
        missing: a sentence that says what this machine lacks, or None.
    """
    if missing:
        print(f"{engine}_demo: {missing}", file=sys.stderr)
        return 2
    settings = {
        "model": str(options.model),
        "workloads": workloads(options.requests, options.prompts),
        **{name: getattr(options, name) for name in names},
    }
    results: dict[str, dict[str, Any]] = {}
    written = threading.Lock()

    def keep(choice: str, result: dict[str, Any]) -> None:
        with written:
            results[choice] = result
            if options.json:
                # After each workload, so that an interrupted run keeps what it has.
                text = json.dumps(report(engine, settings, results), indent=2) + "\n"
                options.json.with_suffix(".part").write_text(text)
                options.json.with_suffix(".part").replace(options.json)

    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    # A time limit or a closed terminal ends the script by these signals, and what it has started must end too.
    before = {each: signal.signal(each, _end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        _run_all(run_file, settings, options, keep)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    show(Console(), results)
    failed = ["error" in result for result in results.values()]
    return 2 if all(failed) else int(any(failed))


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _run_all(
    run_file: Path,
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    keep: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run the choices one after another; with `at_once` they start together and only measure in turn."""
    choices = list(dict.fromkeys(options.choices))
    at_once = getattr(options, "at_once", False)
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as turns, ThreadPoolExecutor(len(choices) if at_once else 1) as pool:

        def one(turn: int, choice: str) -> None:
            print(f"running {choice} ...", flush=True)
            name = re.sub(r"[^\w.]+", "-", choice)
            log = options.json and options.json.with_name(f"{options.json.stem}-{name}.log")
            place = turns, turn, len(choices)
            given = {**settings, "turns": place} if at_once else settings
            keeps, waits = functools.partial(keep, choice), functools.partial(is_waiting, *place)
            try:
                keeps(run(run_file, choice, given, options.timeout, keeps, stop=stop, waits=waits, log=log))
            finally:
                (Path(turns) / f"{turn}.{ENDED}").touch()

        try:
            for ended in [pool.submit(one, *each) for each in enumerate(choices)]:
                ended.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def show(console: Console, results: Mapping[str, Mapping[str, Any]]) -> None:
    """One table of all choices, and what attnplug chose for which layers."""
    table = Table("attention", "requests", title="tokens per second")
    phases = ("prefill", "first_prefill", "decode", "first_decode")
    for phase in phases:
        table.add_column(phase.replace("_", "\n"), justify="right")
    table.add_column("requests with\nright tokens", justify="right")
    for choice, result in results.items():
        for name, figures in result.get("workloads", {}).items():
            cells = [f"{figures[f'{phase}_tokens_per_s']:,.0f}" for phase in phases]
            table.add_row(choice, name, *cells, f"{figures['right']:.0%}")
    console.print(table)
    for choice, result in results.items():
        if "error" in result:
            ended = "did not end" if result.get("workloads") else "did not run"
            console.print(f"{choice} {ended}: {result['error']}", markup=False, soft_wrap=True)
        for group in result.get("layers", []):
            for line in explained(group):
                console.print(line, markup=False, soft_wrap=True)


def explained(group: Mapping[str, Any]) -> list[str]:
    """The choice of attnplug for a group of layers, and its reason."""
    first, *_, last = [group["layers"][0], group["layers"][-1]]
    named = first if len(group["layers"]) == 1 else f"{len(group['layers'])} layers ({first} to {last})"
    pages = f", pages of {group['block_size']} tokens" if group["block_size"] else ""
    lines = [f"{named}, {group['kinds']}{pages}: {group['backend']}"]
    lines += [f"  {reason}" for reason in group["why"]]
    order = ", ".join(f"{name} {priority}" for name, priority in group["accepted"])
    lines.append(f"  accepted, with priorities: {order}")
    lines += [f"  {name} refused: {reasons}" for name, reasons in group["refused"]]
    return lines


def report(
    engine: str, settings: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The figures as JSON."""
    import torch

    found = {name: _version(name) for name in PACKAGES[engine]}
    return {
        "benchmark": engine,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: version for name, version in found.items() if version},
        "settings": {**settings, "model": Path(settings["model"]).name},
        "choices": dict(results),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
