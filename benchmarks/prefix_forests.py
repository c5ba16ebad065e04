"""The host's time to find the prefixes that 256 requests of 2,000 blocks share: `python benchmarks/prefix_forests.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from attnplug.runtime.batch.forest import find_forest, may_share, reach_of

REQUESTS, BLOCKS, SIZE = 256, 2000, 16


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


def main() -> None:
    """Print the least and the median time of each step, in microseconds."""
    computed, new = np.full(REQUESTS, BLOCKS * SIZE - 8), np.ones(REQUESTS, dtype=np.int64)
    for name, table in _tables().items():

        def find(table: npt.NDArray[np.int32] = table) -> object:
            return may_share(table) and find_forest(table, SIZE, new, reach_of(computed, new, SIZE), _saved)

        times = _times(find)
        print(f"{name}: {min(times):.0f} us, median {statistics.median(times):.0f} us")


if __name__ == "__main__":
    main()
