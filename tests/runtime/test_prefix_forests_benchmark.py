"""The benchmark of shared prefixes times what it says, on a CPU with small cells, and goes on from its file."""

from __future__ import annotations

import json
from pathlib import Path

import prefix_forests
import pytest
from prefix_forests import Cell, cascade_step, drawn_step

from attnplug.runtime.steps import prefix_sharing

HEADS = (2, 1, 16)
SHARED = Cell(((512, 12),), (16,) * 12, heads=HEADS)
APART = Cell(((16, 1), (64, 1)), (8, 9), heads=HEADS)


def test_a_batch_that_the_prices_run_plainly_has_the_finding_beside_a_plain_step() -> None:
    found = drawn_step(APART, "cpu", "TORCH", 1)
    assert found["timed"] == "a plain step, and the finding"
    assert found["prices share"] is False
    assert found["note"] == "no blocks are shared"
    assert 0 < found["plain over ruled"] < 1


def test_a_batch_that_the_prices_share_is_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prefix_sharing, "prices_of", lambda *_: prefix_forests.SharingPrices(1e6, 1.0, 1e15, 0.0)
    )
    found = drawn_step(SHARED, "cpu", "TORCH", 1)
    assert found["timed"] == "a plain step, and one by the prices"
    assert found["plain over ruled"] == pytest.approx(found["plain"] / found["ruled"], rel=1e-2)


def test_one_prefix_of_all_requests_is_timed_by_both_kernels() -> None:
    found = cascade_step(SHARED, "cpu", "TORCH", 2)
    assert found["cascade over ruled"] == pytest.approx(found["cascade"] / found["ruled"], rel=1e-2)


def test_a_second_run_goes_on_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefix_forests, "drawn", lambda seed: APART)
    monkeypatch.setattr(prefix_forests, "_finding", lambda: iter(()))
    file = tmp_path / "forests.json"
    asked = ["--device", "cpu", "--backend", "TORCH", "--layers", "1", "--only", "drawn", "--json", str(file)]
    prefix_forests.main([*asked, "--random", "1"])
    before = json.loads(file.read_text())["steps, us of a layer"]
    prefix_forests.main([*asked, "--random", "2"])
    found = json.loads(file.read_text())
    assert set(found["steps, us of a layer"]) == {"drawn 0", "drawn 1"}
    assert found["steps, us of a layer"]["drawn 0"] == before["drawn 0"]
    assert found["drawn"]["batches"] == 2
    assert found["drawn"]["plain, with the finding"]["batches"] == 2
    with pytest.raises(SystemExit, match="another device, backend or version"):
        prefix_forests.main([*asked, "--layers", "2"])
