"""Wrong backends as ported kernels get wrong by accident: caps, sinks, windows, spans, selections and scales."""

from __future__ import annotations

import dataclasses
import math

import torch
from plain_attention import KernelImpl

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.spec import AttentionType
from attnplug.testing.oracle import chosen_keys
from mutants.table import Table

table = Table("accidents")
kernel = table.on(KernelImpl)
impl = table.on(TorchImpl)


# Features.


@kernel.logits("correct/mixed-h4x2-d64-float32-b16-NHD-cap3", "scale after the cap")
def cap_before_scale(right, self, scaled, span):
    """The soft cap is on the logits before the scale."""
    cap = self.spec.logits_soft_cap
    if cap is None:
        return right(scaled, span)
    raw = scaled / self.spec.scale
    slopes = self.tensors.alibi_slopes
    capped = cap * (raw / cap).tanh() * self.spec.scale
    return capped if slopes is None else capped - slopes[:, None, None] * self.distance(span)


@kernel.logits("correct/mixed-h4x2-d64-float32-b16-NHD-cap3-alibi", "ALiBi before the cap")
def alibi_before_cap(self, scaled, span):
    """ALiBi is added before the soft cap."""
    cap, slopes = self.spec.logits_soft_cap, self.tensors.alibi_slopes
    if slopes is not None:
        scaled = scaled - slopes[:, None, None] * self.distance(span)
    return scaled if cap is None else cap * (scaled / cap).tanh()


# fmt: off
# ALiBi is slope x key position: the same softmax of causal layers, another LSE.
kernel.distance("correct/mixed-h4x2-d64-float32-b16-NHD-alibi-lse", "ALiBi of key positions",
    alibi_by_key=lambda right, self, span: -span.held[None].float() if self.spec.causal else right(span))
# ALiBi's distance keeps its sign, so later keys of non-causal layers gain.
kernel.distance("correct/*encoder*alibi*", "ALiBi of signed distances", alibi_signed=lambda self, span: span.at[:, None] - span.held)
# Sinks are taken for logits in base 2.
kernel.weigh("correct/mixed-h4x2-d64-float32-b16-NHD-sinks", "sink in base 2",
    sink_of_base_two=lambda right, self, logits, values, sinks, span: right(logits, values, None if sinks is None else sinks * math.log(2), span))
# Sinks are multiplied by the softmax scale.
kernel.weigh("correct/mixed-h4x2-d64-float32-b16-NHD-sinks", "sink multiplied by the scale",
    sink_scaled=lambda right, self, logits, values, sinks, span: right(logits, values, None if sinks is None else sinks * self.spec.scale, span))
# fmt: on


@kernel.weigh("merge/2-parts-sinks", "sink counted twice in a merge")
def sinks_always_in_decode(right, self, logits, values, sinks, span):
    """Decodes have their sinks also where the caller wants none."""
    return right(logits, values, self.tensors.sinks if span.is_decode else sinks, span)


@kernel.weigh("correct/*cap*sinks*", "soft cap on the sink too")
def sink_capped(right, self, logits, values, sinks, span):
    """The sink goes through the soft cap too."""
    cap = self.spec.logits_soft_cap
    if sinks is not None and cap is not None:
        sinks = cap * (sinks / cap).tanh()
    return right(logits, values, sinks, span)


@kernel.weigh("tensors/sees-nothing-cross-lse-sinks", "sinks ignored")
def sink_missing_in_lse(right, self, logits, values, sinks, span):
    """Rows that see no key have LSE -inf, also with a sink."""
    out, lse = right(logits, values, sinks, span)
    empty = (logits == -math.inf).all(2)
    return out, lse.masked_fill(empty, -math.inf)


@kernel.window(
    "correct/mixed-h4x2-d64-float32-b16-NHD-window6.0", "window off by one: a key too many before the query"
)
def extend_window(right, self, span):
    """In extends the window is one key wider."""
    left = self.spec.window[0]
    seen = right(span)
    if left >= 0 and not span.is_decode and span.at.numel() and int(span.at[0]) > 0:
        seen = seen | (span.at[:, None] - span.held == left + 1)
    return seen


@kernel.window("correct/mixed-h4x2-d64-float32-b16-NHD-non_causal-window-1.7", "sliding window ignored")
def right_is_causal(right, self, span):
    """A window on the right is ignored when there is none on the left."""
    if self.spec.window[0] < 0 and self.spec.chunk_size is None:
        return torch.ones(span.at.shape[0], span.held.shape[0], dtype=torch.bool)
    return right(span)


