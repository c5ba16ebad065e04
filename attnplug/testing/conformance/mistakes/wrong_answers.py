"""A wrong answer in words: which requests, rows and heads are wrong, by how much, and in which pattern."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnplug.testing.conformance.mistakes.deviation import Deviation
from attnplug.testing.conformance.mistakes.wrong_patterns import hints, patterns
from attnplug.testing.conformance.wording import layer_words, path_of, request_words, some_of

_MOST_REQUESTS = 3
_MOST_PATTERNS = 3


def description(wrong: Deviation) -> list[str]:
    """Some lines about a wrong answer, at most ten."""
    if wrong.output.shape != wrong.expected.output.shape:
        return [f"layer: {layer_words(wrong.batch.spec)}"]
    lines = list(_requests(wrong))
    lines += [f"pattern: {text}" for text in [*hints(wrong), *patterns(wrong)][:_MOST_PATTERNS]]
    return [_extent(wrong), *lines, f"layer: {layer_words(wrong.batch.spec)}"]


def _extent(wrong: Deviation) -> str:
    """How many requests, rows and heads are wrong, and by how much."""
    bad, spans = wrong.wrong, wrong.spans
    requests = [index for index, span in enumerate(spans) if bool(bad[span].any())]
    served = sum(span.stop > span.start for span in spans)
    heads = bad.any(0).nonzero().flatten().tolist()
    rows = int(bad.any(1).sum())
    counts = f"{len(requests)} of {served} requests, {rows} of {len(bad)} rows, "
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
        where = [some_of("row", rows, new), some_of("head", heads, wrong.wrong.shape[1])]
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
