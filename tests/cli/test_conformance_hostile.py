"""A backend that hangs, crashes, hogs memory or prints while it is checked: each check fails with its cause."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from plugin_env import PLUGINS

from attnplug.testing import conformance_checks

# Each test waits for commands that run checks in worker processes.
pytestmark = pytest.mark.slow

KNOWN = "non_causal"
"""Of these layers the process leaves with exit code 7, and that is known."""
CAUSES = {
    "sinks": r"timed out after 8 s at .*impl.py:\d+, in hang_in_c",
    "direct": r"timed out after 8 s at .*impl.py:\d+",
    "alibi": r"the worker process crashed: Segmentation fault at .*impl.py:\d+, in crash",
    "v": r"the worker process crashed: Aborted: what\(\):  no such kernel at .*impl.py:\d+, in abort",
    "cap": r"out of memory: .*can't allocate memory",
    "chunk": r"wrote to stdout: 'acme: 4 blocks\\n'",
    "lse": r"wrote to stdout: 'acme: block 0\\n'",
    "window": r"raised KeyboardInterrupt",
}
"""What must be said of a check whose layer asks for one feature, by how that feature begins in an id."""


def layers_of_one_feature() -> dict[str, str]:
    """A check for each feature alone, by the feature; and two plain ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(PLUGINS / "attnplug-bad-kernels")
        from attnplug_bad_kernels import BadKernels

        checks = conformance_checks(BadKernels, device="cpu")
    ids = [check.id for check in checks if check.id.startswith("correct/mixed-")]
    plain = set(ids[0].split("-"))
    found = {"": ids[0]}
    for check in ids:
        more = set(check.split("-")) - plain
        if len(more) == 1:
            (word,) = more
            feature = next((each for each in (*CAUSES, KNOWN) if re.fullmatch(rf"{each}[\d.]*", word)), None)
            if feature is not None or re.fullmatch(r"d\d+", word):
                found.setdefault(feature or "another size", check)
    return found


class Run:
    """One run of the command: what it printed, its exit code, and the message of each failed check by id."""

    def __init__(self, done: subprocess.CompletedProcess[str], report: Path) -> None:
        self.out, self.code = done.stdout, done.returncode
        self.ids = [case.attrib["name"][len("test_conformance[") : -1] for case in _cases(report)]
        self.failures = {
            check: failure.attrib["message"] or ""
            for check, case in zip(self.ids, _cases(report), strict=True)
            if (failure := case.find("failure")) is not None
        }


def _cases(report: Path) -> list[ET.Element]:
    return list(ET.parse(report).getroot().iter("testcase"))


@pytest.fixture(scope="module")
def chosen() -> dict[str, str]:
    return layers_of_one_feature()


@pytest.fixture(scope="module")
def hostile(run_with_plugins, tmp_path_factory, chosen) -> Run:
    folder = tmp_path_factory.mktemp("hostile")
    report = folder / "report.xml"
    only = [part for check in chosen.values() for part in ("--only", check)]
    limits = ["--timeout", "8", "--memory", "3GiB", "--jobs", "2"]
    known = folder / "known.toml"
    known.write_text(f'[known_failures]\n"*-{KNOWN}*" = "no licence, acme#12"\n')
    files = ["--known-failures", known, "--junit", report]
    done = run_with_plugins(
        ["attnplug-bad-kernels"],
        ["-m", "attnplug", "conformance", "BAD_KERNELS", *limits, *only, *files],
        env={"XDG_CACHE_HOME": str(folder), "COLUMNS": "80"},
        timeout=500,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return Run(done, report)


@pytest.mark.parametrize("feature", CAUSES)
def test_a_check_that_goes_wrong_fails_with_its_cause(hostile, chosen, feature):
    check = chosen[feature]
    assert re.search(CAUSES[feature], hostile.failures[check])
    told = hostile.out.partition("\nfailed:\n")[2]
    assert re.search(rf"failed  {re.escape(check)}( \(.* s\))?\n        {CAUSES[feature]}", told)


def test_the_run_goes_on_and_every_other_check_passes(hostile, chosen):
    assert hostile.code == 1
    assert sorted(hostile.ids) == sorted(chosen.values())
    assert set(hostile.failures) == {chosen[feature] for feature in CAUSES}
    assert f"\n{len(CAUSES)} checks failed, 2 checks passed, 1 failed as known in " in hostile.out


def test_a_worker_that_dies_as_known_is_a_known_failure(hostile, chosen):
    assert chosen[KNOWN] in hostile.ids
    assert chosen[KNOWN] not in hostile.failures


def test_a_backend_whose_import_kills_the_process_is_named(run_with_plugins):
    done = run_with_plugins(["attnplug-bad-aborts"], ["-m", "attnplug", "conformance", "BAD_ABORTS"])
    assert done.returncode == 1
    assert done.stderr == "attnplug: listing the checks of BAD_ABORTS crashed: SIGABRT\n"


def test_a_worker_that_leaves_fails_with_its_exit_code(run_with_plugins, chosen, tmp_path):
    done = run_with_plugins(
        ["attnplug-bad-kernels"],
        ["-m", "attnplug", "conformance", "BAD_KERNELS", "--only", chosen[KNOWN]],
        env={"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "        the worker process crashed: it left with exit code 7\n" in done.stdout
