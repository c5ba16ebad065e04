"""FLASHINFER as `attnplug tune` runs it: decodes in the wrapper that a graph has, planned for the step of the job."""

from __future__ import annotations

from typing import Any

import pytest
from flashinfer_on_cpu import FlashInferOnCpu

from attnplug import Device, LayerSpec
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.plugins.records import Offer
from attnplug.tuning.jobs import Job
from attnplug.tuning.timers import HostTimer
from attnplug.tuning.worker import Runner

pytestmark = pytest.mark.usefixtures("fake_library")


@pytest.mark.parametrize(
    ("shape", "has_graphs", "captured"),
    [
        ("decode 3 x 70 ragged", True, 3),
        ("decode 3 x 70 ragged", False, 0),
        # Its graphs have decodes of one token.
        ("decode 2 x 3 of 50", True, 0),
        ("prefill 2 x 20 of 60", True, 0),
    ],
)
def test_a_decode_runs_the_wrapper_of_a_graph(shape: str, has_graphs: bool, captured: int) -> None:
    """It plans in another way than a plain one. On the CPU a captured step runs as it was last planned."""
    told: list[tuple[str, dict[str, Any]]] = []
    sizes: list[int] = []

    class Watched(Runner):
        def _made(self, *asked: Any) -> Any:
            inputs, call, builder = super()._made(*asked)
            sizes.extend(builder._captured or {0})
            return inputs, call, builder

    timer = HostTimer(round_us=100.0, has_graphs=has_graphs)
    runner = Watched(Device("cpu"), lambda event, **facts: told.append((event, facts)), timer)
    runner._offers["FLASHINFER", None] = Offer("FLASHINFER", FlashInferOnCpu, "", None, None)
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32)
    for timed in (False, True):
        backends = (("FLASHINFER", None),)
        runner.run(Job(0, spec, StepShape.parse(shape), backends, "FLASHINFER", timed))
    assert [event for event, _ in told if event not in ("begin", "done")] == ["checked", "timed"]
    assert sizes == [captured, captured]
