"""Interpreted kernels are slow: checks of many steps or features wait for `pytest -m slow` where there is no GPU."""

from __future__ import annotations

import pytest
import torch

_MANY_STEPS = ("builder/", "runtime/", "merge/context", "refused/never-after-acceptance", "state/", "batch/c")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    kept = set()
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        if item.path.parent.name != "triton" or check is None:
            continue
        if check.id.startswith("mla/"):
            # One case of each kind of batch; test_triton_latent.py has small ones of each size.
            shape = "-".join(check.id.split("-")[:2])
            if shape in kept or not shape.startswith("mla/correct/latent"):
                item.add_marker(pytest.mark.slow)
            kept.add(shape)
            continue
        # Mixed batches ask for each feature alone; of every other kind of batch one case is enough here.
        kind = check.id.partition("-")[0]
        again = kind.startswith("correct/") and kind != "correct/mixed" and kind in kept
        kept.add(kind)
        if again or check.id.startswith(_MANY_STEPS):
            item.add_marker(pytest.mark.slow)
