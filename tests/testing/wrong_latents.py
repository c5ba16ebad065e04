"""Backends of latent attention with one mistake each: variants of TORCH's decode and of the base's prefill."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from catching import Wrong

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.latent import TorchMLABuilder, TorchMLAImpl
from attnplug.core import LayerSpec, MLADims

__all__ = ["WRONG_LATENTS"]

_DIMS = MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
_LAYER = LayerSpec(num_heads=4, num_kv_heads=1, head_size=40, mla=_DIMS)
_SERVING: Any = TorchBackend.for_layer(_LAYER)


class Decode(TorchMLAImpl):
    """Hooks before and after TORCH's decode."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        given = self.given(q_nope, q_pe, kv_cache, metadata)
        super().decode(*given, output, output_lse)
        self.after(kv_cache, metadata, output, output_lse)

    def given(self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any) -> Any:
        return q_nope, q_pe, kv_cache, metadata

    def after(self, kv_cache: Any, metadata: Any, output: Any, output_lse: Any) -> None:
        """Does nothing."""


class ScaleOfLatent(Decode):
    """Scales by the size of the absorbed query."""

    def given(self, q_nope: Any, q_pe: Any, *rest: Any) -> Any:
        self.softmax_scale = self.dims.latent_size**-0.5
        return q_nope, q_pe, *rest


class OwnScale(Decode):
    """Scales by the size of the query, without the layer's own factor."""

    def given(self, q_nope: Any, q_pe: Any, *rest: Any) -> Any:
        self.softmax_scale = self.spec.query_size**-0.5
        return q_nope, q_pe, *rest


class BaseTwo(Decode):
    """Gives an LSE in base 2."""

    def after(self, kv_cache: Any, metadata: Any, output: Any, output_lse: Any) -> None:
        if output_lse is not None:
            output_lse.div_(math.log(2))


class ZeroForNoKeys(Decode):
    """Gives queries without keys, as on a rank that has none of a request, the LSE 0."""

    def after(self, kv_cache: Any, metadata: Any, output: Any, output_lse: Any) -> None:
        if output_lse is not None:
            output_lse.masked_fill_(output_lse == -torch.inf, 0.0)


class LastValues(Decode):
    """Takes the last elements of a latent as its value."""

    def decode(self, q_nope: Any, q_pe: Any, kv_cache: Any, *rest: Any) -> None:
        turned = kv_cache.flip(-1)
        rank = self.dims.kv_lora_rank
        query = torch.cat((q_nope, q_pe), 2).flip(-1)
        super().decode(query[..., :rank], query[..., rank:], turned, *rest)
        rest[1].copy_(rest[1].flip(-1))


class RotatedFirst(Decode):
    """Expects the rotated part of the query first."""

    def given(self, q_nope: Any, q_pe: Any, *rest: Any) -> Any:
        both, rope = torch.cat((q_pe, q_nope), 2), self.dims.kv_lora_rank
        return both[..., :rope], both[..., rope:], *rest


class Dense(Decode):
    """Reads blocks that are apart as if they lay side by side."""

    def given(self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any) -> Any:
        dense = torch.empty(kv_cache.shape, device="meta").stride()
        return q_nope, q_pe, kv_cache.as_strided(kv_cache.shape, dense), metadata


class Chunks(TorchMLAImpl):
    """Prefills with some of the chunks of the context."""

    kept = slice(None)

    def forward_mha(
        self, q: Any, kv_c: Any, k_pe: Any, cache: Any, meta: Any, *rest: Any, **more: Any
    ) -> None:
        if meta.prefill is not None:
            fewer = dataclasses.replace(meta.prefill, chunks=meta.prefill.chunks[self.kept])
            meta = dataclasses.replace(meta, prefill=fewer)
        super().forward_mha(q, kv_c, k_pe, cache, meta, *rest, **more)


class FirstChunkDropped(Chunks):
    """Begins with the second chunk."""

    kept = slice(1, None)


