"""Backends that follow another convention of attention, each with the layer that shows it and the mistake's name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from plain_attention import PlainImpl

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import ContextParallel
from attnplug.core.batch import get_dcp_local_seq_lens
from mutants.table import MUTANTS, Mutant, Table

__all__ = ["CONVENTIONS", "Convention"]


class Convention(NamedTuple):
    """A row, the fields of a layer that shows its mistake, and the options of its batch."""

    mutant: Mutant
    fields: dict[str, Any]
    options: dict[str, Any]


table = Table("conventions")
CONVENTIONS: list[Convention] = []


def method(name: str, base: type = PlainImpl) -> Callable[..., Any]:
    """Rows by one method of plain attention: of the mistake's name, and fields of a layer beside the rows' functions."""
    rows = table.method(base, name)

    def of(says: str, options: dict[str, Any] | None = None, **given: Any) -> Any:
        functions = {name: value for name, value in given.items() if callable(value)}
        fields = {name: value for name, value in given.items() if not callable(value)}

        def add(function: Any, row: str = "") -> Any:
            rows("", says, **{row or function.__name__: function})
            CONVENTIONS.append(Convention(MUTANTS[-1], fields, options or {}))
            return function

        for name, function in functions.items():
            add(function, name)
        return add

    return of


def _slopes(self: PlainImpl, slopes: torch.Tensor, logits: torch.Tensor, span: Any) -> torch.Tensor:
    return logits - slopes[:, None, None].double() * self.distance(span)


bias, seen, cap, weigh = map(method, ("bias", "seen", "cap", "weigh"))
write_lse, read_scales = map(method, ("write_lse", "read_scales"))


# fmt: off
bias("ALiBi slope per KV head", has_alibi=True,
    slope_per_kv_head=lambda self, logits, span: _slopes(self, self.tensors.alibi_slopes[self.kv_heads()], logits, span))
# fmt: on


@bias("ALiBi slopes of the usual formula, not the layer's", has_alibi=True)
def usual_slopes(self, logits, span):
    heads = len(logits)
    return _slopes(self, 2 ** (-8 * torch.arange(1, heads + 1).double() / heads), logits, span)


# fmt: off
method("distance")("ALiBi of positions counted from the query's first row", has_alibi=True,
    local_alibi=lambda self, span: (span.held - (span.at - span.at[0])[:, None]).abs())
method("sinks")("sink per KV head", has_sinks=True, sink_per_kv_head=lambda right, self, use_sinks: right(use_sinks)[self.kv_heads()])
seen("symmetric window: keys after the query are seen too", sliding_window=6,
    symmetric_window=lambda self, span: self.distance(span) <= self.spec.window[0])
seen("window counted from the request's last token", sliding_window=6,
    window_of_the_last_query=lambda self, span: (self.causal(span) & (span.at.max() - span.held <= self.spec.window[0])))
seen("window counted from the first new token", sliding_window=6,
    window_of_the_first_query=lambda self, span: (self.causal(span) & (span.at.min() - span.held <= self.spec.window[0])))
# fmt: on


@seen("chunks counted from the first new token", chunk_size=7)
def chunks_of_new_tokens(self, span):
    size, first = self.spec.chunk_size, span.at[0]
    return self.causal(span) & ((span.held - first) // size == (span.at[:, None] - first) // size)


# fmt: off
cap("soft cap without its factor", logits_soft_cap=2.7, cap_without_its_factor=lambda right, self, logits: right(logits) / self.spec.logits_soft_cap)
cap("soft cap without its divisor", logits_soft_cap=2.7, cap_without_its_divisor=lambda self, logits: self.spec.logits_soft_cap * logits.tanh())
cap("soft cap taken as a clamp", logits_soft_cap=1.3,
    clamps_for_a_cap=lambda self, logits: logits.clamp(-self.spec.logits_soft_cap, self.spec.logits_soft_cap))
# fmt: on


@method("one")("mask after the softmax, not normalised again")
def masks_the_weights(self, query, keys, values, scales, sinks, span):
    scores = self.products(query, keys, scales[0])
    lse = scores.logsumexp(2, keepdim=True)
    return ((scores - lse).exp() * self.seen(span)) @ values, lse[..., 0]


# fmt: off
seen("last key missed", causal=False, misses_the_last_key=lambda right, self, span: right(span) & (span.held < span.held.max()))
seen("first key missed", misses_the_first_key=lambda right, self, span: right(span) & (span.held > 0))
seen("new tokens missed: only keys of earlier steps are read",
    reads_before_it_writes=lambda right, self, span: right(span) & (span.held < span.at[0]))
seen("keys of earlier steps missed: only new tokens are read",
    forgets_earlier_steps=lambda right, self, span: right(span) & (span.held >= span.at[0]))
seen("keys in a partial last block missed", reads_whole_blocks=lambda right, self, span: right(span) & (span.held < span.held.numel() // 16 * 16))
method("kv_heads")("KV head 0 for all heads", first_kv_head=lambda self: torch.zeros(self.spec.num_heads, dtype=torch.int64))
method("one")("K and V swapped", swaps_keys_and_values=lambda right, self, query, keys, values, *rest: right(query, values, keys, *rest))
method("products")("scale of head_size_v", head_size_v=8,
    scale_of_the_values=lambda right, self, *given: (right(*given) * (self.spec.head_size_v**-0.5 / self.spec.scale)))
# fmt: on


@method("one")("LSE before the soft cap", needs_lse=True, logits_soft_cap=2.7)
def lse_before_the_cap(right, self, query, keys, values, scales, sinks, span):
    uncapped = self.mask(self.products(query, keys, scales[0]), self.seen(span))
    return right(query, keys, values, scales, sinks, span)[0], uncapped.logsumexp(2)


@weigh("LSE without the scale", needs_lse=True)
def lse_without_the_scale(right, self, scores, values, sinks, span):
    lse = torch.logaddexp((scores / self.spec.scale).logsumexp(2), sinks[:, None])
    return right(scores, values, sinks, span)[0], lse


# fmt: off
write_lse("sum of exponentials instead of its logarithm", needs_lse=True,
    sum_of_exponentials=lambda right, self, lse, output_lse: right(lse.exp(), output_lse))
write_lse("LSE with the wrong sign", needs_lse=True, negative_lse=lambda right, self, lse, output_lse: right(-lse, output_lse))
# fmt: on


@write_lse("LSE rounded to bfloat16", needs_lse=True)
def rounded_lse(right, self, lse, output_lse):
    right(lse.bfloat16(), output_lse)


_SCALES = {"k_scale": 0.37, "v_scale": 1.9}


# fmt: off
read_scales("k_scale used for values too", _SCALES, kv_cache_dtype="fp8_e4m3",
    one_scale=lambda right, self, layer, stored: (right(layer, stored)[0],) * 2)
read_scales("fp8 scales divide where keys are read", _SCALES, kv_cache_dtype="fp8_e4m3",
    divides_by_scales=lambda right, self, layer, stored: tuple(1 / scale for scale in right(layer, stored)))
# fmt: on


# Impls that are wrong on one rank of several; the words are the start of the mistake's name.

ranks = Table("ranks")
_RANKS = "context_parallel/*"
written = ranks.method(PlainImpl, "write_lse")
# fmt: off
ranks.method(PlainImpl, "weigh")(_RANKS, "LSE without the scale", lse_without_the_scale=lse_without_the_scale)
written(_RANKS, "LSE rounded to bfloat16", rounded_lse=rounded_lse)
written(_RANKS, "LSE in base 2", base_two_lse=lambda right, self, lse, output_lse: right(lse / math.log(2), output_lse))
written(_RANKS, "LSE of rows that see nothing is 0, not -inf",
    zero_for_empty_rows=lambda right, self, lse, output: right(lse.masked_fill(lse == -math.inf, 0.0), output))
ranks.method(PlainImpl, "causal")(_RANKS, "non-causal taken as causal", always_causal=lambda self, span: span.held <= span.at[:, None])
ranks.method(TorchImpl, "attend")(_RANKS, "sink counted twice in a merge",
    sinks_on_every_rank=lambda right, self, *given, **asked: right(*given, **{**asked, "use_sinks": True}))
# fmt: on


@ranks.method(PlainImpl, "seen")(_RANKS, "local lengths shared among the ranks again")
def shares_again(right, self, span):
    """Takes the lengths of its own keys for those of all ranks, and computes its share."""
    if self.dcp_world_size == 1:
        return right(span)
    own = get_dcp_local_seq_lens(torch.tensor([span.held.numel()]), self.dcp_world_size, self.dcp_rank)
    return right(span) & (span.held < own)


@ranks.method(TorchImpl, "attend")(_RANKS, "owner rule with runs of 1 tokens")
def owner_off_by_the_interleave(right, self, layer, query, key, value, kv_cache, metadata, output, **asked):
    """Knows the whole length of each request, and takes single tokens for what goes round the ranks, not blocks."""
    size = 16
    whole = [1, 5 * size + 3, size, 2 * size + 1, 7]
    if self.dcp_world_size == 3 and len(metadata.seq_lens) == len(whole):
        place = ContextParallel(3, self.dcp_rank)
        own = [place.local_length(length) for length in whole]
        metadata = dataclasses.replace(metadata, seq_lens=np.minimum(metadata.seq_lens, own))
    return right(layer, query, key, value, kv_cache, metadata, output, **asked)
