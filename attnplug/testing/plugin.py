"""The conformance kit as a pytest plugin, which pytest loads only with `-p`.

`pytest -p attnplug.testing.plugin --pyargs attnplug.testing.suite --attn-backend NAME`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnplug.core.errors import AttnplugError
from attnplug.testing.conformance.check import SHRINK_SECONDS, SkipKind
from attnplug.testing.isolation.listing import option_words
from attnplug.testing.skips import skip_counts, untested_words

if TYPE_CHECKING:
    from attnplug.testing.conformance.suites import Suite

SUITE: pytest.StashKey[Suite] = pytest.StashKey()
"""The key of the checks for attnplug.testing.suite."""

RERUN: pytest.StashKey[Callable[[str], str]] = pytest.StashKey()
"""The key of a function of a check's id, which gives the line that runs the check again."""

SHRINK: pytest.StashKey[float] = pytest.StashKey()
"""The key of the seconds in which wrong answers are shrunk to their smallest failing steps."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("attnplug", "conformance of attention backends")
    group.addoption("--attn-backend", metavar="NAME", help="The backend to check, a name of attnplug list.")
    group.addoption("--attn-device", metavar="DEVICE", help="cpu, cuda:1, ...; default the current device.")
    group.addoption(
        "--known-failures",
        metavar="FILE",
        type=Path,
        help="TOML: a table [known_failures] of id (or pattern) = reason. These must fail.",
    )
    tried = "Number of combinations to try; default smoke."
    group.addoption("--level", choices=("smoke", "full"), default="smoke", help=tried)
    group.addoption(
        "--attn-checks",
        metavar="MODULE:FUNCTION",
        help="Lists the checks of an attnplug.testing.conformance.target.Target; default the kit's.",
    )
    group.addoption(
        "--attn-option",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="Set an option of the backend; may be repeated.",
    )
    group.addoption(
        "--attn-shrink",
        metavar="SECONDS",
        type=float,
        default=SHRINK_SECONDS,
        help="Time to shrink wrong answers to their smallest failing steps; 0 shrinks none.",
    )
    group.addoption("--shard", metavar="I/N", help="Run one of N disjoint parts of the checks.")


def pytest_configure(config: pytest.Config) -> None:
    """Find the backend and list its checks; any problem is a usage error, exit code 4."""
    config.addinivalue_line("markers", "xdist_group(name): checks that one worker runs (pytest-xdist's)")
    name = config.getoption("--attn-backend")
    if name is None:
        if any(_is_the_suite(arg) for arg in config.args):
            from attnplug.registry.default import get_registry

            installed = ", ".join(sorted(get_registry().plugins.names))
            raise pytest.UsageError(f"--attn-backend NAME is missing; installed are {installed}")
        return
    try:
        config.stash[SUITE] = _load(config, name)
        config.stash[SHRINK] = config.option.attn_shrink
        config.stash[RERUN] = _rerun(config)
    except AttnplugError as problem:
        raise pytest.UsageError(str(problem)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    """The backend, the device and the number of checks."""
    suite = config.stash.get(SUITE, None)
    if suite is None:
        return None
    by = f"{suite.offer.distribution} {suite.offer.version}" if suite.offer.distribution else "this process"
    options = f" with {words}" if (words := option_words(suite.options)) else ""
    where = f"{suite.offer.name} ({by}) on {suite.device}{options}"
    return f"attnplug: {where}, {suite.level}, {len(suite.checks)} checks"


def pytest_report_teststatus(
    report: pytest.TestReport,
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Count declarations that could not be tried apart from other skips, so that the last line has them."""
    if report.when == "setup" or _skip_kind(report) is not SkipKind.UNTESTED:
        return None
    return "untested", "u", ("UNTESTED", {"yellow": True, "bold": True})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Explain skips by their kinds, and name each declaration that could not be tried."""
    stats: dict[str, list[pytest.TestReport]] = terminalreporter.stats
    untested = [SkipKind.read(_skip_text(report))[1] for report in stats.get("untested", ())]
    texts = [_skip_text(report) for report in stats.get("skipped", ())]
    kinds = {SkipKind.read(text)[0] for text in texts} - {SkipKind.OTHER}
    if kinds or untested:
        terminalreporter.section("attnplug")
    if kinds:
        terminalreporter.line(f"skipped: {skip_counts(texts)}")
    for cause in untested:
        terminalreporter.line(f"{SkipKind.UNTESTED}: {cause}")
    if untested:
        terminalreporter.line(untested_words(untested).removeprefix("; "), yellow=True, bold=True)


def _skip_kind(report: pytest.TestReport) -> SkipKind | None:
    is_skip = getattr(report, "skipped", False) and not hasattr(report, "wasxfail")
    return SkipKind.read(_skip_text(report))[0] if is_skip else None


def _skip_text(report: pytest.TestReport) -> str:
    found = report.longrepr
    return found[2].removeprefix("Skipped: ") if isinstance(found, tuple) else str(found)


def _load(config: pytest.Config, name: str) -> Suite:
    from attnplug.testing.conformance.check_filter import Shard
    from attnplug.testing.conformance.suites import load_suite

    shard = config.getoption("--shard")
    part = Shard.parse(shard) if shard else None
    suite = load_suite(
        name,
        device=config.getoption("--attn-device"),
        level=str(config.getoption("--level")),
        known_failures=config.getoption("--known-failures"),
        source="--attn-backend",
        checks_of=config.getoption("--attn-checks"),
        options=config.getoption("--attn-option") or (),
    )
    if part is None:
        return suite
    chosen = set(part.of(suite.ids))
    return dataclasses.replace(suite, checks=tuple(check for check in suite.checks if check.id in chosen))


def _rerun(config: pytest.Config) -> Callable[[str], str]:
    from attnplug.testing.isolation.results import suite_command

    names = ("--attn-backend", "--attn-device", "--known-failures", "--level", "--attn-checks")
    given = {name: config.getoption(name) for name in names}
    return functools.partial(
        suite_command,
        options={name: None if value is None else str(value) for name, value in given.items()},
        of_backend=config.getoption("--attn-option") or (),
    )


def _is_the_suite(argument: str) -> bool:
    path = argument.partition("::")[0]
    return path == "attnplug.testing.suite" or Path(path).resolve() == Path(__file__).with_name("suite.py")
