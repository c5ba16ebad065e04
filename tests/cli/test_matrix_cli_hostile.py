"""A backend that hangs, crashes or hogs memory while its cells are run: each ends alone, with the cause."""

from __future__ import annotations

import re

import pytest

from attnplug.matrix.model import Status
from attnplug.matrix.results import read_matrix

# It waits for two timeouts. test_conformance_hostile.py has the same causes, and
# tests/matrix/test_matrix_verify.py the status that each cause gives a cell.
pytestmark = pytest.mark.slow

REFUTED, NOT_RUN = Status.REFUTED, Status.NOT_RUN
ENDS = {
    "plain": (Status.VERIFIED, ""),
    "sliding_window": (REFUTED, r"raised KeyboardInterrupt"),
    "chunked_local": (REFUTED, r"wrote to stdout: 'acme: 4 blocks\\n'"),
    "alibi": (REFUTED, r"the worker process crashed: Segmentation fault at .*impl.py:\d+, in crash"),
    "head_size_v": (
        REFUTED,
        r"the worker process crashed: Aborted: what\(\):  no such kernel at .*impl.py:\d+",
    ),
    "non_causal": (REFUTED, r"the worker process crashed: it left with exit code 7"),
    "soft_cap": (NOT_RUN, r"out of memory: .*can't allocate memory"),
    "sinks": (NOT_RUN, r"timed out after 6 s at .*impl.py:\d+, in hang_in_c"),
    "direct_kv": (NOT_RUN, r"timed out after 6 s at .*impl.py:\d+"),
}
"""What becomes of the one cell of each feature, and why."""


@pytest.fixture(scope="module")
def verified(run_with_plugins, tmp_path_factory):
    """What came of a run: the command, and each finding by feature."""
    folder = tmp_path_factory.mktemp("hostile")
    cells = {each: "direct" if each == "direct_kv" else "b16/NHD" for each in ENDS}
    only = [
        part
        for feature, pages in cells.items()
        for part in ("--only", f"{feature}/mixed/d64/bfloat16/auto/{pages}")
    ]
    limits = ["--timeout", "6", "--memory", "3GiB", "--jobs", "1"]
    command = ["-m", "attnplug", "matrix", "--backend", "BAD_KERNELS", "--device", "cpu", "--verify"]
    done = run_with_plugins(
        ["attnplug-bad-kernels"],
        [*command, *limits, *only, "--json", folder / "matrix.json"],
        env={"XDG_CACHE_HOME": str(folder), "XDG_DATA_HOME": str(folder), "COLUMNS": "80"},
        timeout=500,
    )
    (run,) = read_matrix(folder / "matrix.json").runs
    return done, {finding.cell.feature: finding for finding in run.findings}


def test_what_crashes_is_refuted_and_what_takes_too_much_is_not_run_each_with_its_cause(verified):
    done, findings = verified
    assert done.returncode == 4, done.stdout + done.stderr
    assert {name: str(each.status) for name, each in findings.items()} == {
        name: str(status) for name, (status, _) in ENDS.items()
    }
    for name, (_, why) in ENDS.items():
        assert re.fullmatch(why and f"(?s){why}.*", "".join(findings[name].why)), name


def test_the_run_says_so(verified):
    done, _ = verified
    assert "\nBAD_KERNELS on cpu: 1 verified, 5 refuted, 3 not run in " in done.stdout
