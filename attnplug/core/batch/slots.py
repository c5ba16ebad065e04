"""Where new tokens' K and V go: the slots of a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, overload

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import flag
from attnplug.core.batch.context_parallel import local_offsets
from attnplug.core.batch.host import IntArray, check_count, exact_integers
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID

_MOST = 2**63 - 1
_APART = "must not overlap itself: each slot is written to an element of its own"
Slots = npt.NDArray[np.int64]


def is_block_tables_empty(block_tables: object) -> TypeGuard[Mapping[Any, None] | None]:
    """Whether there are no tables yet, as while memory is profiled: None, or a mapping to only None."""
    if block_tables is None:
        return True
    return isinstance(block_tables, Mapping) and all(table is None for table in block_tables.values())


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """The first position of a request that needs a slot: past what a prompt's window will never see.

    Args:
        is_prompt: whether the request's prompt is being computed.
        query_len: its new tokens.
        context_len: its computed tokens; they do not change where it starts.
        sliding_window: W keys including the query's own, or None.

    Raises:
        BatchError: a count that is not an integer, or is negative.
    """
    is_prompt = flag("is_prompt", is_prompt)
    for field, count in (("query_len", query_len), ("context_len", context_len)):
        check_count(field, count, 0)
    if sliding_window is not None:
        check_count("sliding_window", sliding_window, 1)
    if not is_prompt or sliding_window is None:
        return 0
    return max(0, query_len - sliding_window)


@overload
def compute_slot_mapping(
    block_table: IntArray | Mapping[Any, None] | None,
    num_computed_tokens: IntArray,
    num_new_tokens: IntArray,
    block_size: int,
    *,
    start_idx: IntArray | None = None,
    num_tokens: int | None = None,
    out: Slots | None = None,
    context_parallel: ContextParallel | None = None,
) -> Slots: ...


@overload
def compute_slot_mapping(
    block_table: torch.Tensor | Mapping[Any, None] | None,
    num_computed_tokens: torch.Tensor,
    num_new_tokens: torch.Tensor,
    block_size: int,
    *,
    start_idx: torch.Tensor | None = None,
    num_tokens: int | None = None,
    out: torch.Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> torch.Tensor: ...


def compute_slot_mapping(
    block_table: Any,
    num_computed_tokens: Any,
    num_new_tokens: Any,
    block_size: int,
    *,
    start_idx: Any = None,
    num_tokens: int | None = None,
    out: Any = None,
    context_parallel: ContextParallel | None = None,
) -> Any:
    """The slot of every new token, request after request: `table[p // block] * block + p % block`.

    Inputs are numpy arrays or tensors of any integer type, all of one kind. Host tensors are
    computed in numpy; on a device nothing waits and values are not checked.

    Args:
        block_table: `[R, max_blocks]`; with none yet (`is_block_tables_empty`) every slot is -1.
        num_computed_tokens: `[R]`; request i has new positions from here on.
        num_new_tokens: `[R]`.
        block_size: tokens per KV page.
        start_idx: `[R]`: positions before it get -1; see `compute_slot_mapping_start_idx`.
        num_tokens: slots to give, those past the new tokens being -1; default as many as there are
            new tokens. Required on a device, where they cannot be counted without waiting.
        out: int64, at least `num_tokens` long: the slots are written to its front.
        context_parallel: the rank whose slots are given. An entry of the table then covers `block_size` tokens of
            each rank, and tokens of other ranks get -1.

    Returns:
        int64 `[num_tokens]`; a view of `out` where it is given.

    Raises:
        BatchError: a list or another kind of input than num_new_tokens, ragged or negative counts, a
            position past the table's width, `num_tokens` or `out` too small. Also for an interleave that does not
            divide the block size.
    """
    check_count("block_size", block_size, 1)
    if num_tokens is not None:
        check_count("num_tokens", num_tokens, 0)
    place = _checked(context_parallel, block_size)
    if block_size * (1 if place is None else place.size) > _MOST:
        limit = f"times the ranks that share a block must be at most {_MOST}"
        raise BatchError("block_size", block_size, limit)
    table = None if is_block_tables_empty(block_table) else block_table
    given = (table, num_computed_tokens, num_new_tokens, start_idx, out)
    _check_kinds(given)
    _check_shapes(table, num_computed_tokens, num_new_tokens, start_idx)
    _check_dtypes(given)
    if not isinstance(num_new_tokens, torch.Tensor):
        return _on_host(block_size, num_tokens, *given, place=place)
    if num_new_tokens.device.type != "cpu":
        return _on_device(block_size, num_tokens, *given, place=place)
    views: Any = [None if part is None else part.numpy() for part in given]
    slots = _on_host(block_size, num_tokens, views[0], views[1], views[2], views[3], views[4], place)
    return torch.from_numpy(slots) if out is None else out[: slots.shape[0]]


def _checked(place: ContextParallel | None, block_size: int) -> ContextParallel | None:
    """`place` where ranks share tokens, else None; BatchError for runs that a block would cut."""
    if place is None:
        return None
    if not isinstance(place, ContextParallel):
        raise BatchError("context_parallel", place, "must be a ContextParallel or None")
    if block_size % place.interleave:
        limit = f"must divide block_size={block_size}"
        raise BatchError("context_parallel.interleave", place.interleave, limit)
    return place if place.size > 1 else None


_FIELDS = ("block_table", "num_computed_tokens", "num_new_tokens", "start_idx", "out")


def _check_kinds(given: tuple[Any, ...]) -> None:
    """All are arrays, or all are tensors; `num_new_tokens` says which."""
    new = given[_FIELDS.index("num_new_tokens")]
    if not isinstance(new, (np.ndarray, torch.Tensor)):
        raise BatchError("num_new_tokens", type(new).__name__, "must be a numpy array or a tensor")
    kind = torch.Tensor if isinstance(new, torch.Tensor) else np.ndarray
    for field, part in zip(_FIELDS, given, strict=True):
        may_be_left_out = field in ("block_table", "start_idx", "out")
        if not isinstance(part, kind) and not (part is None and may_be_left_out):
            limit = f"must be a {kind.__name__}, as num_new_tokens is"
            raise BatchError(field, type(part).__name__, limit)


_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8))


def _check_dtypes(given: tuple[Any, ...]) -> None:
    """All are integers on one device; the computed tokens are not read without a table."""
    new = given[_FIELDS.index("num_new_tokens")]
    for field, part in zip(_FIELDS, given, strict=True):
        if part is None or (given[0] is None and field == "num_computed_tokens"):
            continue
        if isinstance(part, np.ndarray):
            if part.dtype.kind not in "iu":
                raise BatchError(field, str(part.dtype), "must be of an integer type")
        elif part.dtype not in _INTEGERS or part.layout is not torch.strided:
            raise BatchError(
                field, f"{part.dtype} {part.layout}", "must be a strided tensor of an integer type"
            )
        elif part.device != new.device:
            raise BatchError(
                f"{field}.device", str(part.device), f"must be {new.device}, that of num_new_tokens"
            )


def _check_shapes(table: Any, computed: Any, new: Any, start_idx: Any) -> None:
    if new.ndim != 1:
        raise BatchError("num_new_tokens", tuple(new.shape), "must have one dimension")
    for field, counts in (("num_computed_tokens", computed), ("start_idx", start_idx)):
        if counts is not None and counts.shape != new.shape:
            limit = f"must have the shape of num_new_tokens, {tuple(new.shape)}"
            raise BatchError(field, tuple(counts.shape), limit)
    if table is not None and (table.ndim != 2 or table.shape[0] != new.shape[0]):
        raise BatchError("block_table", tuple(table.shape), f"must be of shape ({new.shape[0]}, max_blocks)")


def _on_host(
    block_size: int,
    num_tokens: int | None,
    table: IntArray | None,
    computed: IntArray,
    new: IntArray,
    start_idx: IntArray | None,
    out: Slots | None,
    place: ContextParallel | None = None,
) -> Slots:
    new = _signed("num_new_tokens", new)
    for field, counts in (("num_new_tokens", new), ("num_computed_tokens", computed)):
        if counts.size and counts.min() < 0:
            row = int(counts.argmin())
            raise BatchError(field, int(counts[row]), f"of request {row} must be at least 0")
    total = _sum(new)
    slots = _slots_for(total if num_tokens is None else num_tokens, total, out)
    if table is None or not total:
        slots[:] = PAD_SLOT_ID
        return slots
    rows, positions = _positions(_signed("num_computed_tokens", computed), new, total)
    covered = block_size if place is None else block_size * place.size
    blocks = positions // covered
    width = table.shape[1]
    last = blocks.argmax()
    if blocks[last] >= width:
        limit = f"of request {int(rows[last])} is past its table: {width} blocks of {covered} tokens"
        raise BatchError("position", int(positions[last]), limit)
    pages = table.take(rows * width + blocks) if table.flags.c_contiguous else table[rows, blocks]
    pages, written = _signed("block_table", pages), slots[:total]
    if pages.min() < 0:
        at = int(pages.argmin())
        limit = f"is the block of position {int(positions[at])} of request {int(rows[at])}; least is 0"
        raise BatchError("block_table", int(pages[at]), limit)
    _check_product(block_size, pages)
    if place is None:
        # block * block_size + position - position // block_size * block_size, in 64 bits
        np.subtract(pages, blocks, out=written, dtype=np.int64)
        written *= block_size
        written += positions
    else:
        np.multiply(pages, block_size, out=written, dtype=np.int64)
        offsets = local_offsets(positions, blocks, block_size, place)
        written += offsets
        written[offsets < 0] = PAD_SLOT_ID
    if start_idx is not None:
        written[positions < start_idx[rows]] = PAD_SLOT_ID
    slots[total:] = PAD_SLOT_ID
    return slots


def _signed(field: str, array: IntArray) -> IntArray:
    # Integers without a sign become int64: together with signed ones numpy makes floats of them.
    if array.dtype.kind not in "iu":
        raise BatchError(field, str(array.dtype), "must be of an integer type")
    return exact_integers(field, array)


def _sum(counts: IntArray) -> int:
    """The sum of `counts`, at least 0 each, also where it does not fit 64 bits."""
    if counts.dtype.itemsize < 8 or not counts.size or int(counts.max()) <= _MOST // counts.size:
        return int(counts.sum())
    # Integers of Python do not wrap.
    return sum(counts.tolist())


def _check_product(block_size: int, pages: IntArray) -> None:
    """BatchError if a page of these has slots past int64."""
    largest = _MOST // block_size - 1
    # Pages of int32 are multiplied without a look at them unless blocks are of 4 G tokens.
    if largest < np.iinfo(pages.dtype).max and int(pages.max()) > largest:
        limit = f"must be at most {largest}: slots of blocks of {block_size} tokens would pass {_MOST}"
        raise BatchError("block_table", int(pages.max()), limit)


def _slots_for(num_tokens: int, total: int, out: Slots | None) -> Slots:
    if num_tokens < total:
        raise BatchError("num_tokens", num_tokens, f"must be at least {total}, the number of new tokens")
    if out is None:
        try:
            return np.empty(num_tokens, dtype=np.int64)
        except (MemoryError, ValueError):
            raise BatchError("num_tokens", num_tokens, "is more slots than memory holds") from None
    if out.dtype != np.int64 or out.ndim != 1 or out.shape[0] < num_tokens:
        limit = f"must be int64 with at least {num_tokens} elements"
        raise BatchError("out", f"{out.dtype} {out.shape}", limit)
    if not out.flags.writeable:
        raise BatchError("out", "read-only", "must be an array that can be written", "pass one of its own")
    if out.size > 1 and abs(out.strides[0]) < out.itemsize:
        raise BatchError("out", f"strides {out.strides}", _APART, "pass one of its own")
    return out[:num_tokens]


def _positions(computed: IntArray, new: IntArray, total: int) -> tuple[IntArray, IntArray]:
    """The request and the position of each new token, int64."""
    num_reqs, each = new.shape[0], int(new[0])
    requests = np.arange(num_reqs)
    if each * num_reqs != total or (new != each).any():
        rows = requests.repeat(new)
        positions = (computed - new.cumsum() + new)[rows]
        positions += np.arange(total)
        return rows, positions
    first = computed.astype(np.int64)
    if each == 1:
        return requests, first
    return requests.repeat(each), (first[:, None] + np.arange(each)).ravel()


def _on_device(
    block_size: int,
    num_tokens: int | None,
    table: torch.Tensor | None,
    computed: torch.Tensor,
    new: torch.Tensor,
    start_idx: torch.Tensor | None,
    out: torch.Tensor | None,
    place: ContextParallel | None = None,
) -> torch.Tensor:
    if num_tokens is None:
        raise BatchError("num_tokens", None, "is required on a device: counting would wait for it")
    num_reqs = new.shape[0]
    if out is not None and (out.dtype != torch.int64 or out.ndim != 1 or out.shape[0] < num_tokens):
        limit = f"must be int64 with at least {num_tokens} elements"
        raise BatchError("out", f"{out.dtype} {tuple(out.shape)}", limit)
    if out is not None and out.shape[0] > 1 and not out.stride(0):
        raise BatchError("out", f"strides {tuple(out.stride())}", _APART, "pass one of its own")
    slots = torch.empty(num_tokens, dtype=torch.int64, device=new.device) if out is None else out[:num_tokens]
    if table is None or not num_reqs or not table.shape[1]:
        return slots.fill_(PAD_SLOT_ID)
    ends = new.cumsum(0, dtype=torch.int64)
    tokens = torch.arange(num_tokens, device=new.device)
    rows = torch.searchsorted(ends, tokens, right=True)
    padding = rows == num_reqs
    rows.clamp_(max=num_reqs - 1)
    positions = tokens + (computed - ends + new)[rows]
    blocks = positions // (block_size if place is None else block_size * place.size)
    pages = table[rows, blocks.clamp(max=table.shape[1] - 1)]
    if place is None:
        torch.sub(pages, blocks, out=slots)
        slots.mul_(block_size).add_(positions)
    else:
        offsets = local_offsets(positions, blocks, block_size, place)
        torch.add(offsets, pages, alpha=block_size, out=slots)
        padding |= offsets < 0
    if start_idx is not None:
        padding |= positions < start_idx[rows]
    return slots.masked_fill_(padding, PAD_SLOT_ID)
