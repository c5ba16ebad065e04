"""Layers whose tokens several GPUs share, beside one GPU: outputs, capacity, times, and NCCL's own floor.

    python benchmarks/context_parallel.py --json benchmarks/results/context-parallel-h200x2.json
    python benchmarks/context_parallel.py --smoke            # two processes on the CPU, without times
    python benchmarks/context_parallel.py --goals FILE.json  # the goals of an earlier run

It starts a process for each of `--ranks`. Every cell is checked before it is timed: the outputs of the ranks are those
of one GPU. A row that fails or hangs costs only itself: its processes end, and others run the next rows. The JSON is
written after each row, and a run with the JSON of an earlier one keeps its rows. The exit code is 1 where a row failed,
an output is wrong, or a time misses its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sharded_cells import PARTS, goals, rows

_WORKER = Path(__file__).with_name("sharded_parts.py")
_POLL = 0.1
_DEAD_WITHOUT_ROW = 2
"""Ranks that end so many times in turn before any row begins are not started again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 where a row failed, an output is wrong or, with times, a limit is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, each with a GPU (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of a graph (default: %(default)s)")
    parser.add_argument("--interleave", type=int, default=1, help="tokens of a run (default: %(default)s)")
    parser.add_argument("--backend", help="of attnplug (default: the first that serves the layer)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=[*PARTS], help="parts, in order (default: all)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="only rows with this text in their name, such as 128k"
    )
    parser.add_argument(
        "--row-timeout", type=float, default=150.0, help="seconds for a row (default: %(default)g)"
    )
    parser.add_argument("--json", type=Path, help="keep the rows there, and write it after each row")
    parser.add_argument("--smoke", action="store_true", help="small cells on the CPU, without times")
    parser.add_argument("--goals", type=Path, metavar="FILE", help="print the goals of a report, and end")
    options = parser.parse_args(arguments)
    if options.goals:
        return say_goals(json.loads(options.goals.read_text()))
    report: dict[str, Any] = {"ranks": options.ranks, "interleave": options.interleave}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    report["date"] = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    report.setdefault("failed", [])
    wanted = rows(options.parts, options.only, smoke=options.smoke)
    for part, row in run_rows(wanted, options, report):
        record(report, part, row)
        print(", ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return say_goals(report) if not options.smoke else say_failed(report)


def say_goals(report: dict[str, Any]) -> int:
    """Print each goal; 1 if one is missed or a row failed."""
    found = goals(report)
    print(*found, sep="\n")
    missed = say_failed(report)
    return int(missed or any(goal.met is False for goal in found))


def say_failed(report: dict[str, Any]) -> int:
    """Print the rows that failed; 1 if there are any."""
    failed = report["failed"]
    print(f"failed: {'; '.join(failed)}" if failed else "all within their limits")
    return int(bool(failed))


def record(report: dict[str, Any], part: str, row: dict[str, Any]) -> None:
    """Put a row in the place of an earlier one of its name, or last."""
    kept = [each for each in report.get(part, ()) if each["name"] != row["name"]]
    report[part] = [*kept, row]
    title = f"{part}: {row['name']}"
    report["failed"] = [each for each in report["failed"] if each != title]
    report["failed"] += [title] if row.get("ok") is False else []


def shown(value: object) -> str:
    """A value for one line."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_rows(
    wanted: Sequence[tuple[str, str]], options: argparse.Namespace, report: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run rows on new ranks until all are done; one that does not end is a row with "failed" and the reason."""
    left, idle = list(wanted), 0
    while left:
        begun: tuple[str, str] | None = None
        why = ""
        with started_ranks(left, options) as ranks:
            for event in ranks.events(options.row_timeout):
                if event["event"] == "machine":
                    report |= event["facts"]
                elif event["event"] == "begin":
                    begun = event["part"], event["name"]
                elif event["event"] == "failed":
                    why = why or f"rank {event['rank']}: {event['why']}"
                elif event["event"] == "row":
                    left.remove((event["part"], event["row"]["name"]))
                    begun = None
                    yield event["part"], event["row"]
            why = why or ranks.why
        if begun is None:
            idle += 1
            if left and idle >= _DEAD_WITHOUT_ROW:
                for part, name in left:
                    yield part, {"name": name, "failed": why, "ok": False}
                return
            continue
        idle = 0
        left.remove(begun)
        yield begun[0], {"name": begun[1], "failed": why, "ok": False}


class Ranks:
    """The processes of one group."""

    def __init__(self, left: Sequence[tuple[str, str]], options: argparse.Namespace, folder: Path) -> None:
        self._events, self.why = folder / "events", ""
        self._events.touch()
        task = {
            "rows": left,
            "events": str(self._events),
            "smoke": options.smoke,
            "layers": options.layers,
            "interleave": options.interleave,
            "backend": options.backend,
            # Exchanges wait longer than a row may take, so that the reason is the row's.
            "seconds": options.row_timeout + 60,
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # NVLink multicast is shared by all tenants of a host.
        common |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(_WORKER), json.dumps(task)],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(options.ranks)
        ]

    def events(self, seconds: float) -> Iterator[dict[str, Any]]:
        """The events of all ranks, until all or one of them end, or none tells anything for `seconds`."""
        last, part = time.monotonic(), ""
        with self._events.open(encoding="utf-8") as file:
            while True:
                # Asked before reading, so that the events of ranks that have ended are all read.
                codes = [process.poll() for process in self._processes]
                part += file.read()
                *lines, part = part.split("\n")
                for line in lines:
                    last = time.monotonic()
                    yield json.loads(line)
                bad = [(rank, code) for rank, code in enumerate(codes) if code]
                if bad:
                    self.why = "rank {} ended with code {}".format(*bad[0])
                    return
                if all(code == 0 for code in codes):
                    return
                if time.monotonic() - last > seconds:
                    self.why = f"took longer than {seconds:g} s"
                    return
                time.sleep(_POLL)

    def end(self) -> None:
        """End all processes that still run."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def started_ranks(left: Sequence[tuple[str, str]], options: argparse.Namespace) -> Iterator[Ranks]:
    """New ranks that run the rows `left`; none runs after the block."""
    with tempfile.TemporaryDirectory(prefix="attnplug-ranks-") as folder:
        ranks = Ranks(left, options, Path(folder))
        try:
            yield ranks
        finally:
            ranks.end()


if __name__ == "__main__":
    sys.exit(main())
