"""Backends with wrong numbers: they ignore a feature or compute it by another convention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from plain_attention import PlainImpl

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import LayerSpec, LayerTensors
from mutants.parts import Altered
from mutants.table import Table

__all__ = ["Misread", "misread"]

table = Table("numbers")


class Misread(TorchImpl):
    """TORCH's own kernels, for a layer with some fields changed."""

    changes: dict[str, Callable[[LayerSpec], Any]]

    def _bind(self, spec: LayerSpec, layer_name: str, tensors: LayerTensors, *rest: Any) -> None:
        taken = spec.replace(**{name: change(spec) for name, change in self.changes.items()})
        kept = dataclasses.replace(
            tensors,
            sinks=tensors.sinks if taken.has_sinks else None,
            alibi_slopes=tensors.alibi_slopes if taken.has_alibi else None,
        )
        super()._bind(taken, layer_name, kept, *rest)


def misread(**changes: Callable[[LayerSpec], Any]) -> type[TorchImpl]:
    """`Misread` of these fields."""
    return type("Misread", (Misread,), {"changes": changes})


def wider(before: int, after: int) -> Callable[[LayerSpec], tuple[int, int]]:
    """A window of so many keys more on each side that has a limit."""

    def window(spec: LayerSpec) -> tuple[int, int]:
        left, right = spec.window
        return (
            left + before if left >= 0 else -1,
            right + after if right >= 0 and not spec.causal else right,
        )

    return window


_PLAIN = "correct/mixed-h4x2-d64-float32-b16-NHD"


def _case(alone: str) -> str:
    """The id of the case whose only feature is `alone`."""
    return alone if alone.startswith("correct/") else f"{_PLAIN}{alone}"


def misreads(alone: str, says: str, asked: str, name: str, **changes: Callable[[LayerSpec], Any]) -> None:
    """A row of `Misread`: the case that must fail, and a pattern of those that can."""
    table.row(name, _case(alone), says, asked=f"*{asked}", impl=misread(**changes))


def method(name: str, base: type = PlainImpl) -> Callable[..., Any]:
    """Rows by one method of plain attention."""
    rows = table.method(base, name)

    def add(alone: str, says: str, asked: str, **functions: Any) -> Any:
        return rows(_case(alone), says, asked=f"*{asked}", **functions)

    return add


_FP8 = "correct/mixed-h4x2-d64-float32-fp8-b16-NHD"
_IDLE = "correct/idle-h4x2-d64-float32-b16-NHD-lse"
_WINDOW, _ALIKE = (
    ("-window6.0", "sliding window ignored", "window*"),
    "correct/alike-h4x2-d64-float32-b16-NHD",
)
causal, positions, score, logits = map(method, ("causal", "positions", "score", "logits"))
read_scales, write_lse, weigh = map(method, ("read_scales", "write_lse", "weigh"))

misreads(*_WINDOW, "ignores_windows", window=lambda spec: (-1, -1))


@method("attend", TorchImpl)(*_WINDOW)
def ignores_windows_of_decodes(right, self, *given, output_lse=None, **options):
    """One of two kernels is right: decodes of one token each see the whole request."""
    *inputs, metadata, output = given
    right(*given, output_lse=output_lse, **options)
    spec, self.spec = self.spec, self.spec.replace(window=(-1, -1))
    whole, whole_lse = output.clone(), None if output_lse is None else output_lse.clone()
    right(*inputs, metadata, whole, output_lse=whole_lse, **options)
    self.spec = spec
    rows = metadata.query_starts[:-1][metadata.query_lens == 1]
    output[rows] = whole[rows]
    if output_lse is not None:
        output_lse[rows] = whole_lse[rows]
    return output


