"""Mutants of what is written to the cache and read from it: scales, rounding, layouts, sizes of values."""

from __future__ import annotations

import math
from typing import Any

import torch

from attnplug.ops.checks import kv_scales
from mutants.making import mutant, on
from mutants.reference import Reference, Request, Tensor

reference = on(Reference)


def scaled(name: str, change: Any, reads_only: bool = False) -> None:
    """Scales `(k, v)` that a function changes, for what is written and read or for what is read only."""

    class Scaled(Reference):
        def scales(self, layer: Any) -> tuple[float, float]:
            k, v = super().scales(layer)
            return change(self, layer, k, v) if self.spec.has_quantized_kv_cache else (k, v)

        def write_scales(self, layer: Any) -> tuple[float, float]:
            return Reference.scales(self, layer) if reads_only else self.scales(layer)

    Scaled.__name__, Scaled.__module__ = name, __name__
    mutant("correct/*-fp8*")(Scaled)


def power(scale: float) -> float:
    return 2.0 ** round(math.log2(scale))


# fmt: off
scaled("ScalesSwapped", lambda impl, layer, k, v: (v, k))
scaled("ScalesInverse", lambda impl, layer, k, v: (1 / k, 1 / v))
scaled("ScalesOfOne", lambda impl, layer, k, v: (1.0, 1.0))
scaled("ScalesOfPowersOfTwo", lambda impl, layer, k, v: (power(k), power(v)))
scaled("ScalesOfPowersOfTwoWhenRead", lambda impl, layer, k, v: (power(k), power(v)), True)
scaled("ScaleOfKeysOnly", lambda impl, layer, k, v: (k, 1.0), True)
scaled("ScaleOfValuesOnly", lambda impl, layer, k, v: (1.0, v), True)
scaled("ScaleOfKeysForBoth", lambda impl, layer, k, v: (k, k))
scaled("ScalesAtLeastOne", lambda impl, layer, k, v: (max(k, 1.0), max(v, 1.0)))
scaled("ScalesAtMostOne", lambda impl, layer, k, v: (min(k, 1.0), min(v, 1.0)))
scaled("ScalesAreProduct", lambda impl, layer, k, v: (k * v, 1.0), True)
scaled("ScalesOfTheLayerOnly", lambda impl, layer, k, v: (1.0, 1.0) if layer is None else (k, v))
scaled("ScalesOfTheTensorsOnly", lambda impl, layer, k, v: kv_scales(None, impl.tensors))
scaled("ScalesOfNumbersOnly", lambda impl, layer, k, v: ((1.0, 1.0) if isinstance(impl.tensors.k_scale, torch.Tensor) and layer is None else (k, v)))
scaled("ScalesNotForE5m2", lambda impl, layer, k, v: (1.0, 1.0) if "e5m2" in impl.spec.kv_cache_dtype else (k, v), True)
scaled("ScalesReadFromTensors", lambda impl, layer, k, v: kv_scales(None, impl.tensors), True)
# fmt: on


# fmt: off
# Applies the engine's scales to values that are stored as they are.
reference.scales("tensors/unused-scales-*", "_k_scale=0.37 in the engine's layer",
    scales_of_any_cache=lambda self, layer: kv_scales(layer, self.tensors))
# fmt: on


@reference.attend("tensors/unused-scales-*", "_q_scale=0.37 in the engine's layer")
def scales_of_plain_queries(right, self, layer, query, *given, **options):
    """Applies the engine's q scale to queries that are not quantised."""
    scale = 1.0 if layer is None else layer._q_scale_float
    return right(layer, query * scale, *given, **options)


@reference.attend("tensors/unused-scales-*", "_prob_scale=0.37 in the engine's layer")
def scales_of_plain_weights(right, self, layer, query, *given, **options):
    """Applies the engine's scale of probabilities."""
    found = right(layer, query, *given, **options)
    return found if layer is None or found.dtype.itemsize == 1 else found.mul_(layer._prob_scale)


