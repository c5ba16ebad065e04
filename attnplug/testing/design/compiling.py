"""Chooses what to try of a backend that compiles a kernel for each compile key."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, TypeVar

from attnplug.registry.plugins.waiting import guarded_call

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.spec import LayerSpec

_Key = TypeVar("_Key", bound=Hashable)


def compile_key(backend: type[AttentionBackend], spec: LayerSpec) -> Hashable | None:
    """The backend's `compile_key` of a layer; None also if that raises or cannot be hashed."""

    def hashed() -> Hashable | None:
        key = backend.compile_key(spec)
        hash(key)
        return key

    key: Hashable | None = guarded_call(hashed)[0]
    return key


def most_adding(
    sets: Mapping[_Key, Set[Any]], had: Iterable[Any] = (), most: int | None = None
) -> list[_Key]:
    """The keys in greedy order: each adds most elements to `had` and the sets before; the first of equals wins.

    Only the first `most` are looked for; None is all.
    """
    seen, rest, order = set(had), dict(sets), list[_Key]()
    while rest and len(order) != most:
        best = max(rest, key=lambda key: len(rest[key] - seen))
        seen |= rest.pop(best)
        order.append(best)
    return order
