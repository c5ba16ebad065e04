"""Block numbers as an engine gives them: checked, and as an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attnplug.core.errors import BatchError

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
