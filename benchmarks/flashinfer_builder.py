"""The host's cost of FLASHINFER's builder for 256 requests: without FlashInfer's `plan()`, with it, and for two groups.

Run as `python benchmarks/flashinfer_builder.py [--requests N] [--json FILE]`. Needs a GPU and FlashInfer; without
them `plan()` and the gathering of pages are left out, so that only the figures without `plan()` mean anything.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import statistics
import time
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from library_stand_ins import flashinfer

import attnplug.backends.flashinfer.builder as builder_module
from attnplug.backends.flashinfer.backend import FlashInferBackend
from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
from attnplug.backends.flashinfer.impl import FlashInferImpl
from attnplug.backends.flashinfer.options import Options
from attnplug.core import BuilderConfig, CommonAttentionMetadata, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import PAD_SLOT_ID, AttentionMetadataBuilder
from attnplug.core.spec import Phase
from attnplug.errors import BackendUnavailableError

PAGE, CONTEXT, STEPS, ROUNDS = 16, 8192, 8, 400
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
WINDOWED = SPEC.replace(sliding_window=1024)
MODELS = {"one group": {"full": SPEC}, "two groups": {"full": SPEC, "sliding": WINDOWED}}
GOALS = {
    "besides plan()": 60.0,
    "with plan(), decodes": 150.0,
    "two groups / one": 1.6,
    "synchronisations": 0.0,
}


def builder_of(specs: dict[str, LayerSpec], requests: int, device: torch.device) -> FlashInferMetadataBuilder:
    layers: dict[str, Any] = {
        name: types.SimpleNamespace(
            impl=FlashInferImpl.from_spec(spec, backend=FlashInferBackend, layer_name=name, options=Options())
        )
        for name, spec in specs.items()
    }
    config = BuilderConfig(layers=layers, max_num_seqs=requests, max_model_len=CONTEXT)
    cache: Any = kv_cache_spec_for(SPEC, PAGE)
    made = FlashInferMetadataBuilder(cache, list(layers), config, device)
    made.warm_up(Phase.DECODE)
    return made


def steps(requests: int, device: torch.device) -> list[CommonAttentionMetadata]:
    """Decodes whose numbers of pages differ from step to step, so that each is planned."""
    lengths = np.random.default_rng(0).integers(1, CONTEXT - STEPS * PAGE, requests)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    table = torch.from_numpy(
        np.random.default_rng(1).integers(1, 999, (requests, CONTEXT // PAGE)).astype(np.int32)
    )
    made = []
    for step in range(STEPS):
        host = (lengths + step * PAGE).astype(np.int32)
        made.append(
            CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=torch.from_numpy(host).to(device),
                num_reqs=requests,
                num_actual_tokens=requests,
                max_query_len=1,
                max_seq_len=CONTEXT,
                block_table_tensor=table.to(device),
                slot_mapping=torch.full((requests,), PAD_SLOT_ID, device=device),
                seq_lens_host=host,
            )
        )
    return made


def measure(
    builders: Mapping[str, AttentionMetadataBuilder[Any]],
    batches: list[CommonAttentionMetadata],
    rounds: int = ROUNDS,
) -> dict[str, tuple[float, float]]:
    """By builder, microseconds of a build and of `plan()` in it: medians of rounds that take turns."""

    def planning(made: AttentionMetadataBuilder[Any]) -> float:
        return sum(cost.seconds for cost in getattr(made, "plan_costs", {}).values())

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in builders}
    for number in range(-len(batches), rounds):
        for name, made in builders.items():
            before = planning(made)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            made.build(0, batches[number % len(batches)])
            whole = time.perf_counter() - began
            planned = planning(made) - before
            if number >= 0:
                times[name].append((whole, planned))
    return {
        name: (
            1e6 * statistics.median(whole for whole, _ in kept),
            1e6 * statistics.median(planned for _, planned in kept),
        )
        for name, kept in times.items()
    }


def waits(builder: AttentionMetadataBuilder[Any], batches: list[CommonAttentionMetadata]) -> int:
    """The number of times that torch makes the host wait in a build of each step, and whether the GPU's work is waited for."""
    if not torch.cuda.is_available():
        return 0
    found = 0
    for before, batch in zip(batches, [*batches[1:], batches[0]], strict=True):
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            builder.build(0, before)
            torch.cuda.set_sync_debug_mode("default")
        # Turning it on says, once, that not all "synchronizing operations" are found: that does not count as a wait.
        found += sum("called a synchronizing" in str(each.message) for each in caught)
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
        busy = torch.cuda.Event()
        busy.record()
        # Another step, which is planned: that of before would only be looked at.
        builder.build(0, batch)
        found += busy.query()
    torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        version = str(builder_module.library().version) if device.type == "cuda" else None
    except BackendUnavailableError as problem:
        version = None
        print(problem)
    if version is None:
        builder_module.library = flashinfer  # type: ignore[assignment]
        device = torch.device("cpu")
    batches = steps(arguments.requests, device)
    builders = {name: builder_of(specs, arguments.requests, device) for name, specs in MODELS.items()}
    if version is None:
        for made in builders.values():
            for indices in made._indices.values():
                indices._gather = lambda pages: None  # type: ignore[method-assign]
    figures: dict[str, dict[str, float]] = {}
    for name, (whole, planned) in measure(builders, batches).items():
        made = builders[name]
        figures[name] = {
            "build": whole,
            "plan()": planned,
            "besides": whole - planned,
            "waits": waits(made, batches),
        }
    one, two = figures.values()
    kind = f"FlashInfer {version}" if version else "without plan() and the gathering of pages"
    print(
        f"{arguments.requests} decodes, pages of {PAGE}, contexts to {CONTEXT}, {device}, {kind}; microseconds"
    )
    for name, row in figures.items():
        print(f"  {name:12}" + "".join(f"{key} {value:8.1f}   " for key, value in row.items()))
    results = {
        "besides plan()": one["besides"],
        "with plan(), decodes": one["build"],
        "two groups / one": two["build"] / one["build"],
        "synchronisations": one["waits"] + two["waits"],
    }
    for goal, limit in GOALS.items():
        met = "met" if results[goal] <= limit else "missed"
        print(f"  {goal:22} {results[goal]:8.2f}   goal {limit:g}: {met}")
    if arguments.json:
        where = {
            "date": dt.datetime.now(dt.UTC).isoformat(),
            "machine": platform.processor(),
            "flashinfer": version,
        }
        where |= {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        arguments.json.write_text(
            json.dumps({**where, "figures": figures, "goals": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
