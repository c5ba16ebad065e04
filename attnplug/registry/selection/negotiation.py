"""One block size and one KV layout for layers with equal caches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from attnplug.core.blocks import MultipleOf
from attnplug.core.errors import LayoutError
from attnplug.core.interface.answers import answer
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.validation import reads_blocks

if TYPE_CHECKING:
    from attnplug.registry.selection.decision import Decision

_K = TypeVar("_K")


def negotiated(decisions: Mapping[_K, Decision]) -> dict[_K, Decision]:
    """The decisions with one block size and one KV layout for all layers with equal caches.

    Raises:
        LayoutError: no size or layout suits all backends of such layers; it names them.
    """
    groups: dict[Any, list[_K]] = {}
    for key, decision in decisions.items():
        if decision.backend is not None and decision.block_size is not None:
            # An open block size counts as 1 here, so that only the rest of the cache is compared.
            cache = kv_cache_spec_for(decision.spec, decision.spec.block_size or 1)
            groups.setdefault((cache, decision.spec.block_size), []).append(key)
    agreed = dict(decisions)
    for keys in groups.values():
        members = [decisions[key] for key in keys]
        # One class may prefer different sizes for different specs, so the sizes are compared, not the backends.
        if len({(decision.block_size, decision.kv_cache_layout) for decision in members}) > 1:
            size, layout = _common_size(members), _common_layout(members)
            for key in keys:
                agreed[key] = dataclasses.replace(decisions[key], block_size=size, kv_cache_layout=layout)
    return agreed


def _common_size(members: Sequence[Decision]) -> int:
    allowed = [
        tuple(answer(d.get_backend_cls(), "get_supported_kernel_block_sizes", d.spec, d.device))
        for d in members
    ]
    entries = {size for sizes in allowed for size in sizes}
    bases = [item.base for item in entries if isinstance(item, MultipleOf)]
    wanted = [d.block_size for d in members if d.block_size is not None]
    fixed = sorted(item for item in entries if isinstance(item, int))
    for size in (*wanted, *fixed, math.lcm(*bases)):
        if all(reads_blocks(d.get_backend_cls(), size, d.spec, d.device) for d in members):
            return size
    raise _no_agreement("block_size", members, allowed)


def _common_layout(members: Sequence[Decision]) -> str:
    readable: list[tuple[str, ...]] = [
        answer(d.get_backend_cls(), "supported_kv_cache_layouts") for d in members
    ]
    for layout in readable[0]:
        if all(layout in layouts for layouts in readable):
            return layout
    raise _no_agreement("kv_cache_layout", members, readable)


def _no_agreement(
    field: str, members: Sequence[Decision], allowed: Sequence[Sequence[object]]
) -> LayoutError:
    one_each = {(d.backend, tuple(sizes)): d for d, sizes in zip(members, allowed, strict=True)}
    sides = "; ".join(
        f"{name} (layer {d.layer_name}) takes {', '.join(map(str, sizes))}"
        for (name, sizes), d in one_each.items()
    )
    limit = f"cannot be agreed on by layers with like caches: {sides}"
    return LayoutError(field, None, limit, "ask for one backend for all of them")
