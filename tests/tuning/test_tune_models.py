"""What benchmarks/tune_models.py makes of one measurement: the table, the steps held back, and two runs compared."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "registry"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tune_models
from fake_plugins import CPU, SPEC, backend, registry

from attnplug.registry.evidence import Subject
from attnplug.registry.tuned import Row, TunedLayer, TunedTable
from attnplug.tuning.workloads import workload_of

TABLE, HELD = workload_of("decode 8 x 1k, decode 1 x 8k"), workload_of("decode 4 x 2k")
FAKES = [backend(name, priority) for name, priority in (("A", 90), ("B", 50))]


def measured(**times: float) -> TunedTable:
    """A table of every step, in which each backend takes equally long at all of them."""
    rows = tuple(
        Row(Subject(name, None, None, CPU, ()), shape, (16, "NHD"), us=us, rounds=5, date="2026-11-22")
        for name, us in times.items()
        for shape, _ in (*TABLE, *HELD)
    )
    return TunedTable(CPU, (TunedLayer(SPEC, 1, (*TABLE, *HELD), rows),))


def test_a_part_has_its_own_steps_and_weights_only() -> None:
    part = tune_models.part_of(measured(A=10.0, B=20.0), HELD)
    assert part.layers[0].workload == HELD
    assert [(row.subject.backend, str(row.shape)) for row in part.layers[0].rows] == [
        ("A", "decode 4 x 2k"),
        ("B", "decode 4 x 2k"),
    ]
    assert tune_models.part_of(part, TABLE).layers == ()


@pytest.mark.parametrize(
    ("second", "alike", "gap"),
    [
        ({"A": 11.0, "B": 9.0}, True, 0.2222),
        ({"A": 10.0, "B": 9.9}, False, 0.0101),
        ({"A": 10.0}, False, 0.0),
    ],
)
def test_two_runs_are_compared_cell_by_cell(second: dict[str, float], alike: bool, gap: float) -> None:
    first = measured(A=11.0, B=9.0)
    found: Any = tune_models.agreement(registry(*FAKES), first, measured(**second), None)
    # All three steps are in both tables.
    assert found[0] == [alike] * 3
    assert found[1] == [pytest.approx(gap, abs=1e-4)] * 3
    other = dataclasses.replace(first, layers=())
    assert tune_models.agreement(registry(*FAKES), first, other, None) == ([], [])


def test_the_default_lists_are_workloads_with_no_step_in_common() -> None:
    table, held = workload_of(tune_models.TABLE), workload_of(tune_models.HELD)
    assert not {shape for shape, _ in table} & {shape for shape, _ in held}
    kinds = tune_models.layers_of_models(tune_models.SIX.split(","))
    assert len(kinds) * len(held) >= 60
