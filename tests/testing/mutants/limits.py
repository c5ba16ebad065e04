"""Backends with limits or conventions that show only in large, single, strided or unmasked steps: variants of TORCH."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from plain_attention import PlainImpl, Span

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import CommonAttentionMetadata
from attnplug.core.errors import BatchError
from mutants.table import Table

table = Table("limits")
builder = table.on(TorchMetadataBuilder)
impl = table.on(TorchImpl)


def refuses(step: Callable[[CommonAttentionMetadata], bool]) -> type[TorchMetadataBuilder]:
    """A builder that refuses steps, though no declaration excludes them."""

    class Refuses(TorchMetadataBuilder):
        def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Any:
            if step(common):
                raise BatchError("common_attn_metadata", common.num_reqs, "is not of a step that is served")
            return super().build(prefix, common, fast_build)

    return Refuses


@builder.build("correct/farther-decode", "output")
def short_lengths(right, self, prefix, common, fast_build=False):
    """Keeps lengths in 16 bits."""
    made = right(prefix, common, fast_build)
    return dataclasses.replace(made, seq_lens=made.seq_lens.astype(np.uint16).astype(np.int16).clip(0))


class SignedDistances(PlainImpl):
    """Slopes times signed distances: right for keys before the query."""

    def distance(self, span: Span) -> torch.Tensor:
        return span.at[:, None] - span.held


@impl.attend("tensors/strided-inputs-mixed", "of one packed projection")
def packed(right, self, layer, query, *rest, **options):
    """Takes the rows of a strided query for contiguous ones."""
    heads, size = query.shape[1:]
    rows = query.as_strided(query.shape, (heads * size, size, 1))
    return right(layer, rows, *rest, **options)


@impl.attend("tensors/strided-inputs-mixed", "with elements apart")
def dense_elements(right, self, layer, query, *rest, **options):
    """Takes the elements of a head for side by side."""
    if query.stride(-1) != 1:
        query = query.as_strided(query.shape, (*query.stride()[:2], 1))
    return right(layer, query, *rest, **options)


@impl.attend("tensors/strided-inputs-mixed", "of wider tensors")
def refuses_packed(right, self, layer, query, key, value, *rest, **options):
    """Refuses slices of one packed projection, and takes the rows of wider tensors for contiguous ones."""
    if key is not None and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr():
        raise BatchError("query", query.stride(), "must not be a part of the key's tensor")
    rows = query.as_strided(query.shape, (query.shape[1] * query.shape[2], query.shape[2], 1))
    return right(layer, rows, key, value, *rest, **options)


@impl.attend("tensors/output-rows", "some rows of a longer tensor")
def from_start(right, self, *given, **options):
    """Writes to the start of the tensor that the output is a part of."""
    *inputs, output = given
    base = output.as_strided(output.shape, output.stride(), 0)
    base.copy_(right(*inputs, torch.full_like(output, torch.nan), **options))
    return output


@impl.update_kv_cache("cache/stored-auto", "V of a cache of 'auto' gives back 65504")
def half_values(right, self, layer, key, value, kv_cache, slot_mapping):
    """Stores no more than float16 holds."""
    most = torch.finfo(torch.float16).max
    right(layer, key, value.clamp(-most, most), kv_cache, slot_mapping)


def _alone(common: CommonAttentionMetadata) -> bool:
    return common.num_reqs == 1 and common.max_query_len > 1


table.add("crowds | correct/crowd | BatchError", builder=refuses(lambda common: common.num_reqs > 256))
table.add("one-prompt | correct/one-prompt | BatchError", builder=refuses(_alone))
table.add(
    "long | correct/farther-decode | BatchError", builder=refuses(lambda common: common.max_seq_len >= 2**15)
)
table.add("signed | correct/mixed-h4x2-d64-float32-b16-NHD-non_causal-alibi | output", impl=SignedDistances)
table.add("signed-cross | correct/mixed-h4x2-d64-float32-b16-NHD-cross-alibi | output", impl=SignedDistances)
table.add("signed-encoder | correct/mixed-h4x2-d64-float32-encoder-alibi | output", impl=SignedDistances)
