"""Values that hold inside of `with` blocks, which may end in any order and in any thread or task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Block(Generic[_T]):
    __slots__ = ("is_open", "value")

    def __init__(self, value: _T) -> None:
        self.value, self.is_open = value, True


class Scopes(Generic[_T]):
    """The values of the open blocks around a point of the program.

    A context variable keeps them, so threads and tasks see their own, and a task also those that were open where it
    began. A value holds until its own block ends, whichever block ends first and whichever context ends it. Resetting
    a context variable by its token would bring back a value whose block has ended.

    Args:
        name: of the context variable.
    """

    def __init__(self, name: str) -> None:
        self._blocks: ContextVar[tuple[_Block[_T], ...]] = ContextVar(name, default=())

    def get(self) -> tuple[_T, ...]:
        """The values of the open blocks, innermost first."""
        blocks = self._blocks.get()
        # Most programs are in no block, and each selection asks.
        return tuple(each.value for each in blocks if each.is_open) if blocks else ()

    @contextlib.contextmanager
    def block(self, value: _T) -> Iterator[_T]:
        """A block; inside it `value` comes first."""
        own = _Block(value)
        try:
            self._blocks.set((own, *self._open()))
            yield value
        finally:
            # Contexts that copied this one, or began the block, still have it.
            own.is_open = False
            self._blocks.set(self._open())

    def _open(self) -> tuple[_Block[_T], ...]:
        return tuple(each for each in self._blocks.get() if each.is_open)
