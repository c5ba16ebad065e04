"""A batch as the host sees it: numpy views that share memory, checked, and never copied from a device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import integer, unusual_form
from attnplug.core.errors import BatchError
from attnplug.core.metadata import OPTIONAL_ROWS, CommonAttentionMetadata

_MOST = 2**63 - 1
IntArray = npt.NDArray[Any]
"""A one-dimensional array of some integer type."""
_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8))


def check_count(field: str, value: object, least: int) -> None:
    """BatchError unless `value` is an integer of at least `least`."""
    if type(value) is not int or not least <= value <= _MOST:
        limit = f"must be an integer of at least {least}"
        if not least <= integer(field, value, limit) <= _MOST:
            raise BatchError(field, value, f"{limit} and at most {_MOST}")


def host_view(field: str, tensor: torch.Tensor) -> IntArray:
    """The memory of a host tensor of integers as numpy.

    Raises:
        BatchError: the tensor is on a device; reading it would wait for the device. Or it is not a tensor of integers.
    """
    if not isinstance(tensor, torch.Tensor) or unusual_form(tensor):
        raise BatchError(field, tensor, "must be a tensor of integers")
    if tensor.device.type != "cpu":
        raise BatchError(field, str(tensor.device), "must be on the host: a copy would wait for the device")
    # torch.tensor([]) is of floats.
    if tensor.dtype not in _INTEGERS and tensor.numel():
        raise BatchError(f"{field}.dtype", tensor.dtype, "must be an integer type")
    return exact_integers(field, tensor.numpy())


def exact_integers(field: str, array: IntArray) -> IntArray:
    """`array`, as int64 if its integers are narrow or have no sign: sums and differences of these would wrap.

    Raises:
        BatchError: a number past int64.
    """
    kind, size = array.dtype.kind, array.dtype.itemsize
    if (kind == "i" and size >= 4) or kind not in "iu":
        return array
    if size == 8 and array.size and int(array.max()) > _MOST:
        raise BatchError(field, int(array.max()), f"must be at most {_MOST}")
    return array.astype(np.int64)


def query_spans(common: CommonAttentionMetadata) -> tuple[IntArray, IntArray]:
    """Start locations `[R + 1]` and query lengths `[R]` of a batch.

    Raises:
        BatchError: start locations that are not R + 1, do not start at 0, decrease, or go past
            `num_actual_tokens`.
    """
    if not isinstance(common, CommonAttentionMetadata):
        raise BatchError("common_attn_metadata", common, "must be a CommonAttentionMetadata")
    for name in ("num_reqs", "num_actual_tokens"):
        check_count(name, getattr(common, name), 0)
    starts = host_view("query_start_loc_cpu", common.query_start_loc_cpu)
    if starts.shape != (common.num_reqs + 1,):
        raise BatchError("query_start_loc_cpu", starts.shape, f"must be of shape ({common.num_reqs + 1},)")
    if common.num_actual_tokens == common.num_reqs:
        decodes, ones = _one_each(common.num_reqs)
        # Both have as many bytes, and `startswith` compares them without a copy.
        if starts.dtype == np.int32 and starts.flags.c_contiguous and decodes.startswith(starts.data):
            return starts, ones
    # Compared before they are subtracted: a difference of two int32 numbers may wrap.
    if (falls := starts[1:] < starts[:-1]).any():
        row = int(falls.argmax())
        length = int(starts[row + 1]) - int(starts[row])
        raise BatchError("query_start_loc_cpu", length, f"is the length of request {row}; least is 0")
    lengths = starts[1:] - starts[:-1]
    if starts[0] != 0 or starts[-1] > common.num_actual_tokens:
        found, limit = (
            (int(starts[0]), int(starts[-1])),
            f"must go from 0 to at most {common.num_actual_tokens}",
        )
        raise BatchError("query_start_loc_cpu", found, f"{limit}, num_actual_tokens")
    return starts, lengths


@functools.lru_cache(maxsize=64)
def _one_each(num_reqs: int) -> tuple[bytes, IntArray]:
    # Cached, because steps of decodes have one query in each request, and come most often.
    ones = np.ones(num_reqs, dtype=np.int32)
    # All callers get this one array.
    ones.flags.writeable = False
    return np.arange(num_reqs + 1, dtype=np.int32).tobytes(), ones


def is_one_each(lengths: IntArray) -> bool:
    """Whether `query_spans` found one query in each request; False also for lengths from elsewhere."""
    return lengths is _one_each(lengths.size)[1]


def known_seq_lens(common: CommonAttentionMetadata) -> IntArray | None:
    """Sequence lengths `[R]` that the host knows exactly, or None.

    Raises:
        BatchError: not one length for each request.
    """
    field = "seq_lens"
    if common.seq_lens_host is not None and common.seq_lens_host_exact:
        field, lengths = "seq_lens_host", common.seq_lens_host
        if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "iu":
            raise BatchError(field, lengths, "must be a numpy array of integers")
        lengths = exact_integers(field, lengths)
    elif common._seq_lens_cpu is not None:
        lengths = host_view("_seq_lens_cpu", common._seq_lens_cpu)
    elif not isinstance(common.seq_lens, torch.Tensor) or common.seq_lens.device.type == "cpu":
        lengths = host_view(field, common.seq_lens)
    else:
        return None
    if lengths.shape != (common.num_reqs,):
        raise BatchError(field, lengths.shape, f"must be of shape ({common.num_reqs},)")
    return lengths


def exact_seq_lens(
    common: CommonAttentionMetadata, query_lens: IntArray, *, keyless: bool = False
) -> IntArray:
    """Sequence lengths `[R]`, none of them shorter than the request's query.

    Args:
        common: the batch.
        query_lens: new tokens of each request, `[R]`.
        keyless: whether a request may also have length 0; its queries, if any, then see nothing.

    Raises:
        BatchError: lengths that the host does not know exactly, that are ragged or too short.
    """
    lengths = known_seq_lens(common)
    if lengths is None:
        found = None if common.seq_lens_host is None else "an upper bound"
        remedy = "give the batch exact seq_lens_host"
        raise BatchError("seq_lens_host", found, "must be exact: a copy would wait for the device", remedy)
    short = lengths < query_lens
    if short.any():
        short &= not keyless or lengths != 0
        if not short.any():
            return lengths
        row = int(short.argmax())
        limit = f"of request {row} must be at least its query length {int(query_lens[row])}"
        raise BatchError("seq_lens", int(lengths[row]), limit)
    return lengths


def to_device(array: IntArray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`: shared memory on the host, else a copy that nobody waits for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # From memory that is not pinned, the copy itself would wait.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def optional_rows(
    common: CommonAttentionMetadata, requests: slice | IntArray, tokens: slice | IntArray
) -> dict[str, Any]:
    """The optional inputs of these requests and tokens by field, where the batch has them.

    Slices give views, and int64 indices copies. Inputs without a row for each request or token are left out: start
    locations of keys, and wanted logits.
    """
    found: dict[str, Any] = {}
    for name, per in OPTIONAL_ROWS.items():
        value = getattr(common, name)
        if value is None:
            continue
        rows = requests if per == "request" else tokens
        if isinstance(rows, slice) or isinstance(value, np.ndarray):
            found[name] = value[rows]
        else:
            where = value.device if isinstance(value, torch.Tensor) else value.counts.device
            found[name] = value[to_device(rows, where)]
    return found
