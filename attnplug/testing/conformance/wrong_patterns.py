"""Patterns of the wrong rows of an answer that point at the cause, such as "only requests with extend"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from attnplug.testing.conformance.deviation import Deviation
from attnplug.testing.conformance.wording import numbers_words, path_of, some_of

_MOSTLY = 0.8
"""Part of the rows past a limit that must be wrong, since single rows are right by chance."""


_TILE = 16
"""Kernels work on tiles of a multiple of so many rows."""


class _Request(NamedTuple):
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
        _Request(bool(wrong.wrong[span].any()), path_of(batch.spec, new, total), new, total)
        for span, total in zip(wrong.spans, batch.seq_lens, strict=True)
        if (new := span.stop - span.start)
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
    if first and first % _TILE == 0 and bool(rows[first:].all()):
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
        told = states | (own > 0)
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
