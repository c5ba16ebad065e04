"""Decodes over pages with `fwd_kvcache` of flash-attn 2, which takes the number of splits as an argument.

`varlen_fwd` derives that number, and its memory for partial results, from the context. If it is 1, the returned LSE
belongs to other heads and requests (2.7 to 2.8.3: written as `[Hkv, R, group]`, read as `[Hkv, group, R]`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from attnplug.backends.flash_attn.metadata import Call

FWD_KVCACHE = (
    *("q", "kcache", "vcache", "k", "v", "seqlens_k", "rotary_cos", "rotary_sin", "cache_batch_idx"),
    *("leftpad_k", "block_table", "alibi_slopes", "out", "softmax_scale", "is_causal", "window_size_left"),
    *("window_size_right", "softcap", "is_rotary_interleaved", "num_splits"),
)
"""The arguments of `fwd_kvcache`, which are positional."""

_ROWS = 64
"""Rows of queries per thread block."""
_MOST_SPLITS = 128
_BLOCKS_AT_ONCE = 2
"""Thread blocks that a multiprocessor runs at the same time."""


def attend_decodes(fwd_kvcache: Callable[..., Any], call: Call) -> torch.Tensor | None:
    """As `Kernels`, by `fwd_kvcache`, of requests with one query each, over pages."""
    requests, spec = call.requests, call.spec
    own = slice(requests.first_token, requests.end_token)
    out, left = call.output[own].unsqueeze(1), call.window[0]
    heads, rows = spec.num_heads, 1
    if heads > spec.num_kv_heads and left < 0 and call.alibi_slopes is None:
        # In this case it packs the query heads of a KV head, and writes the output as `[R, group, Hkv, D]`.
        heads, rows = spec.num_kv_heads, heads // spec.num_kv_heads
        out = call.output[own].view(-1, heads, rows, spec.head_size).transpose(1, 2)
    page, table = call.key.shape[1], requests.block_table
    units = requests.seq_lens.shape[0] * heads * -(-rows // _ROWS)
    slots = _multiprocessors(call.query.device) * _BLOCKS_AT_ONCE
    # From the table's width: the memory for splits may not depend on the context.
    splits = num_splits(units, slots, -(-call.table_keys // _block_keys(spec.head_size)))
    # It takes the table's width for the longest context, so the table is cut to that.
    longest = max(-(-requests.max_seq_len // page), 1)
    _, lse = fwd_kvcache(
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
        False,  # the one query is the last token: no key comes after it
        left,
        -1,
        spec.logits_soft_cap or 0.0,
        False,
        splits,
    )
    return cast(torch.Tensor, lse)[:, :, 0].t() if call.wants_lse else None


@functools.lru_cache(maxsize=4096)
def num_splits(units: int, slots: int, key_blocks: int) -> int:
    """The number of parts to split the keys of each request into.

    It is the smallest number that fills the GPU to 85 % of the best one, the rule of the library. Among numbers that
    give parts of equally many key blocks, only the smallest is considered.

    Args:
        units: thread blocks without splitting.
        slots: thread blocks that the GPU runs at once.
        key_blocks: blocks of keys that the longest request may have; a part has at least one.
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
