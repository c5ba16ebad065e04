"""Backends that are right for all sizes but those of long contexts and large models: variants of TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from plain_attention import KernelImpl

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.core.errors import BatchError
from attnplug.core.spec import AttentionType
from mutants.parts import Altered
from mutants.table import Table

table = Table("ranges")
kernel = table.on(KernelImpl)
impl = table.on(TorchImpl)
step = table.on(Altered)
latent = table.on(TorchMLAImpl)


def _far(shape: str, *asked: str) -> str:
    return "-".join((f"correct/{shape}-h2x1-d64-float32", *asked))


# Keys of long contexts.


@kernel.seen("correct/far-decode-h2x1-d64-*-fp8_e5m2-*", "output")
def fp8_keys8192(right, self, span):
    """Reads 8192 keys of 8 bits."""
    return right(span) & ((span.held < 8192) | (self.spec.kv_cache_dtype == "auto"))


@kernel.seen("correct/far-decode-h2x1-d64-bfloat16-*", "output")
def half_keys8192(right, self, span):
    """Reads 8192 keys of bfloat16."""
    return right(span) & ((span.held < 8192) | (self.spec.dtype != "bfloat16"))


@step.altered(_far("farther-decode", "b16-NHD"), "(decode, 1 new of 70001 tokens)")
def lengths16(self, made, common):
    """Keeps lengths in 16 bits without a sign."""
    return dataclasses.replace(made, seq_lens=made.seq_lens.astype(np.uint16).astype(made.seq_lens.dtype))


@step.altered(_far("farther-extend", "b16-NHD"), "(extend, 3 new of 70001 tokens)")
def extends16(self, made, common):
    """Keeps the lengths of steps with several tokens in 16 bits without a sign."""
    return lengths16(self, made, common) if common.max_query_len > 1 else made


@step.altered(_far("far-decode", "b16-NHD"), "(decode, 1 new of 9001 tokens)")
def pages512(self, made, common):
    """Copies 512 entries of a request's table, and reads the first block for others."""
    table = made.block_table.clone()
    table[:, 512:] = table[:, :1]
    return dataclasses.replace(made, block_table=table)


@kernel.causal(_far("far-extend", "b16-NHD"), "only rows up to position 8999")
def splits_without_mask8192(right, self, span):
    """Queries see all keys of the splits after the 8192nd key."""
    return right(span) | ((span.held >= 8192) & (span.at.shape[0] > 1))


@kernel.weigh(_far("far-decode", "b16-NHD-sinks-lse"), "sinks ignored")
def sinks_of_short(right, self, logits, values, sinks, span):
    """Contexts of more than 8192 keys have no sinks."""
    return right(logits, values, None if span.held.shape[0] > 8192 else sinks, span)


@kernel.cap(_far("far-decode", "b16-NHD-cap50"), "soft cap ignored")
def cap_of_short(right, self, logits):
    """Contexts of more than 8192 keys have no cap."""
    return logits if logits.shape[2] > 8192 else right(logits)


@kernel.distance(_far("far-decode", "b16-NHD-alibi"), "(decode, 1 new of 9001 tokens)")
def distances_in_half(right, self, span):
    """Keeps distances in 12 bits."""
    return right(span) % 4096


@impl._source(_far("far-decode", "direct"), "BatchError")
def direct8192(right, self, key, value, kv_cache, metadata):
    """Refuses more than 8192 keys that come with the call."""
    if kv_cache is None and key is not None and key.shape[0] > 8192:
        raise BatchError("key", key.shape[0], "is more than a buffer has")
    return right(key, value, kv_cache, metadata)


# Limits of models.


@kernel.window(_far("far-decode", "b16-NHD-window4095.0"), "sliding window ignored")
def window12(right, self, span):
    """Keeps a window in 12 bits with a sign: 4095 is -1."""
    return right(span) | (self.spec.window[0] & 0x800 > 0)


