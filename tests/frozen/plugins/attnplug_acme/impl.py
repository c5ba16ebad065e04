"""Runs a layer, in plain PyTorch that passes the conformance kit: put your kernels in its place."""

from __future__ import annotations

import torch
from attnplug.core import AttentionImpl, AttentionLayer
from attnplug.errors import LayoutError
from attnplug.ops import write_kv_cache
from attnplug.ops.calls import check_keys, check_queries, pages_of
from torch.nn.functional import scaled_dot_product_attention

from attnplug_acme.backend import AcmeBackend
from attnplug_acme.builder import AcmeMetadata


class AcmeImpl(AttentionImpl[AcmeMetadata]):
    """Attends one request after the other, over pages gathered into one piece."""

    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write `key` and `value` `[T, Hkv, D]` where the slots say; slot -1 is not written."""
        key, value = check_keys(key, value, slot_mapping.shape[0], self.spec)
        k_pages, v_pages = pages_of(AcmeBackend, kv_cache, self.spec)
        write_kv_cache(key, value, k_pages, v_pages, slot_mapping)

    @torch.no_grad()
    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: AcmeMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend `query [T, H, D]` over the pages and write `output [T, H, D]`.

        Raises:
            BatchError: tensors that do not fit the layer, an LSE, a quantised output.
            LayoutError: no KV cache, or one of another shape or dtype.
        """
        starts = attn_metadata.query_starts
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        check_queries(query, output, output_lse, starts[-1], self.spec, **scales)
        if kv_cache is None:
            raise LayoutError("kv_cache", None, "is required: K and V are read from pages")
        # Views of the cache, with the strides of whatever layout the engine chose.
        k_pages, v_pages = pages_of(AcmeBackend, kv_cache, self.spec)
        block_size = k_pages.shape[1]
        for request, seq_len in enumerate(attn_metadata.seq_lens):
            start, stop = starts[request], starts[request + 1]
            # Rows before the first token, as padding requests have them, see nothing: their output is 0.
            first = stop - min(stop - start, seq_len)
            output[start:first] = 0
            if first == stop:
                continue
            # Table entries past the last page may hold anything, and rows of a page past the length NaN.
            blocks = attn_metadata.block_table[request, : -(-seq_len // block_size)]
            keys = k_pages[blocks].flatten(0, 1)[:seq_len]
            values = v_pages[blocks].flatten(0, 1)[:seq_len]
            output[first:stop] = self._attend_request(query[first:stop], keys, values)
        return output

    def _attend_request(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention of the last tokens `[Tq, H, D]` of a request to all of its tokens `[S, Hkv, D]`."""
        new, seq_len = query.shape[0], keys.shape[0]
        # Row j stands at position S - Tq + j; `is_causal=True` would put it at position j.
        positions = torch.arange(seq_len, device=query.device)
        seen = positions <= positions[seq_len - new :, None]
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=self.spec.scale,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
        )
        return attended[0].transpose(0, 1)
