"""Runs the program in this process, as a shell would."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnplug.cli import main
from attnplug.registry import default

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


@pytest.fixture
def few_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B with 4 heads of 64: Triton's interpreter takes a third of a second for a step, and not a second and a half."""
    config = json.loads((MODELS / "qwen3-8b.json").read_text())
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(config))
    return path


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """`run("list", "--json")` gives exit code, standard output and standard error, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(default, "_registry", None)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["attnplug", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return call
