"""Ranges of steps by their shape, which a composite gives to one member: their text, their check and their words.

Imports no torch, because selections and plans read them.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from attnplug._system.json_files import typed
from attnplug.core.errors import SpecError
from attnplug.core.spec import Phase

Limits: TypeAlias = tuple[int, int | None]
"""The least and the most of a quantity; None for no upper limit."""
_ANY: Limits = (1, None)
_QUANTITIES = ("query", "requests", "rows", "keys")
_PART = re.compile(r"(query|requests|rows|keys) (\d{0,9})\.\.(\d{0,9})")
_FORM = "write 'prefill query ..256', 'draft', 'decode requests ..2' or 'mixed requests 17..34 keys ..4096'"


class StepKind(enum.StrEnum):
    """The kinds of steps that a composite tells apart; a decode has at most the builder's threshold of queries."""

    DECODE = "decode"
    """Each request has one query."""
    DRAFT = "draft"
    """Decodes, and at least one has several queries, as in speculative decoding."""
    PREFILL = "prefill"
    """Each request has more queries than a decode: prompts, and further parts of prompts."""
    MIXED = "mixed"
    """Decodes and prefills together."""

    @property
    def phase(self) -> Phase | None:
        """The phase whose choice of a backend serves such steps; None for both."""
        if self is StepKind.MIXED:
            return None
        return Phase.PREFILL if self is StepKind.PREFILL else Phase.DECODE


