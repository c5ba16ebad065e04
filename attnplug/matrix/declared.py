"""The declared matrix: what a backend's class says of each cell, for any device, with nothing run or looked up."""

from __future__ import annotations

import datetime as dt
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import attnplug
from attnplug.matrix.design import answers
from attnplug.matrix.model import Finding, Run, Status
from attnplug.registry.devices import resolve_device
from attnplug.registry.records import Offer

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.registry.devices import DeviceLike

__all__ = ["declare", "source_commit"]


def declare(backend: Offer | type[AttentionBackend], device: DeviceLike) -> Run:
    """What a backend declares for a device: each cell of its design, declared or refused with the reasons.

    From its class alone: what it requires is taken to be installed, and the device need not be here.

    Args:
        backend: as a plugin offers it, which tells the distribution too, or only the class.
        device: a Device or "sm90", "rocm:9.4", "cpu", ... as `attnplug.select` takes it.

    Raises:
        SpecError: text that names no device.
    """
    where = resolve_device(device)
    if isinstance(backend, Offer):
        offer: Offer | None = backend
        backend_cls = backend.backend
    else:
        offer, backend_cls = None, backend
    return Run(
        backend=offer.name if offer else backend_cls.get_name(),
        distribution=offer.distribution if offer else None,
        version=offer.version if offer else None,
        device=str(where),
        device_name=None,
        versions={},
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        commit=source_commit(),
        findings=tuple(
            Finding(cell, Status.REFUSED if reasons else Status.DECLARED, tuple(map(str, reasons)))
            for cell, reasons in answers(backend_cls, where).items()
        ),
    )


@functools.cache
def source_commit() -> str | None:
    """The commit of attnplug's own source, where it is imported from a checkout; else None."""
    checkout = Path(attnplug.__file__).resolve().parents[1]
    if not (checkout / ".git").exists():  # a repository further up is somebody else's
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
