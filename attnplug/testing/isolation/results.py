"""Results of checks, and the file that saves them for `--resume`.

The lines for a shell that run one check again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attnplug._system import files
from attnplug._system.json_files import parse_json
from attnplug.registry.plugins.options import VARIABLE
from attnplug.testing.isolation.failures import Failure

if TYPE_CHECKING:
    from attnplug.testing.isolation.listing import Listing, SuiteRequest


_NO_TRAP = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class CheckOutcome(enum.StrEnum):
    """The end of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It does not apply to this backend on this device."""
    UNTESTED = "untested"
    """It is about a declaration that cannot be tried on this machine."""
    KNOWN = "known"
    """It failed, and the list of known failures has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The end of one check.

    Args:
        id: the check's id.
        outcome: passed, failed, skipped, untested or failed as known.
        seconds: its duration.
        cause: why it failed, is skipped or untested, or is known to fail; "" if it passed.
        detail: the traceback, or what a worker wrote before it died; may be "".
        failure: what it shares with other failures, if it failed.
    """

    id: str
    outcome: CheckOutcome
    seconds: float = 0.0
    cause: str = ""
    detail: str = ""
    failure: Failure = dataclasses.field(default_factory=Failure)


class CheckObserver(Protocol):
    """Receives the progress of a run, in the process that started it."""

    def started(self, check_id: str) -> None:
        """A worker starts a check."""

    def finished(self, result: Result) -> None:
        """A check ended. It ends a second time, as failed, if its worker dies after it had passed."""


class SavedResults:
    """Results of one suite of checks, a JSON line each, in the user's cache folder.

    The file name depends on the backend, its code and versions, the device, the options, the kind of checks, the
    level and the shard. pytest's cache cannot replace it: `--lf` leaves out tests that never ran, and a killed run writes no cache.
    """

    def __init__(self, listing: Listing, shard: str | None = None, folder: Path | None = None) -> None:
        from platformdirs import user_cache_path

        about = [
            listing.name,
            listing.shipped_by,
            listing.device,
            listing.device_name,
            listing.code,
            shard,
            listing.options,
        ]
        key = json.dumps([about, listing.request.level, listing.request.checks_of, dict(listing.versions)])
        folder = folder or user_cache_path("attnplug", appauthor=False) / "conformance"
        self.path = folder / f"{listing.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"

    def load(self) -> dict[str, Result]:
        """The last result of each check; incomplete lines are ignored."""
        results: dict[str, Result] = {}
        with contextlib.suppress(OSError):
            for line in files.read_bytes(self.path).decode("utf-8", "replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                    data = parse_json(line)
                    outcome, seconds = CheckOutcome(data["outcome"]), float(data["seconds"])
                    results[str(data["id"])] = Result(str(data["id"]), outcome, seconds, str(data["cause"]))
        return results

    def reusable(self, known: Mapping[str, str]) -> dict[str, Result]:
        """The results that need no second run: passed, skipped, and failed as `known` says."""
        return {
            check: result
            for check, result in self.load().items()
            if result.outcome in (CheckOutcome.SKIPPED, CheckOutcome.UNTESTED)
            or result.outcome is (CheckOutcome.KNOWN if check in known else CheckOutcome.PASSED)
        }

    def remove(self, ids: Iterable[str]) -> None:
        """Remove the results of the checks `ids`, which are about to run again."""
        removed = set(ids)
        kept = [result for check, result in self.load().items() if check not in removed]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(self.path, b"".join(map(_line, kept)))

    def add(self, result: Result) -> None:
        """Append one result, so that it survives the end of this process."""
        # A file that replaced ours meanwhile is not followed, and a FIFO not waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_TRAP
        with os.fdopen(os.open(self.path, flags, 0o666), "ab", buffering=0) as file:
            file.write(_line(result))


def _line(result: Result) -> bytes:
    data = {"id": result.id, "outcome": result.outcome, "seconds": result.seconds, "cause": result.cause}
    # The first line break ends a line that a killed run left incomplete.
    return f"\n{json.dumps(data)}\n".encode()


def cli_command(request: SuiteRequest, check: str, limits: Mapping[str, str | None] | None = None) -> str:
    """The line that runs one check of a request alone, in one worker, with the options of `limits`."""
    options = {
        "--level": request.level,
        "--device": request.device,
        "--known-failures": request.known_failures,
        **(limits or {}),
        "--jobs": "1",
    }
    given = [word for text in request.options for word in ("--option", text)]
    return _shell_line("attnplug", "conformance", request.name, "--only", check, *given, **options)


def suite_command(check: str, options: Mapping[str, str | None], of_backend: Sequence[str] = ()) -> str:
    """The line that runs one check of the suite in pytest with the options of the run, and those of the backend."""
    node = f"attnplug.testing.suite::test_conformance[{check}]"
    given = [word for text in of_backend for word in ("--attn-option", text)]
    return _shell_line("pytest", "-p", "attnplug.testing.plugin", "--pyargs", node, *given, **options)


def node_command() -> str | None:
    """The line that runs pytest's current test alone; None outside of pytest."""
    # pytest sets the variable to "tests/test_acme.py::test_conformance[ID] (call)".
    node = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return _shell_line("pytest", node) if node else None


def _shell_line(*words: str, **options: str | None) -> str:
    given = [word for option, value in options.items() if value is not None for word in (option, value)]
    variable = os.environ.get(VARIABLE)
    front = f"{VARIABLE}={shlex.quote(variable)} " if variable else ""
    return front + shlex.join([*words, *given])
