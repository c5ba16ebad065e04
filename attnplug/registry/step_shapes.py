"""The shape of a step: how many requests compute how many new tokens after how many earlier ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Self

from attnplug.core.errors import PolicyError
from attnplug.core.json_reading import typed
from attnplug.core.spec import Phase

MOST_TOKENS = 1 << 24
"""The longest request of a shape, and the most requests."""
_TEXT = re.compile(
    r"(?P<phase>decode|prefill)\s+(?P<batch>\d{1,8})\s*x\s*(?P<first>\d{1,8}k?)"
    r"(?:\s+of\s+(?P<context>\d{1,8}k?))?(?P<ragged>\s+ragged)?"
)
_FORM = "write it as 'decode 64 x 8k', 'decode 16 x 4 of 8k', 'prefill 4 x 4k' or 'decode 64 x 8k ragged'"


def tokens_of(text: str) -> int | None:
    """The number that "8192" or "8k" is, with k = 1024; None for other text."""
    match = re.fullmatch(r"(\d{1,8})(k?)", text.strip().lower())
    return None if match is None else int(match[1]) * (1024 if match[2] else 1)


def tokens_in_words(tokens: int) -> str:
    """A number of tokens: "8k" for 8192, "1000" for what no k divides."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """The requests of one step.

    Args:
        phase: the phase in which a backend is chosen for the step.
        batch: number of requests.
        query: new tokens of each request; above 1 in a decode, the tokens of speculative decoding.
        context: all tokens of each request, the new ones included; the mean if `ragged`.
        ragged: the requests have unlike lengths, from an eighth of the mean to nearly twice it.
    """

    phase: Phase
    batch: int
    query: int
    context: int
    ragged: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "query", "context"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST_TOKENS:
                raise PolicyError(f"shape.{name}", value, f"must be an integer from 1 to {MOST_TOKENS}")
        if self.query > self.context:
            limit = f"must be at most the {self.context} tokens of a request"
            raise PolicyError("shape.query", self.query, limit)

    @classmethod
    def parse(cls, text: str, argument: str = "shape") -> Self:
        """Read "decode 64 x 8k", "decode 16 x 4 of 8k", "prefill 4 x 4k" or "prefill 4 x 1k of 9k ragged".

        Raises:
            PolicyError: text of another form, or numbers out of range; it names `argument`.
        """
        match = _TEXT.fullmatch(text.strip().lower())
        if match is None:
            raise PolicyError(argument, text, "is not the shape of a step", _FORM)
        phase, first = Phase(match["phase"]), tokens_of(match["first"]) or 0
        context = first if match["context"] is None else tokens_of(match["context"]) or 0
        query = 1 if phase is Phase.DECODE and match["context"] is None else first
        return cls(phase, int(match["batch"]), query, context, match["ragged"] is not None)

    @property
    def lengths(self) -> tuple[int, ...]:
        """All tokens of each request: equal ones, or if ragged evenly spaced ones of the same mean."""
        if not self.ragged or self.batch == 1:
            return (self.context,) * self.batch
        least = max(self.context // 8, self.query)
        most = 2 * self.context - least
        steps = self.batch - 1
        return tuple(least + (most - least) * index // steps for index in range(self.batch))

    @property
    def query_lens(self) -> tuple[int, ...]:
        """New tokens of each request."""
        return (self.query,) * self.batch

    def __str__(self) -> str:
        query = tokens_in_words(self.query)
        plain = self.query == (1 if self.phase is Phase.DECODE else self.context)
        context = tokens_in_words(self.context)
        tokens = context if plain else f"{query} of {context}"
        return f"{self.phase} {self.batch} x {tokens}{' ragged' if self.ragged else ''}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {**dataclasses.asdict(self), "phase": str(self.phase)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The shape that `to_dict` wrote; LookupError, TypeError or ValueError for damaged data."""
        return cls(
            Phase(typed(data, "phase", str)),
            typed(data, "batch", int),
            typed(data, "query", int),
            typed(data, "context", int),
            typed(data, "ragged", bool),
        )
