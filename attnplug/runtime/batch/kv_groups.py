"""The KV groups of a builder of steps: what their pages cover, and where a request may have null blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from attnplug.runtime.plan.sharding import shares_tokens, tokens_per_block


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KVGroups:
    """The KV groups of a builder.

    Args:
        block_sizes: tokens per page of each.
        specs: of each; empty if unknown.
        cross: those with encoder tokens.
        place: of this rank; None without context parallelism.
        tokens_per_block: tokens of a request that a block number of each covers, on all ranks that share them.
        sharded: those whose tokens the ranks share.
        decoder: those with decoder tokens.
    """

    block_sizes: tuple[int, ...]
    specs: tuple[KVCacheSpec, ...]
    cross: frozenset[int]
    place: ContextParallel | None
    tokens_per_block: tuple[int, ...]
    sharded: frozenset[int]
    decoder: tuple[int, ...]

    @classmethod
    def of(
        cls,
        block_sizes: Sequence[int],
        specs: Sequence[KVCacheSpec],
        cross: frozenset[int],
        place: ContextParallel | None,
    ) -> Self:
        """The groups; BatchError if their tokens cannot be shared among the ranks of `place`."""
        covered, sharded = tuple(block_sizes), frozenset[int]()
        if place is not None:
            if not specs:
                limit = "needs kv_cache_specs: ranks share the tokens of some kinds of groups only"
                raise BatchError("context_parallel", place, limit)
            covered = tuple(tokens_per_block(spec, place) for spec in specs)
            sharded = frozenset(group for group, spec in enumerate(specs) if shares_tokens(spec))
            for group in sorted(sharded):
                if block_sizes[group] % place.interleave:
                    limit = f"must divide block_sizes[{group}]={block_sizes[group]}"
                    raise BatchError("context_parallel.interleave", place.interleave, limit)
        decoder = tuple(group for group in range(len(block_sizes)) if group not in cross)
        return cls(tuple(block_sizes), tuple(specs), cross, place, covered, sharded, decoder)


def first_attended(spec: KVCacheSpec, computed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first key that requests of `computed` tokens attend next, int64 `[R]`; blocks in front may be null."""
    if isinstance(spec, SlidingWindowSpec):
        return np.maximum(computed - spec.sliding_window + 1, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return computed // spec.chunk * spec.chunk
    return np.zeros_like(computed)


def reach(spec: KVCacheSpec) -> str:
    """The facts of a KV group that decide which of its blocks a request keeps, as text."""
    if isinstance(spec, SlidingWindowSpec):
        return f"SlidingWindowSpec(sliding_window={spec.sliding_window})"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"ChunkedLocalAttentionSpec(chunk={spec.chunk})"
    return type(spec).__name__
