"""A backend of latent attention whose decode is a loop over requests, with records of its calls."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from attnplug.core import CommonAttentionMetadata, Feature, MLADecodeBackend
from attnplug.mla import MLADecodeBuilder, MLADecodeImpl


class LoopImpl(MLADecodeImpl):
    """Attends request by request and records its arguments."""

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CommonAttentionMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        self.backend.calls.append((q_nope, q_pe, metadata))  # type: ignore[attr-defined]
        query, starts = torch.cat((q_nope, q_pe), 2).float(), metadata.query_start_loc_cpu
        for request, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(int(starts[request]), int(starts[request + 1]))
            places = torch.arange(length)
            blocks = metadata.block_table_tensor[request].long()[places // kv_cache.shape[1]]
            raw = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
            latents = raw[blocks, places % kv_cache.shape[1]].view(kv_cache.dtype).float()
            scores = torch.einsum("tnd,sd->tns", query[rows], latents) * self.softmax_scale
            ends = length - (rows.stop - rows.start) + torch.arange(rows.stop - rows.start)
            scores = scores.masked_fill((places > ends[:, None])[:, None], -torch.inf)
            lse = scores.logsumexp(2)
            weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
            output[rows] = torch.einsum("tns,sl->tnl", weights, latents[:, : q_nope.shape[2]]).to(
                output.dtype
            )
            if output_lse is not None:
                output_lse[rows] = lse


class LoopBackend(MLADecodeBackend):
    """Any dimensions, on a CPU."""

    device_types = ("cpu",)
    supported_dtypes = ("float32", "bfloat16")
    supported_kv_cache_dtypes = ("auto", "fp8")
    features = Feature.MLA | Feature.LSE | Feature.FP8_KV
    calls: ClassVar[list[Any]] = []

    @staticmethod
    def get_name() -> str:
        return "LOOP"

    @classmethod
    def get_impl_cls(cls) -> type[LoopImpl]:
        return LoopImpl

    @classmethod
    def get_builder_cls(cls) -> type[MLADecodeBuilder]:
        return MLADecodeBuilder


@pytest.fixture
def loop() -> type[LoopBackend]:
    """A fresh class, so that tests can change its declarations."""
    return type("Loop", (LoopBackend,), {"calls": []})
