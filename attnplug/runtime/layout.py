"""The physical layout of KV pages that a plan uses by default."""

from __future__ import annotations

import os
import threading
from typing import Literal, TypeAlias, TypeGuard

from attnplug.core.errors import LayoutError

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
