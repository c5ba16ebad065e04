"""Wrong page tables of sparse layers with latents: the kit fails them and names the mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.core import Device, Selection
from attnplug.mla import selected
from attnplug.ops.selection import table_of_tokens
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.target import Target

TARGET = Target(TorchMLABackend, Device("cpu"))
RIGHT = table_of_tokens


def cases() -> dict[str, Case]:
    found = designed_cases(TARGET)
    return {
        case.shape: case
        for case in found
        if case.id.endswith("h4x1-d80-v64-float32-b16-NHD-token_topk_24-lse")
    }


def shifted(by: int) -> Callable[..., None]:
    """Chosen positions that are each `by` later, where the query sees that key."""

    def fill(chosen: Selection, *given: Any) -> None:
        kept = torch.arange(chosen.positions.shape[1]) < chosen.counts[:, None]
        RIGHT(Selection((chosen.positions + by).where(kept, -1), chosen.counts), *given)

    return fill


def as_slots(chosen: Selection, *given: Any) -> None:
    """Chosen positions taken as slots of the cache."""
    RIGHT(chosen, *given)
    table, counts, _ = given[-3:]
    seen = torch.arange(table.shape[1]) < counts[:, None]
    columns = min(table.shape[1], chosen.positions.shape[1])
    table[:, :columns] = chosen.positions[: len(table), :columns].clamp(min=0)
    table.masked_fill_(~seen, 0)


def last_keys(chosen: Selection, *given: Any) -> None:
    """The last keys of a query, as many as it may choose."""
    sparse, starts, lens, *_ = given
    rows = torch.arange(len(chosen.counts))
    owners = torch.searchsorted(starts[1:].long(), rows, right=True).clamp(max=len(lens) - 1)
    ends = lens[owners] - starts[owners + 1] + rows + 1
    positions = ends[:, None].int() - 1 - torch.arange(chosen.positions.shape[1]).int()
    counts = ends.clamp(0, sparse.topk).int()
    kept = torch.arange(chosen.positions.shape[1]) < counts[:, None]
    RIGHT(Selection(positions.where(kept, -1).int(), counts), *given)


@pytest.mark.parametrize(
    ("fill", "named"),
    [
        (shifted(1), "selection one position late"),
        (shifted(-1), "selection one position early"),
        (as_slots, "positions of the selection taken as slots"),
        (last_keys, "selection taken as the last keys"),
    ],
    ids=["late", "early", "slots", "last"],
)
@pytest.mark.parametrize("shape", ["decode", "unequal", "context"])
def test_a_wrong_table_is_named(
    fill: Callable[..., None], named: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases()[shape]
    check_case(TARGET, case)
    monkeypatch.setattr(selected, "table_of_tokens", fill)
    with pytest.raises(ConformanceError) as raised:
        check_case(TARGET, case)
    assert named in str(raised.value)
