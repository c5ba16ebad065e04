"""The modules of examples/engine, importable as its scripts import them; small models on one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "engine"))


@pytest.fixture(autouse=True)
def _quiet_on_one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, far slower where cores are busy."""
    import torch
    from transformers import logging

    threads, level = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)
    torch.set_num_threads(threads)
