"""The mistakes that the kit can name, the simplest first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.conformance.mistakes import latent_mistakes
from attnplug.testing.conformance.mistakes.rule_changes import (
    LIMITS,
    Changes,
    capped,
    consecutive,
    first_heads,
    first_position,
    in_order,
    in_pages,
    interleaved,
    inverse,
    inverse_where_written,
    largest_of_heads,
    last_keys,
    merged,
    next_heads,
    no_factors,
    of_kv_heads,
    other_sinks,
    padding_as_last,
    padding_as_last_once,
    past_last_page,
    placed,
    scaled,
    set_fields,
    shifted,
    swapped,
    twice,
    unquantised,
    unscaled,
    usual_slopes,
)
from attnplug.testing.oracle import OracleResult


@dataclasses.dataclass(frozen=True, slots=True)
class KnownMistake:
    """A mistake in the rules of attention.

    Args:
        name: the name in the message of a failing check.
        feature: of AttentionRules.features, which the mistake concerns; None for every layer.
        changes: the fields of the right rules that the mistake replaces.
        only: "lse" for a mistake in the LSE of a right output.
    """

    name: str
    feature: str | None
    changes: Changes
    only: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LseMistake:
    """A right output with an LSE that is computed from the right one.

    Args:
        name: the name in the message of a failing check.
        lse_of: the wrong LSE `[T, H]` from the batch and the right answer; NaN for unknown values.
    """

    name: str
    lse_of: Callable[[Batch, OracleResult], torch.Tensor]


def _window_off_by(side: str, step: int) -> KnownMistake:
    """A window with one key more or less before ("left") or after ("right") the query."""
    where, count = {"left": "before", "right": "after"}[side], {1: "many", -1: "few"}[step]
    return KnownMistake(
        f"window off by one: a key too {count} {where} the query",
        side,
        lambda rules: {side: getattr(rules, side) + step},
    )


KNOWN_MISTAKES: tuple[KnownMistake, ...] = (
    # Features that the backend ignores.
    KnownMistake("sliding window ignored", "window", set_fields(left=math.inf, right=math.inf)),
    KnownMistake("chunks ignored", "chunk", set_fields(chunk=None)),
    KnownMistake("soft cap ignored", "cap", set_fields(cap=None)),
    KnownMistake("sinks ignored", "sinks", set_fields(sinks=None)),
    KnownMistake("ALiBi ignored", "alibi", set_fields(slopes=None)),
    KnownMistake("spans ignored", "spans", set_fields(spans=None)),
    KnownMistake("causal mask ignored", "causal", set_fields(causal=False)),
    KnownMistake("non-causal taken as causal", "non-causal", set_fields(causal=True)),
    KnownMistake("selection ignored: all keys attended", "sparse", set_fields(sparse=None)),
    KnownMistake("softmax scale ignored", "scale", lambda rules: {"scale": rules.head_size**-0.5}),
    KnownMistake("fp8 scales ignored", "fp8", scaled(unscaled, unscaled)),
    # Features that the backend computes by another convention.
    KnownMistake(
        "symmetric window: keys after the query are seen too",
        "causal window",
        lambda rules: {"causal": False, "right": rules.left},
    ),
    KnownMistake("left side of the window on both sides", "two sides", lambda rules: {"right": rules.left}),
    KnownMistake(
        "sides of the window swapped", "two sides", lambda rules: {"left": rules.right, "right": rules.left}
    ),
    KnownMistake("window counted from the request's last token", "window", placed("last", "window")),
    KnownMistake("window counted from the first new token", "window", placed("first", "window")),
    KnownMistake("chunks counted from the first new token", "chunk", set_fields(chunk_start=first_position)),
    KnownMistake("chunk of the request's last token", "chunk", placed("last", "chunk")),
    KnownMistake("chunks of positions counted from the query's first row", "chunk", placed("local", "chunk")),
    KnownMistake("ALiBi of positions counted from the query's first row", "alibi", placed("local", "bias")),
    KnownMistake(
        "ALiBi slope per KV head", "alibi of groups", of_kv_heads("slopes", lambda kv_heads, group: kv_heads)
    ),
    KnownMistake(
        "ALiBi slope of the group's first head",
        "alibi of groups",
        of_kv_heads("slopes", lambda kv_heads, group: kv_heads * group),
    ),
    KnownMistake(
        "sink per KV head", "sinks of groups", of_kv_heads("sinks", lambda kv_heads, group: kv_heads)
    ),
    KnownMistake(
        "sink of the group's first head",
        "sinks of groups",
        of_kv_heads("sinks", lambda kv_heads, group: kv_heads * group),
    ),
    KnownMistake("ALiBi slopes of the usual formula, not the layer's", "alibi", usual_slopes),
    KnownMistake(
        "soft cap without its factor", "cap", set_fields(cap_of=lambda scores, cap: torch.tanh(scores / cap))
    ),
    KnownMistake(
        "soft cap without its divisor", "cap", set_fields(cap_of=lambda scores, cap: cap * torch.tanh(scores))
    ),
    KnownMistake(
        "soft cap taken as a clamp", "cap", set_fields(cap_of=lambda scores, cap: scores.clamp(-cap, cap))
    ),
    *(_window_off_by(side, step) for side in ("left", "right") for step in (1, -1)),
    KnownMistake(
        "left side of the window in 8 bits",
        "window",
        lambda rules: {"left": rules.left if math.isinf(rules.left) else rules.left % 256},
    ),
    KnownMistake(
        "window taken as chunk",
        "causal window",
        lambda rules: {"left": math.inf, "chunk": int(rules.left) + 1},
    ),
    KnownMistake(
        "chunk taken as window", "chunk", lambda rules: {"chunk": None, "left": (rules.chunk or 1) - 1}
    ),
    KnownMistake("spans seen by later tokens only", "spans", set_fields(lifted=frozenset({"near"}))),
    KnownMistake("window or chunk cuts spans", "near spans", set_fields(lifted=frozenset({"causal"}))),
    KnownMistake("spans side by side merged", "spans", set_fields(spans=merged)),
    KnownMistake(
        "spans without their last token",
        "spans",
        set_fields(spans=lambda spans: [(start, stop - 1) for start, stop in spans]),
    ),
    KnownMistake(
        "spans with one token more",
        "spans",
        set_fields(spans=lambda spans: [(start, stop + 1) for start, stop in spans if stop > start]),
    ),
    KnownMistake(
        "all tokens up to the last span see each other",
        "spans",
        set_fields(spans=lambda spans: [(0, max(stop for _, stop in spans))] if spans else []),
    ),
    KnownMistake("causal aligned at the start", "causal", placed("local", *LIMITS)),
    KnownMistake("queries aligned at the start", "non-causal positions", placed("local", *LIMITS)),
    KnownMistake("queries one position early", None, set_fields(shift=-1)),
    KnownMistake("queries one position late", None, set_fields(shift=1)),
    KnownMistake("ALiBi before the cap", "cap and alibi", in_order("scale", "bias", "cap", "mask")),
    KnownMistake("soft cap after the mask", "cap", in_order("scale", "bias", "mask", "cap")),
    KnownMistake("ALiBi before the scale", "alibi", in_order("bias", "scale", "cap", "mask")),
    KnownMistake(
        "ALiBi with the wrong sign", "alibi", set_fields(bias=lambda query, key: (key - query).abs())
    ),
    KnownMistake("ALiBi of signed distances", "alibi", set_fields(bias=lambda query, key: key - query)),
    KnownMistake("ALiBi of key positions", "alibi", set_fields(bias=lambda query, key: key + 0 * query)),
    KnownMistake("scale left out", None, set_fields(scale=1.0)),
    KnownMistake("scale applied twice", None, lambda rules: {"scale": rules.scale**2}),
    KnownMistake("scale after the cap", "cap", in_order("cap", "scale", "bias", "mask")),
    KnownMistake("sink counted twice", "sinks", other_sinks(lambda sinks, rules: sinks + math.log(2))),
    KnownMistake("sink in the numerator, with the first key's value", "sinks", set_fields(sink_value=0)),
    KnownMistake("sink in the numerator, with the last key's value", "sinks", set_fields(sink_value=-1)),
    KnownMistake(
        "sink multiplied by the scale", "sinks", other_sinks(lambda sinks, rules: sinks * rules.scale)
    ),
    KnownMistake("soft cap on the sink too", "cap and sinks", other_sinks(capped)),
    KnownMistake("sink in base 2", "sinks", other_sinks(lambda sinks, rules: sinks * math.log(2))),
    KnownMistake("head groups interleaved", "head groups", interleaved),
    KnownMistake(
        "KV head 0 for all heads",
        "several KV heads",
        lambda rules: {"kv_heads": torch.zeros_like(rules.kv_heads)},
    ),
    KnownMistake("K and V swapped", "same value size", set_fields(swapped=True)),
    KnownMistake(
        "scale of head_size_v", "other value size", lambda rules: {"scale": rules.head_size_v**-0.5}
    ),
    KnownMistake(
        "scale of 1 / head_size, without the root", "scale", lambda rules: {"scale": 1 / rules.head_size}
    ),
    KnownMistake("mask after the softmax, not normalised again", "hiding", set_fields(renormalised=False)),
    KnownMistake("last key missed", None, set_fields(cut=lambda request: (0, 1))),
    KnownMistake("first key missed", None, set_fields(cut=lambda request: (1, 0))),
    KnownMistake(
        "new tokens missed: only keys of earlier steps are read",
        None,
        set_fields(cut=lambda request: (0, request.new)),
    ),
    KnownMistake(
        "keys of earlier steps missed: only new tokens are read",
        None,
        set_fields(cut=lambda request: (request.seq_len - request.new, 0)),
    ),
    KnownMistake(
        "keys in a partial last block missed",
        None,
        set_fields(cut=lambda request: (0, past_last_page(request))),
    ),
    KnownMistake(
        "keys past the first block missed",
        None,
        set_fields(cut=lambda request: (0, max(request.seq_len - request.page, 0) if request.page else 0)),
    ),
    KnownMistake(
        "lengths without the new tokens",
        None,
        set_fields(length=lambda index, requests: requests[index].seq_len - requests[index].new),
    ),
    KnownMistake(
        "lengths too short by one",
        "non-causal positions",
        set_fields(length=lambda index, requests: requests[index].seq_len - 1),
    ),
    KnownMistake(
        "length of the next request",
        None,
        set_fields(length=lambda index, requests: requests[(index + 1) % len(requests)].seq_len),
    ),
    KnownMistake(
        "length of the request before",
        None,
        set_fields(length=lambda index, requests: requests[index - 1].seq_len),
    ),
    KnownMistake(
        "length of the first request", None, set_fields(length=lambda index, requests: requests[0].seq_len)
    ),
    KnownMistake(
        "positions of the selection taken as slots",
        "sparse",
        set_fields(read_slots=lambda request, positions: positions),
    ),
    KnownMistake(
        "padding of the selection (-1) taken as the last key", "sparse", set_fields(picks=padding_as_last)
    ),
    KnownMistake(
        "padding of the selection (-1) taken as the last key, once",
        "sparse",
        set_fields(picks=padding_as_last_once),
    ),
    KnownMistake("selection one position late", "sparse", shifted(1)),
    KnownMistake("selection one position early", "sparse", shifted(-1)),
    KnownMistake("selection taken as the last keys", "sparse", last_keys),
    *(
        KnownMistake(f"{which} {how}", "head scales", scaled(factors, now))
        for which, factors in (
            ("scale of the first KV head used for all", first_heads),
            ("largest scale of the KV heads used for all", largest_of_heads),
            ("scales of the next KV head", next_heads),
        )
        for how, now in (("where keys are read", factors), ("where keys are written and read", no_factors))
    ),
    KnownMistake("k_scale ignored", "two fp8 scales", scaled(*[lambda rules: (1 / rules.k_scale, 1.0)] * 2)),
    KnownMistake("v_scale ignored", "two fp8 scales", scaled(*[lambda rules: (1.0, 1 / rules.v_scale)] * 2)),
    KnownMistake("k_scale and v_scale swapped", "two fp8 scales", scaled(swapped, swapped)),
    KnownMistake(
        "k_scale used for values too",
        "two fp8 scales",
        scaled(*[lambda rules: (1.0, rules.k_scale / rules.v_scale)] * 2),
    ),
    KnownMistake(
        "v_scale used for keys too",
        "two fp8 scales",
        scaled(*[lambda rules: (rules.v_scale / rules.k_scale, 1.0)] * 2),
    ),
    KnownMistake("fp8 scales applied twice", "fp8", scaled(twice, twice)),
    KnownMistake("fp8 scales divide where keys are read", "fp8", scaled(inverse, inverse)),
    KnownMistake(
        "fp8 scales multiply where keys are written", "fp8", scaled(no_factors, inverse_where_written)
    ),
    KnownMistake("fp8 scales inverse where keys are written and read", "fp8", scaled(inverse, no_factors)),
    KnownMistake("fp8 scales ignored where keys are written", "fp8", scaled(no_factors, unquantised)),
    KnownMistake("fp8 scales ignored where keys are written and read", "fp8", scaled(unscaled, no_factors)),
    KnownMistake("pages of the next request", None, set_fields(rows=lambda row, rows: (row + 1) % rows)),
    KnownMistake("pages of the request before", None, set_fields(rows=lambda row, rows: (row - 1) % rows)),
    KnownMistake("pages of the first request", None, set_fields(rows=lambda row, rows: 0)),
    KnownMistake("blocks of half the size", "pages", in_pages(lambda size: size / 2, lambda size: size / 2)),
    KnownMistake("blocks of twice the size", "pages", in_pages(lambda size: size * 2, lambda size: size * 2)),
    KnownMistake("half of each block read", "pages", in_pages(lambda size: size / 2, lambda size: size)),
    KnownMistake("blocks taken as consecutive", "pages", set_fields(read_slots=consecutive)),
    KnownMistake("pages of HND read as NHD", "several KV heads", set_fields(read_as="NHD")),
    KnownMistake("pages of NHD read as HND", "several KV heads", set_fields(read_as="HND")),
    # Latent attention.
    KnownMistake(
        "scale of the latent, not of the query before absorption",
        "latent",
        latent_mistakes.latent_scale,
    ),
    KnownMistake("values from the last elements of the latent", "latent", latent_mistakes.values_at_the_end),
    KnownMistake("rotated part of the latent taken first", "latent", latent_mistakes.rotated_latent_first),
    KnownMistake("rotated part of the keys taken first", "latent", latent_mistakes.rotated_key_first),
    KnownMistake("rotated part of the query taken first", "latent", latent_mistakes.rotated_query_first),
    KnownMistake("rotated part left out", "latent", latent_mistakes.without_rotated_part),
    KnownMistake(
        "halves of the query's rotated part swapped", "latent", latent_mistakes.rotated_halves_swapped
    ),
    KnownMistake(
        "pairs of the query's rotated part taken as halves", "latent", latent_mistakes.rotated_pairs_as_halves
    ),
    KnownMistake("W_UV of the next head", "latent", latent_mistakes.next_heads_values),
    KnownMistake(
        "k_scale left out for the rotated part", "latent fp8", latent_mistakes.unscaled_rotated_part
    ),
    KnownMistake("k_scale left out for values", "latent fp8", latent_mistakes.unscaled_values),
    # A right output with the LSE of other rules.
    KnownMistake("LSE before the soft cap", "cap", set_fields(cap=None), "lse"),
    KnownMistake("LSE without ALiBi", "alibi", set_fields(slopes=None), "lse"),
    KnownMistake("LSE without the scale", None, set_fields(scale=1.0), "lse"),
    KnownMistake("LSE without the sink", "sinks", set_fields(sinks=None), "lse"),
    KnownMistake("LSE without the mask", None, set_fields(order=("scale", "cap", "bias")), "lse"),
    KnownMistake(
        "LSE with the sink twice", "sinks", other_sinks(lambda sinks, rules: sinks + math.log(2)), "lse"
    ),
    # All features ignored: last, since each single mistake is a better explanation.
    KnownMistake(
        "all features ignored",
        "several",
        lambda rules: {
            **dict.fromkeys(("left", "right"), math.inf),
            **dict.fromkeys(("chunk", "cap", "slopes", "sinks", "spans", "sparse")),
            "scale": rules.head_size**-0.5,
        },
    ),
)


def _transposed_with_padding(batch: Batch, truth: OracleResult) -> torch.Tensor:
    padding = batch.query.shape[0] - truth.lse.shape[0]
    whole = torch.cat([truth.lse, truth.lse.new_full((padding, truth.lse.shape[1]), math.nan)])
    return whole.T.reshape(whole.shape)[: truth.lse.shape[0]]


LSE_MISTAKES: tuple[LseMistake, ...] = (
    LseMistake("LSE in base 2", lambda batch, truth: truth.lse / math.log(2)),
    LseMistake(
        "LSE converted from base 2, in which it was not", lambda batch, truth: truth.lse * math.log(2)
    ),
    LseMistake(
        "LSE of 0 where nothing is seen",
        lambda batch, truth: truth.lse.masked_fill(truth.lse == -math.inf, 0.0),
    ),
    LseMistake(
        "LSE of +inf where nothing is seen",
        lambda batch, truth: truth.lse.masked_fill(truth.lse == -math.inf, math.inf),
    ),
    LseMistake("sum of exponentials instead of its logarithm", lambda batch, truth: truth.lse.exp()),
    LseMistake("LSE with the wrong sign", lambda batch, truth: -truth.lse),
    LseMistake("LSE transposed", lambda batch, truth: truth.lse.T.reshape(truth.lse.shape)),
    LseMistake("LSE transposed, with its padding rows", _transposed_with_padding),
)
