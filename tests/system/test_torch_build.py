"""Whether torch may see a GPU, from its build and the driver, without importing it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnplug.core import device as torch_build
from attnplug.core.device import may_see_gpus


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "sys", SimpleNamespace(modules={}, platform="linux"))


def build(monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any] | None) -> None:
    monkeypatch.setattr(torch_build, "_build", lambda: variables)


def driver(monkeypatch: pytest.MonkeyPatch, cuda: bool, amd: bool) -> None:
    monkeypatch.setattr(torch_build, "_loads", lambda library: cuda)
    monkeypatch.setattr(torch_build, "_AMD_DRIVER", SimpleNamespace(exists=lambda: amd))


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize(
    ("variables", "cuda", "amd", "may"),
    [
        ({"cuda": None, "hip": None, "xpu": None}, True, True, False),
        ({"cuda": "13.0", "hip": None, "xpu": None}, True, False, True),
        ({"cuda": "13.0", "hip": None, "xpu": None}, False, True, False),
        ({"cuda": None, "hip": "7.0", "xpu": None}, False, True, True),
        ({"cuda": None, "hip": "7.0", "xpu": None}, True, False, False),
        ({"cuda": None, "hip": None, "xpu": "20250"}, False, False, True),
        ({"cuda": None}, False, False, True),
        (None, False, False, True),
    ],
)
def test_only_a_certain_absence_is_believed(
    variables: dict[str, Any] | None, cuda: bool, amd: bool, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch, variables)
    driver(monkeypatch, cuda, amd)
    assert may_see_gpus() is may


@pytest.mark.usefixtures("not_imported")
def test_other_systems_ask_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build.sys, "platform", "win32")
    build(monkeypatch, {"cuda": "13.0", "hip": None})
    driver(monkeypatch, cuda=False, amd=False)
    assert may_see_gpus()


def test_an_imported_torch_answers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, {"cuda": None, "hip": None})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # type: ignore[arg-type]
    assert may_see_gpus()


def test_the_build_is_that_of_the_installed_torch() -> None:
    import torch

    variables = torch_build._build()
    assert variables is not None
    assert (variables["cuda"], variables["hip"]) == (torch.version.cuda, torch.version.hip)


_ASKS = """
import sys
from attnplug.core import Device
found = Device.current()
import_needed = "torch" in sys.modules
import torch
Device.current.__func__.__globals__["_gpu_index"].cache_clear()
Device.current.__func__.__globals__["_probe"].cache_clear()
assert Device.current() == found
print(import_needed)
"""


def test_the_answer_equals_that_of_torch() -> None:
    import torch

    done = subprocess.run([sys.executable, "-c", _ASKS], capture_output=True, text=True, check=True)
    if torch.version.cuda is None and torch.version.hip is None:
        assert done.stdout.strip() == "False"


def find_by(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """Make torch be found so; all else is found as it is, since coverage looks modules up while a test runs."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        if name == "torch" and isinstance(found, Exception):
            raise found
        return found if name == "torch" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.parametrize(
    "found", [None, SimpleNamespace(origin=None), ImportError("broken"), ValueError("no spec")]
)
def test_a_torch_that_is_not_found_has_no_build(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find_by(monkeypatch, found)
    assert torch_build._build() is None


@pytest.mark.parametrize("text", [None, "1 / 0", "import no_such_module", "def"])
def test_a_version_file_that_does_not_run_tells_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = tmp_path / "__init__.py"
    find_by(monkeypatch, SimpleNamespace(origin=str(origin)))
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    assert torch_build._build() is None
    (tmp_path / "version.py").write_text("cuda = '13.0'\nhip = None")
    variables = torch_build._build()
    assert variables is not None
    assert (variables["cuda"], variables["hip"]) == ("13.0", None)


@pytest.mark.skipif(sys.platform != "linux", reason="the name of a library of Linux")
def test_a_library_is_found_as_the_dynamic_linker_finds_it() -> None:
    assert torch_build._loads("libc.so.6")
    assert not torch_build._loads("libcuda.so.no-such-version")