@reference.held("correct/*-fp8*")
def scales_twice_for_decodes(right, self, request, kv_cache, layer):
    """Decodes multiply keys by their scale twice."""
    key, value = right(request, kv_cache, layer)
    return (key * self.scales(layer)[0] if request.new == 1 else key), value


def encoded(name: str, change: Any) -> None:
    class Encoded(Reference):
        def encode(self, tokens: Tensor, stored: torch.dtype, scale: float) -> Tensor:
            found = change(self, tokens, stored, scale)
            return super().encode(tokens, stored, scale) if found is None else found.to(stored)

    Encoded.__name__, Encoded.__module__ = name, __name__
    mutant("correct/*")(Encoded)


def truncated(tokens: Tensor, stored: torch.dtype, scale: float) -> Tensor:
    limit = torch.finfo(stored).max
    given = (tokens.float() / scale).clamp(-limit, limit)
    found = given.to(stored)
    # One step towards 0 where rounding went away from it.
    bits = found.view(torch.uint8)
    return torch.where(found.float().abs() > given.abs(), bits - 1, bits).view(stored)


# fmt: off
encoded("StoresTruncated", lambda impl, t, s, scale: truncated(t, s, scale) if s.itemsize == 1 else None)
encoded(
    "StoresHalfTruncated",
    lambda impl, t, s, scale: (
        (t.float().view(torch.int32) & -65536).view(torch.float32)
        if s is torch.bfloat16 and t.dtype is torch.float32
        else None
    ),
)
encoded("StoresUnclamped", lambda impl, t, s, scale: (t.float() / scale) if s.itemsize == 1 else None)
encoded("StoresAtMost240", lambda impl, t, s, scale: (t.float() / scale).clamp(-240, 240) if s.itemsize == 1 else None)
encoded("StoresThroughBfloat16", lambda impl, t, s, scale: t.bfloat16() if s in (torch.float32, torch.float16) else None)
encoded("StoresThroughFp8", lambda impl, t, s, scale: t.to(torch.float8_e5m2) if s is torch.float16 else None)
encoded("StoresScaledInHalf", lambda impl, t, s, scale: (t.bfloat16() / scale).clamp(-448, 448) if s is torch.float8_e4m3fn else None)
encoded("StoresSmallValuesAsZero",
    lambda impl, t, s, scale: ((t.float() / scale).clamp(-448, 448) * ((t.float() / scale).abs() > 2**-6) if s is torch.float8_e4m3fn else None))
# fmt: on


@mutant()
class ReadsGivenKeys(Reference):
    """Prefills attend the keys of the call, which the cache rounds."""

    def attend(self, layer: Any, query: Tensor, key: Any, value: Any, *given: Any, **options: Any) -> Tensor:
        self.fresh = key, value
        return super().attend(layer, query, key, value, *given, **options)

    def held(self, request: Request, kv_cache: Tensor, layer: Any) -> Any:
        fresh = self.fresh
        cross = self.spec.attn_type == "encoder_decoder" or self.kv_sharing_target_layer_name
        if request.new < request.length or fresh[0] is None or cross:
            return super().held(request, kv_cache, layer)
        return [each[request.rows].float() for each in fresh]


@mutant("cache/sharing-writes-none", "keys and not those of its call")
class ReadsGivenKeysWhenSharing(ReadsGivenKeys):
    """A layer that shares a cache attends the keys that it computed itself."""

    def held(self, request: Request, kv_cache: Tensor, layer: Any) -> Any:
        if self.kv_sharing_target_layer_name is None or request.new < request.length or self.fresh[0] is None:
            return Reference.held(self, request, kv_cache, layer)
        return [each[request.rows].float() for each in self.fresh]


@reference.store("cache/negative-slots", "with tokens of slot -1")
def writes_minus_one_to_the_end(right, self, pages, tokens, slots, scale):
    """-1 counts from the end."""
    last = pages.shape[0] * pages.shape[1] - 1
    right(pages, tokens.nan_to_num(), torch.where(slots < 0, last, slots), scale)


