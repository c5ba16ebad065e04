"""The message that ranks send about a step: of fixed size, whatever the text of an error is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.runtime.ranks import rank_groups


@given(st.text(st.characters(), max_size=700), st.integers(0, 2**63))
def test_a_report_keeps_its_step_and_the_beginning_of_its_error(error: str, step: int) -> None:
    sent = rank_groups._Report(step, "a" * 64, error)
    message = sent.to_tensor()
    assert message.shape == (rank_groups._BYTES,)
    found = rank_groups._Report.from_tensor(message)
    assert (found.step, found.digest) == (step, "a" * 64)
    assert error.startswith(found.error)
    assert found.error or not error


@pytest.mark.parametrize("letter", ["x", "ü", "\n", "\U0001f600", "\udcff"])
def test_an_error_in_any_script_arrives(letter: str) -> None:
    sent = rank_groups._Report(3, "a" * 64, letter * 1000)
    assert len(rank_groups._Report.from_tensor(sent.to_tensor()).error) >= 20
