"""Counts of tokens by request, as an engine gives them: checked, and in the order of the requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnplug.core.errors import BatchError
from attnplug.runtime.arguments import integer

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
    if counts.dtype.kind == "u" and counts.max(initial=0) > _INT64_MAX:
        raise BatchError(field, int(counts.max()), f"must not pass {_INT64_MAX}")
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