@reference.store("cache/only-slots-written-decode", "no slot names it")
def writes_the_rest_of_the_page(right, self, pages, tokens, slots, scale):
    """Clears the page behind the last token."""
    right(pages, tokens, slots, scale)
    size = pages.shape[1]
    for slot in slots[slots >= 0].tolist()[-1:]:
        pages[slot // size, slot % size + 1 :] = 0


@reference.store("correct/*")
def never_writes_the_last_slot(right, self, pages, tokens, slots, scale):
    """Guards the last slot of the cache."""
    last = pages.shape[0] * pages.shape[1] - 1
    right(pages, tokens, torch.where(slots == last, -1, slots), scale)


@reference.store()
def never_writes_the_first_slots(right, self, pages, tokens, slots, scale):
    """Takes slots of block 0 for padding; that is right."""
    right(pages, tokens, torch.where(slots < 2 * pages.shape[1], -1, slots), scale)


@reference.store()
def stops_at_the_first_padding(right, self, pages, tokens, slots, scale):
    """Takes the first -1 for the end of the step."""
    stop = int((slots < 0).int().argmax()) if bool((slots < 0).any()) else slots.shape[0]
    right(pages, tokens, slots[:stop], scale)


@reference.store("tensors/strided-inputs-*", "as views")
def assumes_contiguous_tokens(right, self, pages, tokens, slots, scale):
    """Reads keys and values as if heads lay side by side."""
    rows, heads, size = tokens.shape
    if rows and tokens.stride() != (heads * size, size, 1) and tokens.stride(0) >= heads * size:
        tokens = tokens.as_strided(tokens.shape, (tokens.stride(0), size, 1))
        tokens = tokens.roll(1, 1)
    right(pages, tokens, slots, scale)


@reference.write("correct/*-v*")
def values_up_to_the_head_size(right, self, request, output, out):
    """Values beyond head_size are not computed."""
    right(request, output, out)
    output[request.rows, :, self.spec.head_size :] = 0


@reference.write()
def values_in_powers_of_two(right, self, request, output, out):
    """Elements of values beyond the largest power of two are left out."""
    right(request, output, out)
    output[request.rows, :, 1 << (self.spec.head_size_v.bit_length() - 1) :] = 0


@reference.pages("correct/*-HND*")
def packed_pages_in_nhd(right, self, kv_cache):
    """Packed pages in HND are read as if tokens were outside, where heads are several."""
    if self.spec.head_size_v != self.spec.head_size and kv_cache.stride(1) < kv_cache.stride(2):
        _, size, heads, width = kv_cache.shape
        kv_cache = kv_cache.as_strided(kv_cache.shape, (size * heads * width, heads * width, width, 1))
    return right(kv_cache)


@reference.pages("correct/*-v*")
def packed_values_first(right, self, kv_cache):
    """Reads packed values from the front of a row where they are larger."""
    k, v = right(kv_cache)
    if self.spec.head_size_v > self.spec.head_size:
        return kv_cache[..., self.spec.head_size_v :], kv_cache[..., : self.spec.head_size_v]
    return k, v


@reference.pages("correct/*-fp8_e5m2*")
def fp8_is_always_e4m3(right, self, kv_cache):
    """Reads and writes e4m3 bits whatever the name."""
    k, v = right(kv_cache)
    if k.dtype.itemsize > 1:
        return k, v
    return k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)


@reference.attend("tensors/quantised-output-*", "output_scale for an output")
def outputs_times_their_scale(right, self, *given, output_scale=None, **options):
    """Multiplies outputs by the output's scale instead of dividing them."""
    inverse = None if output_scale is None else 1 / output_scale
    return right(*given, output_scale=inverse, **options)


@reference.blocks()
def keys_of_next_pages(right, self, request, size):
    """Takes blocks of a request for consecutive ones in long contexts."""
    blocks = right(request, size)
    return torch.where(request.held // size > 40, blocks[:1], blocks)
