"""Backends that are right for ordinary inputs: each is wrong for one kind of number, size or length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from plain_attention import PlainImpl
from torch import Tensor

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.ops.kv_write import write_kv_cache
from mutants.numbers import misread
from mutants.table import Table

table = Table("inputs")
PLAIN = "mixed-h4x2-d64-float32-b16-NHD"
FP8 = "mixed-h4x2-d64-float32-fp8-b16-NHD"


def _check(alone: str) -> str:
    """An id, or the end of the plain case's id."""
    start = "" if "/" in alone else f"correct/{PLAIN}" if alone.startswith("-") else "correct/"
    return start + alone


def method(name: str, base: type = PlainImpl) -> Callable[..., Any]:
    """Rows by one method: of the check that must fail, one that must not, and words."""
    rows = table.method(base, name)

    def add(alone: str, passes: str = PLAIN, says: str = "", **functions: Any) -> Any:
        return rows(_check(alone), says, passes=f"correct/{passes}", **functions)

    return add


def misreads(alone: str, passes: str, name: str, **changes: Any) -> None:
    """A row of TORCH's own kernels for a layer with a field changed."""
    table.row(name, _check(alone), "", passes=f"correct/{passes}", impl=misread(**changes))


class Float32Softmax(PlainImpl):
    """Weights in float32, with a `top` that is subtracted first."""

    def top(self, scores: Tensor, sinks: Tensor) -> Tensor:
        raise NotImplementedError

    def weigh(self, scores: Tensor, values: Tensor, sinks: Tensor, span: Any) -> tuple[Tensor, Tensor]:
        scores, sinks = scores.float(), sinks[:, None, None].float().expand(-1, scores.shape[1], 1)
        top = self.top(scores, sinks).clamp_min(-1e30)
        weights = (scores - top).exp()
        total = weights.sum(2, keepdim=True) + (sinks - top).exp()
        empty = total == 0 if bool(scores.isneginf().all(2).any()) else torch.zeros_like(total).bool()
        output = (weights / total.masked_fill(empty, 1.0)).double() @ values
        return output, (total.log() + top).double()[..., 0]


top = method("top", Float32Softmax)
# fmt: off
top("-far", says="NaN", subtracts_nothing=lambda self, scores, sinks: torch.zeros_like(sinks))
# Of two heads, which a kernel computes in one tile.
top("-far", subtracts_the_tiles_largest=lambda self, scores, sinks: (torch.cat([scores, sinks], 2).amax((0, 2), keepdim=True).expand_as(sinks)))
# fmt: on


@top("-sharp")
def subtracts_the_first_tiles_largest(self, scores, sinks):
    first = torch.cat([scores[:, :, :32], sinks], 2).amax(2, keepdim=True)
    return first.masked_fill(first.isneginf(), 0.0)


# fmt: off
top("-sinks-lse-sharp", f"{PLAIN}-sinks-lse", forgets_the_sink_in_the_largest=lambda self, scores, sinks: scores.amax(2, keepdim=True))
# Right where a query sees nothing, which other cases find.
method("mask")("-far",
    masks_with_minus_hundred=lambda self, logits, seen: logits.masked_fill(~seen, -100.0).masked_fill(~seen.any(-1, keepdim=True), -math.inf))
method("cap")("-far", clamps_logits=lambda right, self, logits: right(logits).clamp(-60, 60))
# fmt: on


@method("bias")("-alibi")
def computes_slopes(self, logits, span):
    if self.tensors.alibi_slopes is None:
        return logits
    slopes = 2.0 ** (-8.0 * torch.arange(1, self.spec.num_heads + 1) / self.spec.num_heads)
    return logits - slopes[:, None, None] * self.distance(span)


@method("attend")("-strangers", says="NaN")
def reads_other_requests(right, self, layer, query, key, value, kv_cache, meta, *rest, **options):
    """Multiplies the values of all requests with weights, which are 0 for those of others."""
    output = right(layer, query, key, value, kv_cache, meta, *rest, **options)
    source = self._source(key, value, kv_cache, meta)
    for request, end in enumerate(source.end.tolist()):
        _, values = source.of_request(request, int(source.first[request]), int(end))
        output[: meta.num_actual_tokens] += 0 * values.float().sum()
    return output


attend = method("attend", TorchImpl)


@attend("mixed-h4x2-d64-bfloat16-b16-NHD", says="modified query, an input of the shape")
def changes_half_queries(right, self, layer, query, *rest, **options):
    """Scales the caller's queries in place, in half precision only."""
    output = right(layer, query, *rest, **options)
    if query.dtype != torch.float32:
        query.mul_(self.spec.scale)
    return output


method("kv_heads")("mixed-h9x9-d64-float32-b16-NHD", reads_eight_kv_heads=lambda right, self: right() % 8)


