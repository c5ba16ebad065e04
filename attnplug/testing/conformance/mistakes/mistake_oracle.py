"""Attention with known mistakes, in float64, one request at a time: each convention is a field to change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attnplug.testing.conformance.mistakes.attention_rules import AttentionRules, RequestContents


def attend(
    rules: AttentionRules,
    requests: Sequence[RequestContents],
    index: int,
    rows: torch.Tensor | None = None,
    heads: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer to request `index`: output `[n, H, Dv]` and LSE `[n, H]`; only of some rows and heads if given.

    A request that reads the pages of a shorter one has NaN for the keys past its length.
    """
    if rules.expand is not None:
        requests = [*requests[:index], rules.expand(requests[index]), *requests[index + 1 :]]
    request, length = requests[index], rules.length(index, requests)
    rows = torch.arange(request.query.shape[0]) if rows is None else rows
    heads = torch.arange(request.query.shape[1]) if heads is None else heads
    key, value = _store(rules, requests, index)
    if rules.swapped:
        key, value = value, key
    query, kv_heads = request.query[rows][:, heads].transpose(0, 1), rules.kv_heads[heads]
    count, keys = len(rows), key.shape[0]
    at = (rows + length - request.query.shape[0] + rules.shift)[:, None]
    held = (torch.arange(keys) + length - keys)[None, :]
    seen = _seen(rules, request, length, at, held)
    times = None
    if rules.sparse is not None and request.chosen is not None:
        times = _times(rules.picks(request.chosen[rows], request, at), length - keys, keys)
        seen &= times > 0

    scores = query @ key[:, kv_heads].permute(1, 2, 0)
    for step in rules.order:
        if step == "scale":
            scores = scores * rules.scale
        elif step == "cap" and rules.cap is not None:
            scores = rules.cap_of(scores, rules.cap)
        elif step == "bias" and rules.slopes is not None:
            bias = rules.bias(_place(rules, "bias", request, length, at), held)
            scores = scores + rules.slopes[heads, None, None] * bias
        elif step == "mask" and rules.renormalised:
            scores = scores.masked_fill(~seen, -math.inf)
            # A key that is gathered several times counts as often.
            scores = scores if times is None else scores + times.clamp(min=1).log()
    terms = scores
    sinks = None if rules.sinks is None else rules.sinks[heads, None, None].expand(-1, count, 1)
    if sinks is not None:
        terms = torch.cat([scores, sinks], dim=2)
    lse = torch.logsumexp(terms, dim=2)
    total = lse[:, :, None].nan_to_num(neginf=0.0, nan=math.nan)
    weights = torch.exp(scores - total)
    if not rules.renormalised:
        weights = weights.masked_fill(~seen, 0.0)
    if sinks is not None and rules.sink_value is not None and keys:
        weights = weights + torch.exp(sinks - total) * _end_of(seen, rules.sink_value)
    values = value[:, kv_heads].transpose(0, 1)
    # A gather by slots reads no row of a key that is not chosen.
    values = values if rules.read_slots is None else values.nan_to_num(0.0)
    return (weights @ values).transpose(0, 1), lse.transpose(0, 1)


def _place(
    rules: AttentionRules, limit: str, request: RequestContents, length: int, at: torch.Tensor
) -> torch.Tensor:
    """The positions of the queries `[n, 1]` by which a limit hides keys."""
    first = length - request.query.shape[0] + rules.shift
    way = rules.places.get(limit)
    if way == "local":
        return at - first
    return at if way is None else torch.full_like(at, first if way == "first" else length - 1 + rules.shift)


