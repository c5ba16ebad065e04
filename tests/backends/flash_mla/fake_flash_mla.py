"""A FlashMLA that computes in torch on a CPU, with the signatures and the checks of `sgl-flash-mla` 1.0.0."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch

SMS = 132
HEADS_OF_A_TILE, KEYS_OF_A_TILE = 64, 64


@dataclasses.dataclass
class FlashMLASchedMeta:
    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def has_legacy() -> bool:
    return True


def parts(rows: int) -> int:
    return max(SMS // -(-rows // HEADS_OF_A_TILE), 1)


def splits_of(seqlens: torch.Tensor) -> torch.Tensor:
    """Numbers that differ for other lengths, so that a call shows a schedule of another step."""
    return torch.nn.functional.pad(torch.cumsum(seqlens + 1, 0), (1, 0)).int()


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert use_legacy, "dense decoding exists only on the legacy side"
    assert h_k == 1
    assert topk is None
    assert seqlens_k.dtype == torch.int32
    assert seqlens_k.is_contiguous()
    assert not is_fp8_kvcache or (seqlens_k >= 1).all(), "reads the page before the table's row"
    kind = 8 if is_fp8_kvcache else 16
    tiles = torch.full((parts(num_q_tokens_per_head_k), 8), kind, dtype=torch.int32)
    return tiles, splits_of(seqlens_k)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert indices is None
    assert use_legacy
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
    assert block_table is not None
    assert cache_seqlens is not None
    reqs, queries, heads, size = q.shape
    is_8bit = bool(is_fp8_kvcache)
    assert q.dtype in ((torch.float8_e4m3fn,) if is_8bit else (torch.float16, torch.bfloat16))
    assert k_cache.dtype == q.dtype, "query and key must have the same dtype"
    assert k_cache.shape[1:] == (64, 1, size), "page_block_size must be 64"
    assert size == 576 or (size == 512 and not is_8bit)
    assert head_dim_v == 512
    for each in (block_table, cache_seqlens):
        assert each.dtype == torch.int32
        assert each.stride(-1) == 1
    assert q.is_contiguous()
    assert k_cache.stride(-1) == 1
    assert cache_seqlens.is_contiguous()
    assert cache_seqlens.shape == (reqs,)
    assert block_table.shape[0] == reqs
    tiles, splits = tile_scheduler_metadata.tile_scheduler_metadata, tile_scheduler_metadata.num_splits
    assert tiles is not None
    assert splits is not None
    assert tiles.shape == (parts(queries * heads), 8)
    assert (tiles == (8 if is_8bit else 16)).all(), "a schedule of the other kernel"
    assert torch.equal(splits, splits_of(cache_seqlens)), "a schedule of another step"
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    if is_8bit:
        assert descale_q is not None
        assert descale_k is not None
        assert descale_q.shape == descale_k.shape == (1,)
        assert descale_q.dtype == descale_k.dtype == torch.float32
        scale *= float(descale_q * descale_k)
    else:
        assert descale_q is None
        assert descale_k is None
        assert scale * 1.4427 > 1e-3, "masks with a finite logit"
    out = torch.zeros(reqs, queries, heads, 512, dtype=torch.bfloat16 if is_8bit else q.dtype)
    lse = torch.full((reqs, queries, heads), torch.inf)
    for req, tokens in enumerate(cache_seqlens.tolist()):
        pages = block_table[req, : -(-tokens // 64)].long()
        keys = k_cache[pages].float().reshape(-1, size)[:tokens]
        for row in range(queries):
            seen = tokens - queries + row + 1 if causal else tokens
            if seen <= 0:
                # What the kernel of 8 bits writes here is not known.
                out[req, row] = torch.nan if is_8bit else 0
                continue
            logits = q[req, row].float() @ keys[:seen].T * scale
            out[req, row] = (logits.softmax(-1) @ keys[:seen, :512]).to(out.dtype)
            lse[req, row] = logits.logsumexp(-1)
    if is_8bit:
        out *= descale_k.to(out.dtype)
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    assert use_legacy
    tokens, heads, size = q.shape
    assert q.dtype == kv.dtype == torch.bfloat16
    assert heads in (64, 128)
    assert size in (576, 512)
    assert d_v == 512
    assert kv.shape[1:] == (1, size)
    assert indices.shape[:2] == (tokens, 1)
    assert indices.dtype == torch.int32
    assert indices.shape[2] % (2 * KEYS_OF_A_TILE) == 0
    assert indices.stride(-1) == 1
    assert topk_length is not None
    assert topk_length.shape == (tokens,)
    assert (topk_length >= 1).all()
    out, lse = torch.zeros(tokens, heads, 512, dtype=q.dtype), torch.full((tokens, heads), torch.inf)
    for row in range(tokens):
        # The kernel loads whole tiles, and NaN of a token past the length would reach the output.
        loaded = -(-int(topk_length[row]) // KEYS_OF_A_TILE) * KEYS_OF_A_TILE
        beyond = indices[row, 0, int(topk_length[row]) : loaded]
        assert not kv[beyond[beyond >= 0].long()].isnan().any()
        chosen = indices[row, 0, : int(topk_length[row])]
        keys = kv[chosen[chosen >= 0].long(), 0].float()
        if keys.shape[0]:
            logits = q[row].float() @ keys.T * sm_scale
            out[row] = (logits.softmax(-1) @ keys[:, :512]).to(out.dtype)
            lse[row] = logits.logsumexp(-1)
    if return_log2_lse is False:
        return out, None, None
    assert return_log2_lse is None, "the LSE would have base 2"
    return out, lse, lse


def make_flash_mla() -> types.ModuleType:
    module = types.ModuleType("flash_mla")
    for function in (
        get_mla_metadata,
        has_legacy,
        get_mla_decoding_metadata,
        flash_mla_with_kvcache,
        flash_mla_sparse_fwd,
    ):
        setattr(module, function.__name__, function)
    return module
