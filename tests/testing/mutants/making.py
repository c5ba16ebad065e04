"""Rows of the table that differ from the reference by one part with one mistake."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

from mutants.declared import ReferenceBackend
from mutants.reference import Reference, ReferenceBuilder, Request, Tensor
from mutants.table import MUTANTS, Methods, Mutant, bound

_Part = TypeVar("_Part", bound="type[Reference] | type[ReferenceBuilder]")


def _expected() -> dict[str, tuple[str, str]]:
    lines = pathlib.Path(__file__).with_name("expected.txt").read_text(encoding="utf-8").splitlines()
    return {
        name: (check, says) for name, check, says in (re.split(r" \| ?", line, maxsplit=2) for line in lines)
    }


EXPECTED = _expected()
"""By name, the check and the words of the file, where they are more exact than those beside the class."""


def mutant(check: str = "correct/*", says: str = "output") -> Callable[[_Part], _Part]:
    """List the class below, an impl or a builder, as a mutant that is named after it."""

    def keep(part: _Part) -> _Part:
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", part.__name__).lower()
        add(name, part.__module__.rpartition(".")[2], part, check, says)
        return part

    return keep


def method(name: str, base: type) -> Callable[..., Callable[[Any], Any]]:
    """Mutants by one method, as `Table.method` makes them; they are named after their functions."""

    def rows(check: str = "correct/*", says: str = "output", **functions: Any) -> Any:
        def keep(function: Any, row: str = "") -> Any:
            row = row or function.__name__
            part = type(row, (base,), {"__doc__": function.__doc__})
            setattr(part, name, bound(part, name, function))
            add(row.replace("_", "-"), function.__module__.rpartition(".")[2], part, check, says)
            return function

        for row, function in functions.items():
            keep(function, row)
        return keep

    return rows


def on(base: type) -> Methods:
    """As `Table.on`: `on(Reference).method(check, words, ...)`."""
    return Methods(lambda name: method(name, base))


def add(
    name: str, family: str, part: type[Reference] | type[ReferenceBuilder], check: str, says: str
) -> None:
    """List a mutant; what is in EXPECTED counts more than `check` and `says`."""
    found = EXPECTED.get(name, ("", ""))
    check, says = found[0] or check, found[1] or says
    method = "get_builder_cls" if issubclass(part, ReferenceBuilder) else "get_impl_cls"
    label = name.upper().replace("-", "_")
    parts = {"get_name": staticmethod(lambda: label), method: classmethod(lambda cls: part)}
    MUTANTS.append(Mutant(name, family, type(label, (ReferenceBackend,), parts), check, says))


def breaks(
    name: str, when: Callable[[Reference, Request], Any], check: str = "correct/*", says: str = "output"
) -> None:
    """List a mutant that loses a tenth of the output of requests for which `when` holds."""

    class Broken(Reference):
        def answer(self, request: Request, *given: Any) -> tuple[Tensor, Tensor]:
            out, lse = super().answer(request, *given)
            return (out * 0.9, lse) if when(self, request) else (out, lse)

    add(name, when.__module__.rpartition(".")[2], Broken, check, says)
