"""The shares of a request's KV among the ranks of decode context parallelism."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from attnplug.core.arguments import Shape, integer
from attnplug.core.batch.host import check_count
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError

_Integers = TypeVar("_Integers", bound=Any)
"""A numpy array, or a tensor, of integers."""
_LENGTHS = Shape("R: integers")
_MOST = 2**31 - 1


def local_lengths(lengths: _Integers, place: ContextParallel) -> _Integers:
    """Tokens of each request of `lengths` tokens that a rank stores, as an array or tensor; nothing is checked."""
    run, size = place.interleave, place.size
    rounds = lengths // (run * size)
    left = lengths - rounds * (run * size) - place.rank * run
    # `clip`, because numpy arrays and tensors both have it.
    return cast("_Integers", rounds * run + left.clip(0, run))


def local_offsets(
    positions: _Integers, blocks: _Integers, block_size: int, place: ContextParallel
) -> _Integers:
    """The place inside its block of each token, whose block number in the table is `blocks`; -1 on another rank.

    Args:
        positions: in the request.
        blocks: `positions // (block_size * place.size)`.
        block_size: slots of a block on each rank.
        place: this rank's.
    """
    inside = place.local_position(positions) - blocks * block_size
    # 1 on this rank and 0 on others: the products need no branch, so arrays and tensors share the code.
    own = (place.owner(positions) == place.rank) * 1
    return cast("_Integers", inside * own + own - 1)


def get_dcp_local_seq_lens(
    seq_lens: torch.Tensor,
    dcp_size: int = 1,
    dcp_rank: int | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> torch.Tensor:
    """The number of each request's tokens on a rank, if runs of tokens go round the ranks.

    Args:
        seq_lens: lengths `[R]`, on any device; on the host they are checked.
        dcp_size: how many ranks there are.
        dcp_rank: the rank asked for; None asks for all.
        cp_kv_cache_interleave_size: tokens in a run.

    Returns:
        int32 `[R]` for one rank or where there is only one, else `[R, dcp_size]`; the ranks' counts
        sum to the length.

    Raises:
        BatchError: sizes below 1, a rank that there is not, lengths that are no tensor, negative or past int32.
    """
    check_count("dcp_size", dcp_size, 1)
    check_count("cp_kv_cache_interleave_size", cp_kv_cache_interleave_size, 1)
    if not isinstance(seq_lens, torch.Tensor):
        raise BatchError("seq_lens", type(seq_lens).__name__, "must be a tensor of lengths")
    _LENGTHS.check("seq_lens", seq_lens, {})
    if dcp_size > _MOST:
        raise BatchError("dcp_size", dcp_size, f"must be at most {_MOST}, as ranks are int32")
    if seq_lens.device.type == "cpu":
        host = seq_lens.numpy()
        if host.min(initial=0) < 0:
            raise BatchError("seq_lens", int(seq_lens.min()), "must be at least 0")
        if host.max(initial=0) > _MOST:
            raise BatchError(
                "seq_lens", int(seq_lens.max()), f"must be at most {_MOST}, as the counts are int32"
            )
    # A run past every length is the whole request.
    run = min(cp_kv_cache_interleave_size, _MOST)
    # Products with the run and the ranks may pass int32.
    lengths = seq_lens.to(torch.int32 if run * dcp_size <= _MOST else torch.int64)
    offset: torch.Tensor | int
    if dcp_rank is None and dcp_size > 1:
        lengths = lengths[:, None]
        offset = torch.arange(dcp_size, dtype=lengths.dtype, device=seq_lens.device)
        offset *= run
    else:
        rank = 0 if dcp_rank is None else integer("dcp_rank", dcp_rank)
        if not 0 <= rank < dcp_size:
            raise BatchError("dcp_rank", rank, f"must be in 0 .. {dcp_size - 1}, dcp_size being {dcp_size}")
        offset = rank * run
    rounds = lengths // (run * dcp_size)
    left = lengths - rounds * (run * dcp_size)
    return (rounds * run + (left - offset).clamp(0, run)).to(torch.int32)
