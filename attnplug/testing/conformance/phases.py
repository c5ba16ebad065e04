"""The steps that a backend of one phase is asked: longer queries cut to decodes, or none but longer ones in front."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug.core.backend import AttentionBackend
from attnplug.core.spec import Phase

__all__ = ["in_phase", "of_phase", "only_phase"]

_LONGER = 3
"""New tokens of what is no decode any more."""


def only_phase(backend: type[AttentionBackend]) -> Phase | None:
    """The one phase that a backend serves; None where it serves both, or says nothing that can be read."""
    served = [phase for phase in Phase if phase in map(str, backend.supported_phases)]
    return served[0] if len(served) == 1 else None


def in_phase(phase: Phase | None, query_lens: Sequence[int]) -> bool:
    """Whether a step is of the phase: single tokens to decode; to prefill, whatever follows a longer query."""
    if phase is Phase.DECODE:
        return max(query_lens, default=0) <= 1
    return phase is None or (len(query_lens) > 0 and query_lens[0] > 1)


def of_phase(phase: Phase | None, query_lens: Sequence[int], *others: Sequence[int]) -> tuple[list[int], ...]:
    """The step as one of the phase, as near to it as can be.

    Args:
        phase: None leaves the step as it is.
        query_lens: new tokens of each request.
        others: more values of each request, the first of them all its tokens.

    Returns:
        The new tokens, then the others, in the same order of requests. To decode, each request has at
        most its last token; to prefill, the longer ones come first, and are made longer where none is.
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
