"""Bring a running batch into the order decode, extend, prefill with as few swaps as possible."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attnplug.core.batch.host import check_count
from attnplug.core.errors import BatchError

_DECODE, _EXTEND, _PREFILL = range(3)


class InputBatch(Protocol):
    """An engine's running batch: R requests in rows that can be swapped."""

    @property
    def req_ids(self) -> Sequence[str]:
        """The request in each row."""
        ...

    @property
    def num_computed_tokens_cpu(self) -> npt.NDArray[Any]:
        """Tokens whose K and V are cached, per row; rows past R are not read."""
        ...

    def swap_states(self, i1: int, i2: int, /) -> None:
        """Exchange everything in two rows."""


class SchedulerOutput(Protocol):
    """The tokens that the scheduler wants in the step."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """New tokens of each request."""
        ...


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: InputBatch, scheduler_output: SchedulerOutput, decode_threshold: int = 1
) -> bool:
    """Swap rows until decodes come first, then extends, then prefills; whether any was swapped.

    A decode has at most `decode_threshold` tokens scheduled and something computed, an extend more
    and something computed, a prefill nothing computed. Rows that are in their region stay, and the
    swaps are the fewest possible.

    Raises:
        BatchError: a request without scheduled tokens, or rows without a number of computed ones.
    """
    region = _regions(input_batch, scheduler_output, decode_threshold)
    counts = np.bincount(region, minlength=3)
    target = np.repeat(np.arange(3, dtype=region.dtype), counts)
    if (region == target).all():
        return False
    # misplaced[a, b]: rows of region a that hold a request of region b.
    misplaced = {
        (a, b): np.flatnonzero((target == a) & (region == b)).tolist()
        for a in range(3)
        for b in range(3)
        if a != b
    }
    for a, b in ((_DECODE, _EXTEND), (_DECODE, _PREFILL), (_EXTEND, _PREFILL)):
        one, other = misplaced[a, b], misplaced[b, a]
        while one and other:  # one swap puts two requests in place
            input_batch.swap_states(one.pop(), other.pop())
    # The other requests are in circles through all three regions, and a circle takes two swaps.
    for a, b, c in ((_DECODE, _EXTEND, _PREFILL), (_DECODE, _PREFILL, _EXTEND)):
        for holds_b, holds_c, holds_a in zip(misplaced[a, b], misplaced[b, c], misplaced[c, a], strict=True):
            input_batch.swap_states(holds_b, holds_a)
            input_batch.swap_states(holds_a, holds_c)
    return True


def _regions(
    input_batch: InputBatch, scheduler_output: SchedulerOutput, decode_threshold: int
) -> npt.NDArray[np.int8]:
    check_count("decode_threshold", decode_threshold, 0)
    for field, given, names in (
        ("input_batch", input_batch, ("req_ids", "num_computed_tokens_cpu", "swap_states")),
        ("scheduler_output", scheduler_output, ("num_scheduled_tokens",)),
    ):
        for name in names:
            if not hasattr(given, name):
                raise BatchError(field, given, f"has no {name}")
    req_ids, by_request = input_batch.req_ids, scheduler_output.num_scheduled_tokens
    if not isinstance(req_ids, Sequence) or isinstance(req_ids, (str, bytes)):
        raise BatchError("req_ids", req_ids, "must be a sequence of request names")
    if not isinstance(by_request, Mapping):
        raise BatchError("num_scheduled_tokens", by_request, "must be a mapping of requests to tokens")
    try:
        counts = [by_request[req_id] for req_id in req_ids]
    except (KeyError, TypeError):
        missing = next(
            req_id for req_id in req_ids if not isinstance(req_id, Hashable) or req_id not in by_request
        )
        raise BatchError("req_ids", missing, "has no num_scheduled_tokens") from None
    for req_id, count in zip(req_ids, counts, strict=True):
        if type(count) is not int or not 0 <= count < 1 << 63:
            check_count(f"num_scheduled_tokens[{req_id!r}]", count, 0)
    scheduled = np.array(counts, dtype=np.int64)
    given_computed = input_batch.num_computed_tokens_cpu
    if not isinstance(given_computed, np.ndarray) or given_computed.dtype.kind not in "iu":
        raise BatchError("num_computed_tokens_cpu", given_computed, "must be a numpy array of integers")
    computed = given_computed[: len(req_ids)]
    if computed.min(initial=0) < 0:
        raise BatchError("num_computed_tokens_cpu", int(computed.min()), "must be at least 0")
    if computed.shape != scheduled.shape:
        raise BatchError("num_computed_tokens_cpu", computed.shape, f"must have {len(req_ids)} rows or more")
    region = (scheduled > decode_threshold).astype(np.int8)
    region[computed == 0] = _PREFILL
    return region
