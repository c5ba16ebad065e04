"""`varlen_fwd` and `fwd_kvcache` of FlashAttention 2 with their real arguments, computed on the CPU.

Their traps are those of `csrc/flash_attn/flash_api.cpp` and `src/flash_fwd_kernel.h`, 2.7 to 2.8.3: memory that
nobody writes is NaN here, and a write out of bounds raises.
"""

from __future__ import annotations

import dataclasses

import torch
from flash_attn_math import INF, Asked, attend, check_rows, keys_of

ROWS = 64
"""Rows of queries in a block of the kernels that read pages or split the keys."""


def _unwritten(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def _asked(scale, causal, left, right, softcap, slopes, longest_keys) -> Asked:
    """With the limits as `mha_*` and `set_params_fprop` turn them."""
    if causal:
        right = 0
    if left >= longest_keys:
        left = -1
    if right >= longest_keys:
        right = -1
    causal = left < 0 and right == 0
    if left < 0 <= right:
        left = longest_keys
    if right < 0 <= left:
        right = longest_keys
    # Only the causal kernel adds the bias of the key's position, not of the distance.
    given = Asked(scale, causal, left, right, softcap, slopes, shifted_alibi=True)
    return given if not causal else dataclasses.replace(given, left=-1)


def _blocks_that_see_nothing(queries: int, keys: int, asked: Asked) -> list[int]:
    """The blocks of rows at whose start the kernel for pages leaves, as no tile of keys is in their reach."""
    found = []
    for block in range(-(-queries // ROWS)):
        reaches = (block + 1) * ROWS + keys - queries + asked.right if asked.right >= 0 else keys
        if min(keys, reaches) <= 0:
            found.append(block)
    return found


def _block_n(size: int) -> int:
    return 256 if size <= 64 else 128 if size <= 128 else 64


def varlen_fwd(
    q,
    k,
    v,
    out_,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    block_table,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    p_dropout,
    softmax_scale,
    zero_tensors,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    return_softmax,
    gen_,
):
    """`mha_varlen_fwd`."""
    check_rows(q, k, v)
    batch, heads, kv_heads = cu_seqlens_q.numel() - 1, q.shape[1], k.shape[-2]
    assert batch > 0
    assert cu_seqlens_k.shape == (batch + 1,)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    paged = block_table is not None
    if paged:
        assert k.shape[1] % 256 == 0
        assert block_table.shape[0] == batch
        assert block_table.stride(-1) == 1
        assert block_table.dtype == torch.int32
    if seqused_k is not None:
        assert seqused_k.shape == (batch,)
        assert seqused_k.dtype == torch.int32
        assert seqused_k.is_contiguous()
        assert max_seqlen_k >= int(seqused_k.max())
    if max_seqlen_q == 1 and alibi_slopes is None:
        is_causal = False
    if is_causal:
        window_size_right = 0
    swapped = max_seqlen_q == 1 and heads > kv_heads and window_size_left < 0 and window_size_right < 0
    swapped = swapped and alibi_slopes is None
    if swapped:
        assert q.shape[0] == batch  # or reshaping fails
        cu_seqlens_q = torch.arange(batch + 1)
    out = torch.empty_like(q)
    if out_ is not None:
        assert out_.shape == q.shape
        assert out_.stride(-1) == 1
        out = torch.empty_like(q) if swapped else out_
    asked = _asked(
        softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes, max_seqlen_k
    )
    tokens = q.shape[0]
    lse = _unwritten(heads, tokens)
    early = []
    for request in range(batch):
        first, end = int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1])
        table_starts = None if paged else cu_seqlens_k
        keys, values = (keys_of(each, request, block_table, table_starts, seqused_k) for each in (k, v))
        found, its_lse = attend(q[first:end], keys, values, asked)
        out[first:end] = found.to(out.dtype)
        lse[:, first:end] = its_lse.float()
        if paged:
            for block in _blocks_that_see_nothing(end - first, keys.shape[0], asked):
                own = range(first + block * ROWS, min(first + (block + 1) * ROWS, end))
                lse[:, list(own)] = torch.nan
                early.append((request, block * ROWS, heads // kv_heads if swapped else len(own)))
    splits = swapped and max_seqlen_k > _block_n(q.shape[2])
    if swapped and paged and not splits:
        # The kernel writes [Hkv, batch, group], and what is returned is read as [Hkv, group, batch].
        lse = lse.view(kv_heads, -1, batch).transpose(1, 2).reshape(heads, batch)
    if not splits:
        _misplace(lse, early, (kv_heads, heads // kv_heads) if swapped else (heads, max_seqlen_q))
    return out, lse, torch.empty(0), torch.empty(2)


def _misplace(lse: torch.Tensor, early: list[tuple[int, int, int]], shape: tuple[int, int]) -> None:
    """+inf for rows of a block that sees nothing, where they would stand were the LSE `[batch, H, longest]`."""
    heads, longest = shape
    flat = lse.view(-1)
    for request, row, rows in early:
        for head in range(heads):
            begin = (request * heads + head) * longest + row
            if begin + rows > flat.numel():
                raise IndexError(f"LSE {begin} .. {begin + rows} is written out of bounds, {flat.numel()}")
            flat[begin : begin + rows] = INF


def fwd_kvcache(
    q,
    kcache,
    vcache,
    k_,
    v_,
    seqlens_k_,
    rotary_cos_,
    rotary_sin_,
    cache_batch_idx_,
    leftpad_k_,
    block_table_,
    alibi_slopes_,
    out_,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    is_rotary_interleaved,
    num_splits,
):
    """`mha_fwd_kvcache` over pages, without new keys. Rows that see nothing are right: its LSE is padded."""
    check_rows(q, kcache, vcache)
    assert k_ is v_ is rotary_cos_ is rotary_sin_ is cache_batch_idx_ is leftpad_k_ is None
    batch, seqlen_q, heads, size = q.shape
    kv_heads = kcache.shape[2]
    assert batch > 0
    assert size <= 256
    assert size % 8 == 0
    assert kcache.shape[1] % 256 == 0
    assert block_table_.dtype == torch.int32
    assert block_table_.stride(-1) == 1
    assert block_table_.shape[0] == batch
    longest_keys = block_table_.shape[1] * kcache.shape[1]
    assert seqlens_k_.shape == (batch,)
    assert seqlens_k_.dtype == torch.int32
    assert seqlens_k_.is_contiguous()
    assert int(seqlens_k_.max()) <= longest_keys  # or pages that are not in the table are read
    assert num_splits <= 128
    if seqlen_q == 1 and alibi_slopes_ is None:
        is_causal = False
    if is_causal:
        window_size_right = 0
    swapped = seqlen_q == 1 and heads > kv_heads and window_size_left < 0 and window_size_right < 0
    swapped = swapped and alibi_slopes_ is None
    shape = (batch, heads // kv_heads, kv_heads, size) if swapped else tuple(q.shape)
    out = torch.empty(shape, dtype=q.dtype) if out_ is None else out_
    assert out.shape == shape
    assert out.stride(-1) == 1
    asked = _asked(
        softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes_, longest_keys
    )
    lse = _unwritten(batch, heads, seqlen_q)
    for request in range(batch):
        keys, values = (keys_of(each, request, block_table_, None, seqlens_k_) for each in (kcache, vcache))
        found, lse[request] = attend(q[request], keys, values, asked)
        out[request] = found.view(kv_heads, -1, size).transpose(0, 1) if swapped else found
    given = out.transpose(1, 2).reshape(batch, 1, heads, size) if swapped else out
    return given, lse
