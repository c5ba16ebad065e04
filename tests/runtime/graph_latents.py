"""A decode over latents in plain torch operations that a CUDA graph can hold, prefilled by TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionCGSupport, MLADecodeBackend
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.mla.backend import QueryLens
from attnplug.core.spec import Phase
from attnplug.mla import MLADecodeBuilder, MLADecodeImpl


class LatentGraphBuilder(MLADecodeBuilder):
    """Hands on the step's own tensors."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    decode_needs_host_seq_lens = False


class ForgetfulBuilder(LatentGraphBuilder):
    """Copies the lengths in each build, so that a captured graph reads those of its capture."""

    def build_decode(self, common: CommonAttentionMetadata) -> Any:
        return dataclasses.replace(common, seq_lens=common.seq_lens.clone())


class LatentGraphImpl(MLADecodeImpl):
    """All queries of a uniform step at once, over all pages of their rows in the table."""

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CommonAttentionMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        reqs, queries = metadata.num_reqs, metadata.max_query_len
        axis = torch.arange(metadata.max_seq_len)
        size = kv_cache.shape[1]
        latents = kv_cache[metadata.block_table_tensor.long()[:, axis // size], axis % size]
        query = torch.cat((q_nope, q_pe), 2).view(reqs, queries, q_nope.shape[1], -1)
        scores = torch.einsum("rqnd,rsd->rqns", query, latents) * self.softmax_scale
        ends = metadata.seq_lens.long()[:, None] - queries + torch.arange(queries)
        scores = scores.masked_fill((axis > ends[..., None])[:, :, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num()
        output.copy_(torch.einsum("rqns,rsl->rqnl", weights, latents[..., : q_nope.shape[2]]).flatten(0, 1))
        if output_lse is not None:
            output_lse.copy_(scores.logsumexp(-1).flatten(0, 1))


def latent_backend(builder: type[MLADecodeBuilder] = LatentGraphBuilder) -> type[MLADecodeBackend]:
    """A backend for both phases, above TORCH in the automatic order."""
    return type(
        "LatentGraphs",
        (MLADecodeBackend,),
        {
            "device_types": ("cpu",),
            "supported_dtypes": ("float32",),
            "supported_phases": tuple(Phase),
            "prefill": TorchBackend,
            "query_lens": QueryLens.UNIFORM,
            "decode_threshold": 4,
            "get_name": staticmethod(lambda: "LATENT_GRAPHS"),
            "get_impl_cls": staticmethod(lambda: LatentGraphImpl),
            "get_builder_cls": staticmethod(lambda: builder),
        },
    )
