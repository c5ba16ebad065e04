"""The host's time of builders of latent attention for benchmarks/mla.py, without the planning of the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from flashinfer_builder import CONTEXT, PAGE, ROUNDS, measure, steps, waits
from mla_latents import Cell, parts_of

from attnplug.core import AttentionBackend

__all__ = ["measured_builders"]


def measured_builders(
    backends: Mapping[str, type[AttentionBackend]],
    requests: Sequence[int] = (64, 256),
    *,
    device: str = "cuda",
    rounds: int = ROUNDS,
    **fields: Any,
) -> Iterator[dict[str, Any]]:
    """By number of requests and backend: microseconds of a build, those of planning in it, and how often it waits."""
    for count in requests:
        batches = steps(count, torch.device(device))
        for name, backend in backends.items():
            row: dict[str, Any] = {"backend": name, "requests": count}
            try:
                spec = Cell(count, CONTEXT, 16, page=PAGE, **fields).spec
                serving = backend.for_layer(spec)
                _, builder = parts_of(
                    serving, spec, torch.device(device), max_num_seqs=count, max_model_len=CONTEXT
                )
                whole, planned = measure({name: builder}, batches, rounds)[name]
                row |= {"build_us": whole, "plan_us": planned, "besides_us": whole - planned}
                row["waits"] = waits(builder, batches)
            except Exception as problem:  # noqa: BLE001 - a library that is absent
                row["error"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            figures = "   ".join(
                f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
            print(f"builder: {figures}", flush=True)
            yield row
