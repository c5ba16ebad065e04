"""The list of tests that were measured as slow names tests that exist, and a share of the tests is each in one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from slow_kits import has_checks, share_of
from slow_tests import LIST, slow_tests

ROOT = Path(__file__).parent.parent.parent
TESTS_HERE = 6


def test_each_line_names_a_test_that_exists() -> None:
    for line in LIST.read_text().split():
        path, *_, name = line.split("::")
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), line


def test_a_test_is_slow_by_its_slowest_case_or_by_its_fixtures() -> None:
    log = "1.20s call     tests/a.py::test_b[x y]\n0.20s call     tests/a.py::test_c\n2.00s setup    tests/a.py::T::test_d\n"
    assert slow_tests(log) == ["tests/a.py::T::test_d", "tests/a.py::test_b"]


def _collected(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", "-p", "no:cacheprovider"]
    return subprocess.run([*program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_shares_have_each_test_once_and_an_unknown_share_is_refused() -> None:
    collected = [
        _collected("-m", "", "--share", f"{share}/2", "tests/ci/test_slow_tests.py") for share in (1, 2)
    ]
    names = [line for run in collected for line in run.stdout.splitlines() if "::" in line]
    assert len(names) == len(set(names)) == TESTS_HERE
    refused = _collected("--share", "3/2", "tests/ci/test_slow_tests.py")
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "K/N is expected, with K from 1 to N" in refused.stderr + refused.stdout


@pytest.mark.parametrize("shares", [6, 32])
def test_a_check_of_a_kit_is_in_a_share_that_lists_the_kit(shares: int) -> None:
    kits = [f"tests/test_{name}.py::test_kit" for name in "abcdefgh"]
    listed = {
        kit: [number for number in range(shares) if has_checks(kit, number + 1, shares)] for kit in kits
    }
    assert {len(numbers) for numbers in listed.values()} == {shares if shares % 4 else shares // 4}
    for kit, numbers in listed.items():
        found = {share_of(f"{kit}[check-{number}]", shares, of_kit=True) for number in range(40 * shares)}
        assert found == set(numbers)


def test_a_test_of_the_list_is_left_out_of_a_plain_run() -> None:
    line = LIST.read_text().split()[0]
    path = line.partition("::")[0]
    assert line not in _collected(path).stdout
    assert line in _collected("-m", "slow", path).stdout
