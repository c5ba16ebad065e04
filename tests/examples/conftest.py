"""The modules of examples/engine, importable as its scripts import them, on one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "engine"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, far slower where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
