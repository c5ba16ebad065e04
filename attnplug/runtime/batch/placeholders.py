"""Maps rows of multimodal embeddings to the placeholder tokens of a step.

Multimodal spans of a step, whose tokens see each other in both directions: a span is computed as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import instance, integer, listed
from attnplug.core.errors import BatchError
from attnplug.runtime.batch.staging import PackedBuffer

PlaceholderRanges: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]
"""By modality, `(offset, length)` of each item's placeholder tokens in the request."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlaceholderMap:
    """The n placeholder tokens of one modality in a step, which get rows of multimodal embeddings.

    `hidden[token_indices] = embeddings[embedding_indices]`. `embeddings` has those of `items` in order, each as
    long as its whole placeholder, even if only a part of it is in this step.

    Args:
        token_indices: int64 `[n]` on the device, rows of the batch, ascending.
        embedding_indices: int64 `[n]` on the device.
        items: request and number of each item; numbers count from 0 within a request and modality.
    """

    token_indices: torch.Tensor
    embedding_indices: torch.Tensor
    items: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholder:
    """One item of a request: its modality, its number within that, and its tokens."""

    modality: str
    number: int
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a step that get consecutive rows of one item."""

    req_id: str
    item: Placeholder
    token: int
    row: int
    count: int


def check_placeholders(ranges: PlaceholderRanges, max_model_len: int) -> tuple[Placeholder, ...]:
    """The items of a request in the order of their tokens.

    Raises:
        BatchError: a range is not two integers, empty, outside the sequence, out of order, or overlaps another.
    """
    items = []
    if not isinstance(ranges, Mapping):
        raise BatchError("placeholders", ranges, "must be a mapping of modalities to (offset, length) pairs")
    for modality, pairs in ranges.items():
        instance("placeholders", modality, str)
        before = 0
        for number, pair in enumerate(listed(f"placeholders[{modality!r}]", pairs, "(offset, length) pairs")):
            field = f"placeholders[{modality!r}][{number}]"
            both = listed(field, pair, "two integers, (offset, length)")
            if len(both) != 2:
                raise BatchError(field, pair, "must be two integers, (offset, length)")
            offset, length = (integer(field, each) for each in both)
            if length < 1 or not 0 <= offset <= max_model_len - length:
                limit = f"(offset, length) must be within max_model_len={max_model_len} and not be empty"
                raise BatchError(field, (offset, length), limit)
            if offset < before:
                raise BatchError(field, (offset, length), "must come after the item before it")
            before = offset
            items.append(Placeholder(modality, number, offset, length))
    items.sort(key=lambda item: item.offset)
    for one, other in itertools.pairwise(items):
        if other.offset < one.offset + one.length:
            found, end = (other.offset, other.length), one.offset + one.length
            limit = f"overlaps {one.modality!r} item {one.number}, which ends at {end}"
            raise BatchError(f"placeholders[{other.modality!r}][{other.number}]", found, limit)
    return tuple(items)


def spans_of(req_id: str, items: Sequence[Placeholder], first: int, count: int, token: int) -> list[Span]:
    """The parts of `items` at positions `first .. first + count` of a request whose rows begin at `token`."""
    spans = []
    for item in items:
        start, stop = max(item.offset, first), min(item.offset + item.length, first + count)
        if start < stop:
            spans.append(Span(req_id, item, token + start - first, start - item.offset, stop - start))
    return spans


def map_placeholders(spans: Sequence[Span], buffer: PackedBuffer) -> dict[str, PlaceholderMap]:
    """One map for each modality of `spans`; fills `buffer` (int64) and copies it to the device."""
    by_modality: dict[str, list[Span]] = {}
    for span in spans:
        by_modality.setdefault(span.item.modality, []).append(span)
    total = sum(span.count for span in spans)
    filled, at = buffer.np(2, total), 0
    for part in by_modality.values():
        base = 0
        for span in part:
            end = at + span.count
            filled[0, at:end] = np.arange(span.token, span.token + span.count)
            filled[1, at:end] = np.arange(base + span.row, base + span.row + span.count)
            # The whole item, even if the step has a part of it: `embeddings` has all its rows.
            at, base = end, base + span.item.length
    tokens, rows = buffer.copy_to_gpu(2, total)
    maps, at = {}, 0
    for modality, part in by_modality.items():
        end = at + sum(span.count for span in part)
        items = tuple((span.req_id, span.item.number) for span in part)
        maps[modality] = PlaceholderMap(tokens[at:end], rows[at:end], items)
        at = end
    return maps


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
