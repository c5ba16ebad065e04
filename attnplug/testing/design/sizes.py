"""Sizes to try with a backend that allows every multiple of one.

Chooses what to try of a backend that compiles a kernel for each compile key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

from attnplug.core.blocks import MultipleOf
from attnplug.registry.plugins.waiting import guarded_call

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.spec import LayerSpec


HEAD_SIZES: tuple[int, ...] = (128, 64, 16, 32, 72, 20, 80, 96, 112, 192, 256, 320)
"""The head sizes of models, the least and the largest of most kernels, and sizes that fill no tile."""
BLOCK_SIZES: tuple[int, ...] = (16, 32, 64, 128, 256, 8, 1, 24, 48)
"""Tokens per page."""


def sizes_to_try(allowed: Sequence[int | MultipleOf], samples: Sequence[int]) -> list[int]:
    """The allowed samples, the sizes listed, and the least of the multiples that allow no sample.

    Entries that are neither a positive int nor a MultipleOf are left out.
    """
    listed = [size for size in allowed if type(size) is int and size > 0]
    multiples = [item for item in allowed if isinstance(item, MultipleOf)]
    sampled = [size for size in samples if MultipleOf.allows([*listed, *multiples], size)]
    least = [item.from_on(1) for item in multiples if not any(size in item for size in samples)]
    return list(dict.fromkeys([*sampled, *listed, *least]))


def spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` values: the first, the extremes, two that are no powers of 2, then others."""
    ordered = sorted(values)
    middle = [value for value in values if value & (value - 1)]
    return list(dict.fromkeys([values[0], ordered[0], ordered[-1], *middle[:2], *values]))[:count]


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
