"""Real batches: ragged lengths, several query tokens, shared prefixes, extends and unusual prefills; and their goals."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from paged_layers import Cell

Heads = tuple[int, int, int]
FP8 = {"kv_cache_dtype": "fp8"}


def ragged(name: str, heads: Heads, requests: int, least: int, most: int, **fields: Any) -> Cell:
    """Decodes of lengths that are log-uniform in `least .. most`, the same in every run."""
    drawn = random.Random(f"{heads} {requests} {least} {most}")
    lens = tuple(int(least * (most / least) ** drawn.random()) for _ in range(requests))
    return Cell(name, "ragged", heads, (1,) * requests, lens, tuple(fields.items()))


def uniform(
    name: str, kind: str, heads: Heads, requests: int, length: int, new: int = 1, **fields: Any
) -> Cell:
    """Requests of `new` queries and `length` tokens each, the queries included."""
    return Cell(name, kind, heads, (new,) * requests, (length,) * requests, tuple(fields.items()))


def speculative(name: str, heads: Heads, requests: int, length: int) -> list[Cell]:
    """The same batch with 1, 2, 4, 8 and 16 queries each; the first is what the others are compared with."""
    return [
        uniform(f"{name}, {new} tokens", "speculative", heads, requests, length, new)
        for new in (1, 2, 4, 8, 16)
    ]


def prefixed(name: str, heads: Heads, requests: int, shared: int, own: Sequence[int]) -> Cell:
    """Decodes whose first `shared` tokens are on the same pages; `own` are the further tokens, taken in turn."""
    lens = tuple(shared + own[index % len(own)] for index in range(requests))
    return Cell(name, "prefix", heads, (1,) * requests, lens, shared=shared)


def step(name: str, heads: Heads, more: tuple[int, int], new: tuple[int, ...]) -> Cell:
    """A step that engines cut from long prompts: one request goes on, with `more` queries and tokens, and others begin."""
    return Cell(name, "extend", heads, (more[0], *new), (more[1], *new))


def prompts(name: str, heads: Heads, lens: Sequence[int], **fields: Any) -> Cell:
    return Cell(name, "prefill", heads, tuple(lens), tuple(lens), tuple(fields.items()))


def _drawn(count: int, least: int, most: int) -> list[int]:
    drawn = random.Random(count)
    return [drawn.randint(least, most) for _ in range(count)]


SERVING = [
    ragged("24/8, 37 of 100 to 20k", (24, 8, 128), 37, 100, 20_000),
    ragged("28/4, 96 of 50 to 30k", (28, 4, 128), 96, 50, 30_000),
    ragged("32/8, 64 of 200 to 32k", (32, 8, 128), 64, 200, 32_000),
    ragged("16/16, 24 of 500 to 64k", (16, 16, 128), 24, 500, 64_000),
    ragged("8/1, 128 of 50 to 64k", (8, 1, 128), 128, 50, 64_000),
    ragged("64/8/64, 256 of 50 to 8k", (64, 8, 64), 256, 50, 8_000),
    ragged("16/8/256, 32 of 100 to 16k", (16, 8, 256), 32, 100, 16_000),
    ragged("32/8 fp8, 96 of 50 to 32k", (32, 8, 128), 96, 50, 32_000, **FP8),
    ragged("28/4 fp8, 200 of 50 to 20k", (28, 4, 128), 200, 50, 20_000, **FP8),
    ragged("32/8 window 1024, 96 of 50 to 32k", (32, 8, 128), 96, 50, 32_000, sliding_window=1024),
    *speculative("32/8, 64 x 8k", (32, 8, 128), 64, 8192),
    *speculative("8/1, 32 x 8k", (8, 1, 128), 32, 8192),
    *speculative("32/8, 4 x 32k", (32, 8, 128), 4, 32_768),
    uniform("16/1, 1 x 128k", "single", (16, 1, 128), 1, 131_072),
    uniform("32/8, 1 x 1k", "single", (32, 8, 128), 1, 1024),
    uniform("32/8, 1 x 8k", "single", (32, 8, 128), 1, 8192),
    prefixed("32/8, 64 share 16k, 1k each", (32, 8, 128), 64, 16_384, [1024]),
    prefixed("32/8, 16 share 2k, 200 to 3k each", (32, 8, 128), 16, 2048, [200, 700, 1500, 3000]),
    prefixed("8/1, 128 share 4k, 100 to 1k each", (8, 1, 128), 128, 4096, [100, 400, 1000]),
    uniform("16 more of 32k, 4", "extend", (32, 8, 128), 4, 32_768, 16),
    uniform("64 more of 8k, 16", "extend", (32, 8, 128), 16, 8192, 64),
    uniform("100 more of 30k, 1", "extend", (32, 8, 128), 1, 30_000, 100),
    uniform("512 more of 32k, 1", "extend", (32, 8, 128), 1, 32_768, 512),
    uniform("2k more of 64k, 8/1", "extend", (8, 1, 128), 1, 65_536, 2048),
    Cell(
        "30 decodes and 2 x 12 more of 16k",
        "extend",
        (32, 8, 128),
        (*[1] * 30, 12, 12),
        (*[4096] * 30, 16_384, 16_384),
    ),
    step("13k more of 15k, with 2k and 1k", (32, 8, 128), (13_312, 15_360), (2048, 1024)),
    step("4k more of 12k, with 8k, 3k and 1k", (32, 8, 128), (4096, 12_288), (8192, 3072, 1024)),
    step("64/8/64, 13k more of 15k, with 2k and 1k", (64, 8, 64), (13_312, 15_360), (2048, 1024)),
    prompts("D 80, 2 x 8k", (32, 8, 80), [8192] * 2),
    prompts("D 96, 2 x 8k", (32, 8, 96), [8192] * 2),
    prompts("D 192, 1 x 8k", (16, 8, 192), [8192]),
    prompts("28/4, 1 x 32k", (28, 4, 128), [32_768]),
    prompts("16/1, 1 x 16k", (16, 1, 128), [16_384]),
    prompts("window 1024 of 16k", (32, 8, 128), [16_384], sliding_window=1024),
    prompts("64 of 128", (32, 8, 128), [128] * 64),
    prompts("ragged, 16 of 50 to 3000", (32, 8, 128), _drawn(16, 50, 3000)),
]


def small(cell: Cell) -> Cell:
    """A cell of the same kind that an interpreter attends in a second: few heads, few and short requests."""
    heads, kv_heads, size = cell.heads
    count = min(len(cell.seq_lens), 2)
    shared = 64 if cell.shared else 0
    new = [min(each, 20) for each in cell.query_lens[-count:]]
    lens = new
    if cell.kind != "prefill":
        lens = [shared + 30 * (index + 1) + each for index, each in enumerate(new)]
    fields = tuple((name, 16 if name == "sliding_window" else value) for name, value in cell.fields)
    return dataclasses.replace(
        cell,
        heads=(heads // kv_heads, 1, size),
        query_lens=tuple(new),
        seq_lens=tuple(lens),
        fields=fields,
        shared=shared,
    )


def judge_serving(cells: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The goals of contender `name`, as ratios of times of one run.

    `value` and `met` are None for a goal without a measured cell.
    """
    found: list[dict[str, Any]] = []
    measured = {cell["cell"]: cell for cell in cells if name in cell["us"]}

    def goal(title: str, value: float | None, limit: float, *, at_least: bool = True) -> None:
        met = None if value is None else value >= limit if at_least else value <= limit
        words = f"{'>=' if at_least else '<='} {limit:g}"
        found.append({"name": f"{name}: {title}", "value": value, "goal": words, "met": met})

    def times_of(title: str, other: str) -> float | None:
        """The time of another contender as a multiple of that of `name`."""
        us = measured[title]["us"] if title in measured else {}
        return us[other] / us[name] if other in us else None

    def best(title: str, peers: Iterable[str]) -> float | None:
        ratios = [ratio for peer in peers if (ratio := times_of(title, peer)) is not None]
        return min(ratios, default=None)

    def of_ceiling(title: str) -> float | None:
        return measured[title]["of_ceiling"][name] if title in measured else None

    drawn = [cell for cell in SERVING if cell.kind == "ragged"]
    large = {
        c.name: share for c in drawn if c.kv_bytes >= 256e6 and (share := of_ceiling(c.name)) is not None
    }
    goal("ragged of >= 256 MB against copy, geometric mean", mean(large.values()), 0.85)
    least = min(large, key=large.__getitem__, default=None)
    goal("the least" + (f" ({least})" if least else ""), large[least] if least else None, 0.75)
    against = [ratio for c in drawn if (ratio := best(c.name, _PAGED_PEERS)) is not None]
    goal("ragged against the best peer, geometric mean", mean(against), 1.5)
    for cell in SERVING:
        title = cell.name
        base, _, new = title.rpartition(", ")
        if cell.kind == "speculative" and not new.startswith("1 "):
            if max(cell.query_lens) * cell.heads[0] // cell.heads[1] <= 32:
                alone = measured.get(f"{base}, 1 tokens")
                ratio = (
                    measured[title]["us"][name] / alone["us"][name] if alone and title in measured else None
                )
                goal(f"{title}, against one token", ratio, 1.15, at_least=False)
            fastest = best(title, _PAGED_PEERS)
            goal(f"{title}, against the best peer", fastest and 1 / fastest, 1.1, at_least=False)
        if cell.kind == "prefix":
            limit = 4.0 if "64 share 16k" in title else 1.0
            goal(f"{title}, against no cascade", times_of(title, f"{name}, no cascade"), limit)
        if title in _MOST_US:
            us = measured[title]["us"][name] if title in measured else None
            goal(f"{title}, us", us, _MOST_US[title], at_least=False)
        if title in _OF_COPY:
            goal(f"{title}, against copy", of_ceiling(title), _OF_COPY[title])
        if title in _OF_FLASH_ATTENTION_4:
            limit = _OF_FLASH_ATTENTION_4[title]
            goal(f"{title}, against FlashAttention 4", times_of(title, "FlashAttention 4"), limit)
        if title in _OF_BEST:
            goal(
                f"{title}, against the best of {' and '.join(_PAGED_PEERS)}",
                best(title, _PAGED_PEERS),
                _OF_BEST[title],
            )
    return found


def mean(values: Collection[float]) -> float | None:
    """The geometric mean; None of no values."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


_PAGED_PEERS = "FlashInfer", "FlashAttention 4"
_MOST_US = {"16/1, 1 x 128k": 28, "32/8, 1 x 1k": 8}
_OF_COPY = {"16 more of 32k, 4": 0.85}
_OF_FLASH_ATTENTION_4 = {
    "64 more of 8k, 16": 0.80,
    "512 more of 32k, 1": 0.80,
    "2k more of 64k, 8/1": 0.80,
    "D 80, 2 x 8k": 0.65,
    "D 96, 2 x 8k": 0.65,
    "D 192, 1 x 8k": 0.65,
    "window 1024 of 16k": 0.80,
    "ragged, 16 of 50 to 3000": 0.82,
}
_OF_BEST = {"64 of 128": 0.90}
