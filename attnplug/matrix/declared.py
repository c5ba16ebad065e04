"""The declared matrix: a backend's class answers each cell, for any device, without running anything."""

from __future__ import annotations

import datetime as dt
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import attnplug
from attnplug.matrix.design import answers
from attnplug.matrix.extent import served_values
from attnplug.matrix.model import Finding, Run, Status
from attnplug.registry.devices import resolve_device
from attnplug.registry.plugins.records import Offer

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.registry.devices import DeviceLike


def declare(backend: Offer | type[AttentionBackend], device: DeviceLike) -> Run:
    """The run of a backend and a device: each cell of the design is declared, or refused with reasons.

    Only the class is consulted: its requirements count as installed, and the device may be absent.

    Args:
        backend: an offer of a plugin, which names the distribution too, or only the class.
        device: a Device or "sm90", "rocm:9.4", "cpu", ... as for `attnplug.select`.

    Raises:
        SpecError: the text names no device.
    """
    where = resolve_device(device)
    offer = backend if isinstance(backend, Offer) else None
    backend_cls = backend.backend if isinstance(backend, Offer) else backend
    findings = tuple(
        Finding(cell, Status.REFUSED if reasons else Status.DECLARED, tuple(map(str, reasons)))
        for cell, reasons in answers(backend_cls, where).items()
    )
    return Run(
        backend=offer.name if offer else backend_cls.get_name(),
        distribution=offer.distribution if offer else None,
        version=offer.version if offer else None,
        device=str(where),
        device_name=None,
        versions={},
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        commit=source_commit(),
        findings=findings,
        axes=served_values(findings),
    )


@functools.cache
def source_commit() -> str | None:
    """The commit of attnplug's own source if it is imported from a checkout; else None."""
    checkout = Path(attnplug.__file__).resolve().parents[1]
    if not (checkout / ".git").exists():  # a repository further up is another project's
        return None
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(checkout), "rev-parse", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
