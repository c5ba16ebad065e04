"""A wrong answer in words: which requests, rows and heads are wrong, by how much, and in which pattern.

Patterns of the wrong rows of an answer that point at the cause, such as "only requests with extend".

Hints in the values of wrong rows: not written, zero, a factor, other heads' or rows' numbers, low precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from attnplug.testing.conformance.harness import layer_words, numbers_words, path_of, request_words, some_of
from attnplug.testing.conformance.mistakes.deviation import Deviation
from attnplug.testing.drawn_values import NUMBERS_IN_WORDS

# Part of the rows past a limit that must be wrong, since single rows are right by chance.
_MOSTLY = 0.8


# Kernels work on tiles of a multiple of so many rows.
_TILE = 16


class _RequestVerdict(NamedTuple):
    """One request with rows: whether it is wrong, and what distinguishes it."""

    wrong: bool
    path: str
    new: int
    total: int


def patterns(wrong: Deviation) -> Iterator[str]:
    """The patterns that all wrong rows, and no right ones, follow."""
    yield from _of_requests(wrong)
    yield from _of_rows(wrong)
    yield from _of_heads(wrong)
    yield from _of_elements(wrong)


def _of_requests(wrong: Deviation) -> Iterator[str]:
    batch = wrong.batch
    requests = [
        _RequestVerdict(bool(wrong.wrong[span].any()), path_of(batch.spec, new, total), new, total)
        for span, total in zip(wrong.spans, batch.seq_lens, strict=True)
        if (new := span.stop - span.start) and bool(wrong.compared[span].any())
    ]
    bad, good = ([each for each in requests if each.wrong is state] for state in (True, False))
    if not bad or not good:
        return
    paths = {each.path for each in bad}
    if not paths & {each.path for each in good}:
        yield f"only requests with {' or '.join(sorted(paths))}"
        return
    size = _block_size(wrong)
    tests = {
        **_limits("tokens", [each.total for each in bad], [each.total for each in good]),
        **_limits("new tokens", [each.new for each in bad], [each.new for each in good]),
        f"only requests that fill their last block of {size}": [each.total % size == 0 for each in requests],
        f"only requests whose last block of {size} is partial": [each.total % size != 0 for each in requests],
        "only the last request": [each is requests[-1] for each in requests],
        "only the first request": [each is requests[0] for each in requests],
    }
    states = [each.wrong for each in requests]
    for text, test in tests.items():
        if test is True or test == states:
            yield text
            return


def _limits(what: str, bad: Sequence[int], good: Sequence[int]) -> dict[str, bool | list[bool]]:
    # A query that sees one key is right whatever its score is.
    return (
        {}
        if max(good) <= 1
        else {
            f"only requests of more than {max(good)} {what}": min(bad) > max(good),
            f"only requests of fewer than {min(good)} {what}": max(bad) < min(good),
        }
    )


def _of_rows(wrong: Deviation) -> Iterator[str]:
    """Limits among the rows of the batch, which point at tiles, or among the rows of the wrong requests."""
    rows = wrong.wrong.any(1)
    first = int(rows.nonzero()[0]) if bool(rows.any()) else 0
    if first and first % _TILE == 0 and bool(rows[first:][wrong.compared[first:]].all()):
        yield f"only rows from row {first} of the batch on"
        return
    batch, size = wrong.batch, _block_size(wrong)
    is_wrong, position, row, after, page_after = [], [], [], [], []
    for span, total in zip(wrong.spans, batch.seq_lens, strict=True):
        new = span.stop - span.start
        if not new or not bool(wrong.wrong[span].any()):
            continue
        own, states = torch.arange(new) + total - new, wrong.wrong[span].any(1)
        # A query that sees one key is right whatever its score is.
        told = (states | (own > 0)) & wrong.compared[span]
        own, states = own[told], states[told]
        is_wrong.append(states)
        position.append(own)
        row.append(torch.arange(new)[told])
        after.append(total - 1 - own)
        page_after.append((total - 1) // size - own // size)
    if not is_wrong or bool((bad := torch.cat(is_wrong)).all()):
        return
    places = {
        "from position {} on": torch.cat(position),
        "from row {} of a request on": torch.cat(row),
        "in the last {} rows of a request": -torch.cat(after) - 1,
        "in the last {} blocks of a request": -torch.cat(page_after) - 1,
    }
    for text, place in places.items():
        for sign in (1, -1):
            signed = place * sign
            first = int(signed[bad].min())
            within = signed >= first
            if bool((~within).any()) and float(bad[within].double().mean()) >= _MOSTLY:
                yield "only rows " + _limit_words(text, sign, first * sign)
                return


def _limit_words(text: str, sign: int, at: int) -> str:
    """The words for places from `at` on (sign 1) or up to it (sign -1)."""
    if "last" in text:
        noun = "row" if "rows" in text else "block"
        if sign > 0:
            return text.format(-at) if at < -1 else f"in the last {noun} of a request"
        return (
            f"before the last {noun} of a request"
            if at == -2
            else f"before the last {-at - 1} {noun}s of a request"
        )
    return text.format(at) if sign > 0 else text.replace("from", "up to").replace(" on", "").format(at)


def _of_heads(wrong: Deviation) -> Iterator[str]:
    spec = wrong.batch.spec
    heads, group = set(wrong.wrong.any(0).nonzero().flatten().tolist()), spec.num_heads // spec.num_kv_heads
    if not heads or len(heads) == spec.num_heads:
        return
    kv_heads = {head // group for head in heads}
    if group > 1 and heads == {head for head in range(spec.num_heads) if head // group in kv_heads}:
        yield f"only the heads of {some_of('KV head', kv_heads, spec.num_kv_heads)}"
    elif group > 1 and heads == {head for head in range(spec.num_heads) if head % group}:
        yield "all but the first head of each group"
    elif len(kv_heads) == spec.num_kv_heads and len({head % group for head in heads}) == 1 and group > 1:
        yield f"only head {min(heads) % group} of each group of {group}"


def _of_elements(wrong: Deviation) -> Iterator[str]:
    """Elements of a head that are right in all rows."""
    magnitude = wrong.expected.output.abs().amax(-1, keepdim=True)
    bad = ~((wrong.output - wrong.expected.output).abs() <= wrong.bound.output[..., None] * magnitude)
    elements = bad.flatten(0, 1).any(0).nonzero().flatten().tolist()
    size = bad.shape[-1]
    # A few elements of small rows may be right by chance.
    if elements and len(elements) <= _MOSTLY * size:
        yield f"only elements {numbers_words(elements)} of {size} in a head"


def _block_size(wrong: Deviation) -> int:
    cache, spec = wrong.batch.kv_cache, wrong.batch.spec
    # Pages of latents have no dimension of heads.
    return spec.block_size or (16 if cache is None else int(cache.shape[-3 if spec.mla is None else 1]))


_ROWS = 48
"""Rows that are compared with each other at most."""
# The usual and the largest relative error that numbers rounded to bfloat16 explain in a float32 layer.
_HALF, _WORST_HALF = 2.0**-7, 2.0**-4
_MANY = 0.1
"""The least part of all rows and heads that is wrong where sums are rounded."""
_NEAR = 8.0
"""Multiple of the bound that a product in half precision may reach in a layer of half precision."""
_TOLD_APART = 0.1
"""The largest bound within which rows of other tokens can be told apart."""
# exp of more overflows in float32.
_LARGEST = 88.0


def hints(wrong: Deviation) -> Iterator[str]:
    """What the values of the wrong rows say about the cause."""
    bad = wrong.output_errors > 1
    if not bool(bad.any()):
        return
    found, right = wrong.output[bad], wrong.expected.output[bad]
    if not bool(found.isfinite().all()):
        yield _of_nan(wrong)
    elif not bool(found.any()):
        yield "the wrong rows are 0"
    elif (factor := _factor(found, right, wrong.bound.output[bad])) is not None:
        yield f"the wrong rows are the right ones times {factor:.4g}"
    elif _is_factor_of_row(found, right, wrong.bound.output[bad]):
        what = "sum of weights, or a sink that is counted too often or not at all"
        yield f"each wrong row and head is the right one times a number of its own: a wrong {what}"
    elif (moved := _other_heads(wrong) or _other_rows(wrong) or _mixed(wrong)) is not None:
        yield moved
    elif (precision := _precision(wrong, bad)) is not None:
        yield precision


def _of_nan(wrong: Deviation) -> str:
    lost = ~wrong.output.isfinite()
    rows = lost.all(-1)
    large = wrong.expected.lse.nan_to_num(neginf=0.0).abs() > _LARGEST
    if bool(large.any()) and torch.equal(lost.any(-1), large):
        return "NaN or infinity exactly where logits are beyond 88: subtract their maximum before exp"
    if bool((rows == lost.any(-1)).all()):
        return "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read"
    return "single elements are NaN or infinite"


def _factor(found: torch.Tensor, right: torch.Tensor, bound: torch.Tensor) -> float | None:
    """The number by which all of `right [k, Dv]` must be multiplied for `found`; None if there is none."""
    square = float((right * right).sum())
    factor = float((found * right).sum()) / square if square else 0.0
    rest = (found - factor * right).abs().amax(-1)
    is_near = bool((rest <= 2 * bound * abs(factor) * right.abs().amax(-1)).all())
    return factor if is_near and factor and abs(factor - 1) > 4 * float(bound.max()) else None


def _is_factor_of_row(found: torch.Tensor, right: torch.Tensor, bound: torch.Tensor) -> bool:
    """Whether each of `found [k, Dv]` is `right` times a positive number, and that number says more than rounding."""
    square = (right * right).sum(-1)
    factors = (found * right).sum(-1) / square.where(square > 0, 1.0)
    rest = (found - factors[:, None] * right).abs().amax(-1)
    is_near = (rest <= 2 * bound * factors.abs().clamp(min=1.0) * right.abs().amax(-1)) & (factors > 0)
    return found.shape[-1] >= 8 and bool(is_near.all()) and bool(((factors - 1).abs() > 8 * bound).any())


def _other_heads(wrong: Deviation) -> str | None:
    """Words for heads in another order."""
    rows = (wrong.output_errors > 1).any(1).nonzero().flatten()[:_ROWS]
    found, right = wrong.output[rows].transpose(0, 1), wrong.expected.output[rows].transpose(0, 1)
    places = _places(found, right, float(wrong.bound.output.max()))
    if places is None or places == list(range(len(places))):
        return None
    first = next(head for head, place in enumerate(places) if head != place)
    return f"heads are in another order: head {first} has the numbers of head {places[first]}"


def _other_rows(wrong: Deviation) -> str | None:
    """Words for rows of other tokens."""
    rows = (wrong.output_errors > 1).any(1).nonzero().flatten()[:_ROWS]
    places = _places(wrong.output[rows], wrong.expected.output, float(wrong.bound.output.max()))
    if places is None or places == rows.tolist():
        return None
    pairs = [(row, place) for row, place in zip(rows.tolist(), places, strict=True) if row != place]
    if not pairs:
        return None
    return f"rows are in another order: row {pairs[0][0]} has the numbers of row {pairs[0][1]}"


def _mixed(wrong: Deviation) -> str | None:
    """Words for rows and heads of a request that changed places with each other."""
    bound, first = float(wrong.bound.output.max()), None
    if bound > _TOLD_APART:
        return None
    for span in wrong.spans:
        bad = (wrong.output_errors[span] > 1).nonzero()[:_ROWS].tolist()
        right = wrong.expected.output[span]
        magnitude = right.abs().amax(-1)
        for row, head in bad:
            found = wrong.output[span][row, head]
            same = ((right - found).abs().amax(-1) <= 2 * bound * magnitude).nonzero().tolist()
            if not same:
                return None
            first = first or (span.start + row, head, span.start + same[0][0], same[0][1])
    if first is None:
        return None
    row, head, other_row, other_head = first
    return (
        f"rows and heads of a request are mixed up: row {row} head {head} has the numbers of row {other_row} head "
        f"{other_head}; are packed groups of heads unpacked in another order?"
    )


def _places(found: torch.Tensor, right: torch.Tensor, bound: float) -> list[int] | None:
    """For each of `found [k, a, b]` the index in `right [l, a, b]` with the same numbers; None without one."""
    # Within a wide bound, numbers of any row are near those of many others.
    if found.numel() * right.shape[0] > 2**24 or bound > _TOLD_APART:
        return None
    magnitude = right.abs().amax(-1, keepdim=True)
    places = []
    for each in found:
        same = ((each - right).abs() <= 2 * bound * magnitude).flatten(1).all(1)
        if not bool(same.any()):
            return None
        places.append(int(same.nonzero()[0]))
    return places


def _precision(wrong: Deviation, bad: torch.Tensor) -> str | None:
    """Words for errors as small as half precision gives."""
    errors, spec = wrong.output_errors, wrong.batch.spec
    relative = (errors * wrong.bound.output)[bad]
    if spec.dtype == "float32":
        usual = float(relative.median())
        if usual <= _HALF and float(relative.max()) <= _WORST_HALF and float(bad.double().mean()) > 0.5:
            return f"errors around {usual:.1g}, as half precision gives: is a product or sum in bfloat16 or float16?"
    elif (
        float(relative.max()) <= _TOLD_APART
        and float(errors[bad].max()) <= _NEAR
        and float(bad.double().mean()) > _MANY
    ):
        return f"errors of a few bounds only: are sums accumulated in {spec.dtype}?"
    return None


_MOST_REQUESTS = 3
_MOST_PATTERNS = 3


def description(wrong: Deviation) -> list[str]:
    """Some lines about a wrong answer, at most eleven."""
    if wrong.output.shape != wrong.expected.output.shape:
        return [f"layer: {layer_words(wrong.batch.spec)}"]
    lines = list(_requests(wrong))
    lines += [f"pattern: {text}" for text in [*hints(wrong), *patterns(wrong)][:_MOST_PATTERNS]]
    words = NUMBERS_IN_WORDS.get(wrong.batch.numbers)
    lines += [] if words is None else [f"numbers: {words}"]
    return [_extent(wrong), *lines, f"layer: {layer_words(wrong.batch.spec)}"]


def _extent(wrong: Deviation) -> str:
    """The numbers of wrong requests, rows and heads, and by how much they are wrong."""
    bad, spans = wrong.wrong, wrong.spans
    requests = [index for index, span in enumerate(spans) if bool(bad[span].any())]
    served = sum(span.stop > span.start for span in spans)
    heads = bad.any(0).nonzero().flatten().tolist()
    rows = int(bad.any(1).sum())
    of = f"{len(bad)} rows" if wrong.batch.sampled is None else f"{int(wrong.compared.sum())} compared rows"
    counts = f"{len(requests)} of {served} requests, {rows} of {of}, "
    text = f"wrong: {counts}{some_of('head', heads, bad.shape[1])}"
    return f"{text}; {_parts(wrong)}"


def _parts(wrong: Deviation) -> str:
    """The largest error of output and LSE, beside their bounds."""
    parts = [_part("output", wrong.output_errors, wrong.bound.output)]
    if wrong.lse_errors is not None:
        parts.append(_part("LSE", wrong.lse_errors, wrong.bound.lse))
    return ", ".join(parts)


def _part(name: str, errors: torch.Tensor, bound: torch.Tensor) -> str:
    """The row that is farthest outside its bound."""
    if not bool((errors > 1).any()):
        return f"{name} is right"
    finite = errors.masked_fill(~errors.isfinite(), 0.0)
    worst = int(finite.argmax())
    times, limit = float(finite.flatten()[worst]), float(bound.flatten()[worst])
    if times > 1:
        return f"{name} error {times * limit:.2g}, bound {limit:.2g}"
    return (
        f"{name} is NaN or infinite" if name == "output" else f"{name} is NaN, or infinite in the wrong rows"
    )


def _requests(wrong: Deviation) -> Iterator[str]:
    """One line for each wrong request, at most three, and the number of the others."""
    batch, spans = wrong.batch, wrong.spans
    bad = [(index, span) for index, span in enumerate(spans) if bool(wrong.wrong[span].any())]
    # One request of each path first, since a path is a kernel of its own.
    paths = [path_of(batch.spec, span.stop - span.start, batch.seq_lens[index]) for index, span in bad]
    first = {path: place for place, path in reversed(list(enumerate(paths)))}
    places = sorted(
        [*first.values(), *(p for p in range(len(bad)) if p not in first.values())][:_MOST_REQUESTS]
    )
    for index, span in (bad[place] for place in places):
        rows = wrong.wrong[span].any(1).nonzero().flatten().tolist()
        heads = wrong.wrong[span].any(0).nonzero().flatten().tolist()
        new = span.stop - span.start
        of_rows = some_of("row", rows, new)
        if wrong.batch.sampled is not None:
            others = f"{len(rows) - 1} more of {int(wrong.compared[span].sum())}"
            of_rows = f"row {rows[0]} and {others} compared rows"
        where = [of_rows, some_of("head", heads, wrong.wrong.shape[1])]
        bad_numbers = int((~wrong.output[span].isfinite()).sum())
        where += (
            [f"{bad_numbers} of {wrong.output[span].numel()} elements NaN or infinite"] if bad_numbers else []
        )
        yield f"{request_words(batch.spec, index, new, batch.seq_lens[index])}: {', '.join(where)}"
    if len(bad) > len(places):
        more = len(bad) - len(places)
        lost = sum(not bool(wrong.output[span].isfinite().all()) for _, span in bad)
        nan = f"; {lost} of {len(bad)} have NaN or infinity" if lost else ""
        yield f"and {more} other request{'s' if more > 1 else ''}{nan}"
