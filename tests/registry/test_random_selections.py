"""Random specs, devices and policies: only documented errors, and one answer under every hash seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attnplug
from attnplug.core import LayerSpec
from attnplug.core.state.dims import StateDims

pytestmark = pytest.mark.attack("declarations")

SCRIPT = Path(__file__).with_name("random_selections.py")


def answers(seed: int, count: int, hash_seed: int) -> str:
    """The digest of all answers, and the number of errors among them."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, str(SCRIPT), str(seed), str(count)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    digest, errors = ran.stdout.split()
    assert 0 < int(errors) < count
    return digest


def check(count: int, hash_seeds: int = 3) -> None:
    assert len({answers(1, count, hash_seed) for hash_seed in range(hash_seeds)}) == 1


def test_random_selections_have_one_answer_or_a_documented_error() -> None:
    check(80, hash_seeds=2)


@pytest.mark.slow
@pytest.mark.rare
def test_ten_thousand_random_selections() -> None:
    check(10_000)


def test_no_backend_fails_on_a_layer_of_odd_sizes() -> None:
    draw, sizes = random.Random(2), [1, 3, 8, 16, 24, 64, 72, 100, 128, 200, 256, 512]
    for _ in range(60):
        kind: dict[str, Any] = {"window": draw.choice([(-1, 0), (0, 0), (4096, 0)])}
        if draw.random() < 0.5:
            kind = {"state": StateDims(rule="linear", decay=draw.choice(["head", "row"]))}
        spec = LayerSpec(
            num_heads=4,
            num_kv_heads=draw.choice([1, 2, 4]),
            head_size=draw.choice(sizes),
            head_size_v=draw.choice(sizes),
            dtype=draw.choice(["float32", "bfloat16"]),
            block_size=draw.choice([None, 1, 17, 256]),
            **kind,
        )
        for device in ("cpu", "sm90", "sm100"):
            for candidate in attnplug.explain(spec, device, assume_installed="all").candidates:
                assert "raised" not in str([str(reason) for reason in candidate.reasons]), spec
