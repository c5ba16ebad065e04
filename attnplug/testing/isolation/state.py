"""What an interrupted run leaves behind, so that the next one need not begin again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from attnplug.testing.isolation.listing import Listing
from attnplug.testing.isolation.results import Outcome, Result

__all__ = ["State"]


class State:
    """Results of one suite of checks, a JSON line each, in the user's cache folder.

    A file belongs to a backend, its code and versions, a device, a kind of checks, a level and a shard: after any of them
    changed, nothing is remembered. Lines are appended whole and the last of a check counts, so that a run
    may end at any moment.

    Args:
        listing: the checks.
        shard: the part of them that is run, as "1/4".
        folder: default the user's cache folder.
    """

    def __init__(self, listing: Listing, shard: str | None = None, folder: Path | None = None) -> None:
        key = {
            "backend": listing.name,
            "shipped_by": listing.shipped_by,
            "device": [listing.device, listing.device_name],
            "level": listing.level,
            "versions": dict(listing.versions),
            "code": listing.code,
            "shard": shard,
            "checks_of": listing.checks_of,
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or _cache_folder()) / f"{listing.name}-{digest}.jsonl"

    def load(self) -> dict[str, Result]:
        """The last result of each check; lines that were cut off are passed over."""
        results: dict[str, Result] = {}
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return results
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data = json.loads(line)
                outcome, seconds = Outcome(data["outcome"]), float(data["seconds"])
                results[str(data["id"])] = Result(str(data["id"]), outcome, seconds, str(data["cause"]))
        return results

    def settled(self, known: Mapping[str, str]) -> dict[str, Result]:
        """The results that need no second run: passed, skipped, and failed as `known` says."""
        return {
            check: result
            for check, result in self.load().items()
            if result.outcome is Outcome.SKIPPED
            or result.outcome is (Outcome.KNOWN if check in known else Outcome.PASSED)
        }

    def forget(self, ids: Iterable[str]) -> None:
        """Drop the results of `ids`, which are about to be found anew."""
        dropped = set(ids)
        kept = [result for check, result in self.load().items() if check not in dropped]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=self.path.parent, prefix=self.path.name, delete=False
        ) as file:
            file.writelines(_line(result) for result in kept)
        Path(file.name).replace(self.path)

    def add(self, result: Result) -> None:
        """Remember one result, whatever happens next."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            line = _line(result).encode()
            if os.fstat(descriptor).st_size:
                os.lseek(descriptor, -1, os.SEEK_END)
                # After a line that was cut off, a new one begins.
                line = line if os.read(descriptor, 1) == b"\n" else b"\n" + line
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _line(result: Result) -> str:
    data = {"id": result.id, "outcome": result.outcome, "seconds": result.seconds, "cause": result.cause}
    return json.dumps(data) + "\n"


def _cache_folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("attnplug", appauthor=False) / "conformance"
