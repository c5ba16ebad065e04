"""Silences transformers' advice, and shortens its errors to one line."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import transformers


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and no log lines of transformers inside the block; restores the settings after it."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def one_line(error: BaseException, limit: int = 240) -> str:
    """The message of `error` as a single line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
