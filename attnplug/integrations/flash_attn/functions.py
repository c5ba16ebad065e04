"""`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache`, with the library's arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from attnplug.core.errors import BatchError
from attnplug.integrations.flash_attn.page_checks import check_pages, check_rows, check_writable
from attnplug.integrations.flash_attn.pages import Pages, block_sizes, cut_into_pages, paged
from attnplug.integrations.flash_attn.request import check_tensors, flag, integer, read_request, refuse
from attnplug.integrations.flash_attn.running import attend_given, attend_pages, shared, untraced
from attnplug.integrations.flash_attn.steps import Lengths, lengths_of, read_lengths
from attnplug.ops import write_kv_cache

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None]


@untraced
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of `q [B, Lq, H, D]` over `k [B, Lk, Hkv, D]` and `v [B, Lk, Hkv, Dv]`.

    Args:
        q: H is a multiple of Hkv.
        k: keys; the last query and the last key are at one position.
        v: values.
        dropout_p: must be 0.
        softmax_scale: default `D ** -0.5`.
        causal: whether a query sees no later key.
        window_size: (left, right) keys seen around the query's position; -1 is no limit, nor is a number past all keys.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 is no cap.
        alibi_slopes: float32 `[H]`, or `[B, H]` with one row for all: of one request, or expanded.
        deterministic: has no effect here, nor in the library's forward pass.
        return_attn_probs: also return the LSE, and None for the probabilities, which only dropout fills.

    Returns:
        `[B, Lq, H, Dv]`, with zeros for queries that see no key; or that, the LSE float32 `[B, H, Lq]` with -inf for
        such queries, and None.

    Raises:
        BatchError: an argument that is not served.
        SpecError: an impossible layer.
        NoBackendError: no backend serves the call; the message has the reasons.
    """
    name = "flash_attn_func"
    check_tensors(name, 4, q=q, k=k, v=v)
    asked = read_request(
        name,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        flag("return_attn_probs", return_attn_probs),
        q.shape[0],
        q=q,
        k=k,
        v=v,
    )
    flag("deterministic", deterministic)
    batch, length = q.shape[:2]
    if not (k.shape[0] == v.shape[0] == batch and k.shape[1:3] == v.shape[1:3] and k.shape[3] == q.shape[3]):
        raise _misfit(q=q, k=k, v=v)
    query_lens = np.full(batch, length, dtype=np.int64)
    key_lens = np.full(batch, k.shape[1], dtype=np.int64)
    packed_q, packed_k, packed_v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out, lse = attend_given(asked, packed_q, packed_k, packed_v, query_lens, key_lens)
    out = out.view(batch, length, *out.shape[1:])
    if lse is None:
        return out
    return out, lse.view(batch, length, q.shape[2]).transpose(1, 2), None


@untraced
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """Attention of packed requests: `q [total_q, H, D]` over `k [total_k, Hkv, D]` and `v [total_k, Hkv, Dv]`.

    Args:
        q: queries of all requests, one after another.
        k: keys; with a `block_table` pages `[N, block_size, Hkv, D]`.
        v: values, as `k`.
        cu_seqlens_q: int32 `[B + 1]`: where each request's queries start. It is copied to the host, which waits for
            a GPU; see `one_step`.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: at least the longest request's queries.
        max_seqlen_k: at least the longest request's keys.
        dropout_p: must be 0.
        softmax_scale: default `D ** -0.5`.
        causal: see `flash_attn_func`.
        window_size: see `flash_attn_func`.
        softcap: see `flash_attn_func`.
        alibi_slopes: float32 `[H]`, or `[B, H]` with one row for all: of one request, or expanded.
        deterministic: has no effect.
        return_attn_probs: also return the LSE, and None.
        block_table: int32 `[B, max_blocks]`.

    Returns:
        `[total_q, H, Dv]`; or that, the LSE float32 `[H, total_q]`, and None.

    Raises:
        BatchError, SpecError, NoBackendError: as `flash_attn_func`.
    """
    name = "flash_attn_varlen_func"
    check_tensors(name, 3, q=q)
    check_tensors(name, 3 if block_table is None else 4, k=k, v=v)
    check_tensors(name, None, q=q, k=k, v=v)
    if block_table is not None:
        check_tensors(name, 2, block_table=block_table)
    if k.shape[-1] != q.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise _misfit(q=q, k=k, v=v)
    asked = read_request(
        name,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        flag("return_attn_probs", return_attn_probs),
        cu_seqlens_q.numel() - 1 if isinstance(cu_seqlens_q, torch.Tensor) else 0,
        q=q,
        k=k,
        v=v,
    )
    flag("deterministic", deterministic)
    rows = (q.shape[0], k.shape[0] if block_table is None else None)
    query_lens, key_lens = shared(
        ("lengths", *rows),
        (cu_seqlens_q, cu_seqlens_k),
        lambda: (
            lengths_of("cu_seqlens_q", cu_seqlens_q, rows[0]),
            lengths_of("cu_seqlens_k", cu_seqlens_k, rows[1]),
        ),
    )
    if query_lens.size != key_lens.size:
        raise BatchError(
            "cu_seqlens_k", key_lens.size + 1, f"must have {query_lens.size + 1} numbers, as cu_seqlens_q"
        )
    for field, given, lens in (
        ("max_seqlen_q", max_seqlen_q, query_lens),
        ("max_seqlen_k", max_seqlen_k, key_lens),
    ):
        longest = int(lens.max(initial=0))
        integer(field, given, f"must be an integer of at least {longest}, the longest request", longest)
    if block_table is None:
        out, lse = attend_given(asked, q, k, v, query_lens, key_lens)
    else:
        pages = paged(k, v, block_table, query_lens.size)
        if key_lens.size and key_lens.max() > pages.capacity:
            limit = f"is past the {pages.capacity} tokens of a row of block_table"
            raise BatchError("cu_seqlens_k", int(key_lens.max()), limit)
        lengths = Lengths.of(key_lens, q.device)
        tables = (cu_seqlens_q, cu_seqlens_k, block_table)
        check_pages(pages, lengths, tables)
        out, lse = attend_pages(asked, q, pages, (), query_lens, lengths, tables, lambda: None)
    return out if lse is None else (out, lse.transpose(0, 1), None)


