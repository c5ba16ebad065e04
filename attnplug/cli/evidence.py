"""What `attnplug doctor` says of cells that were refuted on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug.core.device import Device

__all__ = ["evidence_findings"]

_SHOWN = 3


def evidence_findings(device: Device | None, wanted: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """A warning for a file that cannot be read, and for each backend that was wrong here: what, state, detail.

    Args:
        device: the current one; None where it is not known, and nothing is said of backends.
        wanted: backends or families to look at; empty for all.
    """
    from attnplug.registry.refuted import read_evidence

    evidence = read_evidence()
    if evidence.read_error:
        yield "evidence", "warning", f"left out: {evidence.read_error}"
    for subject, cells in evidence.here(device) if device is not None else ():
        halves = (subject.backend, *subject.backend.split("+"))
        if not wanted or any(f"{half}_".startswith(f"{each}_") for half in halves for each in wanted):
            named = ", ".join(cell.id for cell in cells[:_SHOWN]) + (", ..." if len(cells) > _SHOWN else "")
            detail = f"{len(cells)} refuted here, and refused: {named} ({evidence.path})"
            yield f"{subject.backend} on {device}", "warning", detail
