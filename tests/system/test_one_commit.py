"""An object that changes by one assignment: an interrupted write begins again, and no copy shares its count."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest

from attnplug._system.one_commit import NotCopied, OneCommit
from attnplug.errors import BatchError


class Counter(OneCommit):
    def __init__(self) -> None:
        self.numbers = [0, 0]
        self.interrupts = 0

    def set(self, number: int) -> None:
        self._settle()
        self._change = functools.partial(self._write, number)

    def _write(self, number: int) -> None:
        self.numbers[0] = number
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.numbers[1] = number

    def read(self) -> list[int]:
        self._settle()
        return self.numbers


def test_the_next_access_writes_once():
    made = Counter()
    assert made.read() == [0, 0]
    made.set(3)
    assert made.numbers == [0, 0]
    assert made.read() == [3, 3]
    made.numbers = [5, 5]
    assert made.read() == [5, 5]


def test_an_interrupted_write_begins_again():
    made = Counter()
    made.set(3)
    made.interrupts = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            made.set(4)
    assert made.read() == [3, 3]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("made", [Counter(), NotCopied()])
def test_no_copy_is_made(made, way):
    with pytest.raises(BatchError) as caught:
        way(made)
    assert str(caught.value) == (
        f"object='{type(made).__name__}' cannot be copied or pickled, because it holds views of its own buffers "
        "or counts what others hold; make another one"
    )
