"""The shape of a step: how many requests compute how many new tokens after how many earlier ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Self

from attnplug._system.json_files import typed
from attnplug.core.errors import PolicyError
from attnplug.core.spec import Phase

MOST_TOKENS = 1 << 24
"""The longest request of a shape, and the most requests."""
_TEXT = re.compile(
    r"(?P<phase>decode|prefill|mixed)\s+"
    r"(?:(?P<decodes>\d{1,8})\s*x\s*(?P<decoded>\d{1,8}k?)\s*\+\s*)?"
    r"(?P<batch>\d{1,8})\s*x\s*(?P<first>\d{1,8}k?)"
    r"(?:\s+of\s+(?P<context>\d{1,8}k?))?(?P<ragged>\s+ragged)?"
)
_FORM = (
    "write it as 'decode 64 x 8k', 'decode 16 x 4 of 8k', 'prefill 4 x 4k', 'decode 64 x 8k ragged' "
    "or 'mixed 64 x 8k + 1 x 512 of 2k'"
)
_MIXED = "mixed"
_NUMBERS = ("batch", "query", "context", "decodes", "decode_context")


def tokens_of(text: str) -> int | None:
    """The number that "8192" or "8k" is, with k = 1024; None for other text."""
    match = re.fullmatch(r"(\d{1,8})(k?)", text.strip().lower())
    return None if match is None else int(match[1]) * (1024 if match[2] else 1)


def tokens_in_words(tokens: int) -> str:
    """A number of tokens: "8k" for 8192, "1000" for what no k divides."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """The requests of one step.

    Args:
        phase: the phase of the choice of a backend for the step; None for a mixed step.
        batch: number of requests; in a mixed step those that prefill.
        query: new tokens of each request; above 1 in a decode, the tokens of speculative decoding.
        context: all tokens of each request, the new ones included; the mean if `ragged`.
        ragged: the requests have unlike lengths, from an eighth of the mean to nearly twice it.
        decodes: requests of a mixed step that decode one token each; they come first.
        decode_context: all tokens of each of these.
    """

    phase: Phase | None
    batch: int
    query: int
    context: int
    ragged: bool = False
    decodes: int = 0
    decode_context: int = 0

    def __post_init__(self) -> None:
        mixed = self.phase is None
        for name in _NUMBERS:
            value = getattr(self, name)
            if name.startswith("decode") and not mixed:
                if value != 0 or type(value) is not int:
                    raise PolicyError(f"shape.{name}", value, "must be 0 in a step that is not mixed")
            elif type(value) is not int or not 1 <= value <= MOST_TOKENS:
                raise PolicyError(f"shape.{name}", value, f"must be an integer from 1 to {MOST_TOKENS}")
        if self.query > self.context:
            limit = f"must be at most the {self.context} tokens of a request"
            raise PolicyError("shape.query", self.query, limit)

    @classmethod
    def parse(cls, text: str, argument: str = "shape") -> Self:
        """Read "decode 64 x 8k", "prefill 4 x 1k of 9k ragged" or "mixed 64 x 8k + 1 x 512 of 2k".

        Raises:
            PolicyError: text of another form, or numbers out of range; it names `argument`.
        """
        match = _TEXT.fullmatch(text.strip().lower())
        if match is None or (match["phase"] == _MIXED) is not (match["decodes"] is not None):
            raise PolicyError(argument, text, "is not the shape of a step", _FORM)
        phase = None if match["phase"] == _MIXED else Phase(match["phase"])
        first = tokens_of(match["first"]) or 0
        context = first if match["context"] is None else tokens_of(match["context"]) or 0
        query = 1 if phase is Phase.DECODE and match["context"] is None else first
        ragged = match["ragged"] is not None
        decodes, decoded = int(match["decodes"] or 0), tokens_of(match["decoded"] or "0") or 0
        try:
            return cls(phase, int(match["batch"]), query, context, ragged, decodes, decoded)
        except PolicyError as problem:
            limit = f"is no step: {problem.field}={problem.value} {problem.limit}"
            raise PolicyError(argument, text, limit, _FORM) from None

    @property
    def lengths(self) -> tuple[int, ...]:
        """All tokens of each request: equal ones, or if ragged evenly spaced ones of the same mean."""
        return (
            *self._spaced(self.decodes, 1, self.decode_context),
            *self._spaced(self.batch, self.query, self.context),
        )

    def _spaced(self, requests: int, query: int, context: int) -> tuple[int, ...]:
        if not self.ragged or requests <= 1:
            return (context,) * requests
        least = max(context // 8, query)
        most = 2 * context - least
        return tuple(least + (most - least) * index // (requests - 1) for index in range(requests))

    @property
    def query_lens(self) -> tuple[int, ...]:
        """New tokens of each request."""
        return (1,) * self.decodes + (self.query,) * self.batch

    @property
    def requests(self) -> int:
        """The number of requests."""
        return self.decodes + self.batch

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.decodes + self.batch * self.query

    def __str__(self) -> str:
        query = tokens_in_words(self.query)
        plain = self.query == (1 if self.phase is Phase.DECODE else self.context)
        context = tokens_in_words(self.context)
        tokens = context if plain else f"{query} of {context}"
        phase, ragged = self.phase or _MIXED, " ragged" if self.ragged else ""
        decodes = f"{self.decodes} x {tokens_in_words(self.decode_context)} + " if self.decodes else ""
        return f"{phase} {decodes}{self.batch} x {tokens}{ragged}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {**dataclasses.asdict(self), "phase": str(self.phase or _MIXED)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The shape that `to_dict` wrote; LookupError, TypeError or ValueError for damaged data."""
        phase = typed(data, "phase", str)
        return cls(
            None if phase == _MIXED else Phase(phase),
            ragged=typed(data, "ragged", bool),
            **{name: typed(data, name, int) for name in _NUMBERS},
        )
