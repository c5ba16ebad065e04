"""Random plans and steps against the oracle; `python tests/runtime/random_plans.py` runs any number of them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import random_plans
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def expect_right(found: random_plans.Found, plans: int) -> None:
    assert found.wrong == {}
    assert found.plans >= plans
    assert found.outputs > 3 * plans


def test_layers_of_every_kind_in_random_plans_and_steps() -> None:
    expect_right(random_plans.run(range(22), "TORCH"), 15)


@needs_triton
def test_a_few_random_plans_on_triton() -> None:
    expect_right(random_plans.run(range(1), "TRITON"), 1)


@needs_triton
@pytest.mark.slow
def test_more_random_plans_on_triton() -> None:
    expect_right(random_plans.run(range(1, 4), "TRITON"), 2)


@pytest.mark.slow
def test_many_random_plans() -> None:
    found = random_plans.run(range(1000, 1250), "TORCH")
    expect_right(found, 180)
    assert set(found.layers) == set(random_plans.KINDS)


@pytest.mark.gpu
def test_random_plans_beside_graphs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found = random_plans.run(range(300), "TRITON", "cuda", graphs=True)
    expect_right(found, 250)
    assert found.graphs > 50
