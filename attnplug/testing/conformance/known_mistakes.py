"""The mistakes that the kit can name, the simplest first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.conformance import latent_mistakes as latent
from attnplug.testing.conformance.mistake_oracle import AttentionRules, Request
from attnplug.testing.oracle import OracleResult, Spans

LIMITS = ("causal", "window", "chunk", "spans", "bias")
"""The limits that depend on a query's position."""

_Changes: TypeAlias = Callable[[AttentionRules], dict[str, Any]]
_Factors: TypeAlias = Callable[[AttentionRules], tuple[float, float]]


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
    changes: _Changes
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


def _set(**fields: Any) -> _Changes:
    return lambda rules: fields


def _in_order(*order: str) -> _Changes:
    return _set(order=order)


def _placed(way: str, *limits: str) -> _Changes:
    return _set(places=dict.fromkeys(limits, way))


def _of_kv_heads(field: str, of_group: Callable[[torch.Tensor, int], torch.Tensor]) -> _Changes:
    """The numbers of another head: `of_group` gives it from the KV head of each head and the size of a group."""

    def changes(rules: AttentionRules) -> dict[str, Any]:
        numbers, kv_heads = getattr(rules, field), rules.kv_heads
        group = len(kv_heads) // (int(kv_heads[-1]) + 1)
        return {field: None if numbers is None else numbers[of_group(kv_heads, group)]}

    return changes


def _usual_slopes(rules: AttentionRules) -> dict[str, Any]:
    heads = len(rules.kv_heads)
    return {"slopes": 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)}


def _new(request: Request) -> int:
    return request.seq_len - request.query.shape[0]


def _past_last_page(request: Request) -> int:
    """The keys in the last page if it is partial."""
    return request.seq_len % request.page if request.page else 0