def _of_power_of_two(self):
    shift = math.ceil(math.log2(self.spec.num_heads // self.spec.num_kv_heads))
    return (torch.arange(self.spec.num_heads) >> shift).clamp(max=self.spec.num_kv_heads - 1)


method("kv_heads")("mixed-h9x3-d64-float32-b16-NHD", reads_groups_of_four=_of_power_of_two)
method("kv_heads")("mixed-h14x2-d64-float32-b16-NHD", reads_groups_of_eight=_of_power_of_two)


class CutQueries(TorchImpl):
    """Reads the first elements of each head only."""

    def elements(self, size: int) -> int:
        raise NotImplementedError

    def attend(self, layer: Any, query: Tensor, *rest: Any, **options: Any) -> Tensor:
        query = query.clone()
        query[..., self.elements(query.shape[-1]) :] = 0
        return super().attend(layer, query, *rest, **options)


elements = method("elements", CutQueries)
elements("mixed-h4x2-d20-float32-b16-NHD", reads_eight_elements=lambda self, size: size // 8 * 8)
elements("mixed-h4x2-d72-float32-b16-NHD", reads_sixteen_elements=lambda self, size: size // 16 * 16)
elements("mixed-h4x2-d320-float32-b16-NHD", reads_256_elements=lambda self, size: min(size, 256))


@attend("mixed-h4x2-d64-v128-float32-b16-NHD")
def writes_no_more_than_a_key(right, self, *args, **options):
    """Fills a value head up to the size of a key head."""
    output = right(*args, **options)
    rest = output[..., self.spec.head_size :]
    output[..., self.spec.head_size :] = rest.where(rest.isnan(), 0.0)
    return output


written = method("update_kv_cache", TorchImpl)


@written("mixed-h4x2-d64-float32-b24-NHD")
def finds_offsets_by_masks(right, self, layer, key, value, kv_cache, slots):
    """Takes the block size for a power of two where it writes."""
    size = self._pages_of(kv_cache).k.shape[1]
    wrong = slots // size * size + (slots & (size - 1))
    right(layer, key, value, kv_cache, torch.where(slots < 0, slots, wrong))


@written("far-blocks-h4x2-d64-float32-b1-NHD")
def finds_blocks_in_16_bits(right, self, layer, key, value, kv_cache, slots):
    """Keeps block numbers in 16 bits where it writes."""
    size = self._pages_of(kv_cache).k.shape[1]
    wrong = (slots // size).short().long() % (1 << 15) * size + slots % size
    right(layer, key, value, kv_cache, torch.where(slots < 0, slots, wrong))


@written("cache/scales-of-layer-fp8", FP8)
def writes_by_given_scales(self, layer, key, value, kv_cache, slots):
    """Reads with the layer's scales, and writes with those given to from_spec."""
    pages = self._pages_of(kv_cache)
    write_kv_cache(key, value, pages.k, pages.v, slots, *self._scales(None, pages.k.dtype))


# fmt: off
misreads("-window149.0", f"{PLAIN}-window40.0", "has_windows_of_128", window=lambda spec: (min(spec.window[0], 127), spec.window[1]))
misreads("-chunk129", f"{PLAIN}-chunk24", "has_chunks_of_128", chunk_size=lambda spec: spec.chunk_size and min(spec.chunk_size, 128))
misreads("-non_causal-window5.11", f"{PLAIN}-non_causal-window40.40", "has_symmetric_windows",
    window=lambda spec: spec.window if spec.causal else (spec.window[0],) * 2)
misreads("-cap1.7", f"{PLAIN}-cap3", "has_whole_caps", logits_soft_cap=lambda spec: spec.logits_soft_cap and float(int(spec.logits_soft_cap)))
# Reads the last keys only.
method("seen")("long-decode-h4x2-d64-float32-b16-NHD", sees_4096_keys=lambda right, self, span: right(span) & (span.at[:, None] - span.held < 4096))
# Keeps the positions of a long query in 9 bits.
method("positions")("long-prompt-h4x2-d64-float32-b16-NHD",
    wraps_long_positions=lambda right, self, new, seq_len: right(new, seq_len) % 512 if new > 512 else right(new, seq_len))
# fmt: on


@method("positions")("draft-h4x2-d64-float32-b16-NHD")
def aligns_pairs_at_the_last(right, self, new, seq_len):
    """Takes two tokens of a decode for one position."""
    at = right(new, seq_len)
    return at.clamp(min=seq_len - 1) if new == 2 and seq_len > 100 else at


@attend("many-rows-h4x2-d64-float32-b16-NHD")
def writes_1024_rows(right, self, *args, **options):
    """Writes the rows of a launch that is too small."""
    output = right(*args, **options)
    output[1024:] = torch.nan
    return output


@attend("many-requests-h4x2-d64-float32-b16-NHD")
def serves_32_requests(right, self, *given, **options):
    """Gives the 33rd request and later ones the answer of the 32nd."""
    output, starts = right(*given, **options), given[5].query_starts
    if len(starts) > 33:
        output[int(starts[32]) : int(starts[-1])] = output[int(starts[31])].clone()
    return output


@method("read_scales")(FP8)
def takes_scales_for_inverse(right, self, layer, stored):
    """Multiplies stored keys by the inverse of the other scale: equal for 0.5 and 2."""
    k_scale, v_scale = right(layer, stored)
    return 1 / v_scale, 1 / k_scale


# fmt: off
# Keeps scales as exponents of two.
method("read_scales")(FP8, rounds_scales=lambda right, self, layer, stored: tuple(2.0 ** round(math.log2(scale)) for scale in right(layer, stored)))
# fmt: on


scales = method("_scales", TorchImpl)
# fmt: off
# Ignores the scales of the engine's layer.
scales("cache/scales-of-layer-fp8", FP8, "scales given to from_spec used", reads_given_scales=lambda right, self, layer, stored: right(None, stored))
# fmt: on


# The engine draws whether a case's scales are numbers or tensors: numbers in this one.
@scales("cache/scales-of-tensors-fp8", FP8.replace("fp8", "fp8_e4m3"), "scales taken as 1")
def reads_numbers_only(right, self, layer, stored):
    """Takes a scale in a tensor for 1 where it reads and writes."""
    if layer is None and isinstance(self.tensors.k_scale, torch.Tensor) and stored.itemsize == 1:
        return 1.0, 1.0
    return right(layer, stored)
