"""benchmarks/vllm_step.py: what it makes of a profile, and of a machine without vLLM."""

from __future__ import annotations

import cProfile
import importlib.util
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "vllm_step.py"))
GPU, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def event(name: str, begin: float, end: float, device: Any = GPU) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=begin, end=end))


def test_kernels_that_overlap_keep_the_gpu_busy_once() -> None:
    events = [
        event("attend", 10, 30),
        event("merge", 25, 40),  # launched before the other ends
        event("attend", 60, 80),
        event("inside", 62, 70),
        event("cudaGraphLaunch", 0, 8, CPU),
        event("cudaEventSynchronize", 8, 58, CPU),
        event("cudaMemcpyAsync", 0, 40, CPU),
        event("aten::add", 0, 100, CPU),
        SimpleNamespace(**vars(event("a range", 0, 90)), is_user_annotation=True),
    ]
    found = SCRIPT["profiled"](events, steps=2)
    assert (found["gpu_busy_us"], found["gpu_idle_us"]) == (25, 10)
    assert list(found["kernels"]) == ["attend", "merge", "inside"]
    assert found["kernels"]["attend"] == {"us": 20, "calls": 1}
    assert found["host_waits_us"] == 25
    assert list(found["host_calls"]) == ["cudaEventSynchronize", "cudaMemcpyAsync", "cudaGraphLaunch"]
    figures = {**found, "step_us": 70.0, "fastest_step_us": 65.0, "builders_us": 3.0, "functions": {}}
    _, first, *rest = SCRIPT["lines"]("ATTNPLUG, 64 x 2048", figures, 2, 3)
    assert "gpu busy 25 us, gpu idle 10 us" in first
    assert len(rest) == 5


def test_functions_are_in_order_of_their_own_time() -> None:
    def slow() -> int:
        return sum(number * number for number in range(20_000))

    def outer() -> int:
        return sum(slow() for _ in range(4))

    profile = cProfile.Profile()
    profile.runcall(outer)
    found = SCRIPT["by_own_time"](profile, steps=2)
    named = {name.rpartition(" ")[2]: figures for name, figures in found.items()}
    assert named["slow"]["calls"] == 2
    assert named["outer"]["whole_us"] >= named["slow"]["whole_us"] >= named["slow"]["us"] > 0
    own = [figures["us"] for figures in found.values()]
    assert own == sorted(own, reverse=True)


def test_a_profile_without_kernels_has_figures() -> None:
    found = SCRIPT["profiled"]([], steps=8)
    assert (found["gpu_busy_us"], found["gpu_idle_us"], found["kernels"]) == (0, 0, {})


def test_a_machine_without_vllm_gets_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert SCRIPT["main"](["ATTNPLUG"]) == 2
    assert "vllm_step: vllm is not installed" in capsys.readouterr().err
