"""Host buffers with device twins, and the ring that keeps steps from overwriting each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnplug.core.errors import BatchError
from attnplug.runtime import CpuGpuBuffer, StagingRing
from attnplug.runtime.batch.staging import PackedBuffer


def test_on_the_cpu_buffer_numpy_view_and_twin_are_one():
    buffer = CpuGpuBuffer(3, 2, dtype=torch.int32, device="cpu", fill=-1)
    assert buffer.gpu is buffer.cpu
    assert buffer.np.tolist() == [[-1, -1]] * 3
    buffer.np[1] = 7
    sent = buffer.copy_to_gpu(2)
    assert sent.tolist() == [[-1, -1], [7, 7]]
    assert sent.data_ptr() == buffer.cpu.data_ptr()
    assert buffer.np.dtype == np.int32


def test_without_a_number_all_rows_are_sent():
    assert CpuGpuBuffer(4, dtype=torch.int64, device="cpu").copy_to_gpu().shape == (4,)
    assert CpuGpuBuffer(4, dtype=torch.int64, device="cpu").copy_to_gpu(0).shape == (0,)


def test_a_twin_elsewhere_is_its_own_tensor():
    buffer = CpuGpuBuffer(4, dtype=torch.int64, device="meta")
    assert buffer.gpu is not buffer.cpu
    assert buffer.copy_to_gpu(3).shape == (3,)
    assert buffer.gpu.device.type == "meta"


@pytest.mark.parametrize("n", [-1, 5])
def test_rows_that_are_not_there_cannot_be_sent(n):
    with pytest.raises(BatchError, match=rf"n={n} must be in 0 \.\. 4, the buffer's rows"):
        CpuGpuBuffer(4, dtype=torch.int64, device="cpu").copy_to_gpu(n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_types_that_numpy_lacks_are_refused(dtype):
    with pytest.raises(BatchError, match=f"dtype={dtype} has no numpy view"):
        CpuGpuBuffer(4, dtype=dtype, device="cpu")


def test_a_buffer_has_a_dimension():
    with pytest.raises(BatchError, match=r"size=\(\) must have at least one dimension"):
        CpuGpuBuffer(dtype=torch.int64, device="cpu")


@pytest.mark.parametrize("shape", [(2, 5), (2, 3), (2, 0), (1, 10), (10,)])
def test_a_packed_buffer_is_contiguous_in_every_shape(shape):
    buffer = PackedBuffer(2, 5, dtype=torch.int64, device=torch.device("cpu"))
    host = buffer.np(*shape)
    host[...] = np.arange(host.size).reshape(shape)
    sent = buffer.copy_to_gpu(*shape)
    assert sent.is_contiguous()
    assert sent.tolist() == host.tolist()


def test_a_ring_hands_its_sets_out_in_turn():
    ring = StagingRing(["a", "b", "c"], "cpu")
    taken = []
    for _ in range(7):
        taken.append(ring.acquire())
        ring.release()
    assert taken == ["a", "b", "c", "a", "b", "c", "a"]


def test_a_set_that_was_not_released_is_handed_out_again():
    ring = StagingRing(["a", "b"], "cpu")
    assert [ring.acquire(), ring.acquire()] == ["a", "a"]


@pytest.mark.parametrize("slots", [[], ["a"]])
def test_a_ring_of_fewer_than_two_guards_nothing(slots):
    with pytest.raises(BatchError, match=f"slots={len(slots)} must be at least 2"):
        StagingRing(slots, "cpu")


class Event:
    """An event that says when it was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self, stream: object) -> None:
        self.log.append(f"recorded on {stream}")

    def synchronize(self) -> None:
        self.log.append("waited")


@pytest.fixture
def stream(monkeypatch):
    """The raw stream that is current; what torch makes of it says how often that was."""
    current = {"raw": 7, "made": 0}

    def current_stream(index: int) -> str:
        current["made"] += 1
        return f"stream {current['raw']} of {index}"

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current["raw"], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return current


@pytest.fixture
def made(monkeypatch) -> list[Event]:
    found: list[Event] = []

    def event() -> Event:
        found.append(Event())
        return found[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    return found


@pytest.mark.usefixtures("stream")
def test_each_set_has_an_event_of_its_own_waited_for_when_it_comes_round(made):
    ring = StagingRing(["a", "b"], "cuda:1")
    for _ in range(2):
        ring.acquire()
        ring.release()
    recorded = "recorded on stream 7 of 1"
    assert [one.log for one in made] == [[recorded], [recorded]]  # nothing to wait for yet
    ring.acquire()
    assert [one.log for one in made] == [[recorded, "waited"], [recorded]]
    ring.release()
    ring.acquire()
    assert [one.log for one in made] == [[recorded, "waited", recorded], [recorded, "waited"]]


def test_copies_are_marked_on_the_stream_that_is_current_then(made, stream, monkeypatch):
    ring = StagingRing(["a", "b"], "cuda")
    device = {"index": 0}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device["index"])
    for raw, index in ((7, 0), (7, 0), (8, 0), (8, 1), (8, 1), (7, 0)):
        stream["raw"], device["index"] = raw, index
        ring.release()
    logged = [one.log[-3:] for one in made]
    streams = ["7 of 0", "7 of 0", "8 of 0", "8 of 1", "8 of 1", "7 of 0"]
    assert logged == [[f"recorded on stream {each}" for each in streams[start::2]] for start in (0, 1)]
    assert stream["made"] == 4
