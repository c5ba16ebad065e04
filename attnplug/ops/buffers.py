"""Host buffers with a device copy, and a guarded ring of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import at_least, instance, integer, listed, number, torch_device
from attnplug.core.errors import BatchError

# numpy has no such types, so a host buffer of them has no numpy view.
_NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class CpuGpuBuffer(NotCopied):
    """A host buffer (pinned for a GPU), its numpy view and its device copy.

    On the CPU the copy is the host buffer itself.

    Args:
        size: the shape.
        dtype: element type.
        device: of the copy.
        fill: the initial value.

    Raises:
        BatchError: no dimension, or an element type that numpy lacks.
    """

    def __init__(
        self, *size: int, dtype: torch.dtype, device: torch.device | str, fill: int | float = 0
    ) -> None:
        if not size:
            raise BatchError("size", size, "must have at least one dimension")
        instance("dtype", dtype, torch.dtype)
        for each in size:
            at_least(0)("size", each)
        number("fill", fill)
        if dtype in _NOT_IN_NUMPY:
            raise BatchError("dtype", dtype, "has no numpy view", "view the device's tensor as that dtype")
        where = torch_device("device", device)
        # Only copies from pinned memory run without making the host wait.
        pinned = where.type == "cuda"
        try:
            self.cpu = torch.full(size, fill, dtype=dtype, device="cpu", pin_memory=pinned)
        except (OverflowError, TypeError, ValueError, RuntimeError) as error:
            # Callers make room and try again, so errors of memory stay as they are.
            if isinstance(error, torch.OutOfMemoryError) or 0 in size:
                raise
            found = f"size {size} and fill={fill!r}"
            raise BatchError(
                "dtype", dtype, f"cannot be had with {found}: {str(error).splitlines()[0]}"
            ) from None
        self.np: npt.NDArray[Any] = self.cpu.numpy()
        self.gpu = self.cpu if where.type == "cpu" else self.cpu.to(where)

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Copy the first `n` rows without waiting; returns the device's view of them.

        Raises:
            BatchError: more rows than the buffer has.
        """
        rows = self.cpu.shape[0] if n is None else integer("n", n)
        if not 0 <= rows <= self.cpu.shape[0]:
            raise BatchError("n", rows, f"must be in 0 .. {self.cpu.shape[0]}, the buffer's rows")
        if self.gpu is self.cpu:
            return self.gpu[:rows]
        return self.gpu[:rows].copy_(self.cpu[:rows], non_blocking=True)


class StagingRing(NotCopied):
    """At least two sets of host buffers, so that a step does not overwrite a copy in progress.

    `release` records an event, and `acquire` waits for the event of the set that it returns: the only wait. A set that
    was not released, because a step was interrupted, has no event, so the next `acquire` waits for the device.

    Args:
        slots: the sets, of any type that the caller fills and copies.
        device: the target of the copies, on its current stream; on the CPU nothing waits.

    Raises:
        BatchError: fewer than two sets.
    """

    def __init__(self, slots: Sequence[Any], device: torch.device | str) -> None:
        slots = listed("slots", slots, "sets of buffers")
        if len(slots) < 2:
            raise BatchError("slots", len(slots), "must be at least 2 sets of buffers")
        self._slots = slots
        self._device = torch_device("device", device, is_used=False)
        self._events: list[torch.cuda.Event | None] = [None] * len(slots)
        self._next = 0
        self._is_taken = False
        self._stream: tuple[int, int, torch.cuda.Stream] | None = None

    def acquire(self) -> Any:
        """The next set, after its last copies are done."""
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        if self._is_taken and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._is_taken = True
        return self._slots[self._next]

    def release(self) -> None:
        """Mark the copies from the current set as issued, and go on to the next set."""
        if self._device.type == "cuda":
            # Each set keeps its event: events are recorded again, not made for each step.
            event = self._events[self._next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._current_stream())
            self._events[self._next] = event
        self._next, self._is_taken = (self._next + 1) % len(self._slots), False

    def _current_stream(self) -> torch.cuda.Stream:
        # The stream object is kept, because making one takes longer than recording an event.
        index = self._device.index
        # A device without a number is the current GPU, which may change between steps.
        if index is None:
            index = torch.cuda.current_device()
        # A private function of torch: it returns the stream's handle without making a stream object.
        handle: int = torch._C._cuda_getCurrentRawStream(index)
        kept = self._stream
        if kept is None or kept[:2] != (index, handle):
            kept = self._stream = index, handle, torch.cuda.current_stream(index)
        return kept[2]


def times_written(value: object) -> int:
    """How often a tensor and its views were written to, as torch counts without a look at the values; 0 for others."""
    # Torch does not count for tensors that were made in inference mode.
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
