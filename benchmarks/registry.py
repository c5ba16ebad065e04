"""The times of importing, discovering and selecting, compared with the floor that Python itself sets.

Run as `python benchmarks/registry.py [--json FILE]`. Every figure is a median of runs in one process
(imports: of child processes, interleaved with bare Python), printed with its goal and the ratio to it.
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PLUGIN = """
import pluggy
from attnplug.core.backend import AttentionBackend
ATTNPLUG_API = (1, 1)
hookimpl = pluggy.HookimplMarker("attnplug")
class Backend(AttentionBackend):
    device_types = ("cpu", "cuda")
    get_name = staticmethod(lambda: "BENCH_{0}")
    get_impl_cls = classmethod(lambda cls: None)
    get_builder_cls = classmethod(lambda cls: None)
@hookimpl
def attnplug_backends():
    return (Backend,)
"""


def child_seconds(code: str, path: Path | None = None) -> float:
    arguments = [sys.executable, "-c", code]
    began = time.perf_counter()
    subprocess.run(arguments, check=True, env=None if path is None else environment(path))
    return time.perf_counter() - began


def environment(path: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(path)}


def imports(rounds: int) -> float:
    """Milliseconds that `import attnplug, attnplug.core, attnplug.registry` adds to bare Python."""
    bare, ours = [], []
    for _ in range(rounds):
        bare.append(child_seconds("pass"))
        ours.append(child_seconds("import attnplug, attnplug.core, attnplug.registry"))
    return (statistics.median(ours) - statistics.median(bare)) * 1e3


def make_distributions(folder: Path, count: int) -> None:
    for index in range(count):
        (folder / f"bench_plugin_{index}.py").write_text(PLUGIN.format(index))
        info = folder / f"bench_plugin_{index}-1.0.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: bench-plugin-{index}\nVersion: 1.0\n"
        )
        info.joinpath("entry_points.txt").write_text(
            f"[attnplug.backends]\np{index} = bench_plugin_{index}\n"
        )


DISCOVERY = """
import importlib, statistics, sys, time
from attnplug.registry.plugins.discovery import Host, installed_plugins
import importlib.metadata
def median(call, rounds=9):
    times = []
    for _ in range(rounds):
        importlib.invalidate_caches()
        began = time.perf_counter(); call(); times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3
found = installed_plugins()
began = time.perf_counter()
for item in found:
    importlib.import_module(item.entry_point.module)
imported = (time.perf_counter() - began) * 1e3
assert len(found) > 100, len(found)
floor = median(lambda: importlib.metadata.entry_points(group="attnplug.backends"))
find = median(installed_plugins)
def admit():
    host = Host()
    loaded = [host.load(item) for item in found]
    assert all(item.offers for item in loaded), [item.record for item in loaded if not item.offers]
admitted = median(admit)
print(floor, find, admitted, imported)
"""


def discovery(count: int) -> tuple[float, ...]:
    """Milliseconds of entry_points() alone, of finding, of admitting and of importing `count` plugins."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_distributions(folder, count)
        command = [sys.executable, "-c", DISCOVERY]
        done = subprocess.run(command, check=True, env=environment(folder), stdout=subprocess.PIPE, text=True)
    return tuple(map(float, done.stdout.split()))


def per_call(call: Callable[[], object], count: int = 20_000, rounds: int = 7) -> float:
    """Microseconds of one call: the median over rounds of the mean of `count` calls."""
    means = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(count):
            call()
        means.append((time.perf_counter() - began) / count)
    return statistics.median(means) * 1e6


def selections() -> dict[str, float]:
    import attnplug
    from attnplug.core.spec import Phase
    from attnplug.registry.selection.decision import Placement
    from attnplug.registry.selection.gates import examine

    spec = attnplug.LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=4096)
    equal = attnplug.LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=4096)
    device = attnplug.Device("cpu")
    registry = attnplug.Registry()
    registry.select(spec, device)
    offer = registry.plugins.offers[0]
    return {
        "select, same spec object": per_call(lambda: registry.select(spec, device)),
        "select, equal spec": per_call(lambda: registry.select(equal, device)),
        "gates 1 to 3, one candidate": per_call(lambda: examine(offer, Placement(spec, device), None), 500),
        "gates 1 to 3, one phase": per_call(
            lambda: examine(offer, Placement(spec, device, Phase.DECODE), None), 500
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=15, help="child processes per import figure")
    chosen = parser.parse_args()
    floor, find, admitted, imported = discovery(100)
    listing = f"{sys.executable} -m attnplug list"
    figures: dict[str, tuple[float, float | None, str]] = {
        "import over bare Python": (imports(chosen.rounds), 30, "ms"),
        "entry_points() of 100 distributions, the floor": (floor, None, "ms"),
        "discovery of 100 distributions": (find + admitted, 20, "ms"),
        "their own modules' imports, besides": (imported, None, "ms"),
    }
    goals = (2, 6, 200, 200)
    for (name, value), goal in zip(selections().items(), goals, strict=True):
        figures[name] = (value, goal, "us")
    runs = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(listing.split(), check=True, capture_output=True)
        runs.append(time.perf_counter() - began)
    figures["attnplug list"] = (statistics.median(runs) * 1e3, 500, "ms")
    print(f"{'':48} {'measured':>12} {'goal':>9} {'ratio':>6}")
    for name, (value, goal, unit) in figures.items():
        limit = "" if goal is None else f"{goal:g} {unit}"
        ratio = "" if goal is None else f"{value / goal:.2f}"
        print(f"{name:48} {value:9.2f} {unit} {limit:>9} {ratio:>6}")
    if chosen.json:
        data = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "attnplug": importlib.metadata.version("attnplug"),
            "figures": {name: {"value": v, "goal": g, "unit": u} for name, (v, g, u) in figures.items()},
        }
        chosen.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
