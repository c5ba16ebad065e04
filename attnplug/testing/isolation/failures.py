"""Failed checks of the same mistake: the first to show, and the others that say the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attnplug.testing.conformance.check import ConformanceError

if TYPE_CHECKING:
    from attnplug.testing.isolation.results import Result


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The facts of a failed check by which it is compared with others.

    Args:
        says: text that failures of the same mistake share; "" for one that is like no other.
        is_named: whether `says` is the name of a known mistake.
        tokens: of the step with a wrong answer; 0 if the failure is not about numbers.
        size: the smallest failing step in words, such as "1 request of 3 tokens"; "" if there is none.
        test: the smallest failing step as a test.
    """

    says: str = ""
    is_named: bool = False
    tokens: int = 0
    size: str = ""
    test: str = ""

    @classmethod
    def of(cls, problem: BaseException) -> Failure:
        """The facts in the error of a check."""
        if not isinstance(problem, ConformanceError):
            return cls(f"{type(problem).__name__}: {problem}".partition("\n")[0])
        tokens = 0 if problem.step is None else sum(problem.step.seq_lens)
        found = problem.smallest
        words, test = ("", "") if found is None else (found.words, found.test)
        return cls(problem.says, problem.named is not None, tokens, words, test)

    def properties(self) -> list[tuple[str, object]]:
        """The facts as properties of a pytest report, which also go to a JUnit file."""
        return list(dataclasses.asdict(self).items())

    @classmethod
    def read(cls, properties: Iterable[tuple[str, object]]) -> Failure:
        """The facts in the properties of a report."""
        known = {field.name for field in dataclasses.fields(cls)}
        found = {name: value for name, value in properties if name in known}
        return cls(**found)  # type: ignore[arg-type]


def folded(failed: Iterable[Result], ids: Sequence[str]) -> list[list[Result]]:
    """The failures of each mistake, the cheapest that names it first; named mistakes come before others.

    `ids` are all checks in their order, which decides between equals.
    """
    places = {check: place for place, check in enumerate(ids)}

    def cost(result: Result) -> tuple[bool, int, int]:
        # The number of tokens is the same in each run, and the time is not. Of steps of about one size, the plainer
        # layer comes first in the list.
        size = result.failure.tokens.bit_length()
        return not result.failure.is_named, size, places.get(result.id, len(places))

    groups: dict[str, list[Result]] = {}
    for result in sorted(failed, key=cost):
        groups.setdefault(result.failure.says or result.id, []).append(result)
    return list(groups.values())