_PLURAL = {
    StepKind.DECODE: "decodes",
    StepKind.DRAFT: "decodes of several tokens",
    StepKind.PREFILL: "prefills",
    StepKind.MIXED: "mixed steps",
}
_WORDS = {"query": "new tokens", "requests": "requests", "rows": "new tokens", "keys": "tokens"}
_OF_REQUESTS = ("query", "keys")
"""Quantities of the longest request."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepSizes:
    """The numbers of a step, or of a part of it, by which a composite chooses a member.

    Args:
        kind: of the step.
        query: queries of the longest request.
        requests: number of requests.
        rows: queries of all requests.
        keys: tokens of the longest request, or an upper bound.
    """

    kind: StepKind
    query: int
    requests: int
    rows: int
    keys: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepRange:
    """The steps of one kind within limits, ends included.

    Args:
        kind: of the steps.
        query: queries of the longest request.
        requests: number of requests.
        rows: queries of all requests.
        keys: tokens of the longest request; only for mixed steps, because graphs replay the others, and a graph is
            captured with the longest request of all.

    Raises:
        SpecError: limits that are no two integers in order, or limits of `keys` for another kind.
    """

    kind: StepKind
    query: Limits = _ANY
    requests: Limits = _ANY
    rows: Limits = _ANY
    keys: Limits = _ANY

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _kind(self.kind))
        for name in _QUANTITIES:
            object.__setattr__(self, name, _limits(name, getattr(self, name)))
        if self.keys != _ANY and self.kind is not StepKind.MIXED:
            limit = f"is for mixed steps: a graph replays {_PLURAL[self.kind]}, whose lengths change"
            raise SpecError("keys", self.keys, limit, "limit query, requests or rows")

    def has(self, sizes: StepSizes) -> bool:
        """Whether a step is in the range."""
        if sizes.kind is not self.kind:
            return False
        for name in _QUANTITIES:
            least, most = getattr(self, name)
            found = getattr(sizes, name)
            if found < least or (most is not None and found > most):
                return False
        return True

    def covers(self, other: StepRange) -> bool:
        """Whether it has all steps of another range."""
        if other.kind is not self.kind:
            return False
        for name in _QUANTITIES:
            (least, most), (low, high) = getattr(self, name), getattr(other, name)
            if low < least or (most is not None and (high is None or high > most)):
                return False
        return True

    @classmethod
    def parse(cls, text: str) -> Self:
        """The range that `str` wrote, such as "prefill query ..256".

        Raises:
            SpecError: text of another form.
        """
        kind, _, rest = text.strip().partition(" ")
        limits: dict[str, Any] = {}
        while rest:
            match = _PART.match(rest)
            if match is None or match[1] in limits or rest[match.end() : match.end() + 1] not in ("", " "):
                raise SpecError("steps", text, "is no range of steps", _FORM)
            limits[match[1]] = int(match[2] or 1), int(match[3]) if match[3] else None
            rest = rest[match.end() :].lstrip()
        if kind not in tuple(StepKind):
            raise SpecError("steps", text, f"must begin with one of {', '.join(StepKind)}", _FORM)
        return cls(StepKind(kind), **limits)

    def __str__(self) -> str:
        limits = (f"{name} {_span(*value)}" for name, value in self._limited())
        return " ".join((self.kind, *limits))

    @property
    def words(self) -> str:
        """The steps in words: "prefills with at most 256 new tokens a request"."""
        limits = [_limit_in_words(name, *value) for name, value in self._limited()]
        if not limits:
            return _PLURAL[self.kind]
        *most, last = limits
        return f"{_PLURAL[self.kind]} with {', '.join(most)}{' and ' if most else ''}{last}"

    def _limited(self) -> list[tuple[str, Limits]]:
        return [(name, value) for name in _QUANTITIES if (value := getattr(self, name)) != _ANY]


def _kind(value: object) -> StepKind:
    if value not in tuple(StepKind):
        raise SpecError("kind", value, f"must be one of {', '.join(StepKind)}")
    return StepKind(str(value))


def _limits(name: str, value: object) -> Limits:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        least, most = value
        if type(least) is int and least >= 1 and (most is None or (type(most) is int and most >= least)):
            return least, most
    raise SpecError(name, value, "must be the least and the most, both at least 1; None for no upper limit")


def _span(least: int, most: int | None) -> str:
    return f"{least if least > 1 else ''}..{'' if most is None else most}"


def _limit_in_words(name: str, least: int, most: int | None) -> str:
    what = _WORDS[name]
    of = ""
    if name in _OF_REQUESTS:
        # Of the longest request all have at most as many.
        of = " a request" if least == 1 else " in the longest request"
    if most == 1:
        return f"1 {what[:-1]}{of}"
    if most == least:
        return f"{most} {what}{of}"
    if most is None:
        return f"at least {least} {what}{of}"
    return f"at most {most} {what}{of}" if least == 1 else f"{least} to {most} {what}{of}"


@dataclasses.dataclass(frozen=True, slots=True)
class StepPriority:
    """The rank of a backend for a range of steps that its priority in their phase does not describe.

    Args:
        steps: the range.
        priority: 0 to 999, on the scale of `get_priority`. Prefills and decodes compare it with the priority of the
            other backends in that phase, and mixed steps with the mean of a pair's priorities.

    Raises:
        SpecError: an argument of another type, or a priority that is out of range.
    """

    steps: StepRange
    priority: int

    def __post_init__(self) -> None:
        if type(self.steps) is not StepRange:
            raise SpecError("steps", self.steps, "must be a StepRange")
        if type(self.priority) is not int or not 0 <= self.priority <= 999:
            raise SpecError("priority", self.priority, "must be an integer from 0 to 999")


@dataclasses.dataclass(frozen=True, slots=True)
class StepChoice:
    """A range of steps, the backend that serves them, and why.

    Args:
        steps: the range.
        backend: the name of the member.
        why: the cause: priorities, or a table of measured times.
    """

    steps: StepRange
    backend: str
    why: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The choice that `to_dict` wrote; LookupError, TypeError or ValueError for damaged data."""
        texts = [typed(data, name, str) for name in ("steps", "backend", "why")]
        return cls(StepRange.parse(texts[0]), *texts[1:])

    def __str__(self) -> str:
        return f"{self.steps.words} run on {self.backend}: {self.why}"

    def to_dict(self) -> dict[str, str]:
        """A JSON object with every field."""
        return {"steps": str(self.steps), "backend": self.backend, "why": self.why}


def split_routes(name: str) -> tuple[str, tuple[tuple[StepRange, str], ...]]:
    """The halves "A+B" of "A+B[draft on C; mixed on A]", and each range with the name of its member.

    Raises:
        SpecError: text of another form between the brackets.
    """
    halves, bracket, rest = name.partition("[")
    if not bracket:
        return name, ()
    if not rest.rstrip().endswith("]"):
        raise SpecError("backend", name, "has no ] at its end", "write A+B[draft on A]")
    routes = []
    for part in rest.rstrip()[:-1].split(";"):
        steps, on, member = part.strip().rpartition(" on ")
        if not on or not member.strip():
            raise SpecError(
                "backend", name, f"has {part.strip()!r}, which names no member", "write draft on A"
            )
        routes.append((StepRange.parse(steps), member.strip()))
    return halves.strip(), tuple(routes)


def join_routes(halves: str, routes: tuple[tuple[StepRange, str], ...]) -> str:
    """The text that `split_routes` reads."""
    if not routes:
        return halves
    return f"{halves}[{'; '.join(f'{steps} on {member}' for steps, member in routes)}]"
