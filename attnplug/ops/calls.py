"""The former name of `attnplug.ops.checks`, which plugins of interface 1 import."""

from __future__ import annotations

from attnplug.ops.checks import (
    check_cache as check_cache,
    check_cache_given as check_cache_given,
    check_keys as check_keys,
    check_queries as check_queries,
    check_rows as check_rows,
    kv_scales as kv_scales,
    pages_of as pages_of,
    refuse_output_scales as refuse_output_scales,
)
