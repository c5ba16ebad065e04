"""Lists the checks of a backend in a child process, because importing the backend may crash or hang."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import gc
import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug._system.processes import Child, python_command

if TYPE_CHECKING:
    from attnplug.registry.plugins.records import Offer

_CODE = {".py", ".so", ".pyd", ".dylib", ".cu", ".cpp", ".h", ".json", ".toml"}
_LARGE = 2**20
_CHILD = "from attnplug.testing.isolation.listing import main; main(*sys.argv[1:])"


@dataclasses.dataclass(frozen=True, slots=True)
class SuiteRequest:
    """The arguments of `attnplug.testing.conformance.suites.load_suite`, as text.

    Args:
        only: patterns of the ids that are wanted. If each matches, checks that nobody wants may be left out.
        options: texts of `--option`.
    """

    name: str
    device: str | None = None
    level: str = "smoke"
    known_failures: str | None = None
    checks_of: str | None = None
    only: Sequence[str] = ("*",)
    options: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """The checks of one backend on one device, and the versions they run with.

    Args:
        request: the request that this answers.
        name: the backend.
        shipped_by: its distribution, if it has one.
        device: the device, printed.
        device_type: "cpu", "cuda", ...
        device_name: its marketing name, if known.
        ids: of all checks.
        known: the reason of each check that is known to fail.
        versions: of Python, torch, attnplug, and the distributions that ship the backend or that it requires.
        code: changes if a file of the packages of attnplug or the backend changes.
        options: the options that are not at their defaults, with those of ATTNPLUG_OPTIONS: "tile=32, splits=2".
        designs: the designed cases, for the workers; only they read it.
    """

    request: SuiteRequest
    name: str
    shipped_by: str | None
    device: str
    device_type: str
    device_name: str | None
    ids: Sequence[str]
    known: Mapping[str, str]
    versions: Mapping[str, str]
    code: str
    options: str = ""
    designs: bytes = dataclasses.field(default=b"", repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ListingFailure:
    """The reason why the list could not be made; `usage` if other arguments would help."""

    text: str
    usage: bool


def list_checks(
    request: SuiteRequest, timeout: float, meanwhile: Callable[[], object] = lambda: None
) -> Listing | ListingFailure:
    """List the checks in a child process, which is killed after `timeout` seconds; `meanwhile` is called beside it."""
    with Child(python_command(_CHILD), dataclasses.asdict(request)) as child:
        meanwhile()
        problem = child.problem(timeout)
        answer = child.report.read_text(encoding="utf-8") if problem is None else ""
        if answer:
            facts = json.loads(answer)
            if "usage" in facts:
                return ListingFailure(**facts)
            found = _designs_beside(child.report)
            return Listing(request, **facts, designs=found.read_bytes() if found.is_file() else b"")
        problem = problem or f"failed: {child.last_line()}"
    return ListingFailure(f"listing the checks of {request.name} {problem}", usage=False)


def main(task: str, report: str) -> None:
    """Run in the child: write the facts of the listing of `task`, or why there is none, to the file `report` as JSON."""
    # Collections take an eighth of the time of a process that only imports, lists and ends.
    gc.disable()
    from attnplug.core.composite import CompositeBackend
    from attnplug.core.errors import AttnplugError
    from attnplug.testing.conformance.cases.designed_cases import Designs
    from attnplug.testing.conformance.suites import load_suite

    request = json.loads(Path(task).read_text(encoding="utf-8"))
    known, designs = request.get("known_failures"), Designs()
    arguments = {**request, "known_failures": None if known is None else Path(known), "designs": designs}
    facts: dict[str, Any]
    try:
        suite = load_suite(**arguments)
        if not all(fnmatch.filter(suite.ids, pattern) for pattern in request["only"]):
            # The message about a pattern without a match names the nearest of all ids.
            suite = load_suite(**{**arguments, "only": ("*",)})
        backend = suite.offer.backend
        halves = backend.members().values() if issubclass(backend, CompositeBackend) else (backend,)
        facts = {
            "name": suite.offer.name,
            "shipped_by": suite.offer.distribution,
            "device": str(suite.device),
            "device_type": suite.device.type,
            "device_name": suite.device.name,
            "ids": suite.ids,
            "known": dict(suite.known),
            "versions": versions(suite.offer),
            "options": option_words(suite.options),
            "code": fingerprint(["attnplug", *(half.__module__.partition(".")[0] for half in halves)]),
        }
    except AttnplugError as problem:
        facts = {"text": str(problem), "usage": True}
    _designs_beside(Path(report)).write_bytes(designs.written())
    # The report has a file of its own, because a backend may print while it is imported.
    Path(report).write_text(json.dumps(facts), encoding="utf-8")
    # The modules of torch take a tenth of a second to end, and those of a backend may hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _designs_beside(report: Path) -> Path:
    return report.with_suffix(".designs")


def option_words(options: Any) -> str:
    """The options that differ from their defaults: "tile=32, splits=2"; "" for None."""
    if options is None:
        return ""
    usual = type(options)()
    names = [field.name for field in dataclasses.fields(options) if field.init]
    changed = [name for name in names if getattr(options, name) != getattr(usual, name)]
    return ", ".join(f"{name}={getattr(options, name)}" for name in changed)


def versions(offer: Offer) -> dict[str, str]:
    """Versions of Python, attnplug, torch, the backend's distribution and the distributions it requires."""
    from attnplug.registry.plugins.installed import installed_versions, library_versions

    python = {"Python": platform.python_version()}
    return python | installed_versions(["attnplug"]) | library_versions(offer)


def fingerprint(packages: Sequence[str]) -> str:
    """A digest of the code of `packages`: an edit changes it, a copy with new file times does not."""
    # Large files are compiled libraries, so that size and time are enough.
    digest = hashlib.sha256()
    for package in dict.fromkeys(packages):
        # The order of a folder's files differs between file systems; the digest must not.
        for path in sorted(_files(package)):
            about = path.stat()
            digest.update(f"{path}\0{about.st_size}\0".encode())
            is_small = about.st_size <= _LARGE
            digest.update(path.read_bytes() if is_small else str(about.st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def _files(package: str) -> Iterator[Path]:
    with contextlib.suppress(ImportError, ValueError):  # a module made in code has no spec
        spec = importlib.util.find_spec(package)
        if spec is None:
            return
        if spec.origin and not spec.submodule_search_locations and Path(spec.origin).is_file():
            yield Path(spec.origin)
        for folder in spec.submodule_search_locations or ():
            yield from (path for path in Path(folder).rglob("*") if path.suffix in _CODE and path.is_file())
