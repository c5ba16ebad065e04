"""Random steps divided among TORCH, the interpreted TRITON and FLEX equal the oracle, and all three run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_RANDOM_STEPS = Path(__file__).with_name("routed_steps.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_random_mixed_steps_of_three_backends_equal_the_oracle() -> None:
    # In another process: triton reads the variable when it is imported.
    folders = [str(_RANDOM_STEPS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(_RANDOM_STEPS)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["FLEX", "TORCH", "TRITON"]
