"""The mistakes that the kit can name, the simplest first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.conformance.mistake_oracle import AttentionRules, Request
from attnplug.testing.oracle import OracleResult, Spans

_Changes: TypeAlias = Callable[[AttentionRules], dict[str, Any]]
_Factors: TypeAlias = Callable[[AttentionRules], tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class KnownMistake:
    """A mistake in the rules of attention.

    Args:
        name: the name in the message of a failing check.
        feature: of AttentionRules.features, which the mistake concerns; None for every layer.
        changes: the fields of the right rules that the mistake replaces.
    """

    name: str
    feature: str | None
    changes: _Changes


@dataclasses.dataclass(frozen=True, slots=True)
class LseMistake:
    """A right output with a wrong LSE.

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


def _interleaved(rules: AttentionRules) -> dict[str, Any]:
    heads, kv_heads = len(rules.kv_heads), int(rules.kv_heads[-1]) + 1
    return {"kv_heads": torch.arange(heads) % kv_heads}


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
    *(_window_off_by(side, step) for side in ("left", "right") for step in (1, -1)),
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
        "all tokens up to the last span see each other",
        "spans",
        _set(spans=lambda spans: [(0, max(stop for _, stop in spans))] if spans else []),
    ),
    KnownMistake("causal aligned at the start", "causal", _set(from_start=True)),
    KnownMistake("queries aligned at the start", "non-causal positions", _set(from_start=True)),
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
    KnownMistake("sink in base 2", "sinks", _sinks(lambda sinks, rules: sinks * math.log(2))),
    KnownMistake("head groups interleaved", "head groups", _interleaved),
    KnownMistake("positions of the selection taken as slots", "sparse", _set(by_slot=True)),
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
    KnownMistake("k_scale ignored", "fp8", _scaled(*[lambda rules: (1 / rules.k_scale, 1.0)] * 2)),
    KnownMistake("v_scale ignored", "fp8", _scaled(*[lambda rules: (1.0, 1 / rules.v_scale)] * 2)),
    KnownMistake("k_scale and v_scale swapped", "fp8", _scaled(_swapped, _swapped)),
    KnownMistake("fp8 scales ignored where keys are written", "fp8", _scaled(_right, _unquantised)),
    KnownMistake("fp8 scales ignored where keys are written and read", "fp8", _scaled(_unscaled, _right)),
    KnownMistake("pages of the next request", None, _set(rows=lambda row, rows: (row + 1) % rows)),
    KnownMistake("pages of the request before", None, _set(rows=lambda row, rows: (row - 1) % rows)),
    KnownMistake("pages of the first request", None, _set(rows=lambda row, rows: 0)),
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
    LseMistake("LSE without the sink", lambda batch, truth: batch.oracle(use_sinks=False).lse),
    LseMistake(
        "LSE of +inf where nothing is seen",
        lambda batch, truth: truth.lse.masked_fill(truth.lse == -math.inf, math.inf),
    ),
    LseMistake("LSE transposed", lambda batch, truth: truth.lse.T.reshape(truth.lse.shape)),
    LseMistake("LSE transposed, with its padding rows", _transposed_with_padding),
)
