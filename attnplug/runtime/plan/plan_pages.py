"""Pages that the layers of a plan can share: equal bytes in hybrid models, and the layout set for all.

The physical layout of KV pages that a plan uses by default.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from typing import Literal, TypeAlias, TypeGuard

from attnplug.core.errors import LayoutError
from attnplug.core.interface.answers import answer
from attnplug.core.kv_cache_spec import KVCacheSpec, kv_cache_spec_for
from attnplug.core.validation import reads_blocks
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.plan.grouping import unify_page_sizes

KVCacheLayoutType: TypeAlias = Literal["NHD", "HND"]
"""The order inside a page: token, head, element; or head, token, element."""

_VARIABLE = "ATTNPLUG_KV_CACHE_LAYOUT"
_override: KVCacheLayoutType | None = None
_LOCK = threading.Lock()


def is_valid_kv_cache_layout(value: object) -> TypeGuard[KVCacheLayoutType]:
    """Whether `value` names a layout."""
    return isinstance(value, str) and value in ("NHD", "HND")


def set_kv_cache_layout(layout: KVCacheLayoutType | None) -> KVCacheLayoutType | None:
    """Set the layout for all threads and tasks of this process, as the environment variable does; None clears it.

    The last call wins. It changes the plans made afterwards, and no plan or runtime that exists.

    Returns:
        The layout set before, to restore it in a `finally`; None if none was set.

    Raises:
        LayoutError: `layout` is not NHD or HND; the one set before stays.
    """
    global _override
    checked = None if layout is None else check_kv_cache_layout("layout", layout)
    # A swap, so that of two threads each gets the value that its own call replaced.
    with _LOCK:
        former, _override = _override, checked
    return former


def requested_kv_cache_layout() -> KVCacheLayoutType | None:
    """The first of: the layout set here, ATTNPLUG_KV_CACHE_LAYOUT, None.

    Raises:
        LayoutError: the variable is not NHD or HND.
    """
    override = _override
    if override is not None:
        return override
    environment = os.environ.get(_VARIABLE)
    return check_kv_cache_layout(_VARIABLE, environment) if environment else None


def get_kv_cache_layout(required: str | None = None) -> KVCacheLayoutType:
    """The first of: the layout set here, ATTNPLUG_KV_CACHE_LAYOUT, `required`, NHD.

    Args:
        required: the layout that the chosen backends require, if any.

    Raises:
        LayoutError: a value is not NHD or HND; the error names its source.
    """
    requested = requested_kv_cache_layout()
    if requested is not None:
        return requested
    return "NHD" if required is None else check_kv_cache_layout("required", required)


def check_kv_cache_layout(source: str, value: object) -> KVCacheLayoutType:
    """`value`, if it names a layout; LayoutError with its source if not."""
    if not is_valid_kv_cache_layout(value):
        raise LayoutError(source, value, "must be NHD or HND")
    return value


def planned_caches(decisions: Mapping[str, Decision]) -> dict[str, KVCacheSpec]:
    """The cache of each layer that has one, with the block size decided for it."""
    caches = ((name, kv_cache_spec_for(d.spec, d.block_size or 1)) for name, d in decisions.items())
    return {name: cache for name, cache in caches if cache is not None}


def with_equal_pages(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """The decisions with larger blocks where the kinds of a hybrid model have pages of different bytes.

    Raises:
        LayoutError: only far larger blocks have equal bytes, or a backend does not read these; it names layer and
            backend.
    """
    planned = dict(decisions)
    caches = planned_caches(decisions)
    if len({cache.page_size_bytes for cache in caches.values()}) <= 1:
        return planned
    for name, cache in _unified(caches, decisions).items():
        decision, size = decisions[name], cache.block_size
        if size == decision.block_size:
            continue
        backend = decision.get_backend_cls()
        allowed = answer(backend, "get_supported_kernel_block_sizes", decision.spec, decision.device)
        given = decision.spec.block_size
        # A block size that the spec fixes is never changed, even if the backend reads the larger one.
        if given is not None or not reads_blocks(backend, size, decision.spec, decision.device):
            taken = f"its spec fixes {given}" if given else f"which reads {', '.join(map(str, allowed))}"
            limit = f"is what pages of equal bytes ask of layer {name} on {decision.backend}, {taken}"
            remedy = "give the layers block sizes with equal page bytes"
            raise LayoutError("block_size", size, limit, remedy)
        planned[name] = dataclasses.replace(decision, block_size=size)
    return planned


def _unified(caches: Mapping[str, KVCacheSpec], decisions: Mapping[str, Decision]) -> dict[str, KVCacheSpec]:
    try:
        return unify_page_sizes(caches)
    except LayoutError as error:
        kinds: dict[int, str] = {}
        for name, cache in caches.items():
            page, decision = cache.page_size_bytes, decisions[name]
            whose = f"layer {name} ({decision.backend}, block_size={decision.block_size})"
            kinds.setdefault(page, f"{page} of {whose}")
        limit = f"{error.limit}; found {', '.join(kinds.values())}"
        raise LayoutError(error.field, error.value, limit, error.remedy) from None


def with_layout(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """The decisions with the KV layout that the user set, or else each with its own.

    Raises:
        LayoutError: the backend of a layer cannot read the layout; it names both.
    """
    planned = dict(decisions)
    # Read once, because another thread may set another layout before the last layer is planned.
    requested = requested_kv_cache_layout()
    for name, decision in decisions.items():
        if decision.kv_cache_layout is None:
            continue
        layout = requested or check_kv_cache_layout("required", decision.kv_cache_layout)
        readable = answer(decision.get_backend_cls(), "supported_kv_cache_layouts")
        if layout not in readable:
            limit = f"cannot be read by {decision.backend} (layer {name}), which takes {', '.join(readable)}"
            remedy = "clear ATTNPLUG_KV_CACHE_LAYOUT and set_kv_cache_layout, or ask for another backend"
            raise LayoutError("kv_cache_layout", layout, limit, remedy)
        planned[name] = dataclasses.replace(decision, kv_cache_layout=layout)
    return planned


def other_pages(chosen: Mapping[str, Decision], planned: Mapping[str, Decision]) -> tuple[str, ...]:
    """A note for each backend that was chosen by times with other pages than those that the plan gives it."""
    notes: dict[tuple[str | None, str, str], str] = {}
    for name, decision in planned.items():
        before = chosen.get(name)
        if decision.measured is None or before is None or before.backend != decision.backend:
            continue
        old, new = (f"{each.block_size} tokens in {each.kv_cache_layout}" for each in (before, decision))
        if old != new:
            text = f"{decision.backend} was measured with pages of {old}; the plan gives layer {name} pages of {new}"
            remedy = f"attnplug tune --block-size {decision.block_size} measures these"
            notes.setdefault((decision.backend, old, new), f"{text}; {remedy}")
    return tuple(notes.values())
