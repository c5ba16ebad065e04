"""The GPU checks, with a CPU and a fake torch.cuda in place of the GPU."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
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

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionCGSupport, Device
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError
from attnplug.testing.conformance.serving import gpu
from attnplug.testing.conformance.target import Target

SINGLE = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class PretendGpu:
    """A fake of torch.cuda: whether the device is busy, the memory in use, and sync modes."""

    def __init__(self) -> None:
        self.busy: list[bool] = []
        self.kept = self.taken = self.slack = 0
        self.counts_requests = True
        self.modes: list[Any] = []

    def memory_stats(self) -> dict[str, int]:
        """As of torch.cuda; blocks are larger than tensors by `slack` bytes."""
        counts = {"current": self.kept, "peak": self.kept + self.taken}
        stats = {f"allocated_bytes.all.{name}": count + self.slack for name, count in counts.items()}
        if self.counts_requests:
            stats |= {f"requested_bytes.all.{name}": count for name, count in counts.items()}
        return stats


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    device = PretendGpu()

    class Event:
        def record(self) -> None:
            """Nothing runs."""

        def query(self) -> bool:
            return not device.busy.pop(0)

    answers: dict[str, Any] = {
        "synchronize": lambda: None,
        "_sleep": lambda cycles: None,
        "Event": Event,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": device.modes.append,
        "memory_stats": device.memory_stats,
        "reset_peak_memory_stats": lambda: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(gpu, "_SHORT", 64)
    monkeypatch.setattr(gpu, "_LONG", 256)
    monkeypatch.setattr(gpu, "GPU_TYPES", ("cpu",))
    monkeypatch.setattr(gpu, "GPU_TYPES", ("cpu",))
    return device


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, pretend: PretendGpu) -> None:
    """Replay a graph as the same work with the metadata of the captured step."""

    def record(work: Any) -> Callable[[], None]:
        runtime = work.func.__self__._served.runtime
        captured = runtime._active.layers

        def replay() -> None:
            now, runtime._active.layers = runtime._active.layers, captured
            work()
            runtime._active.layers = now

        return replay

    monkeypatch.setattr(gpu, "record", record)


def outcomes(group: Any, backend: Any) -> dict[str, str]:
    """The message of each failing or skipped check, by id."""
    found = {}
    for check in group(Target(backend, Device("cpu"))):
        try:
            check()
        except (CheckSkipped, ConformanceError) as problem:
            found[check.id] = str(problem)
    return found


def test_a_device_that_stays_busy_and_keeps_its_memory_is_as_it_should_be(pretend: PretendGpu) -> None:
    pretend.busy = [True] * 8
    assert outcomes(gpu.checks, Capturable) == {}
    assert pretend.modes == ["error", 0] * 4


def test_a_step_that_returns_when_the_device_is_idle_has_waited(pretend: PretendGpu) -> None:
    pretend.busy = [True, True, False, False, False, True, True, True]
    assert outcomes(gpu.checks, Capturable) == {
        "gpu/no-wait-decode": "forward of a decode step, where step_safe is declared: "
        "it returned only when the GPU had done all work before it"
    }


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (
            "called a synchronizing CUDA operation",
            "build of a decode step, where step_safe is declared: called a",
        ),
        ("out of memory", "build of a decode step, where step_safe is declared: raised RuntimeError: out of"),
    ],
)
def test_what_torch_raises_of_waits_is_told_from_other_errors(
    pretend: PretendGpu, raised: str, says: str
) -> None:
    class Raising(CapturableBuilder):
        def build(self, *given: Any, **asked: Any) -> CapturableMetadata:
            if pretend.modes[-1:] == ["error"]:
                raise RuntimeError(raised)
            return super().build(*given, **asked)

    pretend.busy = [True] * 8
    found = outcomes(gpu.checks, lying("RAISES", builder=Raising))
    assert found["gpu/no-wait-decode"].startswith(says)
    assert pretend.modes[-1] == 0


@pytest.mark.parametrize("counts_requests", [True, False], ids=["requests", "blocks"])
@pytest.mark.parametrize("what", ["kept", "taken"])
def test_memory_that_grows_with_context_is_measured(
    pretend: PretendGpu, what: str, counts_requests: bool
) -> None:
    class Growing(CapturableBuilder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            setattr(pretend, what, 512 * common_attn_metadata.max_seq_len)
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    pretend.busy = [True] * 8
    pretend.kept, pretend.counts_requests = 1, counts_requests
    found = outcomes(gpu.checks, lying("GROWS", builder=Growing))
    verb = "keeps" if what == "kept" else "takes"
    assert found.keys() == {"gpu/no-growth-decode", "gpu/no-growth-extend"}
    assert found["gpu/no-growth-decode"] == (
        f"a step {verb} 98,304 bytes more with 256 tokens of context than with 64, "
        "where step_safe is declared: memory grows with context"
    )


def test_larger_blocks_for_the_same_tensors_are_no_growth(pretend: PretendGpu) -> None:
    class Reusing(CapturableBuilder):
        def build(self, *given: Any, **asked: Any) -> CapturableMetadata:
            # Each step finds blocks with a MiB more behind a tensor.
            pretend.slack += 1 << 20
            return super().build(*given, **asked)

    pretend.busy = [True] * 8
    pretend.kept = 1
    assert outcomes(gpu.checks, lying("REUSES", builder=Reusing)) == {}


def test_memory_that_python_frees_at_any_time_is_no_growth(pretend: PretendGpu) -> None:
    class Garbage:
        def __init__(self) -> None:
            self.itself = self
            pretend.kept += 1 << 20

        def __del__(self) -> None:
            pretend.kept -= 1 << 20

    built = []

    class Collecting(CapturableBuilder):
        def build(self, *given: Any, **asked: Any) -> CapturableMetadata:
            # The measured steps are the third and the sixth; Python collects in the first of them.
            if len(built) % 6 == 2:
                gc.collect()
            elif len(built) % 6 != 5:
                Garbage()
            built.append(given)
            return super().build(*given, **asked)

    pretend.busy = [True] * 8
    checks = [
        check
        for check in gpu.checks(Target(lying("COLLECTS", builder=Collecting), Device("cpu")))
        if check.id.startswith("gpu/no-growth")
    ]
    gc.disable()
    try:
        for check in checks:
            check()
    finally:
        gc.enable()
    assert len(built) == 12, "two steps that warm up and one that is measured, of both lengths"


def test_a_builder_is_told_no_more_of_lengths_than_it_declares_to_need(pretend: PretendGpu) -> None:
    seen = []

    class Watching(CapturableBuilder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            seen.append(
                (common_attn_metadata.seq_lens_host is None, common_attn_metadata.seq_lens_host_exact)
            )
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    pretend.busy = [True] * 12
    for needs in ("none", "upper_bound", "exact"):
        builder = type("Needing", (Watching,), {"needs_host_seq_lens": needs})
        check = next(gpu.checks(Target(lying(needs, builder=builder), Device("cpu"))))
        check()
    assert list(dict.fromkeys(seen)) == [(True, False), (False, False), (False, True)]


@pytest.mark.usefixtures("recorded")
def test_what_is_replayed_with_other_lengths_is_right() -> None:
    assert outcomes(gpu.graph_checks, Capturable) == {}


@pytest.mark.usefixtures("recorded")
def test_a_graph_that_keeps_its_lengths_is_caught() -> None:
    found = outcomes(gpu.graph_checks, lying("KEEPS_LENGTHS", builder=KeepsLengths))
    assert found.keys() == {"gpu/graph-single", "gpu/graph-uniform", "gpu/graph-any"}
    for message in found.values():
        assert message.startswith("replay of a graph of 2 requests with new tokens {'a':")
        assert message.endswith("without the graph it is right: a graph that keeps what was captured")


@pytest.mark.usefixtures("recorded")
def test_levels_that_are_not_declared_are_skipped() -> None:
    builder = type("Single", (CapturableBuilder,), {"cudagraph_support": SINGLE})
    below = "SINGLE declares UNIFORM_SINGLE_TOKEN_DECODE, which is below"
    assert outcomes(gpu.graph_checks, lying("SINGLE", builder=builder)) == {
        "gpu/graph-uniform": f"{below} UNIFORM_BATCH",
        "gpu/graph-any": f"{below} ALWAYS",
    }


@pytest.mark.usefixtures("recorded")
def test_what_a_capture_raises_is_charged_to_the_level_declared() -> None:
    class Refusing(CapturableBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> CapturableMetadata:
            raise ValueError("no graph for you")

    said, *trail = outcomes(gpu.graph_checks, lying("REFUSES", builder=Refusing))[
        "gpu/graph-any"
    ].splitlines()
    assert said == "capture of 2 requests of 3 tokens, ALWAYS declared: raised ValueError: no graph for you"
    assert "in build_for_cudagraph_capture: raise ValueError" in trail[-1]


@pytest.mark.usefixtures("recorded")
def test_a_backend_that_is_wrong_without_a_graph_is_not_called_a_keeper() -> None:
    class Doubling(CapturableImpl):
        def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
            output = super().attend(*given, **asked)
            return output.mul_(2) if given[1].shape[0] in self.rows else output

        rows: set[int]

    first = outcomes(gpu.graph_checks, lying("DOUBLES", impl=type("First", (Doubling,), {"rows": {19}})))
    wrong = r"without .* graph.*: layer \S*attn\S* \(full, .*\) of KV group 0: output\["
    assert re.match(wrong, first["gpu/graph-any"])
    late = outcomes(gpu.graph_checks, lying("DOUBLES_LATE", impl=type("Late", (Doubling,), {"rows": {4, 6}})))
    assert re.search(f"; {wrong}", late["gpu/graph-any"])


def test_the_pretended_device_is_asked_for_nothing_on_a_cpu() -> None:
    target = Target(Capturable, Device("cpu"))
    assert [*gpu.checks(target), *gpu.graph_checks(target)] == []


def test_step_safe_is_checked_only_where_it_is_declared() -> None:
    here = Device("cuda", (9, 0))
    assert list(gpu.checks(Target(TorchBackend, here))) == []
    assert [check.id for check in gpu.checks(Target(Capturable, here))] == [
        "gpu/no-wait-decode",
        "gpu/no-wait-mixed",
        "gpu/no-growth-decode",
        "gpu/no-growth-extend",
    ]
