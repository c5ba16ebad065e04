"""Runs a layer on a generation of FlashAttention: writes its pages, and prepares the kernels' arguments."""

from __future__ import annotations

import functools
from abc import abstractmethod

import torch

from attnplug.backends.flash_attn.metadata import Call, FlashAttnMetadata, Kernels
from attnplug.backends.impl import BuiltinImpl
from attnplug.core.errors import BatchError
from attnplug.core.impl import AttentionLayer
from attnplug.ops.checks import check_cache_given, check_keys, check_queries
from attnplug.ops.reach import Reach

# The kernels load and store 16 bytes at a time.
_BYTES = 16


class FlashAttnImpl(BuiltinImpl[FlashAttnMetadata]):
    """Attention in FlashAttention's kernels; subclasses name the generation."""

    can_return_lse_for_decode = True
    _reads_adjacent = True

    @classmethod
    @functools.cache
    def kernels(cls) -> Kernels:
        """The generation's kernels, imported at the first call.

        Raises:
            BackendUnavailableError: the library is missing, is another distribution, or does not import.
        """
        return cls.import_kernels()

    @classmethod
    @abstractmethod
    def import_kernels(cls) -> Kernels:
        """As `kernels`, at each call."""

    @torch.no_grad()
    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: FlashAttnMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As AttentionImpl.attend; output scales are not supported."""
        meta, spec = attn_metadata, self.spec
        tokens = meta.num_actual_tokens
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        check_queries(query, output, output_lse, tokens, self.spec, **scales)
        if output.stride(2) != 1:
            limit = "must be 1: a head's elements are contiguous"
            raise BatchError("output.stride(2)", output.stride(2), limit)
        causal = spec.causal_in(meta.causal)
        reach = Reach.of(spec, causal)
        if reach.chunk != meta.chunk:
            remedy = "build it with the layer's own kv_cache_spec"
            raise BatchError("attn_metadata.chunk", meta.chunk, f"is not the layer's {reach.chunk}", remedy)
        k, v, paged = self._keys(key, value, kv_cache, meta)
        if meta.all_requests is None:
            return output
        kernels, tensors = self.kernels(), self.tensors
        query, rows = _aligned(query[:tokens]), output[:tokens]
        # An output at an address that the kernels cannot store to is written by way of another tensor.
        written = rows if _is_aligned(rows) else torch.empty_like(query[..., : spec.head_size_v])
        for requests in meta.calls if kernels.separate_decodes else (meta.all_requests,):
            call = Call(
                spec=spec,
                requests=requests,
                query=query,
                key=k,
                value=v,
                output=written,
                paged=paged,
                causal=causal,
                window=(reach.left, reach.right),
                sinks=_dense(tensors.sinks) if use_sinks else None,
                alibi_slopes=_dense(tensors.alibi_slopes),
                wants_lse=output_lse is not None,
            )
            lse = kernels(call)
            own = slice(requests.first_token, requests.end_token)
            if written is not rows:
                rows[own].copy_(written[own])
            if output_lse is not None and lse is not None:
                # For a query that sees nothing the library's LSE may be infinite of either sign.
                found = lse.t()
                output_lse[own].copy_(found.masked_fill(found.isposinf(), -torch.inf))
        return output

    def _keys(
        self,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        meta: FlashAttnMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Pages of K and V, or packed K and V; and whether they are pages."""
        check_cache_given(kv_cache, self.spec)
        if kv_cache is not None:
            own = self._attends_own_keys and meta.all_new and not meta.chunk
            if key is None or value is None or not own:
                requests = meta.all_requests
                pages = (
                    self._pages_of(kv_cache)
                    if requests is None
                    else self._pages_with_room(kv_cache, requests.block_table, requests.max_query_len)
                )
                return pages.k, pages.v, True
            rows = meta.num_actual_tokens
        else:
            rows = meta.key_tokens
        key, value = check_keys(key, value, rows, self.spec)
        # The kernels load whole tiles. Rows after the last key may be NaN, so they are cut off.
        return _aligned(key[:rows]), _aligned(value[:rows]), False


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether rows of heads `[T, H, D]` can be loaded and stored as the kernels do."""
    each = _BYTES // tensor.element_size()
    strides = tensor.stride()
    aligned = strides[0] % each == 0 and strides[1] % each == 0 and strides[2] == 1
    return aligned and tensor.data_ptr() % _BYTES == 0


def _dense(numbers: torch.Tensor | None) -> torch.Tensor | None:
    """The numbers of a layer's heads side by side: they may be a column of a table."""
    return None if numbers is None else numbers.contiguous()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
