"""Computes the blocks and the tokens of context that fit into device memory."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from attnplug.core.arguments import at_least, checked, one_of
from attnplug.core.checks import short_number
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.dtypes import element_size
from attnplug.core.errors import LayoutError
from attnplug.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from attnplug.core.spec import LayerSpec
from attnplug.mla.chunks import prefill_workspace_bytes
from attnplug.runtime.plan.grouping import num_padding_layers
from attnplug.runtime.plan.sharding import tokens_per_block
from attnplug.runtime.plan.state_plan import StatePlan

_ANY_LENGTH = 1 << 62
_MOST_MEMORY = 1 << 62
_MEMORY_LIMIT = "must be from 1 byte to 4194304 TiB"


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The blocks and tokens that fit.

    Args:
        memory: bytes for the caches and the workspace.
        bytes_per_block: bytes of one block number over all raw tensors.
        num_blocks: blocks that fit, the null block included.
        max_tokens: the longest single sequence whose blocks of all groups fit at once; None if any length fits.
            Cross groups count an encoder sequence of the same length.
        padding_layers: unused pages, counted in layers.
        groups: the KV groups.
        prefill_workspace: bytes of `memory` for the computed tokens that prefills of latent attention expand.
        context_parallel: the ranks that share tokens; the memory is that of one of them. None for one alone.
        index_keys: bytes of `bytes_per_block` for the index keys of sparse layers, which the engine allocates.
        states: the pool of states, whose bytes are taken from `memory` first; None without layers that keep one.
    """

    memory: int
    bytes_per_block: int
    num_blocks: int
    max_tokens: int | None
    padding_layers: int
    groups: tuple[KVCacheGroupSpec, ...]
    prefill_workspace: int = 0
    context_parallel: ContextParallel | None = None
    index_keys: int = 0
    states: StatePlan | None = None

    @property
    def usable_blocks(self) -> int:
        """All blocks except the null block."""
        return max(self.num_blocks - 1, 0)

    def tokens_of(self, group: KVCacheGroupSpec) -> int:
        """Tokens that fit if this group used the whole pool alone."""
        return self.usable_blocks * tokens_per_block(group.kv_cache_spec, self.context_parallel)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "memory": self.memory,
            "prefill_workspace": self.prefill_workspace,
            "bytes_per_block": self.bytes_per_block,
            "index_keys": self.index_keys,
            "states": None
            if self.states is None
            else {
                "layers": list(self.states.caches),
                "num_states": self.states.num_states,
                "bytes_per_state": self.states.bytes_per_state,
                "bytes": self.states.bytes,
            },
            "num_blocks": self.num_blocks,
            "max_tokens": self.max_tokens,
            "padding_layers": self.padding_layers,
            "ranks": 1 if self.context_parallel is None else self.context_parallel.size,
            "groups": [
                {
                    "kind": type(group.kv_cache_spec).__name__,
                    "layers": list(group.layer_names),
                    "block_size": group.kv_cache_spec.block_size,
                    "page_size_bytes": group.kv_cache_spec.page_size_bytes,
                    "tokens": self.tokens_of(group),
                }
                for group in self.groups
            ],
        }


def parse_memory(text: str | int) -> int:
    """The bytes in "80GiB", "80 GB", "512MiB" or a number, from 1 to 2**62; LayoutError for anything else."""
    # A longer number is above the limit, and Python refuses to write out integers of thousands of digits.
    if not isinstance(text, (int, str)) or isinstance(text, bool):
        raise LayoutError("memory", text, "must be bytes, or a number with KiB, MiB, GiB, GB, ...")
    if isinstance(text, int) and not 0 < text <= _MOST_MEMORY:
        raise LayoutError("memory", short_number(text), _MEMORY_LIMIT)
    # ASCII, because \d takes the digits of other scripts too.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(text).strip().lower(), re.ASCII)
    if match is None:
        raise LayoutError("memory", text, "must be bytes, or a number with KiB, MiB, GiB, GB, ...")
    unit = match[2] or " "
    # Decimal, because a float has no exact 0.1.
    size = Decimal(match[1]) * (1024 if unit.endswith("i") else 1000) ** " kmgt".index(unit[0])
    if not 1 <= size <= _MOST_MEMORY:
        raise LayoutError("memory", text, _MEMORY_LIMIT)
    return int(size)


@checked(config=one_of(KVCacheConfig, error=LayoutError))
def bytes_per_block(config: KVCacheConfig) -> int:
    """Bytes of one block number over all raw tensors; LayoutError for a pool without blocks."""
    if config.num_blocks < 1:
        raise LayoutError("config.num_blocks", config.num_blocks, "must be at least 1")
    return sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks


