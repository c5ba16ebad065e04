"""The benchmark of formats in the example engine runs tiny on a CPU: each format has fewer bytes and draws tokens."""

from __future__ import annotations

import json
from pathlib import Path

import format_engine
import pytest


@pytest.mark.slow
def test_each_format_serves_each_load(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"

    found = format_engine.main(["--tiny", "--layers", "1", "--tokens", "6", "--json", str(file)])

    assert json.loads(file.read_text()) == found
    assert [*found["loads"]] == ["4 x 2k", "4 of 100 to 8k"]
    for formats in found["loads"].values():
        assert [*formats] == [*format_engine.FORMATS]
        sizes = {kind: each["bytes of a token"] for kind, each in formats.items()}
        # float32: K and V of two heads of 16 elements.
        assert sizes == {"auto": 256, "fp8_e4m3": 64, "int8_token_head": 80, "nvfp4": 36, "rotated4": 40}
        assert formats["auto"]["equal tokens"]["share before the first other token"] == 1.0
        assert formats["int8_token_head"]["equal tokens"]["share of first tokens"] >= 0.75
