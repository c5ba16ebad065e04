"""Which device a caller means."""

from __future__ import annotations

import types

import pytest
from fake_plugins import CPU, H100

from attnplug import Device
from attnplug.errors import SpecError
from attnplug.registry.devices import is_here, resolve_device


def on(monkeypatch: pytest.MonkeyPatch, current: Device) -> None:
    monkeypatch.setattr("attnplug.core.device.Device.current", classmethod(lambda cls: current))


@pytest.mark.parametrize("current", [CPU, H100])
def test_nothing_and_current_mean_the_current_device(
    current: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, current)
    assert resolve_device(None) == current
    assert resolve_device("current") == current


@pytest.mark.parametrize(("text", "device"), [("cpu", CPU), ("sm90", H100), ("cuda:9.0", H100)])
def test_text_is_read(text: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, CPU)
    assert resolve_device(text) == device


def test_a_device_is_itself() -> None:
    assert resolve_device(H100) is H100
    assert resolve_device(CPU) is CPU


def test_a_torch_device_is_known_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H100)
    assert resolve_device(types.SimpleNamespace(type="cpu")) == CPU  # type: ignore[arg-type]
    assert resolve_device(types.SimpleNamespace(type="cuda")) == H100  # type: ignore[arg-type]


def test_a_real_torch_device_is_taken() -> None:
    torch = pytest.importorskip("torch")
    assert resolve_device(torch.device("cpu")) == CPU
    assert resolve_device(torch.device("cpu:0")) == CPU


@pytest.mark.parametrize("form", ["text", "torch"])
def test_a_numbered_gpu_is_that_one_not_the_current_one(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    asked: list[int | None] = []

    def current(index: int | None = None) -> Device:
        asked.append(index)
        return H100

    monkeypatch.setattr(Device, "current", staticmethod(current))
    assert resolve_device("cuda:1" if form == "text" else torch.device("cuda", 1)) == H100
    assert asked == [1]


def test_a_gpu_that_is_not_here_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"device\.index=99 (must be below|needs a GPU here; name the GPU)"):
        resolve_device("cuda:99")


@pytest.mark.parametrize("device", ["cuda", Device("cuda")])
def test_a_gpu_without_a_capability_is_the_current_one_where_there_is_one(
    device: Device | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, H100)
    assert resolve_device(device) == H100
    on(monkeypatch, CPU)
    assert resolve_device(device) == Device("cuda")
    on(monkeypatch, Device("rocm", (9, 4)))
    assert resolve_device(device) == Device("cuda")


@pytest.mark.parametrize("device", [3, 3.5, ("cuda", (9, 0)), types.SimpleNamespace(type=3)])
def test_anything_else_is_no_device(device: object) -> None:
    with pytest.raises(SpecError, match=r"must be a Device, text, a torch\.device or None"):
        resolve_device(device)  # type: ignore[arg-type]


def test_text_that_names_no_device_is_an_error() -> None:
    with pytest.raises(SpecError, match="device='gpus' is unknown"):
        resolve_device("gpus")


def test_a_device_is_here_where_the_current_one_can_be_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H100)
    assert is_here(CPU)
    assert is_here(H100)
    assert not is_here(Device("cuda", (8, 0)))
    assert not is_here(Device("rocm", (9, 4)))
