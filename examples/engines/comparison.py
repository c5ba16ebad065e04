"""Choices of an engine's attention, one process after another: options, one table of their speeds, and JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import importlib.metadata
import json
import math
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from choice_run import MARK, SAID
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
    found.add_argument("--dense", action="store_true", help="gpt-oss with a dense block for its experts")
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
    found.add_argument("--json", type=Path, help="write the figures here")
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

    def keep(choice: str, result: dict[str, Any]) -> None:
        results[choice] = result
        if options.json:
            # After each workload, so that an interrupted run keeps what it has.
            text = json.dumps(report(engine, settings, results), indent=2) + "\n"
            options.json.with_suffix(".part").write_text(text)
            options.json.with_suffix(".part").replace(options.json)

    # A time limit ends the script by this signal, and what it has started must end too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for choice in dict.fromkeys(options.choices):
            print(f"running {choice} ...", flush=True)
            keep(choice, run(run_file, choice, settings, options.timeout, functools.partial(keep, choice)))
    finally:
        signal.signal(signal.SIGTERM, before)
    show(Console(), results)
    failed = ["error" in result for result in results.values()]
    return 2 if all(failed) else int(any(failed))


def run(
    file: Path,
    choice: str,
    settings: Mapping[str, Any],
    timeout: float,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """The result of one choice; with an `error` beside the figures so far where it did not end.

    Args:
        file: the script that runs it, in a session of its own: what it starts ends with it.
        choice: the script's word.
        settings: for its standard input.
        timeout: seconds.
        keep: gets the figures so far, whenever there are more.
    """
    begin = time.monotonic()
    pipe = subprocess.PIPE
    child = subprocess.Popen(  # noqa: S603  (our own interpreter on our own script)
        [sys.executable, str(file), choice],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    printed = _Printed(child, choice, keep)
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin as given:  # type: ignore[union-attr]
            given.write(json.dumps(settings))
        while child.poll() is None and time.monotonic() < begin + timeout:
            printed.take(0.2)
        is_late = child.poll() is None
    finally:
        # vLLM and SGLang have processes of their own, which may outlive a script that ends by an error.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    printed.take_rest()
    found, errors = printed.result, printed.errors
    if "layers" in found:
        return found
    if is_late:
        said = [line.strip() for line in errors if line.strip()]
        why = f"took more than {timeout:.0f} s; its last line is: {said[-1] if said else '-'}"
    else:
        why = last_error("".join(errors)) or f"ended with exit code {child.returncode}"
    return {**found, "error": why}


class _Printed:
    """What a child prints: figures, progress, and all else of standard error."""

    def __init__(
        self, child: subprocess.Popen[str], choice: str, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        self.result: dict[str, Any] = {}
        self.errors: list[str] = []
        self._choice, self._keep = choice, keep
        self._lines: queue.Queue[str] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=given, daemon=True)
            for given in ((child.stdout, False), (child.stderr, True))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: IO[str], is_error: bool) -> None:
        with stream:
            for line in stream:
                if is_error or line.startswith(MARK):
                    self._lines.put(line)

    def take(self, seconds: float) -> bool:
        """Read one line; False if none comes within `seconds`."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return False
        if line.startswith(MARK):
            self.result = json.loads(line.removeprefix(MARK))
            if "layers" not in self.result:
                self._keep(self.result)
            return True
        self.errors.append(line)
        if line.startswith(SAID):
            print(f"  {self._choice}: {line.removeprefix(SAID).rstrip()}", flush=True)
        return True

    def take_rest(self) -> None:
        """Read what is left; the child has ended."""
        for thread in self._threads:
            thread.join(10.0)
        while not self._lines.empty():
            self.take(0.0)


def last_error(printed: str) -> str:
    """The message of the last exception in a log, which may have several lines; else the last line."""
    # torch names the rank before each line of an exception.
    lines = [re.sub(r"^\[rank\d+\]:", "", line).strip() for line in printed.splitlines()]
    # It warns at the end about what nobody has closed.
    lines = [line for line in lines if line and not re.match(r"\[W\d+", line)]
    for row, line in reversed([*enumerate(lines)]):
        if named := re.search(r"\b\w*(?:Error|Exception): .*", line):
            return " ".join([named[0], *lines[row + 1 : row + 12]])
    return "".join(lines[-1:])


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
