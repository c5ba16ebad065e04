"""The random trials of forests and trees run, go on from their file, and name the first trial that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forest_trials
import pytest

from attnplug.runtime.batch.forest import Forest
from attnplug.runtime.steps import prefix_sharing

ASKED = ["--backend", "TORCH", "--layers", "2", "--forests", "6", "--trees", "3"]


@pytest.mark.slow
def test_trials_pass_and_go_on_from_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trials.json"
    assert forest_trials.main([*ASKED, "--forests", "4", "--json", str(file)]) == 0
    assert forest_trials.main([*ASKED, "--json", str(file)]) == 0
    assert "TORCH: 6 of 6 forests, 2 now" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["forests"]["done"], found["trees"]["done"], found["forests"]["failures"]) == (6, 3, 0)
    assert found["forests"]["shared"] > 0
    with pytest.raises(SystemExit, match="has trials of other versions, layers or seeds"):
        forest_trials.main([*ASKED, "--seed", "1", "--json", str(file)])


@pytest.mark.slow
def test_a_mistake_is_found_and_its_first_trial_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = prefix_sharing.find_forest

    def wrong(table: Any, *given: Any) -> Forest | None:
        """Forgets the last prefix."""
        forest = right(table, *given)
        return None if forest is None else forest._replace(nodes=forest.nodes[:-1])

    monkeypatch.setattr(prefix_sharing, "find_forest", wrong)
    assert forest_trials.main([*ASKED, "--trees", "0"]) == 1
    printed = capsys.readouterr().out
    assert "the first of them, number" in printed
    assert "forests" in printed
    assert "of seed 0, " in printed
    number = printed.partition("of them, number ")[2].partition(":")[0]
    again = [*ASKED, "--only", f"forests:{number}"]
    assert forest_trials.main(again) == 1
    monkeypatch.undo()
    assert forest_trials.main(again) == 0
    assert f"forests:{number} of TORCH is right" in capsys.readouterr().out
