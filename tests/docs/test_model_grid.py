"""The picture of models and GPUs shows what the selector answers today."""

from __future__ import annotations

import re
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest
from fences import DOCS, ROOT
from scripts import load_script
from workplace import run_python

from attnplug import Device


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(DOCS / "model_grid.py")


def words(svg: str) -> list[str]:
    """The texts of a picture, in order."""
    return [each.text or "" for each in ET.fromstring(svg) if each.tag.endswith("}text")]


def test_both_pictures_are_those_that_the_script_draws() -> None:
    run_python(str(DOCS / "model_grid.py"), "--check")


def test_a_picture_that_is_not_there_is_stale(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "ASSETS", ROOT / "docs" / "nowhere")
    monkeypatch.setattr(script, "rows", list)
    assert script.main(["--check"]) == 1
    assert (
        "docs/nowhere/model-grid-dark.svg is stale; run: python docs/model_grid.py" in capsys.readouterr().out
    )


def test_a_cell_names_one_backend_or_that_of_each_phase(script: ModuleType) -> None:
    served = (("TRITON", "TRITON"), ("FLASH_ATTN_4", "FLASHINFER"), ("none", "none"))
    shown = words(script.picture([script.Row("a <model>", served)], "light"))
    start = shown.index("a <model>")
    assert shown[start + 1 : start + 5] == ["Triton", "FA4", "FI", "none"]
    # The legend has the backends of the picture, and no others.
    assert {"R = TRITON", "4 = FLASH_ATTN_4", "F = FLASHINFER"} <= set(shown)
    assert "T = TORCH" not in shown


def test_layers_with_other_answers_have_a_row_of_their_own(script: ModuleType) -> None:
    names = [row.name for row in script.rows()]
    models = {path.stem for path in (ROOT / "examples" / "models").glob("*.json")}
    assert {name.partition(" (")[0] for name in names} == models
    assert len(set(names)) == len(names) > len(models)


def test_every_backend_and_gpu_is_named(script: ModuleType) -> None:
    text = (DOCS / "assets" / "model-grid-light.svg").read_text()
    shown = words(text)
    for gpu in script.GPUS:
        assert shown[shown.index(gpu) + 1] == str(Device.parse(gpu))
    left = [float(x) for x in re.findall(r'<rect x="(\d+)"', text)]
    width = float(re.findall(r'viewBox="0 0 (\d+)', text)[0])
    assert max(left) < width
