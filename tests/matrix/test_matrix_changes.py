"""What changed between two matrices, and which changes are losses."""

from __future__ import annotations

import pytest
from synthetic_matrix import finding, run

from attnplug.matrix.merging import ChangeKind, changes
from attnplug.matrix.model import Matrix, Status

NOWHERE = None
LOSSES = {ChangeKind.REFUTED, ChangeKind.WITHDRAWN, ChangeKind.VANISHED}


def between(old, new) -> list:
    return changes(*(Matrix((run(*([] if status is None else [finding(status)])),)) for status in (old, new)))


@pytest.mark.parametrize("status", Status)
def test_what_is_as_it_was_is_no_change(status):
    assert between(status, status) == []


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (Status.VERIFIED, Status.REFUTED, ChangeKind.REFUTED),
        (Status.DECLARED, Status.REFUTED, ChangeKind.REFUTED),
        (Status.NOT_RUN, Status.REFUTED, ChangeKind.REFUTED),
        (Status.REFUSED, Status.REFUTED, ChangeKind.REFUTED),
        (NOWHERE, Status.REFUTED, ChangeKind.REFUTED),
        (Status.VERIFIED, Status.REFUSED, ChangeKind.WITHDRAWN),
        (Status.DECLARED, Status.REFUSED, ChangeKind.WITHDRAWN),
        (Status.NOT_RUN, Status.UNCLAIMED, ChangeKind.WITHDRAWN),
        (Status.REFUTED, Status.REFUSED, ChangeKind.WITHDRAWN),
        (Status.VERIFIED, NOWHERE, ChangeKind.VANISHED),
        (Status.DECLARED, NOWHERE, ChangeKind.VANISHED),
        (Status.VERIFIED, Status.NOT_RUN, ChangeKind.UNKNOWN),
        (Status.VERIFIED, Status.DECLARED, ChangeKind.UNKNOWN),
        (Status.REFUTED, Status.NOT_RUN, ChangeKind.UNKNOWN),
        (Status.REFUTED, Status.VERIFIED, ChangeKind.VERIFIED),
        (Status.NOT_RUN, Status.VERIFIED, ChangeKind.VERIFIED),
        (Status.REFUSED, Status.VERIFIED, ChangeKind.CLAIMED),
        (Status.UNCLAIMED, Status.DECLARED, ChangeKind.CLAIMED),
        (NOWHERE, Status.VERIFIED, ChangeKind.ADDED),
        (NOWHERE, Status.REFUSED, ChangeKind.ADDED),
        (Status.REFUSED, NOWHERE, ChangeKind.DROPPED),
        (Status.UNCLAIMED, NOWHERE, ChangeKind.DROPPED),
    ],
)
def test_a_change_has_a_name_and_may_be_a_loss(old, new, kind):
    (change,) = between(old, new)
    assert (change.kind, change.old, change.new) == (kind, old, new)
    assert change.kind.is_loss is (kind in LOSSES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Status.DECLARED, Status.NOT_RUN),
        (Status.NOT_RUN, Status.DECLARED),
        (Status.REFUSED, Status.UNCLAIMED),
        (Status.UNCLAIMED, Status.REFUSED),
    ],
)
def test_what_nobody_relied_on_may_change_without_a_word(old, new):
    assert between(old, new) == []


def test_other_reasons_are_told():
    old, new = (Matrix((run(finding(Status.REFUSED, why)),)) for why in ("no", "not yet"))
    (change,) = changes(old, new)
    assert str(change) == (
        "TORCH on cpu: plain/prefill/d128/bfloat16/auto/b16/NHD other reasons (was refused): not yet"
    )


def test_a_whole_run_that_is_missing_vanishes_cell_by_cell():
    old = Matrix(
        (run(finding(Status.VERIFIED), finding(Status.REFUSED, "no", head_size=64)), run(device="sm90"))
    )
    found = changes(old, Matrix((run(device="sm90"),)))
    assert [(each.kind, each.backend, each.device) for each in found] == [
        (ChangeKind.VANISHED, "TORCH", "cpu"),
        (ChangeKind.DROPPED, "TORCH", "cpu"),
    ]
    assert str(found[0]) == "TORCH on cpu: plain/prefill/d128/bfloat16/auto/b16/NHD vanished"


def test_the_gravest_changes_come_first_with_their_evidence():
    old = Matrix((run(finding(Status.REFUSED), finding(Status.VERIFIED, head_size=64)),))
    new = Matrix((run(finding(Status.DECLARED), finding(Status.REFUTED, "window off by one", head_size=64)),))
    found = changes(old, new)
    assert [each.kind for each in found] == [ChangeKind.REFUTED, ChangeKind.CLAIMED]
    assert str(found[0]).endswith("/d64/bfloat16/auto/b16/NHD now refuted (was verified): window off by one")
