"""The physical layout of KV pages that a plan uses by default."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Literal, TypeAlias, TypeGuard

from attnplug.core.errors import LayoutError

KVCacheLayoutType: TypeAlias = Literal["NHD", "HND"]
"""The order inside a page: token, head, element; or head, token, element."""

_VARIABLE = "ATTNPLUG_KV_CACHE_LAYOUT"
_OVERRIDE: ContextVar[KVCacheLayoutType | None] = ContextVar("attnplug_kv_cache_layout", default=None)


def is_valid_kv_cache_layout(value: object) -> TypeGuard[KVCacheLayoutType]:
    """Whether `value` names a layout."""
    return isinstance(value, str) and value in ("NHD", "HND")


def set_kv_cache_layout(layout: KVCacheLayoutType | None) -> None:
    """Set the layout for this context (thread or task); None clears it.

    Raises:
        LayoutError: `layout` is not NHD or HND.
    """
    _OVERRIDE.set(None if layout is None else _checked("layout", layout))


def get_kv_cache_layout(required: str | None = None) -> KVCacheLayoutType:
    """The first of: the layout set here, ATTNPLUG_KV_CACHE_LAYOUT, `required`, NHD.

    Args:
        required: the layout that the chosen backends require, if any.

    Raises:
        LayoutError: a value is not NHD or HND; the error names its source.
    """
    override = _OVERRIDE.get()
    if override is not None:
        return override
    environment = os.environ.get(_VARIABLE)
    if environment:
        return _checked(_VARIABLE, environment)
    return "NHD" if required is None else _checked("required", required)


def _checked(source: str, value: object) -> KVCacheLayoutType:
    if not is_valid_kv_cache_layout(value):
        raise LayoutError(source, value, "must be NHD or HND")
    return value
