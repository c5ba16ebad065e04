"""Runs a layer on TRITON: writes its pages, then decodes and whatever is longer, a kernel each."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from attnplug.backends.impl import BuiltinImpl
from attnplug.backends.triton.backend import TritonBackend
from attnplug.backends.triton.builder import TritonMetadata
from attnplug.backends.triton.kernels.decode import decode_kernel, merge_kernel
from attnplug.backends.triton.kernels.prefill import prefill_kernel
from attnplug.backends.triton.launch import decode_launch, merging, prefill_launch, tile_side
from attnplug.backends.triton.reach import switches
from attnplug.backends.triton.workspace import SplitPlan, num_multiprocessors
from attnplug.core.errors import BatchError
from attnplug.core.impl import AttentionLayer
from attnplug.ops.calls import check_keys
from attnplug.ops.reach import Reach
from attnplug.ops.triton.kv_write import write_kv_cache
from attnplug.ops.triton.launch import on_device_of

__all__ = ["TritonImpl"]

_DECODE: Any = decode_kernel
_MERGE: Any = merge_kernel
_PREFILL: Any = prefill_kernel


class TritonImpl(BuiltinImpl[TritonMetadata]):
    """Attention in two Triton kernels."""

    can_return_lse_for_decode = True
    _backend = TritonBackend
    _write = staticmethod(write_kv_cache)

    @torch.no_grad()
    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: TritonMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and write `output`, as AttentionImpl.attend says.

        Raises:
            BatchError: tensors that do not fit the spec or the batch, an LSE the spec did not
                declare, a batch that is not causal for a causal layer, an output scale.
            LayoutError: a cache of another shape or dtype, or one where K and V are given.
        """
        meta = attn_metadata
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        self._check(query, meta.num_actual_tokens, output, output_lse, **scales)
        if output.stride(2) != 1:
            limit = "must be 1: a head's elements lie together"
            raise BatchError("output.stride(2)", output.stride(2), limit)
        reach = Reach.of(self.spec, meta.causal)
        paged = kv_cache is not None
        k, v = self._keys(key, value, kv_cache, meta)
        k_scale, v_scale = self._scales(layer) if k.dtype.itemsize == 1 else (1.0, 1.0)
        query = query if query.stride(2) == 1 else query.contiguous()
        common = self._common(query, output, output_lse, reach, use_sinks, k_scale, v_scale)
        decodes = meta.num_decodes if paged else 0
        longest = meta.max_query_len if paged else max(meta.max_query_len, meta.max_decode_len)
        with on_device_of(query):
            if decodes and meta.max_decode_len:
                self._decode(meta, reach, decodes, common | _kv(k, v))
            if longest:
                given = self._given(key, value, meta) if paged else None
                starts = meta.key_start_loc
                if given is not None:
                    (k, v), starts, paged = given, meta.query_start_loc, False
                self._prefill(meta, decodes, longest, paged, starts, common | _kv(k, v))
        return output

    def _decode(self, meta: TritonMetadata, reach: Reach, decodes: int, tensors: dict[str, Any]) -> None:
        spec, group = self.spec, self._group
        rows = meta.max_decode_len * group
        block_m = min(tile_side(rows), 64)
        row_blocks = -(-rows // block_m)
        each, multiprocessors = spec.num_kv_heads * row_blocks, num_multiprocessors(meta.seq_lens.device)
        widest = max(spec.head_size, spec.head_size_v)
        launch = decode_launch(widest, self._dtype.itemsize, decodes * each, multiprocessors)
        target = max(multiprocessors * launch.waves // each, 1)
        items, spans = meta.splits(SplitPlan(reach, target, launch.block_n, launch.min_keys))
        most = decodes + target
        buffers = meta.workspace.partials(
            most, decodes, spec.num_kv_heads, rows, row_blocks, spec.head_size_v
        )
        merge = merging(rows, decodes * each, multiprocessors)
        _DECODE[(spec.num_kv_heads, row_blocks, most)](
            items=items,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            partials=buffers[0],
            partial_lses=buffers[1],
            arrived=buffers[2],
            max_rows=rows,
            MERGE=merge,
            **({} if launch.max_registers is None else {"maxnreg": launch.max_registers}),
            stride_table=meta.block_table.stride(0),
            BLOCK_SIZE=tensors["k_cache"].shape[1],
            GROUP=group,
            BLOCK_M=block_m,
            BLOCK_N=launch.block_n,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **tensors,
        )

        if merge == "later":
            names = ("output", "lse", "value_scale", "stride_ot", "stride_oh", "stride_lse")
            sizes = ("DV", "BLOCK_DV", "HAS_LSE")
            _MERGE[(decodes, spec.num_kv_heads, rows)](
                partials=buffers[0],
                partial_lses=buffers[1],
                items=items,
                spans=spans,
                max_rows=rows,
                GROUP=group,
                **{name: tensors[name] for name in (*names, *sizes)},
            )

    def _prefill(
        self,
        meta: TritonMetadata,
        decodes: int,
        longest: int,
        paged: bool,
        key_start_loc: torch.Tensor,
        tensors: dict[str, Any],
    ) -> None:
        spec, group = self.spec, self._group
        launch = prefill_launch(
            max(spec.head_size, spec.head_size_v), self._dtype.itemsize, longest * group, paged
        )
        block_m = max(launch.block_m, tile_side(group))
        tokens = meta.num_actual_tokens - meta.num_decode_tokens if decodes else meta.num_actual_tokens
        reqs = meta.num_reqs - decodes
        tiles = tokens // (block_m // group) + reqs
        _PREFILL[(tiles, spec.num_kv_heads)](
            query_start_loc=meta.query_start_loc[decodes:],
            seq_lens=meta.seq_lens[decodes:],
            block_table=meta.block_table[decodes:],
            key_start_loc=key_start_loc[decodes:],
            first_token=meta.num_decode_tokens if decodes else 0,
            num_reqs=reqs,
            stride_table=meta.block_table.stride(0),
            PAGED=paged,
            BLOCK_SIZE=tensors["k_cache"].shape[1] if paged else 1,
            GROUP=group,
            BLOCK_M=block_m,
            BLOCK_N=launch.block_n,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **tensors,
        )

    def _common(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
        reach: Reach,
        use_sinks: bool,
        k_scale: float,
        v_scale: float,
    ) -> dict[str, Any]:
        """The arguments that both kernels take; a pointer that is not used stands for one that is."""
        spec, tensors = self.spec, self.tensors
        sinks = tensors.sinks if use_sinks else None
        return {
            "query": query,
            "output": output,
            "lse": query if output_lse is None else output_lse,
            "sinks": query if sinks is None else sinks,
            "alibi_slopes": query if tensors.alibi_slopes is None else tensors.alibi_slopes,
            "scale": spec.scale * k_scale,
            "value_scale": v_scale,
            "cap": spec.logits_soft_cap or 1.0,
            "left": reach.left,
            "right": reach.right,
            "chunk": reach.chunk,
            "stride_qt": query.stride(0),
            "stride_qh": query.stride(1),
            "stride_ot": output.stride(0),
            "stride_oh": output.stride(1),
            "stride_lse": 0 if output_lse is None else output_lse.stride(0),
            "D": spec.head_size,
            "DV": spec.head_size_v,
            "BLOCK_D": tile_side(spec.head_size),
            "BLOCK_DV": tile_side(spec.head_size_v),
            "HAS_CAP": spec.logits_soft_cap is not None,
            "HAS_SINKS": sinks is not None,
            "HAS_ALIBI": tensors.alibi_slopes is not None,
            "HAS_LSE": output_lse is not None,
            "COMPUTE": self._computed(query.device),
            **switches(reach),
        }

    def _given(
        self, key: torch.Tensor | None, value: torch.Tensor | None, meta: TritonMetadata
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The new tokens' keys and values, where they are all that the longer requests attend."""
        own = self._attends_own_keys and not self.spec.has_quantized_kv_cache
        if key is None or value is None or not (own and meta.starts_anew):
            return None
        check_keys(key, value, meta.num_actual_tokens, self.spec)
        return None if key.stride(2) != 1 or value.stride(2) != 1 else (key[None], value[None])

    def _computed(self, device: torch.device) -> Any:
        """What queries, keys and values are multiplied in, where it is not their own type."""
        if device.type == "cpu" and self._dtype == torch.bfloat16:
            return tl.float32  # the interpreter multiplies bfloat16 as if it were integers
        # float16 holds every 8-bit float, and GPUs convert to nothing else as fast.
        half = self.spec.has_quantized_kv_cache and self._dtype == torch.bfloat16
        return tl.float16 if half else None

    @functools.cached_property
    def _group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads

    def _keys(
        self,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        meta: TritonMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as pages `[num_blocks, block_size, Hkv, D]`; those of the call as one page."""
        self._check_pages(kv_cache)
        if kv_cache is not None:
            return self._pages(kv_cache)
        # How many keys the call must bring is known on the device alone, unless they stand as the queries.
        rows = meta.num_actual_tokens if meta.key_start_loc is meta.query_start_loc else 0
        key, value = check_keys(key, value, rows, self.spec)
        k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
        return k[None], v[None]


def _kv(k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """Keys and values `[blocks, block_size, Hkv, D]` as the kernels take them."""
    return {
        "k_cache": k,
        "v_cache": v,
        "stride_kb": k.stride(0),
        "stride_kt": k.stride(1),
        "stride_kh": k.stride(2),
        "stride_vb": v.stride(0),
        "stride_vt": v.stride(1),
        "stride_vh": v.stride(2),
    }
