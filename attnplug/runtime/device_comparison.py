"""Compares what a GPU reads of a step with the host's copy, and tells of a difference without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata

# A field on the device, its copy on the host, and the flag that says whether that is exact.
_PAIRS = (
    ("query_start_loc", "query_start_loc_cpu", None),
    ("seq_lens", "seq_lens_host", "seq_lens_host_exact"),
    ("encoder_seq_lens", "encoder_seq_lens_cpu", None),
    ("key_start_loc", "key_start_loc_cpu", None),
)


class DeviceComparison:
    """The comparisons of the steps so far, which the device may still be computing."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, list[str], torch.Tensor, torch.cuda.Event]] = []

    def begin(self, field: str, common: CommonAttentionMetadata) -> None:
        """Compare a step on its GPU; nothing happens on a CPU."""
        if common.query_start_loc.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        found = dict(_differences(common))
        if not found:
            return
        flags = torch.empty(len(found), dtype=torch.bool, device="cpu", pin_memory=True)
        flags.copy_(torch.stack(list(found.values())), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((field, list(found), flags, event))

    def check(self) -> None:
        """Raise for a comparison that is done and found a difference.

        Raises:
            BatchError: a tensor on the device differs from its host copy.
        """
        while self._pending and self._pending[0][-1].query():  # type: ignore[no-untyped-call]
            field, names, flags, _ = self._pending.pop(0)
            for name, differs in zip(names, flags.tolist(), strict=True):
                if differs:
                    limit = "differs from its copy on the host, so the outputs of that step are wrong"
                    remedy = "give both sides of a batch the same values, or use StepBatchBuilder"
                    raise BatchError(f"{field}.{name}", "on the device", limit, remedy)


def _differences(common: CommonAttentionMetadata) -> Iterator[tuple[str, torch.Tensor]]:
    for name, copied, exactness in _PAIRS:
        device, host = getattr(common, name), getattr(common, copied)
        if device is None or host is None:
            continue
        values: Any = host if isinstance(host, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(host))
        # The host waits for copies from memory that is not pinned.
        sent = values.pin_memory().to(device.device, non_blocking=True)
        is_exact = exactness is None or getattr(common, exactness)
        yield name, (device != sent).any() if is_exact else (device > sent).any()
