"""A builder on the CPU whose block tables are kept and sent as those of a GPU."""

from __future__ import annotations

import numpy as np
import torch

from attnplug.runtime import StepBatchBuilder
from attnplug.runtime.batch.staging import DeviceTables


def keep_tables_on_device(builder: StepBatchBuilder, few: int | None = None) -> None:
    """Let a new builder send its tables; up to `few` entries of them one by one."""
    tables = builder._requests.device_tables = DeviceTables(builder._requests.tables, torch.device("cpu"))
    if few is not None:
        tables._few = few
    for staging in builder._buffers._ring._slots:
        staging.tables = tables.staging()


def check_tables(builder: StepBatchBuilder, found: torch.Tensor) -> None:
    """The tables of a step are those of the host."""
    kept = builder._requests.device_tables
    assert kept is not None
    assert found.is_contiguous()
    assert np.array_equal(found.numpy(), builder._requests.tables[:, : found.shape[1], : found.shape[2]])
    # The rows of all requests in flight, not only the columns of this step.
    assert torch.equal(
        kept.tables[:, : found.shape[1]], torch.from_numpy(builder._requests.tables[:, : found.shape[1]])
    )
