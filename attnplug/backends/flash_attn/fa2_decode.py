"""Decodes over pages with `fwd_kvcache` of flash-attn 2, which splits the keys as it is told.

`varlen_fwd` splits them too, but into a number that it takes from the context, as it does the memory for partial
results; and where that number is 1, the LSE that it returns is that of other heads and requests (2.7 to 2.8.3: it
is written as `[Hkv, R, group]` and read as `[Hkv, group, R]`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from attnplug.backends.flash_attn.call import Call

__all__ = ["FWD_KVCACHE", "FlashAttn2Decodes", "num_splits"]

FWD_KVCACHE = (
    *(
        "q",
        "kcache",
        "vcache",
        "k",
        "v",
        "seqlens_k",
        "rotary_cos",
        "rotary_sin",
        "cache_batch_idx",
        "leftpad_k",
    ),
    *("block_table", "alibi_slopes", "out", "softmax_scale", "is_causal", "window_size_left"),
    *("window_size_right", "softcap", "is_rotary_interleaved", "num_splits"),
)
"""The arguments of `fwd_kvcache`, which are positional."""

_ROWS = 64
"""Rows of queries that one block of threads takes."""
_MOST_SPLITS = 128
_BLOCKS_AT_ONCE = 2
"""Blocks of threads that a multiprocessor runs at the same time."""


class FlashAttn2Decodes:
    """Calls `fwd_kvcache`.

    Args:
        fwd_kvcache: of the extension `flash_attn_2_cuda`.
    """

    def __init__(self, fwd_kvcache: Callable[..., Any]) -> None:
        self._fwd_kvcache = fwd_kvcache

    def __call__(self, call: Call) -> torch.Tensor | None:
        """As `Kernels`, of requests with one query each, over pages."""
        requests, spec = call.requests, call.spec
        own = slice(requests.first_token, requests.end_token)
        out, left = call.output[own].unsqueeze(1), call.window[0]
        heads, rows = spec.num_heads, 1
        if heads > spec.num_kv_heads and left < 0 and call.alibi_slopes is None:
            # Then it packs the query heads of a KV head, and takes the output as `[R, group, Hkv, D]`.
            heads, rows = spec.num_kv_heads, heads // spec.num_kv_heads
            out = call.output[own].view(-1, heads, rows, spec.head_size).transpose(1, 2)
        page, table = call.key.shape[1], requests.block_table
        units = requests.seq_lens.shape[0] * heads * -(-rows // _ROWS)
        slots = _multiprocessors(call.query.device) * _BLOCKS_AT_ONCE
        # Of the table's width, not of the context, on which no memory may depend.
        splits = num_splits(units, slots, -(-call.table_keys // _block_keys(spec.head_size)))
        # It takes the width of the table for the longest context, and splits that.
        longest = max(-(-requests.max_seq_len // page), 1)
        _, lse = self._fwd_kvcache(
            call.query[own].unsqueeze(1),
            call.key,
            call.value,
            None,
            None,
            requests.seq_lens,
            None,
            None,
            None,
            None,
            table[:, :longest],
            call.alibi_slopes,
            out,
            spec.scale,
            False,  # the one query stands at the end: nothing comes after it
            left,
            -1,
            spec.logits_soft_cap or 0.0,
            False,
            splits,
        )
        return cast(torch.Tensor, lse)[:, :, 0].t() if call.wants_lse else None


@functools.lru_cache(maxsize=4096)
def num_splits(units: int, slots: int, key_blocks: int) -> int:
    """Into how many parts to split the keys of each request.

    The fewest with which the GPU is nearly as full as with any number: 85 % of that, as the library has it. Of
    numbers that leave a part as many blocks of keys only the least is considered.

    Args:
        units: blocks of threads without splitting.
        slots: blocks of threads that the GPU runs at once.
        key_blocks: blocks of keys that the longest request may have; a part has one at least.
    """
    if units >= 0.8 * slots:
        return 1
    # Each wave of blocks takes as long as a full one.
    blocks = max(key_blocks, 1)
    counts = [
        count
        for count in range(1, min(blocks, slots, _MOST_SPLITS) + 1)
        if count == 1 or -(-blocks // count) < -(-blocks // (count - 1))
    ]
    full = [units * count / (-(-units * count // slots) * slots) for count in counts]
    enough = 0.85 * max(full)
    return next(count for count, share in zip(counts, full, strict=True) if share >= enough)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # On a CPU, where tests run the library's arithmetic, few enough that keys are split.
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def _block_keys(head_size: int) -> int:
    return 256 if head_size <= 64 else 128 if head_size <= 128 else 64
