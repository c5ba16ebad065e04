"""Steps for a backend of one phase: longer queries become decodes, or longer queries come first."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug.core.backend import AttentionBackend
from attnplug.core.spec import Phase

_LONGER = 3
"""New tokens of a decode that becomes a prefill."""


def only_phase(backend: type[AttentionBackend]) -> Phase | None:
    """The one phase that a backend serves; None if it serves both or declares no known phase."""
    served = [phase for phase in Phase if phase in map(str, backend.supported_phases)]
    return served[0] if len(served) == 1 else None


def in_phase(phase: Phase | None, query_lens: Sequence[int]) -> bool:
    """Whether a step is of the phase: only single tokens for decode, a longer query first for prefill."""
    if phase is Phase.DECODE:
        return max(query_lens, default=0) <= 1
    return phase is None or (len(query_lens) > 0 and query_lens[0] > 1)


def of_phase(phase: Phase | None, query_lens: Sequence[int], *others: Sequence[int]) -> tuple[list[int], ...]:
    """The nearest step of the phase.

    Args:
        phase: None leaves the step as it is.
        query_lens: new tokens of each request.
        others: more values of each request, first the number of all its tokens.

    Returns:
        The new tokens, then the others, in the same order of requests. For decode, each request has at
        most its last token. For prefill, longer queries come first; if there is none, queries get longer.
    """
    new = list(query_lens)
    if phase is Phase.DECODE:
        new = [min(count, 1) for count in new]
    elif phase is Phase.PREFILL and max(new, default=0) <= 1:
        new = [min(_LONGER * count, tokens) for count, tokens in zip(new, others[0], strict=True)]
    order = list(range(len(new)))
    if phase is Phase.PREFILL:
        order.sort(key=lambda request: new[request] <= 1)
    return tuple([values[request] for request in order] for values in (new, *others))
