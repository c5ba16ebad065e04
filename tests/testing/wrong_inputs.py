"""Backends that are right for ordinary inputs: each is wrong for one kind of number, size or length."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from catching import variant
from plain_attention import PlainImpl
from torch import Tensor
from wrong_numbers import misread

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionBackend, LayerSpec
from attnplug.ops.kv_write import write_kv_cache

__all__ = ["WRONG_INPUTS", "WrongInput"]

PLAIN = "mixed-h4x2-d64-float32-b16-NHD"


@dataclasses.dataclass(frozen=True)
class WrongInput:
    """A wrong backend, the id of a check that must fail, of one that must not, and words of the message."""

    name: str
    backend: type[AttentionBackend]
    check: str
    passes: str
    says: str


class Float32Softmax(PlainImpl):
    """Weights in float32, with a `top` that is subtracted first."""

    def top(self, scores: Tensor, sinks: Tensor) -> Tensor:
        raise NotImplementedError

    def weigh(self, scores: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        scores, sinks = scores.float(), sinks.float()
        top = self.top(scores, sinks).clamp_min(-1e30)
        weights = (scores - top).exp()
        total = weights.sum(2, keepdim=True) + (sinks - top).exp()
        empty = total == 0 if bool(scores.isneginf().all(2).any()) else torch.zeros_like(total).bool()
        output = (weights / total.masked_fill(empty, 1.0)).double() @ values
        return output, (total.log() + top).double()


class SubtractsNothing(Float32Softmax):
    def top(self, scores: Tensor, sinks: Tensor) -> Tensor:
        return torch.zeros_like(sinks)


class SubtractsTheTilesLargest(Float32Softmax):
    def top(self, scores: Tensor, sinks: Tensor) -> Tensor:
        # Of two heads, which a kernel computes in one tile.
        return torch.cat([scores, sinks], 2).amax((0, 2), keepdim=True).expand_as(sinks)


class SubtractsTheFirstTilesLargest(Float32Softmax):
    def top(self, scores: Tensor, sinks: Tensor) -> Tensor:
        first = torch.cat([scores[:, :, :32], sinks], 2).amax(2, keepdim=True)
        return first.masked_fill(first.isneginf(), 0.0)


class ForgetsTheSinkInTheLargest(Float32Softmax):
    def top(self, scores: Tensor, sinks: Tensor) -> Tensor:
        return scores.amax(2, keepdim=True)


class MasksWithMinusHundred(PlainImpl):
    """Right where a query sees nothing, which other cases find."""

    def mask(self, logits: Tensor, seen: Tensor) -> Tensor:
        masked = logits.masked_fill(~seen, -100.0)
        return masked.masked_fill(~seen.any(-1, keepdim=True), -math.inf)


class ClampsLogits(PlainImpl):
    def cap(self, logits: Tensor) -> Tensor:
        return super().cap(logits).clamp(-60, 60)


class ComputesSlopes(PlainImpl):
    def bias(self, logits: Tensor, at: Tensor, held: Tensor) -> Tensor:
        if self.tensors.alibi_slopes is None:
            return logits
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.spec.num_heads + 1) / self.spec.num_heads)
        return logits - slopes[:, None, None] * (held - at).abs()


class ReadsOtherRequests(PlainImpl):
    """Multiplies the values of all requests with weights, which are 0 for those of others."""

    def attend(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        meta: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        output = super().attend(layer, query, key, value, kv_cache, meta, *rest, **options)
        source = self._source(key, value, kv_cache, meta)
        for request, end in enumerate(source.end.tolist()):
            _, values = source.of_request(request, int(source.first[request]), int(end))
            output[: meta.num_actual_tokens] += 0 * values.float().sum()
        return output


class ChangesHalfQueries(TorchImpl):
    """Scales the caller's queries in place, in half precision only."""

    def attend(self, layer: Any, query: Tensor, *rest: Any, **options: Any) -> Tensor:
        output = super().attend(layer, query, *rest, **options)
        if query.dtype != torch.float32:
            query.mul_(self.spec.scale)
        return output


class ReadsEightKvHeads(PlainImpl):
    def kv_heads(self) -> Tensor:
        return super().kv_heads() % 8


class ReadsGroupsOfPowersOfTwo(PlainImpl):
    def kv_heads(self) -> Tensor:
        group = self.spec.num_heads // self.spec.num_kv_heads
        shift = math.ceil(math.log2(group))
        return (torch.arange(self.spec.num_heads) >> shift).clamp(max=self.spec.num_kv_heads - 1)


class CutQueries(TorchImpl):
    """Reads the first elements of each head only."""

    def elements(self, size: int) -> int:
        raise NotImplementedError

    def attend(self, layer: Any, query: Tensor, *rest: Any, **options: Any) -> Tensor:
        query = query.clone()
        query[..., self.elements(query.shape[-1]) :] = 0
        return super().attend(layer, query, *rest, **options)


