"""Of the many wrong backends, and of what the kit asks right ones, a plain run has every tenth test, and CI three of ten."""

from __future__ import annotations

from collections import Counter

import pytest

_EVERY, _EVERY_IN_CI = 10, 5
_SAMPLED = (
    *("test_composite_conformance", "test_declared_nothing", "test_known_mistakes", "test_mutants_numeric"),
    *("test_mutants_structural", "test_right_state", "test_right_variants", "test_wrong_builders"),
    *("test_wrong_build_keys", "test_wrong_conventions", "test_wrong_narrow", "test_wrong_numbers"),
    "test_wrong_structure",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = Counter[str]()
    for item in items:
        is_one_of_many = item.path.stem in _SAMPLED and hasattr(item, "callspec")
        if not is_one_of_many or item.path.parent.name != "testing" or item.get_closest_marker("slow"):
            continue
        found[item.path.stem] += 1
        if found[item.path.stem] % _EVERY != 1:
            item.add_marker(pytest.mark.slow)
            if found[item.path.stem] % _EVERY_IN_CI:
                item.add_marker(pytest.mark.rare)
