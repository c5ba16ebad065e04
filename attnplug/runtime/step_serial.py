"""Numbers that say whether a batch is still that of its builder's latest step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionMetadata


@dataclasses.dataclass(slots=True, eq=False)
class StepSerial:
    """Counts the steps of one owner, and the changes after which batches made before are wrong.

    A StepBatchBuilder has one for its steps and the order of its requests, and graph buffers have one for what they
    hold.

    Args:
        now: the latest number.
        last: the call that made it.
    """

    now: int = 0
    last: str = ""

    def advance(self, call: str) -> Stamp:
        """The next number: batches with older ones are out of date. `call` is named in their refusal."""
        self.last = call
        self.now += 1
        return self, self.now


Stamp: TypeAlias = tuple[StepSerial, int]
"""A serial, and its number when a batch was made."""


def check_current(field: str, stamps: tuple[Stamp, ...]) -> None:
    """BatchError if one of the owners has a later number. Batches made by hand have no stamps."""
    for serial, number in stamps:
        if serial.now != number:
            limit = f"is out of date: {serial.last} was called after it was made"
            remedy = "make a batch by step() once requests are in order, and run it before the next change"
            raise BatchError(f"{field}.step", number, limit, remedy)


class StepMetadata(dict[str, AttentionMetadata]):
    """The metadata of a step by layer, and the stamps of its batch."""

    __slots__ = ("stamps",)

    def __init__(self, metadata: Mapping[str, AttentionMetadata], stamps: tuple[Stamp, ...]) -> None:
        super().__init__(metadata)
        self.stamps = stamps


def check_same_step(metadata: Mapping[str, AttentionMetadata], stamps: tuple[Stamp, ...]) -> None:
    """BatchError if `metadata` was built for another step than that of a batch with these stamps."""
    built = getattr(metadata, "stamps", ())
    # That of a captured graph has none: its tensors are the graph's buffers, which each step fills.
    if built and stamps and built != stamps:
        limit = f"is not that of the batch, {stamps[0][1]}"
        raise BatchError("metadata.step", built[0][1], limit, "build it for this batch")
