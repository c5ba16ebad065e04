"""The limits of a builder of steps: sizes that its buffers can have, and groups that it knows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheSpec
from attnplug.runtime.arguments import instance, integers, listed
from attnplug.runtime.block_numbers import INT32_MAX
from attnplug.runtime.mm_prefix import MMPrefix

_MOST_ROWS = 1 << 27
_MOST_ENTRIES = 1 << 32
"""Of all block tables: 16 GiB on the host."""


def check_sizes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_sizes: Sequence[int],
    num_blocks: int | None,
    thresholds: Sequence[int],
    sparse_topk: int,
    max_encoder_len: int,
    has_cross_groups: bool,
    specs: Sequence[KVCacheSpec],
) -> None:
    """Refuse sizes for which a builder has no buffers; `thresholds` are in ascending order.

    Raises:
        BatchError: a size is out of range, or specs have other block sizes.
    """
    if thresholds and thresholds[0] < 1:
        raise BatchError("reorder_batch_thresholds", thresholds, "must be query lengths of at least 1")
    sizes = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "block_sizes": min(block_sizes, default=0),
        "num_blocks": 1 if num_blocks is None else num_blocks,
    }
    for name, value in (*sizes.items(), ("block_sizes", max(block_sizes, default=0))):
        if not 1 <= value <= INT32_MAX:
            raise BatchError(name, value, f"must be in 1 .. {INT32_MAX}")
    rows = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs * max_encoder_len": max_num_seqs * max_encoder_len,
    }
    for name, value in rows.items():
        if value > _MOST_ROWS:
            limit = f"must be at most {_MOST_ROWS}"
            raise BatchError(name, value, limit, "buffers have an entry for each of them")
    sizes_of_specs = tuple(spec.block_size for spec in specs)
    if specs and sizes_of_specs != tuple(block_sizes):
        limit = f"must have the block sizes {tuple(block_sizes)}"
        raise BatchError("kv_cache_specs", sizes_of_specs, limit)
    if not 0 <= sparse_topk <= INT32_MAX:
        raise BatchError("sparse_topk", sparse_topk, f"must be in 0 .. {INT32_MAX}")
    if has_cross_groups and not 1 <= max_encoder_len <= INT32_MAX:
        limit = f"must be in 1 .. {INT32_MAX} with cross_groups"
        raise BatchError("max_encoder_len", max_encoder_len, limit)
    if max_encoder_len and not has_cross_groups:
        raise BatchError("max_encoder_len", max_encoder_len, "is for builders with cross_groups")


def check_entries(entries: int, max_num_seqs: int, max_model_len: int) -> None:
    """BatchError if block tables of so many entries are too large."""
    if entries > _MOST_ENTRIES:
        limit = f"needs block tables of {entries} entries with max_model_len={max_model_len}; the limit is {_MOST_ENTRIES}"
        raise BatchError("max_num_seqs", max_num_seqs, limit, "lower one of them, or use larger blocks")


def spans_of(mm_prefix: bool, modalities: Collection[str] | None, longest: int) -> MMPrefix | None:
    """The spans of layers with mm_prefix; None without such layers."""
    instance("mm_prefix", mm_prefix, bool)
    if modalities is None:
        return MMPrefix(None, longest) if mm_prefix else None
    names = [
        instance("mm_prefix_modalities", name, str)
        for name in listed("mm_prefix_modalities", modalities, "names")
    ]
    if not mm_prefix:
        raise BatchError("mm_prefix_modalities", sorted(names), "is for builders of layers with mm_prefix")
    return MMPrefix(names, longest)


def numbers(field: str, given: object, what: str, most: int) -> frozenset[int]:
    """`given` as a set of integers below `most`; BatchError for anything else."""
    found = frozenset(integers(field, given))
    if not found <= set(range(most)):
        raise BatchError(field, sorted(found), f"must be indices of {most} {what}")
    return found
