"""The matrix as data: a run has a finding for each cell of one backend on one device."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from attnplug.core.compiled import CompiledKernel
from attnplug.registry.selection.evidence import Cell as Cell


class Status(enum.StrEnum):
    """The status of a cell."""

    DECLARED = "declared"
    """Claimed, not run."""
    COMPILED = "compiled"
    """Claimed, not run, and its kernels are compiled and fit the device; the finding names those that spill."""
    REFUSED = "refused"
    """Not claimed; the finding has the reasons."""
    VERIFIED = "verified"
    """Claimed, run, and right."""
    SAMPLED = "sampled"
    """Of several cells together: those that were run are right, and there are combinations that were not run."""
    REFUTED = "refuted"
    """Claimed, run, and wrong; the finding has the evidence."""
    UNCLAIMED = "unclaimed"
    """Not claimed, but run and right."""
    NOT_RUN = "not run"
    """Claimed, but could not be run; the finding says why."""


CLAIMED = frozenset(
    {
        Status.DECLARED,
        Status.COMPILED,
        Status.VERIFIED,
        Status.SAMPLED,
        Status.REFUTED,
        Status.NOT_RUN,
    }
)
"""The statuses of a cell, or of several, that its backend claims to serve."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The status of one cell.

    Args:
        cell: with a value of each axis.
        status: of the cell.
        why: the reasons of a refusal (also of an unclaimed cell), the evidence of a refutation, or the cause
            of a cell not run, or the kernels of a compiled cell that spill; empty otherwise.
        source: the place of its run in the `sources` of a joined run; None for the run itself.
    """

    cell: Cell
    status: Status
    why: tuple[str, ...] = ()
    source: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The cells of one backend on one device with one set of versions.

    Args:
        backend: its name; "A+B" for a composite.
        distribution: the package that ships it.
        version: of that distribution.
        device: such as "sm90" or "cpu", as for `attnplug.select`.
        device_name: of the hardware, such as "NVIDIA H200"; None if no cell was run.
        versions: of Python, torch and every distribution that the backend requires; empty if no cell was run.
        date: in UTC: "2026-11-21T18:00:00+00:00".
        commit: of attnplug's source if that is a checkout; else None.
        findings: one for each cell, in the order of the design.
        axes: the values that the backend serves, by the field of Cell, whether `findings` have them or not; None if
            that is not known.
        kernels: those of the compiled cells, with what each takes of the device.
        prefixes: by feature that the backend serves, why requests cannot read shared prefixes of such a layer together; None
            if they can. Empty if that is not known.
        sources: other runs that findings come from, themselves without findings; see `merging.join`.
    """

    backend: str
    distribution: str | None
    version: str | None
    device: str
    device_name: str | None
    versions: Mapping[str, str]
    date: str
    commit: str | None
    findings: tuple[Finding, ...]
    axes: Mapping[str, tuple[str | int | None, ...]] | None = None
    kernels: tuple[CompiledKernel, ...] = ()
    prefixes: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    sources: tuple[Run, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The backend and the device."""
        return self.backend, self.device

    @property
    def source(self) -> str:
        """The distribution and its version; "-" for none."""
        return f"{self.distribution or '-'} {self.version or ''}".strip()

    @property
    def plugin(self) -> str | None:
        """The distribution if it is not attnplug itself."""
        return None if self.distribution == "attnplug" else self.distribution


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """Runs; no two have the same backend and device."""

    runs: tuple[Run, ...]