# fmt: off
misreads("-chunk24", "chunks ignored", "chunk*", "ignores_chunks", chunk_size=lambda spec: None)
misreads("-cap3", "soft cap ignored", "cap3*", "ignores_soft_caps", logits_soft_cap=lambda spec: None)
misreads("-sinks", "sinks ignored", "sinks*", "ignores_sinks", has_sinks=lambda spec: False)
misreads("-alibi", "ALiBi ignored", "alibi*", "ignores_alibi", has_alibi=lambda spec: False)
misreads("-scale0.15", "softmax scale ignored", "scale0.15*", "ignores_scales", scale=lambda spec: None)
misreads("", "scale applied twice", "h*x*float32-b16-NHD", "scales_twice", scale=lambda spec: spec.scale**2)
misreads("-spans", "spans ignored", "spans*", "ignores_spans", mm_prefix=lambda spec: False)
misreads("-window6.0", "window off by one: a key too many before the query", "window*", "counts_a_window_without_the_query", window=wider(1, 0))
misreads("-window6.0", "window off by one: a key too few before the query", "window*", "counts_a_window_with_the_query", window=wider(-1, 0))
misreads("-non_causal-window40.40", "window off by one: a key too many after the query", "window40.40*", "looks_ahead_too_far", window=wider(0, 1))
misreads("-chunk24", "chunk taken as window", "chunk*", "takes_chunks_as_windows", chunk_size=lambda spec: None,
    window=lambda spec: ((spec.chunk_size or 0) - 1, 0))
causal("", "causal mask ignored", "mixed-h4x2-d64-float32-b16-NHD*",
    ignores_causality=lambda self, span: torch.ones_like(span.held <= span.at[:, None]))
causal("-non_causal", "non-causal taken as causal", "non_causal*", is_always_causal=lambda self, span: span.held <= span.at[:, None])
positions("", "causal aligned at the start", "h*x*float32-b16-NHD", aligns_at_the_start=lambda self, new, seq_len: torch.arange(new))
positions("", "queries one position early", "h*x*float32-b16-NHD", misses_the_newest_token=lambda right, self, new, seq_len: right(new, seq_len) - 1)
score("-cap3", "soft cap after the mask", "NHD-cap3*",
    caps_after_the_mask=lambda self, scaled, span: self.cap(self.mask(self.bias(scaled, span), self.seen(span))))
logits("-cap3-alibi", "ALiBi before the cap", "cap3*alibi*", caps_after_alibi=lambda self, scaled, span: self.cap(self.bias(scaled, span)))
logits("-scale0.15-cap3", "scale after the cap", "cap3*",
    scales_after_the_cap=lambda self, scaled, span: self.bias(self.cap(scaled / self.spec.scale) * self.spec.scale, span))
logits("-alibi", "ALiBi before the scale", "alibi*",
    scales_alibi=lambda self, scaled, span: self.cap(self.bias(scaled / self.spec.scale, span) * self.spec.scale))
# As FlashAttention 2 does for causal layers, where it shifts nothing but the LSE.
method("distance")("-alibi-lse", "ALiBi of key positions", "alibi-lse*", shifts_the_lse_by_alibi=lambda self, span: -span.held[None])
method("kv_heads")("", "head groups interleaved", "h4x2-d64-float32-b16*",
    interleaves_heads=lambda self: torch.arange(self.spec.num_heads) % self.spec.num_kv_heads)
# fmt: on


@weigh("-sinks", "sink in the numerator, with the first key's value", "NHD-sinks*")
def gives_the_sink_a_value(right, self, scores, values, sinks, span):
    """The sink's weight goes to the first key that is seen, as if its logit were that key's."""
    if scores.shape[2] == 0:
        return right(scores, values, sinks, span)
    first = (scores > -math.inf).int().argmax(2, keepdim=True)
    both = torch.logaddexp(scores.gather(2, first), sinks[:, None, None])
    return right(scores.scatter(2, first, both), values, torch.full_like(sinks, -math.inf), span)


