"""Multimodal spans of a step, whose tokens see each other in both directions: a span is computed as a whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from attnplug.core.errors import BatchError
from attnplug.runtime.placeholders import Placeholder, Span


class MMPrefix:
    """Which placeholders are spans, and the checks that a step computes each of them as a whole.

    Args:
        modalities: those whose items are spans; None for all.
        max_num_batched_tokens: most tokens in a step, so the longest span.
    """

    def __init__(self, modalities: Collection[str] | None, max_num_batched_tokens: int) -> None:
        self._modalities = None if modalities is None else frozenset(modalities)
        self._longest = max_num_batched_tokens

    def _is_span(self, item: Placeholder) -> bool:
        return self._modalities is None or item.modality in self._modalities

    def check_request(self, items: Sequence[Placeholder], num_computed_tokens: int) -> None:
        """Refuse a request whose spans no step can compute as a whole.

        Raises:
            BatchError: a span is longer than a step, or the computed tokens end inside of one.
        """
        for item in filter(self._is_span, items):
            start, stop = item.offset, item.offset + item.length
            name = f"placeholders[{item.modality!r}][{item.number}]"
            if item.length > self._longest:
                limit = f"is a span of mm_prefix layers, longer than max_num_batched_tokens={self._longest}"
                raise BatchError(name, (item.offset, item.length), limit, "a step computes a span as a whole")
            if start < num_computed_tokens < stop:
                limit = f"must not lie inside {name} at {start} .. {stop - 1}, whose tokens see each other"
                raise BatchError("num_computed_tokens", num_computed_tokens, limit, f"give {start} or {stop}")

    def check_step(self, req_id: str, items: Sequence[Placeholder], computed: int, count: int) -> None:
        """Refuse a step that computes a part of a span: its queries would not see the rest.

        Raises:
            BatchError: the step begins or ends inside a span of the request.
        """
        end = computed + count
        for item in filter(self._is_span, items):
            start, stop = item.offset, item.offset + item.length
            is_whole = computed <= start and stop <= end
            if is_whole or stop <= computed or end <= start:
                continue
            what = (
                f"{item.modality!r} item {item.number} at {start} .. {stop - 1}, whose tokens see each other"
            )
            limit = f"of request {req_id} computes a part of {what}"
            if computed > start:
                remedy = f"it began after the {computed} computed tokens: add the request again with at most {start}"
            else:
                before = f"at most {start - computed} tokens, or " if computed < start else "0 tokens, or "
                remedy = f"schedule {before}at least {stop - computed}"
            raise BatchError("num_scheduled_tokens", count, limit, remedy)

    def fill(self, spans: Sequence[Span], rows: npt.NDArray[np.int32]) -> None:
        """Write the span of each token, int32 `[T, 2]`: first position and one past the last, else (0, 0)."""
        rows[:] = 0
        for span in spans:
            if self._is_span(span.item):
                stop = span.item.offset + span.item.length
                rows[span.token : span.token + span.count] = span.item.offset, stop
