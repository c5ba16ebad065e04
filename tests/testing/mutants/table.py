"""The table of mutations: a row is a backend with one mistake, and the check that must catch it in which words."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from catching import variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.core import AttentionBackend, AttentionMetadataBuilder
from attnplug.mla import MLADecodeBuilder, MLADecodeImpl

__all__ = ["MUTANTS", "NAN_ROWS", "Methods", "Mutant", "Table", "bound", "mutants_of"]

NAN_ROWS = "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read"
"""Words of the kit about rows that a wrong page leaves NaN."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A wrong backend, its family, a pattern of the checks of which one must fail, and words of its message.

    `passes` is a check that must not fail; `asked` is a pattern of all checks that can.
    """

    name: str
    family: str
    backend: type[AttentionBackend]
    check: str
    says: str
    passes: str = ""
    asked: str = ""


MUTANTS: list[Mutant] = []
"""All rows, in the order of the modules that have them."""


def mutants_of(*families: str) -> list[Mutant]:
    """The rows of some families."""
    return [each for each in MUTANTS if each.family in families]


class Methods:
    """Gives, for each name of a method, what adds rows by that method."""

    def __init__(self, rows_of: Callable[[str], Any]) -> None:
        self._rows_of = rows_of

    def __getattr__(self, name: str) -> Any:
        return self._rows_of(name)


class Table:
    """Adds the rows of one family, each of which is a variant of TORCH."""

    def __init__(self, family: str) -> None:
        self.family = family

    def add(self, row: str, **parts: Any) -> None:
        """A row "name | check | words" by its declarations and parts."""
        self.row(*row.split(" | ", 2), **parts)

    def row(self, name: str, check: str, says: str, passes: str = "", asked: str = "", **parts: Any) -> None:
        """As `add`, of a name, a check and words."""
        of_latents = any(_is_of_latents(part) for part in parts.values())
        backend = variant(name, base=TorchMLABackend if of_latents else TorchBackend, **parts)
        MUTANTS.append(Mutant(name, self.family, backend, check, says, passes, asked))

    def part(self, check: str, says: str, name: str = "") -> Callable[[type], type]:
        """A row by its impl or builder, the class below, after which it is named unless it is told a name."""

        def add(part: type) -> type:
            row = name or re.sub(r"(?<!^)(?=[A-Z])", "_", part.__name__).lower()
            self.row(row, check, says, **{_kind(part): part})
            return part

        return add

    def on(self, base: type) -> Methods:
        """Rows by one method of an impl or builder: `on(base).method(check, words, ...)`, as `method` has it."""
        return Methods(functools.partial(self.method, base))

    def method(self, base: type, method: str) -> Callable[..., Callable[[Any], Any]]:
        """Rows by one method of an impl or builder.

        The result takes a check, its words and functions by the rows' names; without such it decorates one. A function
        whose first argument is called `right` is given the method that it replaces; `state` are attributes of its class.
        """

        def rows(
            check: str, says: str, *, passes: str = "", asked: str = "", state: Any = None, **functions: Any
        ) -> Any:
            def add(function: Any, name: str = "") -> Any:
                name = name or function.__name__
                part = type(name, (base,), {"__doc__": function.__doc__, **(state or {})})
                setattr(part, method, bound(part, method, function))
                self.row(name, check, says, passes=passes, asked=asked, **{_kind(part): part})
                return function

            for name, function in functions.items():
                add(function, name)
            return add

        return rows


def _kind(part: type) -> str:
    return "builder" if issubclass(part, AttentionMetadataBuilder) else "impl"


def _is_of_latents(part: object) -> bool:
    return isinstance(part, type) and issubclass(part, (MLADecodeImpl, MLADecodeBuilder))


def bound(part: type, method: str, function: Any) -> Any:
    """The function as a method of `part`; one whose first argument is called `right` is given what it replaces."""
    if next(iter(inspect.signature(function).parameters)) != "right":
        return function

    def replaced(self: Any, *given: Any, **asked: Any) -> Any:
        return function(getattr(super(part, self), method), self, *given, **asked)

    return replaced
