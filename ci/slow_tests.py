"""Writes `tests/slow_tests.txt`, the tests that a plain run leaves out because they take half a second or more.

usage: : > tests/slow_tests.txt; pytest -q -n 2 --durations=0 > LOG; python ci/slow_tests.py LOG

A test with `@pytest.mark.slow` is slow by what it does. Those in the list were measured, each with all of its cases; the
list is empty while they are, as a plain run leaves out what is in it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LIMIT = 0.5  # seconds of a test's slowest case, or of its fixtures
LIST = Path(__file__).parent.parent / "tests" / "slow_tests.txt"


def slow_tests(log: str) -> list[str]:
    """Names such as `tests/ops/test_copies.py::test_far` of the tests that took at least LIMIT by pytest's durations."""
    lines = re.finditer(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+(\S+?\.py::[^\[\s]+)", log, re.MULTILINE)
    return sorted({name for seconds, name in (line.groups() for line in lines) if float(seconds) >= LIMIT})


def main() -> None:
    """Replace the list by what a log says."""
    found = slow_tests(Path(sys.argv[1]).read_text())
    if not found:
        sys.exit(f"{sys.argv[1]}: no test took {LIMIT} s; run pytest with --durations=0")
    LIST.write_text("".join(f"{name}\n" for name in found))
    print(f"{LIST.name}: {len(found)} tests")


if __name__ == "__main__":
    main()