@weigh("-sinks", "sink counted twice", "sinks*")
def merges_two_sinks(right, self, scores, values, sinks, span):
    """Two halves of the keys, each with the sink in its denominator, merged by their LSEs."""
    half = scores.shape[2] // 2
    one, lse = right(scores[:, :, :half], values[:, :half], sinks, span)
    two, other = right(scores[:, :, half:], values[:, half:], sinks, span)
    merged = torch.logaddexp(lse, other)
    floor = merged.clamp_min(-1e300)
    return one * (lse - floor).exp()[..., None] + two * (other - floor).exp()[..., None], merged


# fmt: off
method("sinks")("-sinks", "sink in base 2", "sinks*", takes_sinks_in_base_two=lambda right, self, use_sinks: right(use_sinks) * math.log(2))
weigh("-sinks-lse", "LSE without the sink", "sinks*lse*",
    forgets_the_sink_in_the_lse=lambda right, self, scores, values, sinks, span: (right(scores, values, sinks, span)[0], scores.logsumexp(2)))
# fmt: on


@weigh(_IDLE, "NaN where nothing is seen", "idle*")
def divides_zero_by_zero(self, scores, values, sinks, span):
    """Divides the weights by their sum, which is 0 for a query that sees nothing."""
    total = scores.exp().sum(2) + sinks[:, None].exp()
    return scores.exp() @ values / total[..., None], total.log()


# fmt: off
read_scales(_FP8, "fp8 scales ignored", "fp8*", ignores_fp8_scales=lambda self, layer, stored: (1.0, 1.0))
read_scales(_FP8, "k_scale and v_scale swapped", "fp8*", swaps_fp8_scales=lambda right, self, layer, stored: right(layer, stored)[::-1])
write_lse("-lse", "LSE in base 2", "lse*", writes_the_lse_in_base_two=lambda right, self, lse, output: right(lse * math.log2(math.e), output))
write_lse("-lse", "LSE transposed", "lse*",
    writes_the_lse_heads_first=lambda self, lse, output: output.view(-1)[: lse.numel()].copy_(lse.T.flatten()))
write_lse(_IDLE, "LSE of +inf where nothing is seen", "lse*",
    writes_plus_infinity=lambda right, self, lse, output: right(torch.where(lse == -math.inf, math.inf, lse), output))
# Each request has the block table of the next one.
method("altered", Altered)(f"{_ALIKE}-lse", "pages of the next request", "alike-*",
    reads_the_next_row=lambda self, made, common: dataclasses.replace(made, block_table=made.block_table.roll(-1, 0)))
# fmt: on


spans = method("spans")
# fmt: off
# A span lifts the window, but not the causal mask.
spans("-window6.0-spans", "spans seen by later tokens only", "NHD-window6.0-spans",
    sees_spans_backwards=lambda right, self, span: right(span) & (span.held <= span.at[:, None]))
# fmt: on
# A span lifts the causal mask, but neither the window nor the chunk.
for feature in ("window6.0", "chunk24"):
    name = {"window6.0": "cuts_spans_by_windows", "chunk24": "cuts_spans_by_chunks"}[feature]
    cut = {name: lambda right, self, span: right(span) & self.window(span)}
    spans(f"-{feature}-spans", "window or chunk cuts spans", f"NHD-{feature}-spans", **cut)


@method("altered", Altered)("-spans", "spans side by side merged", "spans*")
def merges_spans(self, made, common):
    """Takes spans side by side as one, as a mask of image tokens does."""
    if made.spans is None:
        return made
    spans = made.spans.copy()
    for start, stop in zip(made.query_starts[:-1], made.query_starts[1:], strict=True):
        own = spans[start:stop]
        for row in range(1, len(own)):
            before = own[row - 1]
            if own[row, 1] and before[1] == own[row, 0]:
                own[(own == before).all(1), 1] = own[row, 1]
                own[(own == own[row]).all(1), 0] = before[0]
    return dataclasses.replace(made, spans=spans)


@method("cap")("", "", "mixed-h4x2-d64-float32-b16-NHD*")
def adds_noise(right, self, logits):
    """Adds the same random numbers to the logits of each request."""
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return right(logits) + 0.1 * noise