@untraced
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention of `q [B, Lq, H, D]` over caches, after `k` and `v` were written to them.

    Args:
        q: the last query of a request is its last token.
        k_cache: `[B_cache, S, Hkv, D]`, or with a `block_table` pages `[N, block_size, Hkv, D]`.
        v_cache: the same shape. Rows of any strides are read and written in place. Where both are views of one allocation, such as `torch.empty(2, N, ...)`, backends
            read them in place; otherwise each call copies the keys and values that it reads, and needs their number on
            the host.
        k: new keys `[B, Lnew, Hkv, D]`, written in place from `cache_seqlens` on.
        v: their values.
        rotary_cos: must be None: rotate before the call.
        rotary_sin: must be None.
        cache_seqlens: tokens in the cache before the new ones: an int, or int32 `[B]`. None is a full cache.
        cache_batch_idx: int32 `[B]`: the cache row of each request; not with a `block_table`.
        cache_leftpad: must be None.
        block_table: int32 `[B, max_blocks]`.
        softmax_scale: default `D ** -0.5`.
        causal: see `flash_attn_func`.
        window_size: see `flash_attn_func`.
        softcap: see `flash_attn_func`.
        rotary_interleaved: has no effect without rotary tensors.
        alibi_slopes: float32 `[H]`, or `[B, H]` with one row for all: of one request, or expanded.
        num_splits: has no effect: the backend chooses.
        return_softmax_lse: also return the LSE.

    Returns:
        `[B, Lq, H, D]`; or that and the LSE float32 `[B, H, Lq]`.

    Raises:
        BatchError, SpecError, NoBackendError: as `flash_attn_func`.
    """
    name = "flash_attn_with_kvcache"
    refuse(name, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad)
    check_tensors(name, 4, q=q, k_cache=k_cache, v_cache=v_cache)
    batch, length, heads, width = q.shape
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != width:
        raise _misfit(q=q, k_cache=k_cache, v_cache=v_cache)
    asked = read_request(
        name,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        flag("return_softmax_lse", return_softmax_lse),
        batch,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
    )
    flag("rotary_interleaved", rotary_interleaved)
    integer("num_splits", num_splits, "must be an integer of at least 0; 0 lets the backend choose", 0)
    asked = dataclasses.replace(asked, single=length == 1)
    others: Iterator[Pages] = iter(())
    if block_table is not None:
        check_tensors(name, 2, block_table=block_table)
        refuse(f"{name} with a block_table", cache_batch_idx=cache_batch_idx)
        pages = paged(k_cache, v_cache, block_table, batch)
    else:
        if cache_batch_idx is not None:
            check_tensors(name, 1, cache_batch_idx=cache_batch_idx)
            check_rows(cache_batch_idx, k_cache.shape[0], written=k is not None)
        cut = functools.partial(cut_into_pages, k_cache, v_cache, cache_batch_idx, batch)
        # Smaller pages are cut only where no backend serves the largest.
        others = map(cut, block_sizes(k_cache, v_cache))
        pages = next(others)
    if k is not None or v is not None:
        _check_new(k, v, batch, q=q, k_cache=k_cache, v_cache=v_cache)
    new = 0 if k is None else k.shape[1]
    before = read_lengths(cache_seqlens, batch, pages.capacity, new, q.device)
    after = before.with_more_tokens(new)
    given = (cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None, block_table, cache_batch_idx)
    if block_table is not None:
        check_pages(pages, after, given)

    def write() -> None:
        if k is not None and v is not None:
            slots = pages.slots(before.tensor, new)
            write_kv_cache(k.flatten(0, 1), v.flatten(0, 1), pages.keys, pages.values, slots)

    query_lens = np.full(batch, length, dtype=np.int64)
    out, lse = attend_pages(asked, q.flatten(0, 1), pages, others, query_lens, after, given, write)
    out = out.view(batch, length, heads, width)
    return out if lse is None else (out, lse.view(batch, length, heads).transpose(1, 2))


def _check_new(k: Any, v: Any, batch: int, **others: torch.Tensor) -> None:
    """Refuse new keys and values that do not fit the caches, and a write that would change another argument."""
    if k is None or v is None:
        name, other = ("k", "v") if k is None else ("v", "k")
        raise BatchError(name, None, f"is required where {other} is given")
    k_cache = others["k_cache"]
    check_tensors("flash_attn_with_kvcache", 4, k=k, v=v, k_cache=k_cache)
    if k.shape[0] != batch or k.shape[2:] != k_cache.shape[2:] or v.shape != k.shape:
        raise _misfit(k=k, v=v, k_cache=k_cache)
    check_writable({"k": k, "v": v, **others}, ("k_cache", "v_cache"))


def _misfit(**tensors: torch.Tensor) -> BatchError:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return BatchError(", ".join(tensors), shapes, "do not fit each other: see the docstring for their shapes")
