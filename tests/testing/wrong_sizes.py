"""Wrong backends that are right for small layers and short steps, for one layer, or for steps of one kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from kernel_port import KernelImpl, Span
from wrong_accidents import Accident, with_impl, with_latent_impl

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import AttentionType

__all__ = ["WRONG_SIZES"]

WRONG_SIZES: list[Accident] = []
_add, _add_latent = with_impl(WRONG_SIZES), with_latent_impl(WRONG_SIZES)
_BYTE = 256


def _plain(name: str) -> str:
    return f"correct/{name}-h4x2-d64-float32-b16-NHD"


# Many heads, large heads.


@_add("correct/mixed-h96x4-*", "heads 16-23, 40-47, 64-71, 88-95 of 96")
class GroupsOf16(KernelImpl):
    """Heads past the 16th of a group have the 16th's answer."""

    def one(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.spec.num_heads // self.spec.num_kv_heads
        heads = torch.arange(self.spec.num_heads)
        served = heads // group * group + (heads % group).clamp_max(15)
        out, lse = super().one(*given)
        return out[served], lse[served]


@_add("correct/mixed-h96x4-*", "heads 64-95 of 96")
class Heads64(KernelImpl):
    """Heads past the 64th have the 64th's answer."""

    def one(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        served = torch.arange(self.spec.num_heads).clamp_max(63)
        out, lse = super().one(*given)
        return out[served], lse[served]


@_add("correct/mixed-h4x2-d512-*", "output error")
class Elements320(KernelImpl):
    """Reads 320 elements of a head."""

    def one(self, query: torch.Tensor, keys: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().one(query[..., :320], keys[..., :320], *rest)


# Windows, chunks, caps and scales of models.


@_add(f"{_plain('long-*')}-window1030*", "left side of the window in 8 bits")
class WindowInByte(KernelImpl):
    """Keeps the window in 8 bits."""

    def window(self, span: Span) -> torch.Tensor:
        return span.at[:, None] - span.held <= self.spec.window[0] % _BYTE


@_add(f"{_plain('long-decode')}-chunk1031*", "chunks ignored")
class ChunkInByte(KernelImpl):
    """Takes a chunk that 8 bits do not hold for none."""

    def window(self, span: Span) -> torch.Tensor:
        seen = super().window(span)
        return torch.ones_like(seen) if (self.spec.chunk_size or 0) >= _BYTE else seen


@_add(f"{_plain('mixed')}-cap50", "soft cap ignored")
class CapUpTo40(KernelImpl):
    """Leaves out a cap of more than 40, since small logits hardly change."""

    def logits(self, scaled: torch.Tensor, span: Span) -> torch.Tensor:
        return scaled if (self.spec.logits_soft_cap or 0) > 40 else super().logits(scaled, span)


@_add(f"{_plain('mixed')}-scale1", "softmax scale ignored")
class ScaleOfOne(KernelImpl):
    """Takes a scale of 1 for no scale."""

    def one(self, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        usual = self.spec.head_size**-0.5
        return super().one(query * usual if self.spec.scale == 1.0 else query, *rest)


# Long contexts and many rows.


@_add(_plain("long-extend"), "rows 1-2, 5-6, 9-10")
class PositionsInHalf(KernelImpl):
    """Compares positions in float16, which counts to 2048."""

    def causal(self, span: Span) -> torch.Tensor:
        return span.held.half() <= span.at[:, None].half()


@_add(_plain("long-extend"), "causal mask ignored")
class SplitsWithoutMask(KernelImpl):
    """A verified token sees all keys of the splits after the first."""

    def causal(self, span: Span) -> torch.Tensor:
        seen = super().causal(span)
        return seen | ((span.held >= 512) & (1 < span.at.shape[0] <= 16))


@_add(_plain("many-rows"), "only rows from")
class Prompt1024(KernelImpl):
    """Rows past the 1024th of a prompt see what that one sees."""

    def seen(self, span: Span) -> torch.Tensor:
        seen = super().seen(span)
        return seen[torch.arange(seen.shape[0]).clamp_max(1023)]


@_add(_plain("many-rows"), "the wrong rows are 0")
class Rows2048(KernelImpl):
    """Writes 2048 rows of a step."""

    def one(
        self, query: Any, keys: Any, values: Any, scales: Any, sinks: Any, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().one(query, keys, values, scales, sinks, span)
        rows = torch.arange(span.rows.start, span.rows.stop)
        return out.masked_fill((rows >= 2048)[:, None], 0.0), lse


@_add(f"{_plain('long-decode')}-window1030*", "sinks ignored")
class SplitWindowsWithoutSinks(KernelImpl):
    """A split decode with a window has no sinks."""

    def weigh(
        self, logits: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_split = span.held.shape[0] > 512 and self.spec.is_windowed
        return super().weigh(logits, values, None if is_split else sinks, span)


@_add(f"{_plain('long-decode')}-cap*lse", "LSE before the soft cap")
class SplitLseWithoutCap(KernelImpl):
    """The LSE of a split decode is that of the logits before the cap."""

    def one(
        self, query: Any, keys: Any, values: Any, scales: Any, sinks: Any, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().one(query, keys, values, scales, sinks, span)
        if span.held.shape[0] > 512 and self.spec.logits_soft_cap:
            raw = query @ keys.mT * self.spec.scale
            lse = raw.masked_fill(~self.seen(span), -math.inf).logsumexp(2)
        return out, lse


@_add("correct/long-decode-h4x2-d64-float32-fp8-*", "only requests of more than 129 tokens")
class SplitsWithoutScale(KernelImpl):
    """The splits after the first have no scale of V."""

    def one(
        self, query: Any, keys: Any, values: Any, scales: Any, sinks: Any, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor]:
        late = torch.cat([values[:, :512], values[:, 512:] / scales[1]], dim=1)
        return super().one(query, keys, late, scales, sinks, span)


@_add("correct/long-decode-h14x2-*", "only requests of more than 129 tokens")
class SplitGroups(KernelImpl):
    """A split decode with a group of no power of two reads the next KV head."""

    def one(self, query: Any, keys: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.spec.num_heads // self.spec.num_kv_heads
        odd = keys.shape[1] > 512 and group & (group - 1)
        return super().one(query, keys.roll(group, 0) if odd else keys, *rest)


# Other kinds of layers.


@_add("correct/many-requests-*-encoder", "of 40 requests")
class EncodersOfFive(KernelImpl):
    """Encoders with more than five requests read the keys of later ones one row late."""

    def one(self, query: Any, keys: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        is_late = self.spec.is_encoder and rest[-1].request >= 5
        return super().one(query, keys.roll(1, 1) if is_late else keys, *rest)


@_add(f"{_plain('mixed')}-cross", "1 of 6 requests")
class CrossAsSelf(KernelImpl):
    """Takes queries of a cross layer past the number of its keys for padding."""

    def seen(self, span: Span) -> torch.Tensor:
        seen, (rows, held) = super().seen(span), (span.at.shape[0], span.held.shape[0])
        is_cross = self.spec.attn_type is AttentionType.ENCODER_DECODER
        return seen & ((torch.arange(rows) < held)[:, None] | (not is_cross))


# Layers that share, strides, steps in another form, many calls.


@_add("cache/sharing-window", "sliding window ignored")
class WindowOfTarget(TorchImpl):
    """A layer that shares another's cache has its window too."""

    _windows: ClassVar[dict[str, tuple[int, int]]] = {}

    def _bind(
        self, spec: Any, layer_name: str, tensors: Any, target: Any = None, options: Any = None
    ) -> None:
        super()._bind(spec, layer_name, tensors, target, options)
        self._windows[layer_name] = spec.window
        if target in self._windows:
            self.spec = spec.replace(window=self._windows[target])


@_add("cache/sharing-fp8", "fp8 scales ignored")
class SharesWithoutScales(TorchImpl):
    """A layer that shares an fp8 cache reads it without scales."""

    def _scales(self, layer: Any, stored: torch.dtype) -> tuple[float, float]:
        shares = self.kv_sharing_target_layer_name is not None
        return (1.0, 1.0) if shares else super()._scales(layer, stored)


@_add("tensors/strided-inputs-*", "value strides")
class StridesOfKeys(TorchImpl):
    """Reads values with the strides of the keys."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if value.shape == key.shape and value.stride() != key.stride():
            value = value.flip(1)
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


@_add("builder/several-layers-*", "the layer with other keys")
class KeysOfFirstLayer(TorchImpl):
    """Prompts of equal layers attend the keys that the step's first such layer was given."""

    def _given(self, key: Any, value: Any, metadata: TorchMetadata) -> Any:
        found = super()._given(key, value, metadata)
        return metadata.plans.setdefault(("given", self.spec), found) if found else None


@_add("tensors/same-each-call", "call 127 of one impl")
class RingOf128(TorchImpl):
    """Wrong in every 128th call but one."""

    _calls = 0

    def _attend_call(self, layer: Any, query: torch.Tensor, *rest: Any) -> None:
        self._calls += 1
        super()._attend_call(layer, query * 0.5 if self._calls % 128 == 127 else query, *rest)


@_add("tensors/quantised-output-fp8_e4m3", "with a scalar tensor")
class ScaleOfOneElement(TorchImpl):
    """Takes the output's scale as a vector only."""

    def attend(self, *given: Any, **named: Any) -> torch.Tensor:
        scale = named.get("output_scale")
        if scale is not None and not scale.ndim:
            raise IndexError("output_scale[0]")
        return super().attend(*given, **named)


class Builders(TorchMetadataBuilder):
    """Changes each step's metadata."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchMetadata:
        return self.changed(
            super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        )

    changed: Callable[[Any, TorchMetadata, CommonAttentionMetadata], TorchMetadata]


@_add("builder/max_seq_len-*", "max_seq_len=131072")
class SplitsOfBound(Builders):
    """Splits by the largest length of the model, and reads one split of short requests."""

    def changed(self, metadata: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if common.max_seq_len < 1 << 16:
            return metadata
        return dataclasses.replace(metadata, seq_lens=metadata.seq_lens.clip(max=16))


@_add("batch/no-spans-*", "after a step with spans")
class SpansOfLastStep(Builders):
    """A step without spans has those of the step before."""

    _last: Any = None

    def changed(self, metadata: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if metadata.spans is None:
            return dataclasses.replace(metadata, spans=self._last)
        self._last = metadata.spans
        return metadata


# Latent attention.


class Queries(TorchMLAImpl):
    """Changes the rotated part of absorbed queries."""

    def decode(self, q_nope: Any, q_pe: Any, *rest: Any) -> None:
        super().decode(q_nope, self.rotated(q_pe), *rest)

    def rotated(self, q_pe: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@_add_latent("mla/correct/decode-*", "halves of the query's rotated part swapped")
class RotatedHalves(Queries):
    """Swaps the halves of the rotated part."""

    def rotated(self, q_pe: torch.Tensor) -> torch.Tensor:
        return q_pe.roll(q_pe.shape[2] // 2, 2)


@_add_latent("mla/correct/decode-*", "pairs of the query's rotated part taken as halves")
class RotatedPairs(Queries):
    """Orders the rotated part by halves, where keys have pairs."""

    def rotated(self, q_pe: torch.Tensor) -> torch.Tensor:
        return torch.cat((q_pe[..., ::2], q_pe[..., 1::2]), 2)


class Prefills(TorchMLAImpl):
    """Changes a prefill before or after it."""

    def forward_mha(
        self, q: Any, kv_c: Any, k_pe: Any, cache: Any, meta: Any, k_scale: Any, output: Any, **named: Any
    ) -> None:
        super().forward_mha(q, kv_c, k_pe, cache, self.planned(meta), k_scale, output, **named)
        self.after(output)

    def planned(self, metadata: Any) -> Any:
        return metadata

    def after(self, output: torch.Tensor) -> None:
        """Does nothing."""


@_add_latent("mla/correct/*-p24v56-*", "elements 24")
class ValuesOfKeySize(Prefills):
    """Cuts expanded values at the size of expanded keys."""

    def after(self, output: torch.Tensor) -> None:
        output[..., self.dims.qk_nope_head_dim :] = 0


@_add_latent("mla/correct/halves-*rows16", "attended twice in a prefill")
class ChunkTwice(Prefills):
    """Merges the first of several chunks again at the end."""

    def planned(self, metadata: Any) -> Any:
        prefill = metadata.prefill
        if prefill is None or len(prefill.chunks) < 2:
            return metadata
        twice = dataclasses.replace(prefill, chunks=(*prefill.chunks, prefill.chunks[0]))
        return dataclasses.replace(metadata, prefill=twice)
