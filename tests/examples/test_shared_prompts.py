"""The benchmark of shared prompts and drafts runs tiny on a CPU, and its requests draw the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import shared_prompts


@pytest.mark.slow
def test_each_load_draws_the_tokens_of_plain_steps(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"

    found = shared_prompts.main(["--tiny", "--layers", "1", "--tokens", "10", "--json", str(file)])

    assert json.loads(file.read_text()) == found
    assert {"device", "versions", "date"} <= set(found)
    prompts, rollouts, others, drafts = (
        each for each in found.values() if isinstance(each, dict) and "of" in each
    )
    assert prompts["requests with equal tokens"] == prompts["of"] == 128
    assert "8 shared prefixes with 128 readers" in prompts["shared"]["notes"][0]
    for each in (rollouts, others):
        assert "2 shared prefixes with 32 readers" in each["shared"]["notes"][0]
    assert set(drafts["requests equal to no drafts"].values()) == {16}
    assert drafts["tree of 3 x 4"]["tokens a step of a request"] > 1
