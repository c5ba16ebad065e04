"""The time of `attnplug select` for each example model, with and without transformers importable.

Run as `python benchmarks/select_time.py [--device DEVICE] [--json FILE]`. Each figure is the median of child
processes: the wall time, and the CPU time of the child, which other programs on the machine affect less.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODELS = Path(__file__).parents[1] / "examples" / "models"
GOAL = 1.5

PROGRAM = "import sys; from attnplug.cli import main; main()"
WITHOUT = f"import sys; sys.modules['transformers'] = None\n{PROGRAM}"


def child_seconds(code: str, *arguments: str) -> tuple[float, float]:
    """Wall and CPU seconds of a child that runs the program."""
    before, began = os.times(), time.perf_counter()
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, spent


def medians(code: str, rounds: int, *arguments: str) -> dict[str, float]:
    every = [child_seconds(code, *arguments) for _ in range(rounds)]
    wall, spent = (statistics.median(each) for each in zip(*every, strict=True))
    return {"wall_s": round(wall, 3), "cpu_s": round(spent, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h100", help="as of attnplug select")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=3, help="child processes per figure")
    chosen = parser.parse_args()
    found = {}
    print(f"{'model':22}  with transformers     without it           goal {GOAL} s of wall time")
    for path in sorted(MODELS.glob("*.json")):
        asked = ("select", str(path), "--device", chosen.device)
        found[path.stem] = {
            "with": medians(PROGRAM, chosen.rounds, *asked),
            "without": medians(WITHOUT, chosen.rounds, *asked),
        }
        both = found[path.stem]["with"], found[path.stem]["without"]
        cells = (f"{each['wall_s']:6.2f} s ({each['cpu_s']:.2f} CPU)" for each in both)
        print(f"{path.stem:22}  {'  '.join(cells)}")
    if chosen.json:
        data = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
            "device": chosen.device,
            "rounds": chosen.rounds,
            "goal_wall_s": GOAL,
            "models": found,
        }
        chosen.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
