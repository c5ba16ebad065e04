"""The words of reports for checks that did not run: counts of skips by their kind, and what is untested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attnplug.testing.conformance.check import SkipKind


def skip_counts(texts: Iterable[str]) -> str:
    """The number of skips of each kind, the most frequent first: "9 layer not served, 2 does not apply"."""
    counts = Counter(SkipKind.read(text)[0] for text in texts)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def untested_words(causes: Iterable[str]) -> str:
    """The end of the last line, with the name before the colon of each cause; "" if everything was tried."""
    names = ", ".join(dict.fromkeys(cause.partition(": ")[0] for cause in causes))
    return f"; DECLARED, BUT UNTESTED HERE: {names}" if names else ""
