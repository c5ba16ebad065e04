"""The matrix as data: a cell asks one thing of one backend, a finding answers it for one device."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from attnplug.registry.cell import Cell

__all__ = ["Cell", "Finding", "Matrix", "Run", "Status"]


class Status(enum.StrEnum):
    """What is known of a cell."""

    DECLARED = "declared"
    """Claimed, and not run."""
    REFUSED = "refused"
    """Not claimed: the reasons say why."""
    VERIFIED = "verified"
    """Claimed, run, and right."""
    REFUTED = "refuted"
    """Claimed, run, and wrong: the evidence says how."""
    UNCLAIMED = "unclaimed"
    """Not claimed, run all the same, and right."""
    NOT_RUN = "not run"
    """Claimed, and could not be run: why says it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one cell.

    Args:
        cell: what was asked.
        status: the answer.
        why: the reasons of a refusal, of what is unclaimed too, the evidence of a refutation, or why it was not
            run; empty otherwise.
    """

    cell: Cell
    status: Status
    why: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The cells of one backend on one device with one set of versions.

    Args:
        backend: its name, of a composite "A+B".
        distribution: what ships it.
        version: of that distribution.
        device: as `attnplug.select` takes it, "sm90" or "cpu".
        device_name: what the device calls itself, as "NVIDIA H200"; None where nothing was run.
        versions: of Python, torch and every distribution that the backend requires, as installed;
            empty where nothing was run.
        date: when, in UTC: "2026-11-21T18:00:00+00:00".
        commit: of attnplug's source, where it is a checkout; else None.
        findings: one for each cell, in the order of the design.
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

    @property
    def key(self) -> tuple[str, str]:
        """What the run is about: the backend and the device."""
        return self.backend, self.device


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """Runs, each of another backend or device."""

    runs: tuple[Run, ...]
