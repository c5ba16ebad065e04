"""Kernels on stand-ins are slow: a plain run has a part of the kit's checks, and CI some more.

A GPU runs all of them on the kernels themselves, and `pytest -m slow` all of them anywhere.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest


class Sample(NamedTuple):
    """What a plain run has: one of `every` numeric cases, and no check whose id begins with one of `left_out`."""

    every: int
    left_out: tuple[str, ...]


_SAMPLES = {
    "test_flash_attn_conformance.py": Sample(
        4,
        (
            *("builder/", "runtime/", "merge/context", "refused/never-after-acceptance", "state/", "batch/c"),
            "declared/",
        ),
    ),
    # Each of these runs many cases or steps; a plain run keeps another of its kind.
    "test_flashinfer_conformance_cpu.py": Sample(
        10,
        (
            *("options/", "refused/never-after-acceptance"),
            *("state/memory", "state/like-layers", "state/dropped-layers"),
            *(f"builder/common-prefix-{name}" for name in ("fp8", "lse", "full", "cap", "chunk")),
        ),
    ),
}
_EVERY_IN_CI = 10
"""Of the numeric cases that a plain run leaves out."""
_IN_CI_ALONE = ("test_flash_attn_2", "test_flash_attn_4")
"""What a plain run has of FLASH_ATTN_3, whose bindings make other calls of the same kinds."""


# TRITON's folder has chosen what is slow before: its hook runs first.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numeric, slow = Counter[str](), Counter[str]()
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        if check is None or "backends" not in item.path.parts:
            continue
        name, sample = item.path.name, _SAMPLES.get(item.path.name)
        is_numeric = check.id.startswith("correct/")
        if sample is not None:
            numeric[name] += is_numeric
            is_sampled_out = is_numeric and numeric[name] % sample.every != 1
            if is_sampled_out or check.id.startswith(sample.left_out):
                item.add_marker(pytest.mark.slow)
            elif item.function.__name__ in _IN_CI_ALONE:
                item.add_marker(pytest.mark.slow)
                continue
        if item.get_closest_marker("slow"):
            # In CI, FLEX and LATENT run whole kits, and FLASHINFER all but numbers: they stand for the others.
            in_ci = check.id == "merge/use_sinks" or item.function.__name__ == "test_fa2"
            if is_numeric:
                slow[name] += 1
                in_ci = slow[name] % _EVERY_IN_CI == 1
            if not in_ci:
                item.add_marker(pytest.mark.rare)
