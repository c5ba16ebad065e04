"""The modules of examples/engine, importable as its scripts import them, and no advice from transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "engine"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from transformers import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)
