"""Which cells one compilation serves."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping

from attnplug.core.backend import AttentionBackend
from attnplug.matrix.layers import spec_of
from attnplug.matrix.model import Cell
from attnplug.registry.plugin_calls import guarded_call

__all__ = ["compile_keys", "most_used"]


def compile_keys(backend: type[AttentionBackend], cells: Iterable[Cell]) -> dict[Cell, Hashable | None]:
    """The backend's `compile_key` of each cell's layer; None too where it cannot say."""
    keys: dict[Cell, Hashable | None] = {}
    for cell in cells:
        key, problem = guarded_call(lambda cell=cell: _hashed(backend.compile_key(spec_of(cell))))
        keys[cell] = None if problem is not None else key
    return keys


def most_used(keys: Mapping[Cell, Hashable | None], claimed: Collection[Cell]) -> list[list[Cell]]:
    """The cells by key: the keys of most cells that are claimed first, None last."""
    groups: dict[Hashable | None, list[Cell]] = {}
    for cell, key in keys.items():
        groups.setdefault(key, []).append(cell)
    alone = groups.pop(None, [])
    ordered = sorted(groups.values(), key=lambda group: sum(map(claimed.__contains__, group)), reverse=True)
    return [*ordered, alone] if alone else ordered


def _hashed(key: Hashable | None) -> Hashable | None:
    hash(key)
    return key