@kernel.window("correct/mixed-h4x2-d64-float32-b16-NHD-chunk24", "chunks counted from the first new token")
def chunk_from_context(right, self, span):
    """Chunks are counted from the first new token."""
    chunk = self.spec.chunk_size
    if chunk is None or not span.at.numel():
        return right(span)
    first = int(span.at[0])
    return (span.held - first) // chunk == ((span.at - first) // chunk)[:, None]


@kernel.window("correct/mixed-h4x2-d64-float32-b16-NHD-chunk24", "output[160, 0, 18]")
def chunk_of_whole_pages(right, self, span):
    """A chunk begins at a page."""
    chunk, page = self.spec.chunk_size, 16
    if chunk is None:
        return right(span)
    return span.held >= (span.at // chunk * chunk // page * page)[:, None]


@kernel.spans("correct/mixed-h4x2-d64-float32-b16-NHD-spans", "only requests with extend or prefill")
def span_includes_end(self, span):
    """The end of a span is inclusive."""
    spans = torch.from_numpy(span.meta.spans[span.rows])
    return (span.held >= spans[:, :1]) & (span.held <= spans[:, 1:]) & (spans[:, 1:] > 0)


# fmt: off
# The window hides keys of a span.
kernel.spans("correct/mixed-h4x2-d64-float32-b16-NHD-window6.0-spans", "window or chunk cuts spans",
    span_in_window=lambda right, self, span: right(span) & self.window(span))
# fmt: on


@kernel.chosen("correct/long-decode-*topk*", "")
def at_most256_chosen(self, span):
    """At most 256 keys of a selection are read."""
    selection = span.meta.selection[span.rows]
    cut = type(selection)(selection.positions[:, :256], selection.counts.clamp(max=256))
    return chosen_keys(self.spec, cut, span.held)


@kernel.chosen("correct/draft-*topk*", "only rows from row 1 of a request on")
def chosen_of_first_row(right, self, span):
    """Queries of a speculative step share the selection of the first."""
    seen = right(span)
    return seen[:1].expand_as(seen) if 1 < seen.shape[0] <= 4 else seen


# fmt: off
# Sparse layers forget the sinks.
kernel.weigh("correct/*topk*sinks*", "sinks ignored",
    sparse_without_sinks=lambda right, self, logits, values, sinks, span: right(logits, values, None if self.spec.sparse else sinks, span))
# fmt: on


@kernel.window("correct/*window*topk*", "sliding window ignored")
def sparse_without_window(right, self, span):
    """A sparse layer trusts its indexer, and forgets the window."""
    seen = right(span)
    return torch.ones_like(seen) if self.spec.sparse else seen


@kernel.causal("correct/draft-*", "causal mask ignored")
def drafts_see_all(right, self, span):
    """Verified tokens see each other."""
    seen = right(span)
    return torch.ones_like(seen) if 1 < span.at.shape[0] <= 3 and int(span.at[0]) > 0 else seen


@kernel.weigh("correct/speculative-*", "only requests with extend")
def packed_group_order(right, self, logits, values, sinks, span):
    """Rows of verified tokens are unpacked as (token, group) from (group, token)."""
    out, lse = right(logits, values, sinks, span)
    rows, kv = out.shape[1], self.spec.num_kv_heads
    if 1 < rows <= 8 and int(span.at[0]) > 0:
        packed = out.view(kv, -1, rows, out.shape[2])
        out = packed.transpose(1, 2).reshape(out.shape)
    return out, lse


@kernel.causal("correct/mixed-h4x2-d64-float32-encoder_half", "non-causal taken as causal")
def encoder_is_causal(right, self, span):
    """Only encoder_only layers see all tokens."""
    if self.spec.attn_type is AttentionType.ENCODER:
        return span.held <= span.at[:, None]
    return right(span)


@kernel.window("correct/*cross-window*", "")
def cross_with_window_of_end(right, self, span):
    """Cross layers count positions from the end of the encoder's tokens."""
    if self.spec.attn_type is AttentionType.ENCODER_DECODER and span.is_decode:
        span = dataclasses.replace(span, at=span.at * 0 + span.held.shape[0] // 2)
    return right(span)


@kernel.causal("batch/narrowed-decode", "causal=True ignored")
def narrowed_in_prefill_only(right, self, span):
    """A step may be causal for a non-causal layer, and decodes of several tokens ignore it."""
    seen = right(span)
    return torch.ones_like(seen) if not self.spec.causal and 1 < span.at.shape[0] < 8 else seen


@kernel.weigh("tensors/sees-nothing-cross-lse", "LSE of 0 where nothing is seen")
def empty_row_lse(right, self, logits, values, sinks, span):
    """Rows that see nothing have the LSE 0."""
    out, lse = right(logits, values, sinks, span)
    return out, lse.nan_to_num(neginf=0.0)


@kernel.one("correct/*fp8*lse*", "output is right, LSE error")
def lse_without_scales(right, self, query, keys, values, scales, sinks, span):
    """The LSE of fp8 pages is that of the stored keys."""
    out, lse = right(query, keys, values, scales, sinks, span)
    if torch.as_tensor(scales[0] != 1).any():
        lse = right(query, keys, values, (1.0, 1.0), sinks, span)[1]
    return out, lse


# Quantisation.


@impl._scales(
    "cache/scales-of-layer-fp8",
    "with scales of the engine's layer, which differ from those given to from_spec ({'k_scale'",
)
def one_scale(right, self, layer, stored):
    """V has the scale of K where the engine's layer gives scales."""
    k, v = right(layer, stored)
    return (k, k) if layer is not None else (k, v)


@impl.update_kv_cache("cache/clamped-fp8_e5m2", "K")
def range_of_e4m3(right, self, layer, key, value, kv_cache, slot_mapping):
    """e5m2 is clamped to 448."""
    if self.spec.resolved_kv_cache_dtype == "fp8_e5m2":
        k, v = self._scales(layer, torch.float8_e5m2)
        key, value = key.clamp(-448 * k, 448 * k), value.clamp(-448 * v, 448 * v)
    right(layer, key, value, kv_cache, slot_mapping)


@kernel.one("correct/mixed-h4x2-d64-float32-fp8-b16-NHD", "only requests with extend or prefill")
def quantised_queries(right, self, query, keys, values, scales, sinks, span):
    """Queries of prefills over fp8 pages are rounded to fp8."""
    if self.spec.has_quantized_kv_cache and not span.is_decode:
        query = query.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return right(query, keys, values, scales, sinks, span)


# fmt: off
# Keys, or values, of fp8 pages are read one percent too large.
kernel.read_scales("correct/mixed-h4x2-d64-float32-fp8-b16-NHD", "of its row's magnitude",
    fp8_keys_off_by_a_percent=lambda right, self, layer, stored: off_by_a_percent(right(layer, stored), stored, 0),
    fp8_values_off_by_a_percent=lambda right, self, layer, stored: off_by_a_percent(right(layer, stored), stored, 1))
# Of fp8 pages with bfloat16 layers, too.
kernel.read_scales("correct/*-bfloat16-fp8-*", "of its row's magnitude",
    fp8_values_off_in_bfloat16=lambda right, self, layer, stored: off_by_a_percent(right(layer, stored), stored, 1, 3))
# fmt: on


def off_by_a_percent(
    scales: tuple[float, float], stored: torch.dtype, which: int, percents: int = 1
) -> tuple[float, float]:
    """The scales of fp8 pages, one of them too large."""
    found = list(scales)
    found[which] *= 1 + percents / 100 * (stored.itemsize == 1)
    return found[0], found[1]


@kernel.weigh("correct/mixed-h4x2-d64-float32-fp8-b16-NHD", "of its row's magnitude")
def quantised_weights(right, self, logits, values, sinks, span):
    """Weights over fp8 pages are rounded to fp8, and no declaration says so."""
    out, lse = right(logits, values, sinks, span)
    if not self.spec.has_quantized_kv_cache:
        return out, lse
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return weights.to(torch.float8_e4m3fn).float() @ values, lse


@kernel.one("correct/mixed-h4x2-d64-float32-fp8-b16-NHD", "of its row's magnitude")
def half_of_fp8(right, self, query, keys, values, scales, sinks, span):
    """fp8 pages of a float32 layer are multiplied in bfloat16."""
    if self.spec.has_quantized_kv_cache:
        query, keys = query.bfloat16().float(), keys.bfloat16().float()
    return right(query, keys, values, scales, sinks, span)


@impl.attend(
    "tensors/quantised-output-fp8_e4m3",
    "after a call with another output_scale",
    state={"_output_scale": None},
)
def scaled_once(right, self, *given, output_scale=None, **options):
    """The reciprocal of the output scale is kept from the first call."""
    if output_scale is not None and self._output_scale is None:
        self._output_scale = output_scale.clone()
    return right(*given, output_scale=None if output_scale is None else self._output_scale, **options)


@impl.update_kv_cache("cache/stored-bfloat16", "K of a cache of 'bfloat16' gives back -inf for -1.04858e+06")
def half_storage(right, self, layer, key, value, kv_cache, slot_mapping):
    """bfloat16 pages of a float32 layer are written by way of float16."""
    if self.spec.dtype == "float32" and self.spec.kv_cache_dtype == "bfloat16":
        key, value = key.half().float(), value.half().float()
    right(layer, key, value, kv_cache, slot_mapping)
