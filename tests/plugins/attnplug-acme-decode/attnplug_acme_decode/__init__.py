"""Serves decode steps only, of nearly every layer, on CPUs and NVIDIA GPUs. Nothing is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug import hookimpl

if TYPE_CHECKING:
    from attnplug import AttentionBackend

ATTNPLUG_API = (1, 1)


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers ACME_DECODE."""
    from attnplug_acme_decode.backend import AcmeDecodeBackend

    return [AcmeDecodeBackend]
