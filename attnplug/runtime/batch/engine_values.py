"""Values that an engine gives: counts, block numbers and sizes, and refusals of steps that requests cannot run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnplug.core.arguments import instance, integer, integers, listed
from attnplug.core.errors import BatchError
from attnplug.runtime.batch.kv_groups import first_attended
from attnplug.runtime.batch.placeholders import MMPrefix

if TYPE_CHECKING:
    from attnplug.runtime.batch.request_rows import RequestRows
    from attnplug.runtime.batch.step_batch_builder import StepBatchBuilder

Ints: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = Mapping[str, int] | Sequence[int] | npt.NDArray[Any] | int
"""By request, in the order of the requests, or one number for all."""
_INT64_MAX = 2**63 - 1


def counts_of(field: str, given: Counts, req_ids: Collection[str], tokens: Ints | None = None) -> Ints:
    """One integer per request, in the order of `req_ids`.

    A mapping may leave out requests, which get 0; with `tokens`, only those of 0 tokens.

    Raises:
        BatchError: values that are no integers, or of other requests.
    """
    values: Any = given
    if isinstance(given, Mapping):
        if unknown := given.keys() - set(req_ids):
            raise BatchError(field, sorted(unknown, key=str), "are not in flight")
        for name, held in zip(req_ids, () if tokens is None else tokens.tolist(), strict=False):
            # With 0 or all tokens as the default, a forgotten request would go on with wrong ones.
            if held and name not in given:
                limit = f"has no count: every request with tokens needs one, and it has {held}"
                raise BatchError(field, name, limit)
        values = [given.get(name, 0) for name in req_ids]
    # numpy reads True among integers as 1, so values of other types are looked at one by one.
    try:
        if isinstance(values, (list, tuple)) and set(map(type, values)) - {int, list, tuple}:
            values = [integer(field, value) for value in values]
        counts = np.asarray(values)
    except Exception:  # noqa: BLE001  (`__array__` is code of the caller)
        raise BatchError(field, values, "must be integers, one for each request") from None
    if counts.dtype.kind not in "iu" and counts.size:
        raise BatchError(field, values, "must be integers")
    if counts.ndim and counts.shape != (len(req_ids),):
        raise BatchError(field, counts.shape, f"must be one count for each of {len(req_ids)} requests")
    # Numbers of uint64 would wrap in the conversion to int64.
    if counts.dtype.kind == "u" and counts.max(initial=0) > _INT64_MAX:
        raise BatchError(field, int(counts.max()), f"must not pass {_INT64_MAX}")
    # Without requests no later check would see the number.
    if counts.ndim == 0 and counts < 0 and not len(req_ids):
        raise BatchError(field, int(counts), "must not be negative")
    if counts.ndim == 0:
        return np.full(len(req_ids), counts, dtype=np.int64)
    return counts.astype(np.int64, copy=False)


def check_at_most(field: str, counts: Ints, most: Ints, req_ids: Sequence[str], what: str) -> None:
    """Refuse counts below 0 or above `most`; `what` says what those are, such as "scheduled tokens".

    Raises:
        BatchError: names the first such request.
    """
    bad = (counts < 0) | (counts > most)
    if bad.any():
        worst = int(bad.argmax())
        limit = f"of request {req_ids[worst]} must be in 0 .. {most[worst]}, its {what}"
        raise BatchError(field, int(counts[worst]), limit)


# Block tables, lengths and start locations are int32.
INT32_MAX = 2**31 - 1
_FEW = 64


def block_numbers(field: str, given: Any, num_blocks: int | None) -> npt.NDArray[np.int64]:
    """The numbers of blocks as int64 `[n]`.

    Args:
        field: the argument's name, for errors.
        given: a sequence, array or CPU tensor of integers.
        num_blocks: blocks of the pool; None if the pool is not known.

    Raises:
        BatchError: it is not a sequence of integers, or a number is not a block of the pool. Block tables are
            int32, so no number is larger.
    """
    last = INT32_MAX if num_blocks is None else num_blocks - 1
    # Most calls give a request one block: numpy would take longer for each of its checks than Python for all.
    is_plain = type(given) in (list, tuple) and len(given) <= _FEW and set(map(type, given)) == {int}
    if is_plain and min(given) >= 0 and max(given) <= last:
        return np.array(given, dtype=np.int64)
    try:
        blocks = np.asarray(given)
        # numpy reads True among integers as 1, so the types of a plain sequence are checked one by one.
        kinds = set() if hasattr(given, "dtype") or blocks.ndim != 1 else set(map(type, given))
    except Exception:  # noqa: BLE001  (`__array__` and `__len__` are code of the caller)
        raise _refused(field, given) from None
    if blocks.ndim != 1 or any(issubclass(kind, (bool, np.bool_)) for kind in kinds):
        raise _refused(field, given)
    if blocks.dtype.kind not in "iu" and blocks.size:
        if kinds != {int}:
            raise _refused(field, given)
        # numpy has no integer type for numbers past 64 bits, and they are past every pool.
        blocks = blocks.astype(object)
    least, most = (blocks.min(), blocks.max()) if blocks.size else (0, 0)
    if not 0 <= least <= most <= last:
        limit = f"must be in 0 .. {last}"
        if num_blocks is not None:
            limit += f", the {num_blocks} blocks of the pool"
        raise BatchError(field, int(least if least < 0 else most), limit)
    return blocks.astype(np.int64, copy=False)


def _refused(field: str, given: object) -> BatchError:
    return BatchError(field, given, "must be a sequence of block numbers")


_MOST_ROWS = 1 << 27
# Entries of all block tables are int32, so these are 16 GiB on the host.
_MOST_ENTRIES = 1 << 32


def check_sizes(made: StepBatchBuilder, sparse_topk: int) -> None:
    """Refuse sizes for which a builder has no buffers.

    Raises:
        BatchError: a size is out of range, or specs have other block sizes.
    """
    thresholds, specs = made.reorder_batch_thresholds, made.kv_cache_specs
    if thresholds and thresholds[0] < 1:
        raise BatchError("reorder_batch_thresholds", thresholds, "must be query lengths of at least 1")
    sizes = {
        "max_num_seqs": made.max_num_seqs,
        "max_num_batched_tokens": made.max_num_batched_tokens,
        "max_model_len": made.max_model_len,
        "block_sizes": min(made.block_sizes, default=0),
        "num_blocks": 1 if made.num_blocks is None else made.num_blocks,
    }
    for name, value in (*sizes.items(), ("block_sizes", max(made.block_sizes, default=0))):
        if not 1 <= value <= INT32_MAX:
            raise BatchError(name, value, f"must be in 1 .. {INT32_MAX}")
    rows = {
        "max_num_seqs": made.max_num_seqs,
        "max_num_batched_tokens": made.max_num_batched_tokens,
        "max_num_seqs * max_encoder_len": made.max_num_seqs * made.max_encoder_len,
    }
    for name, value in rows.items():
        if value > _MOST_ROWS:
            limit = f"must be at most {_MOST_ROWS}"
            raise BatchError(name, value, limit, "buffers have an entry for each of them")
    sizes_of_specs = tuple(spec.block_size for spec in specs)
    if specs and sizes_of_specs != tuple(made.block_sizes):
        limit = f"must have the block sizes {tuple(made.block_sizes)}"
        raise BatchError("kv_cache_specs", sizes_of_specs, limit)
    if not 0 <= sparse_topk <= INT32_MAX:
        raise BatchError("sparse_topk", sparse_topk, f"must be in 0 .. {INT32_MAX}")
    if made.cross_groups and not 1 <= made.max_encoder_len <= INT32_MAX:
        limit = f"must be in 1 .. {INT32_MAX} with cross_groups"
        raise BatchError("max_encoder_len", made.max_encoder_len, limit)
    if made.max_encoder_len and not made.cross_groups:
        raise BatchError("max_encoder_len", made.max_encoder_len, "is for builders with cross_groups")


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


def check_step(
    requests: RequestRows, scheduled: Ints, lengths: Ints, max_num_batched_tokens: int, max_model_len: int
) -> tuple[int, int]:
    """Refuse scheduled tokens for which the requests have no room; they are then of these lengths.

    Returns:
        The most scheduled tokens of a request, and the longest length.

    Raises:
        BatchError: see `StepBatchBuilder.step`.
    """
    largest, longest = int(scheduled.max(initial=0)), int(lengths.max(initial=0))
    names = requests.members.names
    if scheduled.min(initial=0) < 0:
        worst = int(scheduled.argmin())
        limit = f"of request {names[worst]} must not be negative"
        raise BatchError("num_scheduled_tokens", int(scheduled[worst]), limit)
    # Each within the limit keeps the sum from overflowing.
    total = largest if largest > max_num_batched_tokens else int(scheduled.sum())
    if total > max_num_batched_tokens:
        limit = f"in all must not pass max_num_batched_tokens={max_num_batched_tokens}"
        raise BatchError("num_scheduled_tokens", total, limit)
    if longest > max_model_len:
        limit = f"of request {names[int(lengths.argmax())]} is past max_model_len={max_model_len}"
        raise BatchError("seq_len", longest, limit)
    # One comparison covers all KV groups; only a refusal looks for the one at fault.
    if (lengths > requests.capacity[: lengths.size]).any():
        _refuse_short(requests, "seq_len", lengths, requests.groups.decoder)
    if requests.groups.cross:
        needed = np.where(scheduled > 0, requests.encoder_lens[: scheduled.size], 0)
        _refuse_short(requests, "encoder_len", needed, requests.groups.cross)
    _check_null_blocks(requests, scheduled, lengths)
    # The flag spares most steps this check, which reads the tables of all requests.
    if requests.holders.may_cross:
        _check_crossed(requests, scheduled, requests.computed[: scheduled.size])
    return largest, longest


def _check_null_blocks(requests: RequestRows, scheduled: Ints, lengths: Ints) -> None:
    """Refuse requests with null blocks among the pages of tokens that they attend or write."""
    reqs = scheduled.size
    if not requests.null_ends[:, :reqs].any():
        return
    for group, spec in enumerate(requests.groups.specs):
        if not requests.null_ends[group, :reqs].any():
            continue
        size = requests.groups.tokens_per_block[group]
        ends = requests.encoder_lens[:reqs] if group in requests.groups.cross else lengths
        first = first_attended(spec, requests.computed[:reqs])
        # Null blocks past the tokens do no harm, so each suspect's pages are looked at.
        for row in np.flatnonzero(
            (requests.null_ends[group, :reqs] * size > first) & (scheduled > 0)
        ).tolist():
            start, end = int(first[row]) // size, -(-int(ends[row]) // size)
            nulls = np.flatnonzero(requests.tables[group, row, start:end] == 0)
            if nulls.size:
                token = max((start + int(nulls[0])) * size, int(first[row]))
                limit = f"of request {requests.members.names[row]} in KV group {group} is null, and token {token} is attended"
                raise BatchError("block", start + int(nulls[0]), limit, "give it a block of the pool")


def _check_crossed(requests: RequestRows, scheduled: Ints, computed: Ints) -> None:
    """Refuse requests whose computed tokens are in a block that another KV group of the pool writes too."""
    reqs, groups = scheduled.size, range(len(requests.groups.block_sizes))
    held = [
        {
            block
            for row in range(reqs)
            for block in requests.tables[g, row, : requests.num_blocks[g, row]].tolist()
        }
        for g in groups
    ]
    for group in requests.groups.decoder:
        other = set().union(*(held[g] for g in groups if g != group)) - {0}
        size, spec = requests.groups.tokens_per_block[group], requests.groups.specs[group : group + 1]
        first = first_attended(spec[0], computed) if spec else np.zeros(reqs, dtype=np.int64)
        for row in np.flatnonzero((scheduled > 0) & (computed > first)).tolist():
            pages = requests.tables[group, row, first[row] // size : -(-computed[row] // size)].tolist()
            if lost := other.intersection(pages):
                limit = f"is given to another KV group too, so computed tokens of request {requests.members.names[row]} are lost"
                remedy = "give each KV group blocks of its own, because the groups share one pool"
                raise BatchError(f"block_ids[{group}]", min(lost), limit, remedy)


def check_rollback(requests: RequestRows, fewer: Ints, computed: Ints) -> None:
    """Refuse to write tokens again that other requests read in a shared block."""
    for group in requests.groups.decoder:
        size = requests.groups.tokens_per_block[group]
        first, last = fewer // size, computed // size
        for row in np.flatnonzero(first < last).tolist():
            blocks = requests.tables[group, row, first[row] : last[row]]
            shared = blocks[requests.holders.is_shared(group, blocks)]
            if shared.size:
                name = requests.members.names[row]
                limit = f"of request {name} goes back into block {shared[0]}, which another request reads"
                remedy = "share blocks after the drafts in them are verified"
                raise BatchError("num_tokens", int(computed[row] - fewer[row]), limit, remedy)


def _refuse_short(requests: RequestRows, field: str, needed: npt.NDArray[Any], groups: Iterable[int]) -> None:
    for group in groups:
        capacity = requests.num_blocks[group, : needed.size] * requests.groups.tokens_per_block[group]
        if (needed > capacity).any():
            worst = int((needed > capacity).argmax())
            name = requests.members.names[worst]
            limit = f"of request {name} is past the {capacity[worst]} tokens of its pages in KV group {group}"
            raise BatchError(field, int(needed[worst]), limit, "append_blocks first")
