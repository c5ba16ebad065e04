"""The words with which a layer asks that its bits do not depend on how a step is made."""

from __future__ import annotations

from typing import Any

from attnplug.core.errors import SpecError

INVARIANCES = ("batch", "rows", "heads")
"""On what the bits of a row's output and LSE do not depend.

"batch": the other requests, their number, order, lengths and values; pages, widths of tables and padding.
"rows": which of the request's tokens are in the step: chunks, drafts, decodes, preemption.
"heads": the number of heads on the rank.
"""


def check_invariance(words: Any) -> tuple[str, ...]:
    """The words in the order of INVARIANCES, each once.

    Raises:
        SpecError: not a sequence of such words.
    """
    limit = f"must be a tuple of words among {', '.join(INVARIANCES)}"
    if not isinstance(words, (tuple, list)) or not all(isinstance(word, str) for word in words):
        raise SpecError("invariance", words, limit, 'such as ("batch",)')
    if unknown := [word for word in words if word not in INVARIANCES]:
        raise SpecError("invariance", unknown[0], limit)
    return tuple(word for word in INVARIANCES if word in words)