def _store(
    rules: AttentionRules, requests: Sequence[RequestContents], index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the request reads, multiplied by the factors of wrong scales."""
    request, other = requests[index], requests[rules.rows(index, len(requests))]
    # A request of another length reads other keys only if it has all of its own.
    own = request.key.shape[0]
    count = own if own < request.seq_len else max(rules.length(index, requests), 0)
    if rules.read_slots is not None:
        return _at_slots(requests, rules.read_slots(request, torch.arange(count)))
    is_new = (torch.arange(other.key.shape[0]) >= other.key.shape[0] - other.new)[:, None, None]
    tensors = []
    for tokens, (before, now) in ((other.key, rules.key_factors), (other.value, rules.value_factors)):
        # Most mistakes have no factors, and long requests are large.
        plain = not isinstance(before, torch.Tensor) and before == now == 1.0
        held = tokens if plain else torch.where(is_new, tokens * now, tokens * before)
        held = held[:count]
        missing = held.new_full((count - held.shape[0], *held.shape[1:]), math.nan)
        held = torch.cat([held, missing]) if len(missing) else held
        tensors.append(held if rules.read_as is None else _read_as(rules.read_as, held, request.page))
    return tensors[0], tensors[1]


def _read_as(layout: str, tokens: torch.Tensor, page: int) -> torch.Tensor:
    """The tokens `[m, Hkv, D]` that are found if pages of the other layout are read as `layout`."""
    if not page:
        return tokens
    pages, heads = -(-len(tokens) // page), tokens.shape[1]
    # Rows of a last page that hold no token are NaN.
    whole = tokens.new_full((pages * page, *tokens.shape[1:]), math.nan)
    whole[: len(tokens)] = tokens
    stored = whole.view(pages, page, heads, -1)
    if layout == "NHD":
        found = stored.transpose(1, 2).reshape(pages, page, heads, -1)
    else:
        found = stored.reshape(pages, heads, page, -1).transpose(1, 2)
    return found.reshape(whole.shape)[: len(tokens)]


def _at_slots(requests: Sequence[RequestContents], slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of some slots: NaN in slots of no request."""
    most = max(
        (int(each.slots.max()) for each in requests if each.slots is not None and len(each.slots)), default=0
    )
    most = max(most, requests[0].page)
    # Slots of no request have a row of their own, the last.
    places = torch.where((slots < 0) | (slots > most), most + 1, slots)
    tensors = []
    for name in ("key", "value"):
        tokens = getattr(requests[0], name)
        held = tokens.new_full((most + 2, *tokens.shape[1:]), math.nan)
        held[: requests[0].page] = 0.0
        for request in requests:
            if request.slots is not None:
                held[request.slots] = getattr(request, name)
        tensors.append(held[places])
    return tensors[0], tensors[1]


def _times(chosen: torch.Tensor, first: int, keys: int) -> torch.Tensor:
    """How often each of the keys at `first ..` is among the positions of each query: float64 `[n, m]`."""
    at = chosen - first
    inside = (chosen >= 0) & (at >= 0) & (at < keys)
    # Other positions are counted in a column of their own, which is cut off.
    found = torch.zeros(chosen.shape[0], keys + 1, dtype=torch.float64)
    found.scatter_add_(1, torch.where(inside, at, keys), torch.ones_like(at, dtype=torch.float64))
    return found[:, :keys]


def _seen(
    rules: AttentionRules, request: RequestContents, length: int, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Whether each query `[n, 1]` sees each key `[1, m]`."""
    at = {limit: _place(rules, limit, request, length, query) for limit in ("causal", "window", "chunk")}
    ordered = key <= at["causal"] if rules.causal else torch.ones_like(query + key, dtype=torch.bool)
    near = (at["window"] - key <= rules.left) & (key - at["window"] <= rules.right)
    if rules.chunk is not None:
        start = rules.chunk_start(request)
        near &= (at["chunk"] - start) // rules.chunk == (key - start) // rules.chunk
    seen = ordered & near
    for begin, end in rules.spans(request.spans) if rules.spans is not None else ():
        own = _place(rules, "spans", request, length, query)
        together = (own >= begin) & (own < end) & (key >= begin) & (key < end)
        if "causal" not in rules.lifted:
            together &= ordered
        if "near" not in rules.lifted:
            together &= near
        seen |= together
    before, after = rules.cut(request)
    return seen & (key >= before) & (key < length - after)


def _end_of(seen: torch.Tensor, which: int) -> torch.Tensor:
    """1 at the first (0) or last (-1) key that each query sees, else 0: `[n, m]`."""
    ranks = seen.cumsum(1)
    wanted = torch.ones_like(ranks[:, -1:]) if which == 0 else ranks[:, -1:]
    return (seen & (ranks == wanted)).double()