def _in_pages(size_of: Callable[[int], float], stride_of: Callable[[int], float]) -> _Changes:
    """Slots of pages of another size: `size_of` and `stride_of` give the size and stride from the right size."""

    def slots(request: Request, positions: torch.Tensor) -> torch.Tensor:
        if request.table is None or not len(request.table):
            return torch.full_like(positions, -1)
        size = max(int(size_of(request.page)), 1)
        pages = request.table[(positions // size).clamp(max=len(request.table) - 1)]
        return pages * max(int(stride_of(request.page)), 1) + positions % size

    return _set(read_slots=slots)


def _consecutive(request: Request, positions: torch.Tensor) -> torch.Tensor:
    first = -1 if request.slots is None or not len(request.slots) else int(request.slots[0])
    return first + positions if first >= 0 else torch.full_like(positions, -1)


def _window_off_by(side: str, step: int) -> KnownMistake:
    """A window with one key more or less before ("left") or after ("right") the query."""
    where, count = {"left": "before", "right": "after"}[side], {1: "many", -1: "few"}[step]
    return KnownMistake(
        f"window off by one: a key too {count} {where} the query",
        side,
        lambda rules: {side: getattr(rules, side) + step},
    )


def _sinks(change: Callable[[torch.Tensor, AttentionRules], torch.Tensor]) -> _Changes:
    return lambda rules: {"sinks": None if rules.sinks is None else change(rules.sinks, rules)}


def _scaled(before: _Factors, now: _Factors) -> _Changes:
    """Factors of (keys, values): `before` for those stored before this step, `now` for the new ones."""

    def changes(rules: AttentionRules) -> dict[str, Any]:
        keys, values = zip(before(rules), now(rules), strict=True)
        return {"key_factors": keys, "value_factors": values}

    return changes


def _right(rules: AttentionRules) -> tuple[float, float]:
    return 1.0, 1.0


def _unscaled(rules: AttentionRules) -> tuple[float, float]:
    return 1 / rules.k_scale, 1 / rules.v_scale


def _unquantised(rules: AttentionRules) -> tuple[float, float]:
    return rules.k_scale, rules.v_scale


def _swapped(rules: AttentionRules) -> tuple[float, float]:
    return rules.v_scale / rules.k_scale, rules.k_scale / rules.v_scale


def _inverse(rules: AttentionRules) -> tuple[float, float]:
    return rules.k_scale**-2, rules.v_scale**-2


def _twice(rules: AttentionRules) -> tuple[float, float]:
    return rules.k_scale, rules.v_scale


def _inverse_where_written(rules: AttentionRules) -> tuple[float, float]:
    return rules.k_scale**2, rules.v_scale**2


def _interleaved(rules: AttentionRules) -> dict[str, Any]:
    heads, kv_heads = len(rules.kv_heads), int(rules.kv_heads[-1]) + 1
    return {"kv_heads": torch.arange(heads) % kv_heads}


def _capped(sinks: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    return sinks if rules.cap is None else rules.cap * (sinks / rules.cap).tanh()


def _merged(spans: Spans) -> Spans:
    """The spans of a mask that only says which tokens are in some span."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _shifted(step: int) -> _Changes:
    return _set(picks=lambda chosen, request, query: torch.where(chosen < 0, -1, chosen + step))


def _padding_as_last(chosen: torch.Tensor, request: Request, query: torch.Tensor) -> torch.Tensor:
    return torch.where(chosen < 0, request.seq_len - 1, chosen)


def _padding_as_last_once(chosen: torch.Tensor, request: Request, query: torch.Tensor) -> torch.Tensor:
    last = torch.full((chosen.shape[0], 1), request.seq_len - 1)
    padded = (chosen < 0).any(1, keepdim=True) & (chosen != last).all(1, keepdim=True)
    return torch.cat([chosen, torch.where(padded, last, -1)], dim=1)


def _last_keys(rules: AttentionRules) -> dict[str, Any]:
    """As many keys as a query may choose, the nearest before it, whatever the indexer chose."""

    def picks(chosen: torch.Tensor, request: Request, query: torch.Tensor) -> torch.Tensor:
        most = 0 if rules.sparse is None else rules.sparse.topk * rules.sparse.block
        places = query - torch.arange(min(most, request.seq_len))
        return torch.where(places < 0, -1, places)

    return {"picks": picks}


KNOWN_MISTAKES: tuple[KnownMistake, ...] = (
    # Features that the backend ignores.
    KnownMistake("sliding window ignored", "window", _set(left=math.inf, right=math.inf)),
    KnownMistake("chunks ignored", "chunk", _set(chunk=None)),
    KnownMistake("soft cap ignored", "cap", _set(cap=None)),
    KnownMistake("sinks ignored", "sinks", _set(sinks=None)),
    KnownMistake("ALiBi ignored", "alibi", _set(slopes=None)),
    KnownMistake("spans ignored", "spans", _set(spans=None)),
    KnownMistake("causal mask ignored", "causal", _set(causal=False)),
    KnownMistake("non-causal taken as causal", "non-causal", _set(causal=True)),
    KnownMistake("selection ignored: all keys attended", "sparse", _set(sparse=None)),
    KnownMistake("softmax scale ignored", "scale", lambda rules: {"scale": rules.head_size**-0.5}),
    KnownMistake("fp8 scales ignored", "fp8", _scaled(_unscaled, _unscaled)),
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
    KnownMistake("window counted from the request's last token", "window", _placed("last", "window")),
    KnownMistake("window counted from the first new token", "window", _placed("first", "window")),
    KnownMistake("chunks counted from the first new token", "chunk", _set(chunk_start=_new)),
    KnownMistake("chunk of the request's last token", "chunk", _placed("last", "chunk")),
    KnownMistake(
        "chunks of positions counted from the query's first row", "chunk", _placed("local", "chunk")
    ),
    KnownMistake("ALiBi of positions counted from the query's first row", "alibi", _placed("local", "bias")),
    KnownMistake(
        "ALiBi slope per KV head", "alibi of groups", _of_kv_heads("slopes", lambda kv_heads, group: kv_heads)
    ),
    KnownMistake(
        "ALiBi slope of the group's first head",
        "alibi of groups",
        _of_kv_heads("slopes", lambda kv_heads, group: kv_heads * group),
    ),
    KnownMistake(
        "sink per KV head", "sinks of groups", _of_kv_heads("sinks", lambda kv_heads, group: kv_heads)
    ),
    KnownMistake(
        "sink of the group's first head",
        "sinks of groups",
        _of_kv_heads("sinks", lambda kv_heads, group: kv_heads * group),
    ),
    KnownMistake("ALiBi slopes of the usual formula, not the layer's", "alibi", _usual_slopes),
    KnownMistake(
        "soft cap without its factor", "cap", _set(cap_of=lambda scores, cap: torch.tanh(scores / cap))
    ),
    KnownMistake(
        "soft cap without its divisor", "cap", _set(cap_of=lambda scores, cap: cap * torch.tanh(scores))
    ),
    KnownMistake(
        "soft cap taken as a clamp", "cap", _set(cap_of=lambda scores, cap: scores.clamp(-cap, cap))
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
    KnownMistake("spans seen by later tokens only", "spans", _set(lifted=frozenset({"near"}))),
    KnownMistake("window or chunk cuts spans", "near spans", _set(lifted=frozenset({"causal"}))),
    KnownMistake("spans side by side merged", "spans", _set(spans=_merged)),
    KnownMistake(
        "spans without their last token",
        "spans",
        _set(spans=lambda spans: [(start, stop - 1) for start, stop in spans]),
    ),
    KnownMistake(
        "spans with one token more",
        "spans",
        _set(spans=lambda spans: [(start, stop + 1) for start, stop in spans if stop > start]),
    ),
    KnownMistake(
        "all tokens up to the last span see each other",
        "spans",
        _set(spans=lambda spans: [(0, max(stop for _, stop in spans))] if spans else []),
    ),
    KnownMistake("causal aligned at the start", "causal", _placed("local", *LIMITS)),
    KnownMistake("queries aligned at the start", "non-causal positions", _placed("local", *LIMITS)),
    KnownMistake("queries one position early", None, _set(shift=-1)),
    KnownMistake("queries one position late", None, _set(shift=1)),
    KnownMistake("ALiBi before the cap", "cap and alibi", _in_order("scale", "bias", "cap", "mask")),
    KnownMistake("soft cap after the mask", "cap", _in_order("scale", "bias", "mask", "cap")),
    KnownMistake("ALiBi before the scale", "alibi", _in_order("bias", "scale", "cap", "mask")),
    KnownMistake("ALiBi with the wrong sign", "alibi", _set(bias=lambda query, key: (key - query).abs())),
    KnownMistake("ALiBi of signed distances", "alibi", _set(bias=lambda query, key: key - query)),
    KnownMistake("ALiBi of key positions", "alibi", _set(bias=lambda query, key: key + 0 * query)),
    KnownMistake("scale left out", None, _set(scale=1.0)),
    KnownMistake("scale applied twice", None, lambda rules: {"scale": rules.scale**2}),
    KnownMistake("scale after the cap", "cap", _in_order("cap", "scale", "bias", "mask")),
    KnownMistake("sink counted twice", "sinks", _sinks(lambda sinks, rules: sinks + math.log(2))),
    KnownMistake("sink in the numerator, with the first key's value", "sinks", _set(sink_value=0)),
    KnownMistake("sink in the numerator, with the last key's value", "sinks", _set(sink_value=-1)),
    KnownMistake("sink multiplied by the scale", "sinks", _sinks(lambda sinks, rules: sinks * rules.scale)),
    KnownMistake("soft cap on the sink too", "cap and sinks", _sinks(_capped)),
    KnownMistake("sink in base 2", "sinks", _sinks(lambda sinks, rules: sinks * math.log(2))),
    KnownMistake("head groups interleaved", "head groups", _interleaved),
    KnownMistake(
        "KV head 0 for all heads",
        "several KV heads",
        lambda rules: {"kv_heads": torch.zeros_like(rules.kv_heads)},
    ),
    KnownMistake("K and V swapped", "same value size", _set(swapped=True)),
    KnownMistake(
        "scale of head_size_v", "other value size", lambda rules: {"scale": rules.head_size_v**-0.5}
    ),
    KnownMistake(
        "scale of 1 / head_size, without the root", "scale", lambda rules: {"scale": 1 / rules.head_size}
    ),
    KnownMistake("mask after the softmax, not normalised again", "hiding", _set(renormalised=False)),
    KnownMistake("last key missed", None, _set(cut=lambda request: (0, 1))),
    KnownMistake("first key missed", None, _set(cut=lambda request: (1, 0))),
    KnownMistake(
        "new tokens missed: only keys of earlier steps are read",
        None,
        _set(cut=lambda request: (0, request.new)),
    ),
    KnownMistake(
        "keys of earlier steps missed: only new tokens are read",
        None,
        _set(cut=lambda request: (request.seq_len - request.new, 0)),
    ),
    KnownMistake(
        "keys in a partial last block missed", None, _set(cut=lambda request: (0, _past_last_page(request)))
    ),
    KnownMistake(
        "keys past the first block missed",
        None,
        _set(cut=lambda request: (0, max(request.seq_len - request.page, 0) if request.page else 0)),
    ),
    KnownMistake(
        "lengths without the new tokens",
        None,
        _set(length=lambda index, requests: requests[index].seq_len - requests[index].new),
    ),
    KnownMistake(
        "lengths too short by one",
        "non-causal positions",
        _set(length=lambda index, requests: requests[index].seq_len - 1),
    ),
    KnownMistake(
        "length of the next request",
        None,
        _set(length=lambda index, requests: requests[(index + 1) % len(requests)].seq_len),
    ),
    KnownMistake(
        "length of the request before", None, _set(length=lambda index, requests: requests[index - 1].seq_len)
    ),
    KnownMistake(
        "length of the first request", None, _set(length=lambda index, requests: requests[0].seq_len)
    ),
    KnownMistake(
        "positions of the selection taken as slots",
        "sparse",
        _set(read_slots=lambda request, positions: positions),
    ),
    KnownMistake(
        "padding of the selection (-1) taken as the last key", "sparse", _set(picks=_padding_as_last)
    ),
    KnownMistake(
        "padding of the selection (-1) taken as the last key, once",
        "sparse",
        _set(picks=_padding_as_last_once),
    ),
    KnownMistake("selection one position late", "sparse", _shifted(1)),
    KnownMistake("selection one position early", "sparse", _shifted(-1)),
    KnownMistake("selection taken as the last keys", "sparse", _last_keys),
    KnownMistake("k_scale ignored", "two fp8 scales", _scaled(*[lambda rules: (1 / rules.k_scale, 1.0)] * 2)),
    KnownMistake("v_scale ignored", "two fp8 scales", _scaled(*[lambda rules: (1.0, 1 / rules.v_scale)] * 2)),
    KnownMistake("k_scale and v_scale swapped", "two fp8 scales", _scaled(_swapped, _swapped)),
    KnownMistake(
        "k_scale used for values too",
        "two fp8 scales",
        _scaled(*[lambda rules: (1.0, rules.k_scale / rules.v_scale)] * 2),
    ),
    KnownMistake(
        "v_scale used for keys too",
        "two fp8 scales",
        _scaled(*[lambda rules: (rules.v_scale / rules.k_scale, 1.0)] * 2),
    ),
    KnownMistake("fp8 scales applied twice", "fp8", _scaled(_twice, _twice)),
    KnownMistake("fp8 scales divide where keys are read", "fp8", _scaled(_inverse, _inverse)),
    KnownMistake(
        "fp8 scales multiply where keys are written", "fp8", _scaled(_right, _inverse_where_written)
    ),
    KnownMistake("fp8 scales inverse where keys are written and read", "fp8", _scaled(_inverse, _right)),
    KnownMistake("fp8 scales ignored where keys are written", "fp8", _scaled(_right, _unquantised)),
    KnownMistake("fp8 scales ignored where keys are written and read", "fp8", _scaled(_unscaled, _right)),
    KnownMistake("pages of the next request", None, _set(rows=lambda row, rows: (row + 1) % rows)),
    KnownMistake("pages of the request before", None, _set(rows=lambda row, rows: (row - 1) % rows)),
    KnownMistake("pages of the first request", None, _set(rows=lambda row, rows: 0)),
    KnownMistake("blocks of half the size", "pages", _in_pages(lambda size: size / 2, lambda size: size / 2)),
    KnownMistake(
        "blocks of twice the size", "pages", _in_pages(lambda size: size * 2, lambda size: size * 2)
    ),
    KnownMistake("half of each block read", "pages", _in_pages(lambda size: size / 2, lambda size: size)),
    KnownMistake("blocks taken as consecutive", "pages", _set(read_slots=_consecutive)),
    KnownMistake("pages of HND read as NHD", "several KV heads", _set(read_as="NHD")),
    KnownMistake("pages of NHD read as HND", "several KV heads", _set(read_as="HND")),
    # Latent attention.
    KnownMistake("scale of the latent, not of the query before absorption", "latent", latent.latent_scale),
    KnownMistake("values from the last elements of the latent", "latent", latent.values_at_the_end),
    KnownMistake("rotated part of the latent taken first", "latent", latent.rotated_latent_first),
    KnownMistake("rotated part of the keys taken first", "latent", latent.rotated_key_first),
    KnownMistake("rotated part of the query taken first", "latent", latent.rotated_query_first),
    KnownMistake("rotated part left out", "latent", latent.without_rotated_part),
    KnownMistake("halves of the query's rotated part swapped", "latent", latent.rotated_halves_swapped),
    KnownMistake(
        "pairs of the query's rotated part taken as halves", "latent", latent.rotated_pairs_as_halves
    ),
    KnownMistake("W_UV of the next head", "latent", latent.next_heads_values),
    KnownMistake("k_scale left out for the rotated part", "latent fp8", latent.unscaled_rotated_part),
    KnownMistake("k_scale left out for values", "latent fp8", latent.unscaled_values),
    # A right output with the LSE of other rules.
    KnownMistake("LSE before the soft cap", "cap", _set(cap=None), "lse"),
    KnownMistake("LSE without ALiBi", "alibi", _set(slopes=None), "lse"),
    KnownMistake("LSE without the scale", None, _set(scale=1.0), "lse"),
    KnownMistake("LSE without the sink", "sinks", _set(sinks=None), "lse"),
    KnownMistake("LSE without the mask", None, _set(order=("scale", "cap", "bias")), "lse"),
    KnownMistake("LSE with the sink twice", "sinks", _sinks(lambda sinks, rules: sinks + math.log(2)), "lse"),
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
