"""How a request's KV is shared among the ranks of decode context parallelism."""

from __future__ import annotations

import torch

from attnplug.core.batch.host import check_count
from attnplug.core.errors import BatchError


def get_dcp_local_seq_lens(
    seq_lens: torch.Tensor,
    dcp_size: int = 1,
    dcp_rank: int | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> torch.Tensor:
    """How many of each request's tokens a rank holds, where runs of tokens go round the ranks.

    Args:
        seq_lens: lengths `[R]`, on any device; on the host they are checked.
        dcp_size: how many ranks there are.
        dcp_rank: the rank asked for; None asks for all.
        cp_kv_cache_interleave_size: tokens in a run.

    Returns:
        int32 `[R]` for one rank or where there is only one, else `[R, dcp_size]`; the ranks' counts
        sum to the length.

    Raises:
        BatchError: sizes below 1, a rank that there is not, lengths that are no tensor or negative.
    """
    check_count("dcp_size", dcp_size, 1)
    check_count("cp_kv_cache_interleave_size", cp_kv_cache_interleave_size, 1)
    if not isinstance(seq_lens, torch.Tensor):
        raise BatchError("seq_lens", type(seq_lens).__name__, "must be a tensor of lengths")
    if seq_lens.ndim != 1:
        raise BatchError("seq_lens", tuple(seq_lens.shape), "must have one dimension")
    if seq_lens.device.type == "cpu" and seq_lens.numpy().min(initial=0) < 0:
        raise BatchError("seq_lens", int(seq_lens.min()), "must be at least 0")
    lengths = seq_lens.to(torch.int32)
    offset: torch.Tensor | int
    if dcp_rank is None and dcp_size > 1:
        lengths = lengths[:, None]
        offset = torch.arange(dcp_size, dtype=torch.int32, device=seq_lens.device)
        offset *= cp_kv_cache_interleave_size
    else:
        rank = 0 if dcp_rank is None else dcp_rank
        if not 0 <= rank < dcp_size:
            raise BatchError("dcp_rank", rank, f"must be in 0 .. {dcp_size - 1}, dcp_size being {dcp_size}")
        offset = rank * cp_kv_cache_interleave_size
    rounds = lengths // (cp_kv_cache_interleave_size * dcp_size)
    left = lengths - rounds * (cp_kv_cache_interleave_size * dcp_size)
    return rounds * cp_kv_cache_interleave_size + (left - offset).clamp(0, cp_kv_cache_interleave_size)
