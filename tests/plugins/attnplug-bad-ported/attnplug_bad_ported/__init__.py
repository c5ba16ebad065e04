"""A backend written for vLLM 0.15, with only its imports changed."""

from __future__ import annotations

from attnplug import AttentionBackend, hookimpl
from attnplug_bad_ported.ported import BadPorted

ATTNPLUG_API = (1, 1)


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_PORTED."""
    return [BadPorted]
