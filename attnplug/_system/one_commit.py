"""Objects that an interrupt cannot cut in two, and that nobody copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from attnplug.core.errors import BatchError


class NotCopied:
    """Refuses `copy.copy`, `copy.deepcopy` and pickle.

    It is for objects that hold views of their own buffers, or a count of what others own. A copy has the views of other
    memory, so that it reads zeros, or the same count, so that two objects change it.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        limit = "cannot be copied or pickled, because it holds views of its own buffers or counts what others hold"
        raise BatchError("object", type(self).__name__, limit, "make another one")


class OneCommit(NotCopied):
    """Changes by one assignment, so that a call that is interrupted at any line has changed nothing.

    A method prepares all values first, without a write to what is in use. Its last statement is
    `self._change = functools.partial(write, values)`. The next access calls `_settle`, which writes. `write` gives the same
    result if it was interrupted and begins again.
    """

    _change: Callable[[], None] | None = None

    def _settle(self) -> None:
        """Write the last change. Each method calls it before it reads anything."""
        if (change := self._change) is not None:
            change()
            self._change = None
