"""The engines of the guides take the size of a block from the plan."""

from __future__ import annotations

from typing import Any

import pytest
from fences import fences

import attnplug

FULL = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
LAYERS = {"layers.0": FULL.replace(sliding_window=32), "layers.1": FULL}


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The model and the engine of the page, by name."""
    names: dict[str, Any] = {"layers": LAYERS, "attnplug": attnplug}
    for fence in fences("guides/engine-with-runtime.md"):
        if fence.language == "python" and "Engine" not in names:
            exec(fence.code, names)
    return names


def test_blocks_of_any_size_give_the_same_tokens(guide: dict[str, Any]) -> None:
    found = []
    for size in (4, 16, 64):
        layers = {name: spec.replace(block_size=size) for name, spec in LAYERS.items()}
        engine = guide["Engine"](attnplug.plan(layers, "cpu", num_blocks=64))
        engine.add("first", range(70))
        for counts in (70, 1, 1):
            engine.step({"first": counts})
        engine.add("shared", range(70), prefix_of="first", num_shared=64)
        for counts in (6, 1, 1):
            engine.step({"shared": counts})
        found.append((engine.tokens["first"], engine.tokens["shared"]))
    assert len(found[0][0]) == 73
    assert all(first == shared == found[0][0] for first, shared in found)
