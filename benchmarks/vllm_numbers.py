"""vLLM's own numeric tests over attnplug's backends, on this machine's GPU or CPU: what became of each case.

python benchmarks/vllm_numbers.py --source vllm-0.33.0 --backends TRITON FLASH_ATTN_4 --json numbers.json

`--source` is an unpacked sdist of vLLM, whose tests run unchanged; compiled parts of vLLM are not needed. To vLLM's
cases come its batches by tensor-parallel size, dtype and cache layout, by the same comparison. Backends run side by
side. A case that a backend refuses to serve is counted as such, with the reason.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from installed import versions

ROOT = Path(__file__).parents[1]
HARNESS = ROOT / "tests" / "engines"
FILES = ("tests/v1/attention/test_attention_backends.py", str(HARNESS / "cases_for_vllm.py"))
SELECTED = "(causal or sliding or layout or test_sinks) and not flashinfer and not rocm"
"""The cases with a list of backends; others of vLLM's file are about one backend of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; 1 where a case failed or a run did not end."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.source.is_dir():
        parser.error(f"--source {options.source} must be a folder with vLLM's source tree: unpack its sdist")
    jobs = options.jobs or max(1, (os.cpu_count() or 1) // len(options.backends))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        try:
            for name in options.backends:
                runs[name] = start(name, options, jobs, Path(folder))
            ended = {
                name: wait(process, begin + options.timeout - time.perf_counter())
                for name, process in runs.items()
            }
        finally:
            for process in runs.values():
                end(process)
        found = {name: result(Path(folder), name, code) for name, code in ended.items()}
    for name, figures in found.items():
        print("\n".join(lines(name, figures, options.verbose)))
    if options.json:
        options.json.write_text(json.dumps(report(options, found), indent=1) + "\n")
    return int(any(each["failed"] or not each["ended"] for each in found.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="an unpacked sdist of vLLM")
    parser.add_argument(
        "--backends", nargs="+", required=True, help="names of `attnplug list`, or AUTO for ATTNPLUG"
    )
    parser.add_argument("--select", default=SELECTED, help="pytest's -k (default: %(default)s)")
    parser.add_argument("--few", action="store_true", help="few of the batches by layout, as CI has them")
    parser.add_argument("--jobs", type=int, help="processes for each backend (default: the CPUs, shared)")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds for all (default: %(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="print each case, not only what failed")
    parser.add_argument("--json", type=Path, help="write the cases here")
    return parser


def start(name: str, options: argparse.Namespace, jobs: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start pytest for one backend; it writes a line of JSON for each case as soon as it is known."""
    backend = "ATTNPLUG" if name == "AUTO" else f"ATTNPLUG_{name}"
    own = [str(options.source.resolve()), str(ROOT), str(HARNESS)]
    environment = {
        # The run takes none of those of a pytest around this.
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ATTNPLUG_HARNESS": backend,
        "ATTNPLUG_HARNESS_REFUSED": "skip",
        "ATTNPLUG_HARNESS_GRID": "" if options.few else "all",
        "ATTNPLUG_HARNESS_LOG": str(folder / f"{name}.jsonl"),
        "OMP_NUM_THREADS": "1",
    }
    # Without vLLM's conftest, which imports all of vLLM.
    plain = [
        "-q",
        "-p",
        "vllm_harness",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--noconftest",
        "-o",
        "addopts=",
    ]
    spread = ["-n", str(jobs)] if jobs > 1 else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        *plain,
        *spread,
        f"--rootdir={options.source.resolve()}",
        "--tb=short",
    ]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "-k", options.select, *FILES],
            cwd=options.source,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code, or None if the run took longer and was ended with all its processes."""
    try:
        return process.wait(max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        end(process)
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run with all its processes; nothing is done if it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def result(folder: Path, name: str, code: int | None) -> dict[str, Any]:
    """The cases of one backend: how many passed, failed and were refused, and each by itself."""
    file = folder / f"{name}.jsonl"
    read = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    cases = {each.pop("case"): each for each in read}
    for each in cases.values():
        if each["outcome"] == "skipped":
            refused = "refused: " in each["why"]
            each["outcome"] = "refused" if refused else "skipped"
            each["why"] = each["why"].partition("refused: ")[2] if refused else each["why"]
        elif each["outcome"] == "passed":
            del each["why"]
    counts = collections.Counter(each["outcome"] for each in cases.values())
    made = {kind: counts[kind] for kind in ("passed", "failed", "refused", "skipped")}
    # pytest's code is 1 where tests failed.
    ended = code in (0, 1) and bool(cases)
    tail = [] if ended else (folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:]
    return {**made, "ended": ended, "log": tail, "cases": cases}


def lines(name: str, figures: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    """The printed lines of one backend."""
    counts = ", ".join(f"{figures[kind]} {kind}" for kind in ("passed", "failed", "refused", "skipped"))
    yield f"{name}: {counts}{'' if figures['ended'] else '; the run did not end'}"
    for case, each in figures["cases"].items():
        if verbose or each["outcome"] == "failed":
            why = f": {' '.join(each['why'].split())[:300]}" if "why" in each else ""
            yield f"  {each['outcome']} {case}{why}"
    reasons = collections.Counter(
        each["why"] for each in figures["cases"].values() if each["outcome"] in ("refused", "skipped")
    )
    yield from (f"  {count} times: {' '.join(why.split())[:300]}" for why, count in reasons.most_common())
    yield from (f"  | {line}" for line in figures["log"])


def report(options: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures as JSON."""
    packages = ("torch", "triton", "transformers", "flashinfer-python", "flash-attn-4")
    return {
        "benchmark": "vllm-numbers",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(*packages),
        "settings": {"source": options.source.resolve().name, "select": options.select, "few": options.few},
        "backends": found,
    }


if __name__ == "__main__":
    # The runs are sessions of their own, so they would outlive a process that is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