class LastChunkDropped(Chunks):
    """Stops before the last chunk."""

    kept = slice(-1)


class ChunkOfHalfDropped(LastChunkDropped):
    """Stops before the last of several chunks in half precision."""

    def forward_mha(self, q: Any, *given: Any, **more: Any) -> None:
        self.kept = slice(None) if q.dtype == torch.float32 else slice(-1)
        super().forward_mha(q, *given, **more)


class ManyHeadsOfFp8(Decode):
    """Over fp8, heads past the 32nd have the 32nd's answer."""

    def after(self, kv_cache: Any, metadata: Any, output: Any, output_lse: Any) -> None:
        if kv_cache.dtype.itemsize == 1:
            output[:, 32:] = output[:, 31:32]


class Unmasked(Decode):
    """Shows all tokens of a request to each of its queries."""

    def given(self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any) -> Any:
        self._absorbed.spec = self._absorbed.spec.replace(causal=False)
        return q_nope, q_pe, kv_cache, dataclasses.replace(metadata, causal=False)


class UnscaledRotated(Decode):
    """Applies the scale of stored latents to their first part only."""

    def given(self, q_nope: Any, q_pe: Any, *rest: Any) -> Any:
        return q_nope, q_pe * (self.spec.scale / self.softmax_scale), *rest


class Stale(TorchMLABuilder):
    """Keeps the decodes of a step of as many requests."""

    def build_decode(self, common: Any) -> Any:
        made = super().build_decode(common)
        kept = getattr(self, "kept", None)
        if kept is not None and kept.seq_lens.size == made.seq_lens.size:
            made = dataclasses.replace(made, seq_lens=kept.seq_lens)
        self.kept = made
        return made


def _wrong(name: str, check: str, says: str, impl: Any = None, builder: Any = None, **declared: Any) -> Wrong:
    parts: dict[str, Any] = {"get_name": staticmethod(lambda: name), **declared}
    if impl:
        parts["get_impl_cls"] = classmethod(lambda cls: impl)
    if builder:
        parts["get_builder_cls"] = classmethod(lambda cls: builder)
    return Wrong(name, type(name, (_SERVING,), parts), check, says)


_CHUNKED = "correct/context-*rows*"
WRONG_LATENTS = [
    _wrong("scale_of_latent", "correct/decode-*", "scale of the latent, not of the query", ScaleOfLatent),
    _wrong("own_scale", "correct/halves-*scale0.15*", "softmax scale ignored", OwnScale),
    _wrong("base_two", "correct/decode-*float32-b16-NHD-lse", "LSE in base 2", BaseTwo),
    _wrong("base_two_on_ranks", "context_parallel/decode-2-*", "LSE in base 2", BaseTwo),
    _wrong("zero_for_no_keys", "context_parallel/decode-3-*", "see nothing is 0, not -inf", ZeroForNoKeys),
    _wrong("last_values", "correct/decode-*", "values from the last elements", LastValues),
    _wrong("rotated_first", "correct/decode-*", "rotated part of the keys taken first", RotatedFirst),
    _wrong("dense", "correct/decode-*apart*", "", Dense),
    _wrong("first_chunk_dropped", _CHUNKED, "chunk 1 of", FirstChunkDropped),
    _wrong("last_chunk_dropped", _CHUNKED, "of the computed tokens left out of a prefill", LastChunkDropped),
    _wrong("chunk_of_half_dropped", "correct/context-*-bfloat16-*rows*", "", ChunkOfHalfDropped),
    _wrong("many_heads_of_fp8", "correct/halves-h64x1-*-fp8-*", "heads 32-63 of 64", ManyHeadsOfFp8),
    _wrong("unmasked", "correct/uniform-*", "causal mask ignored", Unmasked),
    _wrong("unscaled_rotated", "correct/decode-*fp8*", "k_scale left out for the rotated", UnscaledRotated),
    _wrong("stale", "builder/build-full", "another step's lengths", builder=Stale),
]
