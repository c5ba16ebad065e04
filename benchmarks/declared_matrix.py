"""The time that the declared matrix of five backends on five devices takes in a fresh process, imports included.

Run as `python benchmarks/declared_matrix.py [--json FILE]`. Figures are medians of child processes, printed
with the goal and the ratio to it; the floor is bare Python.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

BACKENDS = ("TORCH", "TRITON", "FLASH_ATTN_2", "FLASH_ATTN_4", "FLASHINFER")
DEVICES = ("sm80", "sm89", "sm90", "sm100", "cpu")
GOAL = 1.5

DECLARED = f"""
import sys
from attnplug.matrix.design import declare
from attnplug.registry.default import get_registry
offers = {{offer.name: offer for offer in get_registry().plugins.offers}}
runs = [declare(offers[name], device) for name in {BACKENDS!r} for device in {DEVICES!r}]
assert "torch" not in sys.modules
print(sum(len(run.findings) for run in runs))
"""


def child_seconds(code: str) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return time.perf_counter() - began, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=9, help="child processes per figure")
    chosen = parser.parse_args()
    bare, declared = [], []
    cells = 0
    for _ in range(chosen.rounds):
        bare.append(child_seconds("pass")[0])
        seconds, printed = child_seconds(DECLARED)
        declared.append(seconds)
        cells = int(printed)
    found = statistics.median(declared)
    print(f"bare Python                       {statistics.median(bare):6.3f} s")
    print(f"declared matrix, {cells:6} cells    {found:6.3f} s   goal {GOAL} s   ratio {found / GOAL:.2f}")
    if chosen.json:
        data = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "attnplug": importlib.metadata.version("attnplug"),
            "backends": BACKENDS,
            "devices": DEVICES,
            "cells": cells,
            "seconds": {"bare Python": statistics.median(bare), "declared": found, "goal": GOAL},
        }
        chosen.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
