"""Each argument of each public function that runs steps, replaced by values of wrong types, sizes, dtypes and devices."""

from __future__ import annotations

import pytest
from public_calls import ALL
from wrong_arguments import check_refusals

pytestmark = pytest.mark.attack("arguments")

CALLS = {f"{part}.{name}": call for part, calls in ALL.items() for name, call in calls.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    check_refusals(name, CALLS[name])


def test_the_calls_themselves_are_right() -> None:
    for name, (function, make) in CALLS.items():
        if not name.endswith(("context_parallel", "check_same_plan", "RankWatch")):
            function(**make())
