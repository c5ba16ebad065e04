"""Changes of the rules of attention: what a backend with a known mistake does instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from attnplug.testing.conformance.mistakes.attention_rules import AttentionRules, RequestContents
from attnplug.testing.oracle import Spans

LIMITS = ("causal", "window", "chunk", "spans", "bias")
"""The limits that depend on a query's position."""

Changes: TypeAlias = Callable[[AttentionRules], dict[str, Any]]
_Factors: TypeAlias = Callable[[AttentionRules], tuple[Any, Any]]


def set_fields(**fields: Any) -> Changes:
    """These fields of the rules."""
    return lambda rules: fields


def in_order(*order: str) -> Changes:
    """The operations on scores in this order."""
    return set_fields(order=order)


def placed(way: str, *limits: str) -> Changes:
    """The place of a query for some limits, as in `AttentionRules.places`."""
    return set_fields(places=dict.fromkeys(limits, way))


def of_kv_heads(field: str, of_group: Callable[[torch.Tensor, int], torch.Tensor]) -> Changes:
    """The numbers of another head: `of_group` gives it from the KV head of each head and the size of a group."""

    def changes(rules: AttentionRules) -> dict[str, Any]:
        numbers, kv_heads = getattr(rules, field), rules.kv_heads
        group = len(kv_heads) // (int(kv_heads[-1]) + 1)
        return {field: None if numbers is None else numbers[of_group(kv_heads, group)]}

    return changes


def usual_slopes(rules: AttentionRules) -> dict[str, Any]:
    """The slopes of ALiBi's paper for a power of two of heads."""
    heads = len(rules.kv_heads)
    return {"slopes": 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)}


def first_position(request: RequestContents) -> int:
    """The position of the request's first new token."""
    return request.seq_len - request.query.shape[0]


def past_last_page(request: RequestContents) -> int:
    """The keys in the last page if it is partial."""
    return request.seq_len % request.page if request.page else 0


def in_pages(size_of: Callable[[int], float], stride_of: Callable[[int], float]) -> Changes:
    """Slots of pages of another size: `size_of` and `stride_of` give the size and stride from the right size."""

    def slots(request: RequestContents, positions: torch.Tensor) -> torch.Tensor:
        if request.table is None or not len(request.table):
            return torch.full_like(positions, -1)
        size = max(int(size_of(request.page)), 1)
        pages = request.table[(positions // size).clamp(max=len(request.table) - 1)]
        return pages * max(int(stride_of(request.page)), 1) + positions % size

    return set_fields(read_slots=slots)


def consecutive(request: RequestContents, positions: torch.Tensor) -> torch.Tensor:
    """The slots of blocks that follow the request's first one."""
    first = -1 if request.slots is None or not len(request.slots) else int(request.slots[0])
    return first + positions if first >= 0 else torch.full_like(positions, -1)


def other_sinks(change: Callable[[torch.Tensor, AttentionRules], torch.Tensor]) -> Changes:
    """Other sinks, from the right ones `[H]`."""
    return lambda rules: {"sinks": None if rules.sinks is None else change(rules.sinks, rules)}


def scaled(before: _Factors, now: _Factors) -> Changes:
    """Factors of (keys, values): `before` for those stored before this step, `now` for the new ones."""

    def changes(rules: AttentionRules) -> dict[str, Any]:
        keys, values = zip(before(rules), now(rules), strict=True)
        return {"key_factors": keys, "value_factors": values}

    return changes


def no_factors(rules: AttentionRules) -> tuple[Any, Any]:
    """Keys and values as they are."""
    return 1.0, 1.0


def unscaled(rules: AttentionRules) -> tuple[Any, Any]:
    """Scales left out where stored values are read."""
    return 1 / rules.k_scale, 1 / rules.v_scale


def unquantised(rules: AttentionRules) -> tuple[Any, Any]:
    """Scales left out where new values are stored."""
    return rules.k_scale, rules.v_scale


def swapped(rules: AttentionRules) -> tuple[Any, Any]:
    """The scales of keys and values swapped."""
    return rules.v_scale / rules.k_scale, rules.k_scale / rules.v_scale


def inverse(rules: AttentionRules) -> tuple[Any, Any]:
    """Stored values divided by their scales."""
    return rules.k_scale**-2, rules.v_scale**-2


def twice(rules: AttentionRules) -> tuple[Any, Any]:
    """Stored values multiplied by their scales twice."""
    return rules.k_scale, rules.v_scale


def inverse_where_written(rules: AttentionRules) -> tuple[Any, Any]:
    """New values multiplied by their scales, where they are divided."""
    return rules.k_scale**2, rules.v_scale**2


def first_heads(rules: AttentionRules) -> tuple[Any, Any]:
    """The scales of the first KV head for all heads."""
    return rules.k_scale[:1] / rules.k_scale, rules.v_scale[:1] / rules.v_scale


def largest_of_heads(rules: AttentionRules) -> tuple[Any, Any]:
    """The largest scale for all heads."""
    return rules.k_scale.max() / rules.k_scale, rules.v_scale.max() / rules.v_scale


def next_heads(rules: AttentionRules) -> tuple[Any, Any]:
    """The scales of the next KV head for each."""
    return rules.k_scale.roll(-1, 0) / rules.k_scale, rules.v_scale.roll(-1, 0) / rules.v_scale


def interleaved(rules: AttentionRules) -> dict[str, Any]:
    """Query head h reads KV head h modulo their number."""
    heads, kv_heads = len(rules.kv_heads), int(rules.kv_heads[-1]) + 1
    return {"kv_heads": torch.arange(heads) % kv_heads}


def capped(sinks: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """The soft cap applied to the sinks too."""
    return sinks if rules.cap is None else rules.cap * (sinks / rules.cap).tanh()


def merged(spans: Spans) -> Spans:
    """The spans of a mask that only says which tokens are in some span."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def shifted(step: int) -> Changes:
    """Selected positions moved by `step`."""
    return set_fields(picks=lambda chosen, request, query: torch.where(chosen < 0, -1, chosen + step))


def padding_as_last(chosen: torch.Tensor, request: RequestContents, query: torch.Tensor) -> torch.Tensor:
    """The last key for each padding entry of a selection."""
    return torch.where(chosen < 0, request.seq_len - 1, chosen)


def padding_as_last_once(chosen: torch.Tensor, request: RequestContents, query: torch.Tensor) -> torch.Tensor:
    """The last key once for a selection with padding, unless it is selected."""
    last = torch.full((chosen.shape[0], 1), request.seq_len - 1)
    padded = (chosen < 0).any(1, keepdim=True) & (chosen != last).all(1, keepdim=True)
    return torch.cat([chosen, torch.where(padded, last, -1)], dim=1)


def last_keys(rules: AttentionRules) -> dict[str, Any]:
    """As many keys as a query may choose, the nearest before it, instead of those that the indexer chose."""

    def picks(chosen: torch.Tensor, request: RequestContents, query: torch.Tensor) -> torch.Tensor:
        most = 0 if rules.sparse is None else rules.sparse.topk * rules.sparse.block
        places = query - torch.arange(min(most, request.seq_len))
        return torch.where(places < 0, -1, places)

    return {"picks": picks}
