"""vLLM with its own attention and with attnplug's, on one model with made-up weights: one table of their speeds.

python examples/engines/vllm_demo.py

It needs vLLM and an NVIDIA GPU. Each choice runs in a process of its own, one after another; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import importlib.util
import json
import math
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_lookup import BLOCK, FLAG
from vllm_run import MARK

MODELS = Path(__file__).parents[1] / "models"
CHOICES = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "ATTNPLUG")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 2 where it cannot run or no choice did, 1 where a choice failed."""
    options = _parser().parse_args(arguments)
    console = Console()
    problem = missing()
    if problem:
        print(f"vllm_demo: {problem}", file=sys.stderr)
        return 2
    settings = {
        "model": str(options.model),
        "layers": options.layers,
        "dense": options.dense,
        "workloads": workloads(options.requests, options.prompts),
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "memory": options.memory,
        "eager": options.eager,
    }
    results = {}
    for choice in dict.fromkeys(options.choices):
        console.print(f"running {choice} ...", markup=False)
        results[choice] = run(choice, settings, options.timeout)
        if options.json:
            # After each choice, so that an interrupted run keeps what it has.
            options.json.write_text(json.dumps(report(settings, results), indent=2) + "\n")
    show(console, results)
    failed = ["error" in result for result in results.values()]
    return 2 if all(failed) else int(any(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = MODELS / "qwen3-8b.json"
    parser.add_argument("--model", type=_file, default=model, help="a config.json (default: %(default)s)")
    parser.add_argument("--layers", type=_count, help="so many layers; by default those of the model")
    parser.add_argument("--dense", action="store_true", help="gpt-oss with a dense block for its experts")
    parser.add_argument(
        "--requests", type=_count, default=64, help="requests of a workload (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts",
        type=lengths,
        nargs="+",
        default=[(2048, 2048), (100, 14_000)],
        metavar="N|MIN-MAX",
        help="tokens of each prompt, a workload for each value (default: 2048 100-14000)",
    )
    parser.add_argument(
        "--max-tokens", type=_several, default=64, help="tokens to draw for each (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=_count, default=2, help="the best counts (default: %(default)s)")
    parser.add_argument(
        "--choices",
        nargs="+",
        default=CHOICES,
        metavar="NAME[=BACKEND][:OPTIONS]",
        help="attention backends of vLLM, with what ATTNPLUG_BACKEND and ATTNPLUG_OPTIONS shall be (default: all four)",
    )
    parser.add_argument(
        "--memory", type=float, default=0.8, help="share of the GPU's memory (default: %(default)s)"
    )
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for each choice (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file; give the path of a config.json")
    return path


def _count(text: str) -> int:
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
    numbers = [_count(number) for number in text.split("-")]
    pair = numbers[0], numbers[-1]
    if pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(f"{text}: the least is above the most")
    if not BLOCK <= pair[0] <= pair[1] <= 1 << FLAG:
        raise argparse.ArgumentTypeError(f"{text}: prompts need {BLOCK} to {1 << FLAG} tokens")
    return pair


def _several(text: str) -> int:
    if _count(text) < 2:
        raise argparse.ArgumentTypeError(
            "1 token is prefill alone; at least 2 are needed to measure decoding"
        )
    return int(text)


def missing() -> str | None:
    """A sentence that says what this machine lacks; None if the demo can run."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed; pip install vllm, on a machine with an NVIDIA GPU"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU here, and vLLM's own backends need one"
    return None


def workloads(requests: int, prompts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """The prompts' lengths for each pair of least and most tokens: all equal, or evenly on a logarithmic scale."""
    found = {}
    for least, most in prompts:
        draw = random.Random(3)  # noqa: S311
        spread = math.log(most / least)
        name = f"{requests} x {least}" if least == most else f"{requests} x {least} to {most}"
        found[name] = [max(least, int(least * math.exp(draw.random() * spread))) for _ in range(requests)]
    return found


def run(choice: str, settings: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The result of one choice, or its `error`."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_run.py")), choice]
    try:
        done = subprocess.run(  # noqa: S603  (our own interpreter on our own script)
            command, input=json.dumps(settings), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = [line for line in (late.stderr or b"").decode(errors="replace").splitlines() if line.strip()]
        return {"error": f"took more than {timeout:.0f} s; its last line is: {said[-1] if said else '-'}"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    return {"error": _last_error(done.stderr) or f"ended with exit code {done.returncode}"}


def _last_error(printed: str) -> str:
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
    ran = {choice: result for choice, result in results.items() if "error" not in result}
    names = list(next(iter(ran.values()))["workloads"]) if ran else []
    table = Table(title="tokens per second")
    table.add_column("attention")
    for name in names:
        for phase in ("prefill", "decode"):
            table.add_column(f"{name}\n{phase}", justify="right")
    table.add_column("requests with\nright tokens", justify="right")
    for choice, result in ran.items():
        cells = [
            f"{result['workloads'][name][f'{phase}_tokens_per_s']:,.0f}"
            for name in names
            for phase in ("prefill", "decode")
        ]
        table.add_row(choice, *cells, f"{right(result):.0%}")
    console.print(table)
    for choice, result in results.items():
        if "error" in result:
            console.print(f"{choice} did not run: {result['error']}", markup=False)
        for group in result.get("layers", []):
            for line in explained(group):
                console.print(line, markup=False)


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


def right(result: Mapping[str, Any]) -> float:
    """The share of requests with exactly the tokens that follow their prompts; each workload has as many."""
    return statistics.fmean(figures["right"] for figures in result["workloads"].values())


def report(settings: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures as JSON."""
    import torch

    packages = ("attnplug", "vllm", "torch", "transformers", "flashinfer-python")
    found = {name: _version(name) for name in packages}
    return {
        "benchmark": "vllm",
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


if __name__ == "__main__":
    sys.exit(main())
