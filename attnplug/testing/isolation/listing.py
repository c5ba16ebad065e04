"""The list of checks, made in a child process: importing a backend may crash or hang too.

The child is `main`; it writes one JSON object to the file that its first argument names.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Listing", "Trouble", "Wanted", "list_checks"]

# The paths of this process, as the workers have them; -c would put the current folder first.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from attnplug.testing.isolation.listing import main
main(sys.argv[1], json.loads(sys.argv[3]))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be checked: the arguments of `load_suite`, as text."""

    name: str
    device: str | None = None
    level: str = "smoke"
    known_failures: str | None = None
    checks_of: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """The checks of one backend on one device, and what they ran with.

    Args:
        name: the backend.
        shipped_by: its distribution, where it has one.
        device: as a Device prints.
        device_type: "cpu", "cuda", ...
        device_name: its marketing name, where it is known.
        level: "smoke" or "full".
        ids: of all checks.
        known: the reason of each check that is known to fail.
        versions: of Python, torch, attnplug, and the distributions that the backend comes from and requires.
        code: changes whenever a file of attnplug's or the backend's package does.
        checks_of: as in Wanted.
    """

    name: str
    shipped_by: str | None
    device: str
    device_type: str
    device_name: str | None
    level: str
    ids: Sequence[str]
    known: Mapping[str, str]
    versions: Mapping[str, str]
    code: str
    checks_of: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no list: `usage` where whoever asked can put it right."""

    text: str
    usage: bool


def list_checks(wanted: Wanted, timeout: float) -> Listing | Trouble:
    """List the checks in a child process, which may take `timeout` seconds."""
    with tempfile.TemporaryDirectory(prefix="attnplug-conformance-") as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        arguments = [str(report), json.dumps(sys.path), json.dumps(dataclasses.asdict(wanted))]
        # A file, not a pipe: a grandchild that outlives its parent would hold a pipe open.
        with log.open("wb") as output:
            child = subprocess.Popen(  # noqa: S603  (our own interpreter on our own code)
                [sys.executable, "-c", _CHILD, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        if code == 0 and report.exists():
            return _read(report)
        said = log.read_text(errors="replace").strip().splitlines()
    return Trouble(f"listing the checks of {wanted.name} {_how(code, said, timeout)}", usage=False)


def _read(report: Path) -> Listing | Trouble:
    facts = json.loads(report.read_text(encoding="utf-8"))
    return Trouble(**facts) if "usage" in facts else Listing(**facts)


def _how(code: int | None, said: Sequence[str], timeout: float) -> str:
    if code is None:
        return f"took longer than {timeout:g} s"
    if code < 0:
        return f"crashed: {signal.Signals(-code).name}"
    last = said[-1] if said else f"the process left with exit code {code}"
    return f"failed: {last}"


def main(report: str, wanted: Mapping[str, Any]) -> None:
    """In the child: list, and report."""
    from attnplug.core.errors import AttnplugError

    try:
        facts = dataclasses.asdict(_list(Wanted(**wanted)))
    except AttnplugError as problem:
        facts = dataclasses.asdict(Trouble(str(problem), usage=True))
    Path(report).write_text(json.dumps(facts), encoding="utf-8")


def _list(wanted: Wanted) -> Listing:
    from attnplug.core.composite import CompositeBackend
    from attnplug.testing.conformance.suites import load_suite
    from attnplug.testing.isolation.environment import fingerprint, versions

    known = None if wanted.known_failures is None else Path(wanted.known_failures)
    suite = load_suite(
        wanted.name,
        device=wanted.device,
        level=wanted.level,
        known_failures=known,
        checks_of=wanted.checks_of,
    )
    backend = suite.offer.backend
    halves = backend.members().values() if issubclass(backend, CompositeBackend) else (backend,)
    return Listing(
        name=suite.offer.name,
        shipped_by=suite.offer.distribution,
        device=str(suite.device),
        device_type=suite.device.type,
        device_name=suite.device.name,
        level=str(suite.level),
        ids=suite.ids,
        known=dict(suite.known),
        versions=versions(suite.offer),
        code=fingerprint(["attnplug", *(half.__module__.partition(".")[0] for half in halves)]),
        checks_of=wanted.checks_of,
    )
