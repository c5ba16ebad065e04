"""Devices: named without asking them, or asked of torch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import Device
from attnplug.core import device as device_module
from attnplug.errors import SpecError

capabilities = st.tuples(st.integers(0, 12), st.integers(0, 9))
devices = st.builds(
    Device,
    st.sampled_from(["cpu", "cuda", "rocm", "xpu", "mps", "newcomer_1"]),
    st.none() | capabilities,
    st.none() | st.text(),
)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu")),
        ("cuda", Device("cuda")),
        ("sm90", Device("cuda", (9, 0))),
        ("sm_90a", Device("cuda", (9, 0))),
        ("SM100", Device("cuda", (10, 0))),
        ("sm121", Device("cuda", (12, 1))),
        ("cuda:9.0", Device("cuda", (9, 0))),
        ("rocm:9.4", Device("rocm", (9, 4))),
        (" CPU ", Device("cpu")),
        ("mps", Device("mps")),
        ("xpu:1.2", Device("xpu", (1, 2))),
        ("gfx90a", Device("rocm", (9, 0))),
        ("h100", Device("cuda", (9, 0), "H100")),
        ("mi300x", Device("rocm", (9, 4), "MI300X")),
    ],
)
def test_a_device_is_read_from_text(text: str, device: Device) -> None:
    assert Device.parse(text) == device


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:0", "cuda:9", "cpu:1.0", "sm9", "sm9000", "sm90 x", "9", "9."]
)
def test_other_text_is_no_device_and_the_error_shows_the_forms(text: str) -> None:
    with pytest.raises(
        SpecError, match=r"'cpu', 'H100', 'sm90', 'cuda:9\.0', 'rocm:9\.4' or 'current'"
    ) as caught:
        Device.parse(text)
    assert (caught.value.field, caught.value.value) == ("device", text)


def test_only_text_is_read() -> None:
    with pytest.raises(SpecError, match="must be text"):
        Device.parse(torch.device("cpu"))  # type: ignore[arg-type]


@given(st.sampled_from(["cuda", "rocm", "xpu"]), capabilities)
def test_a_device_prints_as_text_that_reads_back(kind: str, capability: tuple[int, int]) -> None:
    device = Device(kind, capability)
    assert Device.parse(str(device)) == device
    assert Device.parse(str(Device(kind))) == Device(kind)


def test_a_device_prints_short() -> None:
    assert [str(Device("cpu")), str(Device("cuda", (9, 0))), str(Device("rocm", (9, 4)))] == [
        "cpu",
        "sm90",
        "rocm:9.4",
    ]


@pytest.mark.parametrize("kind", ["", "CUDA", "cuda:0", "9", None, torch.device("cpu")])
def test_a_device_type_is_a_lower_case_word(kind: str) -> None:
    with pytest.raises(SpecError, match=r"device\.type=.*lower case"):
        Device(kind)


@pytest.mark.parametrize(
    "capability", [(9,), (9, 0, 1), (9.0, 0), ("9", "0"), "90", 9.0, 90, (-1, 0), (True, 0)]
)
def test_a_capability_is_major_and_minor(capability: tuple[int, int]) -> None:
    with pytest.raises(SpecError, match=r"device\.capability=.*must be \(major, minor\)"):
        Device("cuda", capability)


def test_a_name_is_text() -> None:
    with pytest.raises(SpecError, match=r"device\.name=90 must be text"):
        Device("cuda", None, 90)  # type: ignore[arg-type]


def test_a_capability_becomes_a_tuple_and_the_device_hashable() -> None:
    device = Device("cuda", [9, 0])  # type: ignore[arg-type]
    assert device.capability == (9, 0)
    assert {device: 1}[Device("cuda", (9, 0))] == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Device("cpu"), Device("cpu"), True),
        (Device("cpu"), Device("cuda"), False),
        (Device("cuda"), Device("cuda", (9, 0), "NVIDIA H200"), True),
        (Device("cuda", (9, 0)), Device("cuda", (9, 0), "NVIDIA H200"), True),
        (Device("cuda", (8, 0)), Device("cuda", (9, 0)), False),
        (Device("cuda", (9, 0)), Device("rocm", (9, 0)), False),
        (Device("cuda", (9, 0), "NVIDIA H100"), Device("cuda", (9, 0), "NVIDIA H200"), False),
        (Device("cuda", None, "NVIDIA H200"), Device("cuda", (9, 0), "NVIDIA H200"), True),
        (Device("cuda", (9, 0), "H100"), Device("cuda", (9, 0), "NVIDIA H100 80GB HBM3"), True),
        (Device("cuda", (9, 0), "H100"), Device("cuda", (9, 0), "NVIDIA H200"), False),
    ],
)
def test_devices_match_where_nothing_that_is_stated_differs(one: Device, other: Device, same: bool) -> None:
    assert one.matches(other) is same
    assert other.matches(one) is same


@given(devices, devices)
def test_matching_is_symmetric_and_holds_for_itself(one: Device, other: Device) -> None:
    assert one.matches(one)
    assert one.matches(other) is other.matches(one)


@given(devices)
def test_a_device_survives_json_and_pickle(device: Device) -> None:
    assert Device.from_dict(json.loads(json.dumps(device.to_dict()))) == device
    assert pickle.loads(pickle.dumps(device)) == device


def test_a_dict_of_a_device_may_name_the_type_alone() -> None:
    assert Device.from_dict({"type": "cuda"}) == Device("cuda")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"capability": [9, 0]}, "device.type=None is required"),
        (
            {"type": "cuda", "index": 0},
            "index=0 is not a field of a Device; fields are type, capability, name",
        ),
        ({"type": "cuda", "capability": [9]}, "must be (major, minor)"),
        ({"type": "cuda", "capability": []}, "must be (major, minor)"),
        ({"type": "cuda", "capability": [9, 0, 1]}, "must be (major, minor)"),
    ],
)
def test_a_dict_that_is_no_device_is_refused(data: dict[str, object], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Device.from_dict(data)
    assert text in str(caught.value)


class TestCurrent:
    @pytest.fixture(autouse=True)
    def forget_the_real_device(self) -> Iterator[None]:
        asked_once = (device_module._gpu_index, device_module._probe)
        for answer in asked_once:
            answer.cache_clear()
        yield
        for answer in asked_once:
            answer.cache_clear()

    @pytest.fixture
    def two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
        monkeypatch.setattr(torch.version, "hip", None)

    @pytest.fixture
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: False))

    def test_without_a_gpu_it_is_the_cpu(self, no_gpu: None) -> None:
        assert Device.current() == Device("cpu")
        assert Device.parse("current") == Device.current()

    def test_a_torch_that_knows_no_xpu_will_do(self, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch, "xpu")
        assert Device.current() == Device("cpu")

    def test_it_is_the_gpu_that_is_current(self, two_gpus: None) -> None:
        assert Device.current() == Device("cuda", (9, 0), "GPU 1")

    def test_the_only_gpu_is_current_without_asking(
        self, two_gpus: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.delattr(torch.cuda, "current_device")
        assert Device.current() == Device("cuda", (9, 0), "GPU 0")

    def test_a_gpu_is_known_by_its_number(self, two_gpus: None) -> None:
        assert Device.current(1).name == "GPU 1"
        with pytest.raises(SpecError, match=r"device\.index=2 must be below 2"):
            Device.current(2)

    def test_a_rocm_build_of_torch_has_rocm_devices(
        self, two_gpus: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert Device.current().type == "rocm"

    def test_an_xpu_is_found(self, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            torch, "xpu", SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "Arc")
        )
        assert Device.current() == Device("xpu", None, "Arc")
