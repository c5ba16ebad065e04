"""Runs a layer on FLEX: writes its pages, gathers the keys of a step, attends them piece by piece."""

from __future__ import annotations

from typing import Any

import torch
from attnplug.core import AttentionImpl, AttentionLayer
from attnplug.errors import BatchError, PolicyError
from attnplug.ops import Reach, write_kv_cache
from attnplug.ops.calls import check_cache_given, check_keys, check_queries, kv_scales, pages_of
from attnplug.ops.storage import compute_dtype

from attnplug_flex.backend import FlexBackend, FlexOptions
from attnplug_flex.kernel import attend_piece, score_mod
from attnplug_flex.metadata import FlexMetadata
from attnplug_flex.plan import Plan

__all__ = ["FlexImpl"]

_KERNEL_HEAD_SIZE = 16


class FlexImpl(AttentionImpl[FlexMetadata]):
    """FlexAttention over gathered pages."""

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compile = self.options is not None and self.options.compile
        smallest = min(self.spec.head_size, self.spec.head_size_v)
        if self._compile and smallest < _KERNEL_HEAD_SIZE:
            limit = f"needs head sizes of at least {_KERNEL_HEAD_SIZE}, and this layer has {smallest}"
            raise PolicyError("compile", True, limit, f"set {FlexOptions()}")

    @torch.no_grad()
    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values; fp8 storage divides by the scales and clamps."""
        pages = pages_of(FlexBackend, kv_cache, self.spec)
        write_kv_cache(key, value, *pages, slot_mapping, *kv_scales(layer, self.tensors))

    @torch.no_grad()
    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: FlexMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and write `output`, as AttentionImpl.attend says.

        Raises:
            BatchError: a batch or an argument that the layer did not declare.
            LayoutError: a KV cache missing, not declared, or of another dtype.
            PolicyError: `compile` on a CPU.
        """
        spec, metadata = self.spec, attn_metadata
        tokens = metadata.num_actual_tokens
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        check_queries(query, output, output_lse, tokens, spec, **scales)
        self._check_device(query.device)
        plan, keys, values = self._gather(layer, key, value, kv_cache, metadata)

        rows = slice(0, tokens)
        out = output[rows].zero_()
        lse = query.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)
        cap = (
            None if spec.logits_soft_cap is None else torch.tensor(spec.logits_soft_cap, device=query.device)
        )
        slopes = self._on(query.device, self.tensors.alibi_slopes)
        for piece in plan.pieces:
            out[piece.rows], lse[piece.rows] = attend_piece(
                query[piece.rows],
                keys[piece.keys],
                values[piece.keys],
                score_mod(cap, slopes, piece.places),
                piece.mask,
                spec.scale,
                compiled=self._compile,
            )
        sinks = self._on(query.device, self.tensors.sinks) if use_sinks else None
        if sinks is not None:
            # A sink takes part in the denominator only: what was normalised without it shrinks.
            without, lse = lse, torch.logaddexp(lse, sinks)
            out.mul_(torch.exp(without - lse)[..., None])
        if output_lse is not None:
            output_lse[rows] = lse
        return output

    def _check_device(self, device: torch.device) -> None:
        if self._compile and device.type != "cuda":
            remedy = f"set {FlexOptions()}"
            raise PolicyError("compile", True, f"needs a CUDA device, not {device.type!r}", remedy)

    def _gather(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        metadata: FlexMetadata,
    ) -> tuple[Plan, torch.Tensor, torch.Tensor]:
        """The plan, and its keys `[N, Hkv, D]` and values `[N, Hkv, Dv]` in the layer's dtype."""
        spec = self.spec
        reach = Reach.of(spec, metadata.causal)
        check_cache_given(kv_cache, spec)
        if kv_cache is None:
            key, value = check_keys(key, value, int(metadata.key_starts[-1]), spec)
            plan = metadata.plan(reach, direct=True, whole=self._compile)
            return plan, key[plan.keys], value[plan.keys]

        k_pages, v_pages = pages_of(FlexBackend, kv_cache, spec)
        block_size, columns = k_pages.shape[1], metadata.block_table.shape[1]
        if metadata.seq_lens.max(initial=0) > columns * block_size:
            limit = f"is past the {columns * block_size} tokens of {columns} pages per request"
            raise BatchError("seq_lens", int(metadata.seq_lens.max()), limit, "widen block_table_tensor")
        plan = metadata.plan(reach, direct=False, whole=self._compile)
        blocks = metadata.block_table[plan.requests, plan.keys // block_size].long()
        offsets = plan.keys % block_size
        k_scale, v_scale = kv_scales(layer, self.tensors)
        keys = self._read(k_pages, blocks, offsets, k_scale)
        return plan, keys, self._read(v_pages, blocks, offsets, v_scale)

    def _read(
        self, pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, scale: float
    ) -> torch.Tensor:
        dtype = compute_dtype(self.spec)
        if pages.dtype.itemsize > 1:
            return pages[blocks, offsets].to(dtype)
        stored = pages.view(torch.uint8)[blocks, offsets].view(pages.dtype)
        return stored.float().mul_(scale).to(dtype)

    @staticmethod
    def _on(device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)
