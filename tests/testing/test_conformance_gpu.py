"""On a GPU: what declares step_safe or a CUDA-graph level is held to it, and those who lie are caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from capturable import (
    Capturable,
    CapturableBuilder,
    CapturableImpl,
    CapturableMetadata,
    KeepsLengths,
    lying,
)
from catching import failures, variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.testing.conformance.builders import builder_inputs, builders
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.numbers import merging
from attnplug.testing.conformance.serving import gpu, runtimes

pytestmark = pytest.mark.gpu

GROUPS = (
    builders.checks,
    builder_inputs.checks,
    builders.isolation_checks,
    merging.checks,
    runtimes.checks,
    gpu.checks,
    gpu.graph_checks,
)


class WaitingBuilder(CapturableBuilder):
    """Copies the lengths to the host."""

    def build(self, *given: Any, **asked: Any) -> CapturableMetadata:
        made = super().build(*given, **asked)
        made.common.seq_lens.cpu()
        return made


class WaitingImpl(CapturableImpl):
    """Waits for its own result, out of torch's sight."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        output = super().attend(*given, **asked)
        torch.cuda.synchronize()
        return output


class GrowingBuilder(CapturableBuilder):
    """Makes a mask of the step's keys."""

    def build(self, *given: Any, **asked: Any) -> CapturableMetadata:
        made = super().build(*given, **asked)
        self.mask = torch.zeros(
            made.common.num_reqs, made.common.max_seq_len, dtype=torch.bool, device=self.device
        )
        return made


@pytest.mark.parametrize("backend", [TorchBackend, Capturable], ids=lambda backend: backend.get_name())
@pytest.mark.parametrize(
    "group", GROUPS, ids=lambda group: f"{group.__module__.rpartition('.')[2]}-{group.__name__}"
)
def test_an_honest_backend_fails_nothing(backend: Any, group: Any) -> None:
    assert failures(backend, group, Level.SMOKE, "current") == {}


def test_torch_declared_step_safe_is_caught_waiting() -> None:
    found = failures(variant("TORCH_SAFE", step_safe=True), gpu.checks, Level.SMOKE, "current")
    assert {"gpu/no-wait-decode", "gpu/no-wait-mixed"} <= found.keys()
    assert all("step_safe is declared" in str(problem) for problem in found.values())


@pytest.mark.parametrize(
    ("backend", "caught", "says"),
    [
        (lying("WAITS_TO_BUILD", builder=WaitingBuilder), "gpu/no-wait", "build of a"),
        (lying("WAITS_TO_RUN", impl=WaitingImpl), "gpu/no-wait", "forward of a"),
        (lying("GROWS", builder=GrowingBuilder), "gpu/no-growth", "memory grows with context"),
    ],
    ids=lambda value: value.get_name() if isinstance(value, type) else None,
)
def test_a_backend_that_waits_or_grows_is_caught(backend: Any, caught: str, says: str) -> None:
    found = failures(backend, gpu.checks, Level.SMOKE, "current")
    assert {name.rpartition("-")[0] for name in found} == {caught}
    assert all(says in str(problem) for problem in found.values())


def test_a_graph_that_keeps_its_lengths_is_caught() -> None:
    backend = lying("KEEPS_LENGTHS", builder=KeepsLengths)
    found = failures(backend, gpu.graph_checks, Level.SMOKE, "current")
    assert {"gpu/graph-single", "gpu/graph-uniform"} <= found.keys()
    assert all("a graph that keeps what was captured" in str(problem) for problem in found.values())


IN_A_CHILD = """
from catching import failures, variant
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionCGSupport
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.serving import gpu

builder = type("Declares", (TorchBackend.get_builder_cls(),), {"cudagraph_support": AttentionCGSupport.ALWAYS})
found = failures(variant("TORCH_GRAPHS", builder=builder), gpu.graph_checks, Level.SMOKE, "current")
print(*sorted(found), flush=True)
"""


def test_torch_declared_capturable_is_caught_at_capture() -> None:
    # A capture that breaks off may leave the GPU's context unusable: in a process of its own it may.
    child = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.stdout.split() == ["gpu/graph-any", "gpu/graph-single", "gpu/graph-uniform"], child.stderr
