"""What the tests of the decode loop in registers ask of it, emulated on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug.backends.triton import TritonBackend, bindings
from attnplug.core import LayerSpec
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8_token_head", "nvfp4", "rotated4")
LIMITS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 100},
    "sinks": {"has_sinks": True, "needs_lse": True},
    "cap": {"logits_soft_cap": 20.0},
    "chunk": {"chunk_size": 96},
    "sides": {"window": (70, 5), "causal": False},
}


def kept_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What BoundLayer asks for, from now on; None where another loop serves."""
    found: list[Any] = []
    asked = bindings.register_launch

    def kept(*arguments: Any) -> Any:
        found.append(asked(*arguments))
        return found[-1]

    monkeypatch.setattr(bindings, "register_launch", kept)
    return found


def check(
    name: str,
    heads: tuple[int, int, int],
    lens: tuple[list[int], list[int]],
    launches: list[Any],
    *,
    device: str = "cpu",
    runs: int = 1,
    times: float = 1.0,
    **fields: Any,
) -> None:
    """Attend a step `runs` times, with queries `times` as large; each is right, and the loop in registers serves it."""
    drawn = {key: fields.pop(key) for key in ("block_size", "layout", "numbers") if key in fields}
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_size"), heads, strict=True))
    spec = LayerSpec(**{"dtype": "bfloat16", "kv_cache_dtype": name, **sizes, **fields})
    batch = paged_batch(spec, *lens, device=device, backend=TritonBackend, padding=2, **drawn)
    for queries in (batch.query, *batch.queries):
        queries *= times
    for _ in range(runs):
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert launches
    assert None not in launches
