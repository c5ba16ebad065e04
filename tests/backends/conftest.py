"""Of the many numeric cases on stand-ins and interpreted kernels, CI runs every third that a plain run leaves out.

A GPU runs all of them on the kernels themselves, and `pytest -m slow` all of them anywhere.
"""

from __future__ import annotations

from collections import Counter

import pytest

_EVERY = 3


# The folders below have chosen what is slow before: their hooks run first.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = Counter[str]()
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        if check is None or "backends" not in item.path.parts or not item.get_closest_marker("slow"):
            continue
        if check.id.startswith(("correct/", "mla/correct")):
            found[item.path.name] += 1
            if found[item.path.name] % _EVERY != 1:
                item.add_marker(pytest.mark.rare)
