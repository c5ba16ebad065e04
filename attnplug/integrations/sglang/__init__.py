"""attnplug's backends in SGLang: `attnplug`, which selects for each layer, and `attnplug_name` for each backend.

SGLang calls `register` in each of its processes, through the entry point `attnplug` of `sglang.srt.plugins`. SGLang is
imported by that call only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug.registry.selection.decision import Decision

__all__ = ["decisions", "register"]

_log = logging.getLogger("attnplug")


def register() -> None:
    """Make the backends known to SGLang; may be called again.

    `--attention-backend attnplug` then selects a backend for each layer by attnplug's rules, and
    `--attention-backend attnplug_triton` is TRITON for all layers; names follow `attnplug list`.

    An SGLang without the interface gets a warning and no names: it starts, as it does without attnplug.
    """
    try:
        from attnplug.integrations.sglang.names import register_names
    except ImportError as error:
        _log.warning("SGLang gets no attnplug backends: its interface is not that of 0.5.23 (%s)", error)
        return

    register_names()


def decisions(attn_backend: Any) -> dict[str, Decision]:
    """The decision for each layer that has run on attnplug, by the layer's path in the model.

    Args:
        attn_backend: SGLang's attention backend of a model runner, `runner.attn_backend`. Backends inside of SGLang's
            own wrappers, such as one for each phase, are found too.
    """
    return {name: each for found in _ours(attn_backend, set()) for name, each in found.decisions().items()}


def _ours(backend: Any, seen: set[int]) -> Iterator[Any]:
    """The backends of attnplug in SGLang's backend, which may be a wrapper."""
    if backend is None or id(backend) in seen:
        return
    seen.add(id(backend))
    if type(backend).__module__.startswith(f"{__name__}."):
        yield backend
        return
    for value in list(getattr(backend, "__dict__", {}).values()):
        inner = value if isinstance(value, list | tuple) else (value,)
        for each in inner:
            if "Backend" in type(each).__name__:
                yield from _ours(each, seen)
