"""A wrong output while tuning becomes a refuted cell of the matrix, which selections refuse from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.registry.selection.refuted import Recorded, record
from attnplug.testing.isolation.listing import versions

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec
    from attnplug.registry.measured.tuned import Row
    from attnplug.tuning.cells import Contender


def record_wrong(contender: Contender, spec: LayerSpec, row: Row, feature: str) -> Recorded:
    """Remember the cell of a wrong output; MatrixFileError where the file of refuted cells cannot be written."""
    offer, device = contender.offer, contender.subject.device
    cell = {
        "feature": feature,
        "phase": str(row.shape.phase or "mixed"),
        "head_size": spec.head_size,
        "dtype": spec.dtype,
        "kv_cache_dtype": spec.kv_cache_dtype,
        "block_size": row.pages and row.pages[0],
        "layout": row.pages and row.pages[1],
        "status": "refuted",
        "why": [f"at {row.shape}: {row.why}"],
    }
    return record(
        {
            "backend": offer.name,
            "distribution": offer.distribution,
            "version": offer.version,
            "device": str(device),
            "device_name": device.name,
            "versions": versions(offer),
            "date": row.date,
            "commit": None,
            "cells": [cell],
        }
    )
