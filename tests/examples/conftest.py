"""The modules of examples/engine, importable as its scripts import them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "engine"))
