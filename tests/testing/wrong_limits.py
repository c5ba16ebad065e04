"""Backends with limits or conventions that show only in large, single, strided or unmasked steps: variants of TORCH."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from catching import Wrong, wrong
from plain_attention import PlainImpl

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import CommonAttentionMetadata
from attnplug.core.errors import BatchError

__all__ = ["WRONG"]


def refuses(step: Callable[[CommonAttentionMetadata], bool]) -> type[TorchMetadataBuilder]:
    """A builder that refuses steps, though no declaration excludes them."""

    class Refuses(TorchMetadataBuilder):
        def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Any:
            if step(common):
                raise BatchError("common_attn_metadata", common.num_reqs, "is not of a step that is served")
            return super().build(prefix, common, fast_build)

    return Refuses


class ShortLengths(TorchMetadataBuilder):
    """Keeps lengths in 16 bits."""

    def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Any:
        made = super().build(prefix, common, fast_build)
        return dataclasses.replace(made, seq_lens=made.seq_lens.astype(np.uint16).astype(np.int16).clip(0))


class SignedDistances(PlainImpl):
    """Slopes times signed distances: right for keys before the query."""

    def bias(self, logits: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        slopes = self.tensors.alibi_slopes
        return logits if slopes is None else logits - slopes[:, None, None] * (at - held)


class ReadsPacked(TorchImpl):
    """Takes the rows of a strided query for contiguous ones."""

    def attend(self, layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        heads, size = query.shape[1:]
        rows = query.as_strided(query.shape, (heads * size, size, 1))
        return super().attend(layer, rows, *rest, **options)


class WritesFromStart(TorchImpl):
    """Writes to the start of the tensor that the output is a part of."""

    def attend(self, *given: Any, **options: Any) -> torch.Tensor:
        *inputs, output = given
        base = output.as_strided(output.shape, output.stride(), 0)
        base.copy_(super().attend(*inputs, torch.full_like(output, torch.nan), **options))
        return output


class StoresHalf(TorchImpl):
    """Stores no more than float16 holds."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        most = torch.finfo(torch.float16).max
        super().update_kv_cache(layer, key, value.clamp(-most, most), kv_cache, slot_mapping)


def _alone(common: CommonAttentionMetadata) -> bool:
    return common.num_reqs == 1 and common.max_query_len > 1


WRONG: list[Wrong] = [
    wrong("crowds", "correct/crowd", "BatchError", builder=refuses(lambda common: common.num_reqs > 256)),
    wrong("one-prompt", "correct/one-prompt", "BatchError", builder=refuses(_alone)),
    wrong(
        "long",
        "correct/far-decode",
        "BatchError",
        builder=refuses(lambda common: common.max_seq_len >= 2**15),
    ),
    wrong("short-lengths", "correct/far-decode", "output", builder=ShortLengths),
    wrong(
        "signed", "correct/mixed-h4x2-d64-float32-b16-NHD-non_causal-alibi", "output", impl=SignedDistances
    ),
    wrong(
        "signed-cross", "correct/mixed-h4x2-d64-float32-b16-NHD-cross-alibi", "output", impl=SignedDistances
    ),
    wrong("signed-encoder", "correct/mixed-h4x2-d64-float32-encoder-alibi", "output", impl=SignedDistances),
    wrong("packed", "tensors/strided-inputs-mixed", "of one packed projection", impl=ReadsPacked),
    wrong("half-values", "cache/stored-auto", "V of a cache of 'auto' gives back 65504", impl=StoresHalf),
    wrong("from-start", "tensors/output-rows", "some rows of a longer tensor", impl=WritesFromStart),
]
