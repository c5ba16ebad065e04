"""The models, layers and plugins of tests/runtime and tests/registry, importable here."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("runtime", "registry"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
