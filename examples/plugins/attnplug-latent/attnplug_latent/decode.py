"""The decode of LATENT: absorbed queries over the latents of each request."""

from __future__ import annotations

import torch
from attnplug.core import CommonAttentionMetadata
from attnplug.mla import MLADecodeImpl, packed_query


class LatentImpl(MLADecodeImpl):
    """Latent attention; the base does everything but `decode`."""

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CommonAttentionMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend `[T, N, L + R]` queries over `[num_blocks, block_size, L + R]` latents, in float32."""
        query, rank = packed_query(q_nope, q_pe).float(), q_nope.shape[2]
        starts = metadata.query_start_loc_cpu.tolist()
        # Only the device knows those of sparse layers.
        for request, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            blocks = metadata.block_table_tensor[request, : -(-length // kv_cache.shape[1])]
            latents = torch.cat([kv_cache[:0].flatten(0, 1), *(kv_cache[block] for block in blocks.tolist())])
            latents = latents[:length].float()
            count = rows.stop - rows.start
            ends = torch.arange(length - count + 1, length + 1, device=latents.device)
            hidden = torch.arange(length, device=latents.device) >= ends[:, None]
            scores = torch.einsum("tnd,sd->tns", query[rows], latents) * self.softmax_scale
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            lse = scores.logsumexp(2)
            # A query that sees no key has an LSE of -inf and weights of 0.
            weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[:, :, None])
            output[rows] = torch.einsum("tns,sl->tnl", weights, latents[:, :rank]).to(output.dtype)
            if output_lse is not None:
                output_lse[rows] = lse