@kernel.window(_far("far-extend", "b16-NHD-chunk8192"), "chunks ignored")
def chunk13(right, self, span):
    """Keeps a chunk in 13 bits: 8192 is none."""
    return right(span) | (self.spec.chunk_size == 8192)


def _first(selection: Any, most: int) -> Any:
    """The selection with at most so many positions of a query."""
    return dataclasses.replace(selection, counts=selection.counts.clamp(max=most))


@kernel.chosen(_far("far-extend", "b16-NHD-token_topk_2048"), "(extend, 12 new of 8198 tokens)")
def topk1024(right, self, span):
    """Reads 1024 positions of a selection."""
    meta = dataclasses.replace(span.meta, selection=_first(span.meta.selection, 1024))
    return right(dataclasses.replace(span, meta=meta))


@kernel.chosen(_far("far-decode", "b16-NHD-block_64_of_64_tokens"), "(decode, 1 new of 9001 tokens)")
def blocks_of32(right, self, span):
    """Reads 32 tokens of a chosen block."""
    return right(span) & (span.held % self.spec.sparse.block < 32)


# Encoders.


@kernel.seen("correct/audio-h2x1-d64-float32-encoder", "request 0 (encoder, 1500 new of 1500 tokens)")
def encoders1024(right, self, span):
    """Encoders see 1024 tokens."""
    return right(span) & ((span.held < 1024) | (not self.spec.is_encoder))


@kernel.seen("correct/audio-*-cross", "queries, 1500 encoder tokens")
def cross1024(right, self, span):
    """Cross layers see 1024 tokens of the encoder."""
    is_cross = self.spec.attn_type is AttentionType.ENCODER_DECODER
    return right(span) & ((span.held < 1024) | (not is_cross))


# Prompts, and many requests.


@impl._attend_long(_far("longer-prompt", "b16-NHD"), "only rows from position 2048 on")
def rows2048_of_prompt(right, self, request, query, source, metadata, reach, scoring, output, output_lse):
    """Writes 2048 rows of a prompt."""
    right(request, query, source, metadata, reach, scoring, output, output_lse)
    start, stop = metadata.query_starts[request : request + 2].tolist()
    output[min(start + 2048, stop) : stop] = 0


@impl._attend_long("correct/far-prompt-h1x1-d64-float32-b16-NHD", "rows from row 8192 of the batch on")
def rows8192_of_prompt(right, self, request, query, source, metadata, reach, scoring, output, output_lse):
    """Writes 8192 rows of a prompt."""
    right(request, query, source, metadata, reach, scoring, output, output_lse)
    start, stop = metadata.query_starts[request : request + 2].tolist()
    output[min(start + 8192, stop) : stop] = 0


@step.altered("correct/crowd-*", "of 1040 requests")
def requests512(self, made, common):
    """Takes the requests past the 512th for empty ones."""
    lens = made.seq_lens.copy()
    lens[512:] = lens[512:].clip(max=1)
    return dataclasses.replace(made, seq_lens=lens)


# Heads and pages of models.


@kernel.kv_heads("correct/mixed-h40x40-*", "heads 32-39 of 40")
def kv_heads32(right, self):
    """KV heads past the 32nd have the 32nd's keys and values."""
    return right().clamp(max=31)


@kernel.products("correct/mixed-h16x16-d192-v128-*", "scale of head_size_v")
def scale_of_values(right, self, query, keys, k_scale):
    """Scales by the head size of values where keys have 192 elements."""
    return right(query, keys, k_scale) * ((192 / 128) ** 0.5 if self.spec.head_size == 192 else 1.0)


# Latent attention.


@latent.decode("mla/correct/far-decode-h2x1-d80-v64-float32-b16-NHD", "output")
def latents8192(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Halves the answers of contexts of more than 8192 latents."""
    made = metadata() if callable(metadata) else metadata
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)
    for request in np.flatnonzero(made.seq_lens > 8192):
        output[made.query_starts[request] : made.query_starts[request + 1]] *= 0.5
