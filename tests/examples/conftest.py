"""Examples need transformers."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
