"""Backends of latent attention with one mistake each: variants of TORCH's decode and of the base's prefill."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from attnplug.backends.torch_native.latent import TorchMLABuilder, TorchMLAImpl
from mutants.table import Table

table = Table("latents")
_CHUNKED = "correct/context-*rows*"
latent_builder = table.on(TorchMLABuilder)


class Decode(TorchMLAImpl):
    """Hooks before and after TORCH's decode."""

    def decode(self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
        given = self.given(q_nope, q_pe, kv_cache, metadata)
        super().decode(*given, output, output_lse)
        self.after(kv_cache, metadata, output, output_lse)

    def given(self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any) -> Any:
        return q_nope, q_pe, kv_cache, metadata

    def after(self, kv_cache: Any, metadata: Any, output: Any, output_lse: Any) -> None:
        """Does nothing."""


decode = table.on(Decode)


@decode.given("correct/decode-*", "scale of the latent, not of the query")
def scale_of_latent(self, q_nope, q_pe, *rest):
    """Scales by the size of the absorbed query."""
    self.softmax_scale = self.dims.latent_size**-0.5
    return q_nope, q_pe, *rest


@decode.given("correct/halves-*scale0.15*", "softmax scale ignored")
def own_scale(self, q_nope, q_pe, *rest):
    """Scales by the size of the query, without the layer's own factor."""
    self.softmax_scale = self.spec.query_size**-0.5
    return q_nope, q_pe, *rest


class BaseTwo(Decode):
    """Gives an LSE in base 2."""

    def after(self, kv_cache: Any, metadata: Any, output: Any, output_lse: Any) -> None:
        if output_lse is not None:
            output_lse.div_(math.log(2))


@decode.after("context_parallel/decode-3-*", "see nothing is 0, not -inf")
def zero_for_no_keys(self, kv_cache, metadata, output, output_lse):
    """Gives queries without keys, as on a rank that has none of a request, the LSE 0."""
    if output_lse is not None:
        output_lse.masked_fill_(output_lse == -torch.inf, 0.0)


@decode.decode("correct/decode-*", "values from the last elements")
def last_values(right, self, q_nope, q_pe, kv_cache, *rest):
    """Takes the last elements of a latent as its value."""
    turned = kv_cache.flip(-1)
    rank = self.dims.kv_lora_rank
    query = torch.cat((q_nope, q_pe), 2).flip(-1)
    right(query[..., :rank], query[..., rank:], turned, *rest)
    rest[1].copy_(rest[1].flip(-1))


@decode.given("correct/decode-*", "rotated part of the keys taken first")
def rotated_first(self, q_nope, q_pe, *rest):
    """Expects the rotated part of the query first."""
    both, rope = torch.cat((q_pe, q_nope), 2), self.dims.kv_lora_rank
    return both[..., :rope], both[..., rope:], *rest


@decode.given("correct/decode-*apart*", "")
def dense(self, q_nope, q_pe, kv_cache, metadata):
    """Reads blocks that are apart as if they lay side by side."""
    dense = torch.empty(kv_cache.shape, device="meta").stride()
    return q_nope, q_pe, kv_cache.as_strided(kv_cache.shape, dense), metadata


class Chunks(TorchMLAImpl):
    """Prefills with some of the chunks of the context."""

    kept = slice(None)

    def forward_mha(self, q, kv_c, k_pe, cache, meta, *rest, **more):
        if meta.prefill is not None:
            fewer = dataclasses.replace(meta.prefill, chunks=meta.prefill.chunks[self.kept])
            meta = dataclasses.replace(meta, prefill=fewer)
        super().forward_mha(q, kv_c, k_pe, cache, meta, *rest, **more)


@table.part(_CHUNKED, "chunk 1 of")
class FirstChunkDropped(Chunks):
    """Begins with the second chunk."""

    kept = slice(1, None)


@table.part(_CHUNKED, "of the computed tokens left out of a prefill")
class LastChunkDropped(Chunks):
    """Stops before the last chunk."""

    kept = slice(-1)


last_chunk_dropped = table.on(LastChunkDropped)


@last_chunk_dropped.forward_mha("correct/context-*-bfloat16-*rows*", "")
def chunk_of_half_dropped(right, self, q, *given, **more):
    """Stops before the last of several chunks in half precision."""
    self.kept = slice(None) if q.dtype == torch.float32 else slice(-1)
    right(q, *given, **more)


@decode.after("correct/halves-h64x1-*-fp8-*", "heads 32-63 of 64")
def many_heads_of_fp8(self, kv_cache, metadata, output, output_lse):
    """Over fp8, heads past the 32nd have the 32nd's answer."""
    if kv_cache.dtype.itemsize == 1:
        output[:, 32:] = output[:, 31:32]


@decode.given("correct/uniform-*", "causal mask ignored")
def unmasked(self, q_nope, q_pe, kv_cache, metadata):
    """Shows all tokens of a request to each of its queries."""
    self._absorbed.spec = self._absorbed.spec.replace(causal=False)
    return q_nope, q_pe, kv_cache, dataclasses.replace(metadata, causal=False)


# fmt: off
# Applies the scale of stored latents to their first part only.
decode.given("correct/decode-*fp8*", "k_scale left out for the rotated",
    unscaled_rotated=lambda self, q_nope, q_pe, *rest: (q_nope, q_pe * (self.spec.scale / self.softmax_scale), *rest))
# fmt: on


@latent_builder.build_decode("builder/build-full", "another step's lengths")
def stale(right, self, common):
    """Keeps the decodes of a step of as many requests."""
    made = right(common)
    kept = getattr(self, "kept", None)
    if kept is not None and kept.seq_lens.size == made.seq_lens.size:
        made = dataclasses.replace(made, seq_lens=kept.seq_lens)
    self.kept = made
    return made


table.add("base_two | correct/alike-*float32-b16-NHD-lse | LSE in base 2", impl=BaseTwo)
table.add("base_two_on_ranks | context_parallel/decode-2-* | LSE in base 2", impl=BaseTwo)
