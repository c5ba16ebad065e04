"""GPUs by name: as people write them, as torch prints them, and the names near an unknown one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import Device
from attnplug.core.device import arch_capability, find_gpu, gpu_models, near_gpus, same_gpu_name
from attnplug.errors import SpecError


@pytest.mark.parametrize(
    ("text", "name", "device"),
    [
        ("A100", "A100", "sm80"),
        ("a10", "A10", "sm86"),
        ("H20", "H20", "sm90"),
        ("b300", "B300", "sm103"),
        ("gb200", "GB200", "sm100"),
        ("B100", "B100", "sm100"),
        ("NVIDIA DGX Spark", "GB10", "sm121"),
        ("L40S", "L40S", "sm89"),
        ("rtx 4090", "RTX 4090", "sm89"),
        ("rtx-4090", "RTX 4090", "sm89"),
        ("RTX4090", "RTX 4090", "sm89"),
        ("GeForce_RTX_5090", "RTX 5090", "sm120"),
        ("a6000", "RTX A6000", "sm86"),
        ("h100sxm", "H100", "sm90"),
        ("NVIDIA H100 80GB HBM3", "H100", "sm90"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100", "sm90"),
        ("NVIDIA H100 PCIe", "H100", "sm90"),
        ("NVIDIA H20-3e", "H20", "sm90"),
        ("NVIDIA GH200 144G HBM3e", "GH200", "sm90"),
        ("NVIDIA A100-SXM4-40GB", "A100", "sm80"),
        ("NVIDIA A100 80GB PCIe", "A100", "sm80"),
        ("Tesla V100-SXM2-32GB", "V100", "sm70"),
        ("Tesla T4", "T4", "sm75"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "sm89"),
        ("Quadro RTX 6000", "Quadro RTX 6000", "sm75"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000", "sm120"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090", "sm89"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super", "sm89"),
        ("AMD Instinct MI300X", "MI300X", "rocm:9.4"),
        ("AMD Instinct MI250X/MI250", "MI250X", "rocm:9.0"),
        ("mi355x", "MI355X", "rocm:9.5"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX", "rocm:11.0"),
    ],
)
def test_a_gpu_is_found_as_people_and_torch_write_it(text: str, name: str, device: str) -> None:
    found = find_gpu(text)
    assert found is not None
    assert found.name == name
    assert Device.parse(text) == Device(found.type, found.capability, name)
    assert str(Device.parse(text)) == device


@given(st.data())
def test_case_blanks_and_dashes_of_a_name_do_not_matter(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(gpu_models()))
    case = data.draw(st.sampled_from([str.lower, str.upper, str]))
    assert find_gpu(case(re.sub(" ", lambda _: data.draw(st.sampled_from(["", " ", "-", "_", "  "])), model.name))) == model  # fmt: skip


def test_every_gpu_has_an_architecture_a_vendor_and_memory() -> None:
    for model in gpu_models():
        assert arch_capability(model.arch) == model.capability
        assert (model.vendor, model.type) in {("NVIDIA", "cuda"), ("AMD", "rocm")}
        assert model.memory_gb
        assert list(model.memory_gb) == sorted(set(model.memory_gb))


def test_no_name_is_in_two_architectures() -> None:
    names = [model.name for model in gpu_models()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "near"),
    [("H10", "H100"), ("rtx 4091", "RTX 4090"), ("rtx 6000", "RTX 6000 Ada"), ("mi300", "MI300X")],
)
def test_an_unknown_name_lists_near_ones(text: str, near: str) -> None:
    assert near in near_gpus(text)
    with pytest.raises(SpecError, match=f"device='{text}' is unknown; near names are .*{near}"):
        Device.parse(text)


@given(st.text())
def test_any_text_is_a_gpu_or_none(text: str) -> None:
    find_gpu(text)
    assert len(near_gpus(text)) <= 5


def test_names_of_one_gpu_are_the_same_and_of_two_are_not() -> None:
    assert same_gpu_name("H100", "NVIDIA H100 80GB HBM3")
    assert same_gpu_name("an unknown one", "an unknown one")
    assert not same_gpu_name("H100", "NVIDIA H200")
    assert not same_gpu_name("an unknown one", "another")
