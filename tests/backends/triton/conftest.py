"""Interpreted kernels are slow: checks of many steps or features wait for `pytest -m slow` where there is no GPU."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from attnplug.testing.conformance.cases.case_axes import LATENT

# A declared value has its own case among those of `correct/`; the others run many steps.
_LEFT_OUT = (
    *(
        "builder/",
        "runtime/",
        "merge/context",
        "merge/use_sinks",
        "refused/never-after-acceptance",
        "state/",
        "batch/c",
    ),
    *("tensors/same-each-call", "tensors/refilled", "layers/", "context_parallel/extend"),
    *("tensors/deterministic-long", "correct/round"),
    *(
        "correct/crowd",
        "correct/far-decode",
        "correct/far-extend",
        "correct/far-prompt",
        "correct/farther",
        "correct/longer-prompt",
        "correct/audio",
    ),
    "declared/",
)
_PLAIN = frozenset(("correct/mixed", "h4x2", "d64", "float32", "b16", "NHD"))
_SIZES_OF_A_KIND, _EVERY = 1, 32
_MANY, _EVERY_OF_MANY = ("tensors/", "cache/", "batch/"), 6
# Of the cases of a test in these files, a plain run has the first of three.
_CASES, _EVERY_CASE = (
    (
        *("test_triton_steps.py", "test_triton_shares.py", "test_triton_latent.py", "test_triton_layout.py"),
        *("test_triton_hopper_numbers.py", "test_triton_specialized.py", "test_triton_warm_up.py"),
        "test_triton_opened_numbers.py",
    ),
    3,
)


def _sort_of(check_id: str) -> tuple[str, int]:
    """What a check of numbers is an example of, and how many examples are enough without a GPU."""
    kind = check_id.partition("-")[0]
    if kind.startswith("mla/"):
        # test_triton_latent.py has small ones of each size.
        return kind, int(kind in {f"mla/correct/{shape}" for shape in ("decode", "idle", *LATENT)})
    if kind == "correct/mixed":
        # Mixed batches ask for each feature alone, and for each size in turn.
        asked = sorted({*check_id.split("-")} - _PLAIN)
        return re.sub(r"[0-9.]+", "#", f"{kind}-{'-'.join(asked)}"), _SIZES_OF_A_KIND
    return kind, 1 if kind.startswith("correct/") else 1 << 30


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    found = Counter[str]()
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        if item.path.parent.name != "triton":
            continue
        if item.path.name in _CASES and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            name = f"{item.path.name}::{item.function.__name__}"
            found[name] += 1
            if found[name] % _EVERY_CASE != 1:
                item.add_marker(pytest.mark.slow)
        if check is None:
            continue
        sort, enough = _sort_of(check.id)
        found[sort] += 1
        kept = found[sort] <= enough and not check.id.startswith(_LEFT_OUT)
        if kept and sort.startswith("correct/mixed"):
            # Each takes a third of a second under the interpreter.
            found["mixed"] += 1
            kept = found["mixed"] % _EVERY == 1
        many = next((kind for kind in _MANY if check.id.startswith(kind)), None)
        if many is not None:
            found[many] += 1
            kept = kept and found[many] % _EVERY_OF_MANY == 1
        if not kept:
            item.add_marker(pytest.mark.slow)
