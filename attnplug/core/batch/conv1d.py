"""Which program of a short causal convolution takes which tokens, in hybrid models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnplug.core.arguments import checked, torch_device
from attnplug.core.batch.host import host_view, to_device
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID

_BLOCK_M = 8
"""Tokens per program."""
# As in vLLM, so that the tensors of most batches have one size.
_LEAST_PROGRAMS = 1024


@checked(device=torch_device)
def compute_causal_conv1d_metadata(
    query_start_loc: torch.Tensor, *, device: torch.device | None = None
) -> tuple[dict[int, dict[str, Any]], torch.Tensor, torch.Tensor]:
    """The programs of 8 tokens that a batch needs, request after request.

    Args:
        query_start_loc: start locations `[R + 1]`, on the host.
        device: where the two tensors go; default the host.

    Returns:
        nums_dict, batch_ptr and token_chunk_offset_ptr. Both tensors are int32 on `device`, of
        2 * max(1024, programs) elements, -1 past the programs: the request of each program, and its
        index within the request. `nums_dict[8]` has them by their names. It also has values on the host:
        `nums` (programs per request), `tot` and `mlist_len` (programs in all), `mlist` and `offsetlist` (the
        tensors' values without padding, int32).

    Raises:
        BatchError: start locations on a device, of another shape than `[R + 1]`, or that decrease.
    """
    starts = host_view("query_start_loc", query_start_loc)
    if starts.ndim != 1 or not starts.size:
        raise BatchError("query_start_loc", starts.shape, "must be of shape (R + 1,)")
    if starts[0]:
        raise BatchError("query_start_loc", int(starts[0]), "must begin with 0")
    if (falls := starts[1:] < starts[:-1]).any():
        row = int(falls.argmax())
        length = int(starts[row + 1]) - int(starts[row])
        raise BatchError("query_start_loc", length, f"is the length of request {row}; least is 0")
    lengths = starts[1:] - starts[:-1]
    nums = -(-lengths // _BLOCK_M)
    ends = nums.cumsum()
    total = int(ends[-1]) if ends.size else 0

    # One array of both, so that one copy sends them.
    padded = np.full((2, 2 * max(_LEAST_PROGRAMS, total)), PAD_SLOT_ID, dtype=np.int32)
    mlist, offsetlist = padded[0, :total], padded[1, :total]
    mlist[:] = np.repeat(np.arange(nums.size, dtype=np.int32), nums)
    np.subtract(np.arange(total), (ends - nums)[mlist], out=offsetlist, casting="unsafe")
    batch_ptr, token_chunk_offset_ptr = to_device(padded, torch.device("cpu") if device is None else device)
    of_eight = {
        "nums": torch.from_numpy(nums),
        "tot": total,
        "mlist": torch.from_numpy(mlist),
        "mlist_len": total,
        "offsetlist": torch.from_numpy(offsetlist),
        "batch_ptr": batch_ptr,
        "token_chunk_offset_ptr": token_chunk_offset_ptr,
    }
    return {_BLOCK_M: of_eight}, batch_ptr, token_chunk_offset_ptr