class ReadsEightElements(CutQueries):
    def elements(self, size: int) -> int:
        return size // 8 * 8


class ReadsSixteenElements(CutQueries):
    def elements(self, size: int) -> int:
        return size // 16 * 16


class Reads256Elements(CutQueries):
    def elements(self, size: int) -> int:
        return min(size, 256)


class WritesNoMoreThanAKey(TorchImpl):
    """Fills a value head up to the size of a key head."""

    def attend(self, *args: Any, **options: Any) -> Tensor:
        output = super().attend(*args, **options)
        written = output.isnan().logical_not()
        output[..., self.spec.head_size :] = output[..., self.spec.head_size :].where(
            ~written[..., self.spec.head_size :], 0.0
        )
        return output


class FindsOffsetsByMasks(TorchImpl):
    """Takes the block size for a power of two where it writes."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Tensor) -> None:
        size = self._pages_of(kv_cache).k.shape[1]
        wrong = slots // size * size + (slots & (size - 1))
        super().update_kv_cache(layer, key, value, kv_cache, torch.where(slots < 0, slots, wrong))


class FindsBlocksIn16Bits(TorchImpl):
    """Keeps block numbers in 16 bits where it writes."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Tensor) -> None:
        size = self._pages_of(kv_cache).k.shape[1]
        wrong = (slots // size).short().long() % (1 << 15) * size + slots % size
        super().update_kv_cache(layer, key, value, kv_cache, torch.where(slots < 0, slots, wrong))


class SeesAtMost(PlainImpl):
    """Reads the last keys only."""

    def seen(self, at: Tensor, held: Tensor, *, causal: bool) -> Tensor:
        return super().seen(at, held, causal=causal) & (at - held < 4096)


class WrapsLongPositions(PlainImpl):
    """Keeps the positions of a long query in 9 bits."""

    def positions(self, new: int, seq_len: int) -> Tensor:
        at = super().positions(new, seq_len)
        return at % 512 if new > 512 else at


class AlignsPairsAtTheLast(PlainImpl):
    """Takes two tokens of a decode for one position."""

    def positions(self, new: int, seq_len: int) -> Tensor:
        at = super().positions(new, seq_len)
        return at.clamp(min=seq_len - 1) if new == 2 and seq_len > 100 else at


class WritesRows(TorchImpl):
    """Writes the rows of a launch that is too small."""

    most = 1024

    def attend(self, *args: Any, **options: Any) -> Tensor:
        output = super().attend(*args, **options)
        output[self.most :] = torch.nan
        return output


class ServesFewRequests(TorchImpl):
    """Gives the 33rd request and later ones the answer of the 32nd."""

    def attend(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        meta: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        output = super().attend(layer, query, key, value, kv_cache, meta, *rest, **options)
        starts = meta.query_starts
        if len(starts) > 33:
            output[int(starts[32]) : int(starts[-1])] = output[int(starts[31])].clone()
        return output


class TakesScaleForInverse(PlainImpl):
    """Multiplies stored keys by the inverse of the other scale: equal for 0.5 and 2."""

    def read_scales(self) -> tuple[float, float]:
        k_scale, v_scale = super().read_scales()
        return 1 / v_scale, 1 / k_scale


class RoundsScales(PlainImpl):
    """Keeps scales as exponents of two."""

    def read_scales(self) -> tuple[float, float]:
        k_scale, v_scale = super().read_scales()
        return 2.0 ** round(math.log2(k_scale)), 2.0 ** round(math.log2(v_scale))


class ReadsGivenScales(TorchImpl):
    """Ignores the scales of the engine's layer."""

    def _scales(self, layer: Any, stored: torch.dtype) -> tuple[float, float]:
        return super()._scales(None, stored)


class ReadsNumbersOnly(TorchImpl):
    """Takes a scale in a tensor for 1 where it reads and writes."""

    def _scales(self, layer: Any, stored: torch.dtype) -> tuple[float, float]:
        if layer is None and isinstance(self.tensors.k_scale, torch.Tensor) and stored.itemsize == 1:
            return 1.0, 1.0
        return super()._scales(layer, stored)


class WritesByGivenScales(TorchImpl):
    """Reads with the layer's scales, and writes with those given to from_spec."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Tensor) -> None:
        pages = self._pages_of(kv_cache)
        write_kv_cache(key, value, pages.k, pages.v, slots, *super()._scales(None, pages.k.dtype))


def _whole_caps(spec: LayerSpec) -> float | None:
    return None if spec.logits_soft_cap is None else float(int(spec.logits_soft_cap))


def _windows_of_128(spec: LayerSpec) -> tuple[int, int]:
    left, right = spec.window
    return min(left, 127), right


def _wrong(name: str, impl: type[TorchImpl], alone: str, passes: str = PLAIN, says: str = "") -> WrongInput:
    """A backend that fails the check `alone`: an id, or the end of the plain case's id."""
    check = (
        alone if "/" in alone else f"correct/{PLAIN}{alone}" if alone.startswith("-") else f"correct/{alone}"
    )
    return WrongInput(name, variant(name.upper(), impl=impl), check, f"correct/{passes}", says)


_FP8 = "mixed-h4x2-d64-float32-fp8-b16-NHD"

WRONG_INPUTS = (
    _wrong("subtracts-nothing", SubtractsNothing, "-far", says="NaN"),
    _wrong("subtracts-the-tiles-largest", SubtractsTheTilesLargest, "-far"),
    _wrong("subtracts-the-first-tiles-largest", SubtractsTheFirstTilesLargest, "-sharp"),
    _wrong(
        "forgets-the-sink-in-the-largest",
        ForgetsTheSinkInTheLargest,
        "-sinks-lse-sharp",
        f"{PLAIN}-sinks-lse",
    ),
    _wrong("masks-with-minus-hundred", MasksWithMinusHundred, "-far"),
    _wrong("clamps-logits", ClampsLogits, "-far"),
    _wrong("computes-slopes", ComputesSlopes, "-alibi"),
    _wrong("reads-other-requests", ReadsOtherRequests, "-strangers", says="NaN"),
    _wrong(
        "changes-half-queries",
        ChangesHalfQueries,
        "mixed-h4x2-d64-bfloat16-b16-NHD",
        says="modified query, an input of the shape",
    ),
    _wrong("reads-eight-kv-heads", ReadsEightKvHeads, "mixed-h9x9-d64-float32-b16-NHD"),
    _wrong("reads-groups-of-four", ReadsGroupsOfPowersOfTwo, "mixed-h9x3-d64-float32-b16-NHD"),
    _wrong("reads-groups-of-eight", ReadsGroupsOfPowersOfTwo, "mixed-h14x2-d64-float32-b16-NHD"),
    _wrong("reads-eight-elements", ReadsEightElements, "mixed-h4x2-d20-float32-b16-NHD"),
    _wrong("reads-sixteen-elements", ReadsSixteenElements, "mixed-h4x2-d72-float32-b16-NHD"),
    _wrong("reads-256-elements", Reads256Elements, "mixed-h4x2-d320-float32-b16-NHD"),
    _wrong("writes-no-more-than-a-key", WritesNoMoreThanAKey, "mixed-h4x2-d64-v128-float32-b16-NHD"),
    _wrong("finds-offsets-by-masks", FindsOffsetsByMasks, "mixed-h4x2-d64-float32-b24-NHD"),
    _wrong("finds-blocks-in-16-bits", FindsBlocksIn16Bits, "far-blocks-h4x2-d64-float32-b1-NHD"),
    _wrong("has-windows-of-128", misread(window=_windows_of_128), "-window149.0", f"{PLAIN}-window40.0"),
    _wrong(
        "has-chunks-of-128",
        misread(chunk_size=lambda spec: spec.chunk_size and min(spec.chunk_size, 128)),
        "-chunk129",
        f"{PLAIN}-chunk24",
    ),
    _wrong(
        "has-symmetric-windows",
        misread(window=lambda spec: spec.window if spec.causal else (spec.window[0],) * 2),
        "-non_causal-window5.11",
        f"{PLAIN}-non_causal-window40.40",
    ),
    _wrong("has-whole-caps", misread(logits_soft_cap=_whole_caps), "-cap1.7", f"{PLAIN}-cap3"),
    _wrong("sees-4096-keys", SeesAtMost, "long-decode-h4x2-d64-float32-b16-NHD"),
    _wrong("wraps-long-positions", WrapsLongPositions, "long-prompt-h4x2-d64-float32-b16-NHD"),
    _wrong("writes-1024-rows", WritesRows, "many-rows-h4x2-d64-float32-b16-NHD"),
    _wrong("serves-32-requests", ServesFewRequests, "many-requests-h4x2-d64-float32-b16-NHD"),
    _wrong("aligns-pairs-at-the-last", AlignsPairsAtTheLast, "draft-h4x2-d64-float32-b16-NHD"),
    _wrong("takes-scales-for-inverse", TakesScaleForInverse, _FP8),
    _wrong("rounds-scales", RoundsScales, _FP8),
    _wrong(
        "reads-given-scales",
        ReadsGivenScales,
        "cache/scales-of-layer-fp8",
        _FP8,
        "scales given to from_spec used",
    ),
    _wrong("reads-numbers-only", ReadsNumbersOnly, "cache/scales-of-tensors-fp8", _FP8, "scales taken as 1"),
    _wrong("writes-by-given-scales", WritesByGivenScales, "cache/scales-of-layer-fp8", _FP8),
)
"""One for each number, size and length that the kit tries besides the ordinary ones."""
