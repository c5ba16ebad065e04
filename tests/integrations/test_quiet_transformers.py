"""transformers is silent while a model is read, and says again what it would before when the last reading ends."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Iterator

import pytest

transformers = pytest.importorskip("transformers")

from attnplug.integrations.reader.config_file import quiet_transformers  # noqa: E402


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.INFO)
    yield
    transformers.logging.set_verbosity(before)


def is_silent() -> bool:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("heard", stacklevel=1)
    return transformers.logging.get_verbosity() == logging.CRITICAL and not seen


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_that_end_in_any_order_restore_the_settings_at_the_last(order: tuple[int, ...]) -> None:
    filters = list(warnings.filters)
    blocks = [quiet_transformers() for _ in order]
    for each in blocks:
        each.__enter__()
    for place in order:
        assert is_silent()
        blocks[place].__exit__(None, None, None)
    assert transformers.logging.get_verbosity() == logging.INFO
    assert warnings.filters == filters


def test_blocks_of_two_threads_that_overlap_restore_the_settings() -> None:
    filters = list(warnings.filters)
    began, ends = threading.Event(), threading.Event()

    def other() -> None:
        with quiet_transformers():
            began.set()
            ends.wait(60)

    thread = threading.Thread(target=other)
    with quiet_transformers():
        thread.start()
        began.wait(60)
    assert is_silent()
    ends.set()
    thread.join()
    assert transformers.logging.get_verbosity() == logging.INFO
    assert warnings.filters == filters


def test_a_block_that_raises_restores_the_settings() -> None:
    with pytest.raises(RuntimeError, match="out"), quiet_transformers():
        raise RuntimeError("out")
    assert transformers.logging.get_verbosity() == logging.INFO
