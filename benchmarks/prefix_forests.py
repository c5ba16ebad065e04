"""The host's time to find the prefixes that 256 requests of 2,000 blocks share, and steps with and without them.

`python benchmarks/prefix_forests.py` times the host alone; `--device cuda` adds steps of one layer, shared and plain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

import attnplug
from attnplug.core import BuilderConfig
from attnplug.runtime import AttentionRuntime, SharingPrices
from attnplug.runtime.batch.forest import find_forest, may_share, reach_of

REQUESTS, BLOCKS, SIZE = 256, 2000, 16
# Prompts, their tokens, the readers of each, and the own tokens of each reader.
CELLS = (
    (8, 4096, 16, 128),
    (8, 4096, 16, 512),
    (1, 8192, 64, 256),
    (16, 16384, 8, 1024),
    (32, 1024, 4, 256),
    (4, 2048, 4, 512),
    (2, 4096, 3, 1024),
)


def _tables() -> dict[str, npt.NDArray[np.int32]]:
    apart = np.arange(1, REQUESTS * BLOCKS + 1, dtype=np.int32).reshape(REQUESTS, BLOCKS)
    prompts, one = apart.copy(), apart.copy()
    one[:, :-1] = one[0, :-1]
    for first in range(0, REQUESTS, 32):
        prompts[first : first + 32, :256] = prompts[first, :256]
    return {"no block is shared": apart, "all blocks are shared": one, "8 prompts of 256 blocks": prompts}


def _saved(readers: int, rows: int, keys: int) -> float:
    return (readers - 1) * keys - 300 * rows


def _times(call: Callable[[], object], count: int = 200) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def _step(
    cell: tuple[int, int, int, int], device: str, backend: str | None, prices: SharingPrices | bool
) -> tuple[torch.Tensor, float, tuple[str, ...]]:
    """The output of one decode step, its microseconds with the host's part, and the step's notes."""
    prompts, keys, readers, own = cell
    spec = attnplug.LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
    requests = prompts * readers
    blocks = (prompts * keys + requests * (own + 64)) // 16 + requests + 1
    plan = attnplug.plan({"layer": spec}, device, num_blocks=blocks, backend=backend)
    config = BuilderConfig(max_num_seqs=requests, max_num_batched_tokens=max(requests, 64))
    with AttentionRuntime(plan, config=config, debug=False, prefix_sharing=prices) as runtime:
        generator = torch.Generator(device).manual_seed(0)
        for cache in runtime.kv_caches.values():
            cache.normal_(generator=generator)
        builder, size = runtime.step_batch_builder(keys + own + 64), plan.tokens_per_block[0]
        for prompt in range(prompts):
            shared = runtime.block_pool.allocate(keys // size)
            for reader in range(readers):
                held = [*shared, *runtime.block_pool.allocate(own // size + 1)]
                builder.add_request(f"{prompt}.{reader}", [held], keys + own)
        shapes = ((requests, 32, 128), (requests, 8, 128), (requests, 8, 128))
        given = [
            torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for shape in shapes
        ]

        def run() -> torch.Tensor:
            runtime.begin_step(builder.step(1))
            found = runtime.forward("layer", *given)
            if device != "cpu":
                torch.cuda.synchronize()
            return found

        output = run()
        return output, statistics.median(_times(run, 20)), runtime.step_notes


def _compare(device: str, backend: str | None) -> None:
    for cell in CELLS:
        runs = [_step(cell, device, backend, prices) for prices in (False, SharingPrices.free(), True)]
        (plain, plain_us, _), (shared, shared_us, _), (_, ruled_us, notes) = runs
        error = float((plain.float() - shared.float()).abs().max())
        print(
            f"{cell}: plain {plain_us:.0f} us, shared {shared_us:.0f} us ({plain_us / shared_us:.2f}x), "
            f"by the prices {ruled_us:.0f} us, difference {error:.1e}; {notes[0]}"
        )


def main() -> None:
    """Print the least and the median time to find each forest, and with a device those of whole steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="run steps of one layer there, such as cuda")
    parser.add_argument("--backend", help="of the layer; by default the one that attnplug chooses")
    options = parser.parse_args()
    computed, new = np.full(REQUESTS, BLOCKS * SIZE - 8), np.ones(REQUESTS, dtype=np.int64)
    for name, table in _tables().items():

        def find(table: npt.NDArray[np.int32] = table) -> object:
            return may_share(table) and find_forest(table, SIZE, new, reach_of(computed, new, SIZE), _saved)

        times = _times(find)
        print(f"{name}: {min(times):.0f} us, median {statistics.median(times):.0f} us")
    if options.device:
        _compare(options.device, options.backend)


if __name__ == "__main__":
    main()
