"""The regret of priorities and of tables over several models: a summary, and a plot.

    attnplug tune CONFIG --workload 'decode 12 x 6k, ...' --regret --json > model.regret.json   # for each model
    python benchmarks/regret.py *.regret.json --plot regret.svg

Exits with 1 if a policy misses the goals given by `--goal POLICY=MEAN,P95,WORST`, in percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """The cells of all files, each with the name of its file."""
    cells = []
    for path in paths:
        data = json.loads(path.read_text())
        if (data.get("schema"), data.get("version")) != ("attnplug.regret", 1):
            raise SystemExit(f"{path} is not of attnplug tune --regret --json")
        cells += [{**cell, "model": path.name.partition(".")[0]} for cell in data["cells"]]
    return cells


def summary(cells: list[dict[str, Any]], policy: str) -> dict[str, float]:
    """Mean, 95th percentile and worst regret of a policy, and the most that it is slower than the priorities."""
    of = [cell for cell in cells if policy in cell["regret"]]
    values = sorted(cell["regret"][policy] for cell in of)
    against = (
        cell["us"][cell["chosen"][policy]] / cell["us"][cell["chosen"]["priorities"]] - 1 for cell in of
    )
    return {
        "cells": len(values),
        "mean": statistics.fmean(values),
        "p95": values[-(-95 * len(values) // 100) - 1],
        "worst": values[-1],
        "over_default": max(against),
    }


def plot(cells: list[dict[str, Any]], policies: list[str], path: Path) -> None:
    """The share of cells, sorted by regret: a line for each policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    worst = 100 * max(regret for cell in cells for regret in cell["regret"].values())
    right = max(1.0, 1.05 * worst)
    for policy in policies:
        values = sorted(100 * cell["regret"][policy] for cell in cells if policy in cell["regret"])
        shares = [100 * (number + 1) / len(values) for number in range(len(values))]
        axis.step([0, *values, right], [0, *shares, 100], where="post", label=policy)
    axis.set_xlabel("slower than the best backend of the cell, %")
    axis.set_ylabel("share of cells, %")
    axis.set_xlim(0, right)
    axis.set_ylim(0, 101)
    axis.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, help="write the distribution here")
    parser.add_argument("--goal", action="append", default=[], help="POLICY=MEAN,P95,WORST in percent")
    options = parser.parse_args()
    cells = read(options.files)
    policies = list(dict.fromkeys(policy for cell in cells for policy in cell["regret"]))
    found = {policy: summary(cells, policy) for policy in policies}
    print(f"{'policy':32}{'cells':>6}{'mean':>8}{'p95':>8}{'worst':>8}{'against priorities':>20}")
    for policy, each in found.items():
        shares = "".join(f"{100 * each[name]:7.1f}%" for name in ("mean", "p95", "worst"))
        print(f"{policy:32}{each['cells']:6}{shares}{100 * each['over_default']:+19.1f}%")
    missed = 0
    for goal in options.goal:
        policy, _, limits = goal.partition("=")
        for name, limit in zip(("mean", "p95", "worst"), map(float, limits.split(",")), strict=True):
            if 100 * found[policy][name] > limit:
                print(f"MISSED: {name} of {policy} is {100 * found[policy][name]:.1f} %, above {limit:g} %")
                missed = 1
    if options.plot:
        plot(cells, policies, options.plot)
    return missed


if __name__ == "__main__":
    sys.exit(main())