@checked(
    spec=one_of(KVCacheSpec, error=LayoutError),
    num_tokens=at_least(0, LayoutError),
    new_tokens=at_least(1, LayoutError),
    context_parallel=one_of(ContextParallel, error=LayoutError),
)
def blocks_needed(
    spec: KVCacheSpec, num_tokens: int, new_tokens: int = 1, context_parallel: ContextParallel | None = None
) -> int:
    """The most blocks that one sequence of `num_tokens` needs at once in a group of this spec.

    Args:
        spec: of the group's pages.
        num_tokens: tokens of the sequence.
        new_tokens: tokens computed in one step; the blocks cover the window or chunk of each.
        context_parallel: the ranks that share the tokens of groups without a window or chunks.
    """
    size = spec.block_size
    whole = -(-num_tokens // tokens_per_block(spec, context_parallel))
    if isinstance(spec, SlidingWindowSpec):
        # A window may begin at any token of a page, in the worst case at the last.
        return min(whole, -(-(spec.sliding_window + new_tokens - 2) // size) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        # A chunk begins at a multiple of its size, in the worst case so far into a page.
        into_page = size - math.gcd(spec.chunk, size)
        return min(whole, -(-(into_page + spec.chunk + new_tokens - 1) // size))
    return whole


def most_workspace_bytes(specs: Iterable[LayerSpec], rows: int) -> int:
    """Bytes of the largest workspace that a layer needs to expand `rows` latents; 0 if none does, such as sparse layers."""
    expanding = (spec for spec in specs if spec.mla is not None and spec.sparse is None)
    return max((prefill_workspace_bytes(spec, rows) for spec in expanding), default=0)


def index_key_bytes(spec: LayerSpec, elements: int) -> int:
    """Bytes of the key of `elements` that the indexer of a sparse layer keeps for one token.

    It is stored in the layer's dtype, and with one byte for each element and a float32 scale beside an 8-bit cache.
    """
    return elements + 4 if spec.has_quantized_kv_cache else elements * element_size(spec.dtype)


@checked(
    config=one_of(KVCacheConfig, error=LayoutError),
    memory=at_least(-_MOST_MEMORY, LayoutError),
    new_tokens=at_least(1, LayoutError),
    prefill_workspace=at_least(0, LayoutError),
    context_parallel=one_of(ContextParallel, error=LayoutError),
    states=one_of(StatePlan, error=LayoutError),
)
def fit_kv_cache(
    config: KVCacheConfig,
    memory: int,
    new_tokens: int = 1,
    prefill_workspace: int = 0,
    context_parallel: ContextParallel | None = None,
    index_keys: int = 0,
    states: StatePlan | None = None,
) -> MemoryBudget:
    """The budget for `memory` bytes; ignores the configuration's own number of blocks.

    Args:
        config: the groups.
        memory: bytes for the caches and the workspace.
        new_tokens: tokens of a sequence computed in one step; see `blocks_needed`.
        prefill_workspace: bytes that the caches leave free; see `ModelPlan.prefill_workspace_bytes`.
        context_parallel: the ranks that share tokens, each with `memory` bytes.
        index_keys: bytes that the index keys of all sparse layers need for the tokens of one block number.
        states: the pool of states, which gets its bytes first.

    Raises:
        LayoutError: the null block and one more block do not fit, or beside states a block for each of their requests.
    """
    groups, pool = config.kv_cache_groups, 0 if states is None else states.bytes
    if not groups:
        check_room_for_states(states, memory - prefill_workspace, 0)
        return MemoryBudget(memory, 0, 0, None, 0, (), prefill_workspace, context_parallel, states=states)
    each = bytes_per_block(config) + index_keys
    check_room_for_states(states, memory - prefill_workspace, each)
    blocks = (memory - prefill_workspace - pool) // each
    if blocks < 2:
        limit = f"must have room for two blocks of {each} bytes"
        remedy = f"did you mean {memory}GiB?" if memory < 2048 else None
        if prefill_workspace:
            limit += f", and {prefill_workspace} bytes of prefill workspace"
            remedy = "give more memory, or plan with fewer context_chunk_rows"
        raise LayoutError("memory", memory, limit, remedy)

    def fits(num_tokens: int) -> bool:
        needed = (blocks_needed(g.kv_cache_spec, num_tokens, new_tokens, context_parallel) for g in groups)
        # Less and not equal, because one block is the null block.
        return sum(needed) < blocks

    longest = None
    # Windows and chunks alone need no more blocks for longer sequences, so any length fits.
    if not fits(_ANY_LENGTH):
        # The upper bound never fits: a group without a window, or all windows, would fill the pool.
        low = 0
        high = blocks * max(tokens_per_block(each.kv_cache_spec, context_parallel) for each in groups)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        longest = low
    padding = num_padding_layers(config)
    return MemoryBudget(
        *(memory, each, blocks, longest, padding, groups, prefill_workspace, context_parallel, index_keys),
        states=states,
    )


def check_room_for_states(states: StatePlan | None, memory: int, block: int) -> None:
    """LayoutError unless the states fit into `memory` bytes with a block of `block` bytes for each of their requests."""
    if states is None or states.bytes + (1 + states.max_requests) * block <= memory:
        return
    limit = f"must have room for {states.num_states} states of {states.bytes_per_state:,} bytes"
    if block:
        limit += f", and for {1 + states.max_requests} blocks of {block:,} bytes, one for each request and the null block"
    raise LayoutError("memory", memory, limit, "give more memory, or plan with fewer num_states")
