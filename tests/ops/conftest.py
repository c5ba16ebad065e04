"""Where the kernels of `attnplug.ops.triton` run in these tests."""

from __future__ import annotations

import importlib

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU; the CPU where TRITON_INTERPRET=1 (tests/conftest.py sets it without a GPU)."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


class OnGPU(torch.Tensor):
    """A host tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def on_gpu(device, monkeypatch):
    """`on_gpu(tensor)`: the tensor on a GPU, or under the interpreter one that looks like it."""
    return (lambda tensor: tensor.as_subclass(OnGPU)) if device.type == "cpu" else torch.Tensor.cuda


@pytest.fixture
def launches_of(monkeypatch):
    """`launches_of("kv_write")`: a list that gets the grid of each launch of that module's kernel."""

    def spy(module: str) -> list[tuple[int, ...]]:
        host = importlib.import_module(f"attnplug.ops.triton.{module}")
        grids: list[tuple[int, ...]] = []
        monkeypatch.setattr(host, "_KERNEL", Spy(host._KERNEL, grids))
        if hasattr(host, "_bound"):
            # What was bound before launches the kernel itself.
            host._bound.cache_clear()
        return grids

    return spy


class Spy:
    """A kernel that notes the grid of each launch."""

    def __init__(self, kernel: object, grids: list[tuple[int, ...]]) -> None:
        self.kernel, self.grids = kernel, grids
        self.fn = kernel.fn

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.grids.append(grid)
        return self.kernel[grid]
