"""The host's time for a batch's metadata, compared with plain numpy for the same numbers.

Run as `python benchmarks/metadata.py [--quick] [--json FILE]`. A figure is the median of rounds, each
interleaved with a round of its floor: the least numpy that gives the same numbers, unchecked. Goals are for
256 requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnplug.core import CommonAttentionMetadata
from attnplug.core.batch import (
    UBatchSlice,
    compute_causal_conv1d_metadata,
    compute_slot_mapping,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    split_attn_metadata,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
)
from attnplug.runtime import StepBatchBuilder

SIZES = (1, 16, 64, 256, 1024)
GOAL_SIZE = 256
BLOCK, CONTEXT, CHUNK = 16, 8192, 512
Call = Callable[[], object]


@dataclasses.dataclass
class Figure:
    """One row of the table, in microseconds."""

    function: str
    kind: str
    requests: int
    measured: float
    floor: float
    goal: float | None


@dataclasses.dataclass
class Case:
    """What to time: ours and its floor; `parts` divides both, `less` is taken off both, `goal` may depend on the floor."""

    function: str
    ours: Call
    floor: Call
    parts: int = 1
    less: tuple[Call, Call] | None = None
    goal: float | Callable[[float], float] | None = None


def lengths(kind: str, requests: int) -> tuple[Any, Any]:
    """Query and sequence lengths: one token each, four each, half decodes and half chunks, or whole contexts."""
    random = np.random.default_rng(requests)
    context = random.integers(1, CONTEXT - 512, requests)
    if kind == "decode":
        query = np.ones_like(context)
    elif kind == "speculative":
        query = np.full_like(context, 4)
    elif kind == "mixed":
        query = np.where(np.arange(requests) < requests // 2, 1, 64)
        context[3 * requests // 4 :] = 0
    else:
        query, context = np.full_like(context, CONTEXT), np.zeros_like(context)
    return query.astype(np.int32), (query + context).astype(np.int32)


def batch(query: Any, seq: Any) -> CommonAttentionMetadata:
    starts = np.zeros(len(query) + 1, dtype=np.int32)
    query.cumsum(out=starts[1:])
    width = CONTEXT // BLOCK
    table = np.random.default_rng(0).integers(0, 2**20, (len(query), width), dtype=np.int32)
    return CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(starts.copy()),
        query_start_loc_cpu=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq.copy()),
        num_reqs=len(query),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(query.max()),
        max_seq_len=int(seq.max()),
        block_table_tensor=torch.from_numpy(table),
        slot_mapping=torch.arange(int(starts[-1])),
        seq_lens_host=seq,
        logits_indices_padded=torch.from_numpy(starts[1:] - 1),
        num_logits_indices=len(query),
    )


def split_cases(common: CommonAttentionMetadata, seq: Any) -> Iterator[Case]:
    starts, tokens = common.query_start_loc_cpu.numpy(), common.num_actual_tokens

    def two() -> object:
        longer = starts[1:] - starts[:-1] > 1
        decodes = int(longer.argmax()) if longer.any() else len(longer)
        return decodes, len(longer) - decodes, int(starts[decodes]), tokens - int(starts[decodes])

    def three() -> object:
        query = starts[1:] - starts[:-1]
        longer = query > 1
        prefill = longer & (seq == query)
        decodes = int(longer.argmax()) if longer.any() else len(query)
        extends = int(prefill.argmax()) if prefill.any() else len(query)
        return decodes, extends, int(starts[decodes]), int(starts[extends])

    yield Case("split_decodes_and_prefills", lambda: split_decodes_and_prefills(common), two, goal=20)
    yield Case(
        "split_decodes_prefills_and_extends",
        lambda: split_decodes_prefills_and_extends(common),
        three,
        goal=20,
    )


def slot_cases(kind: str, common: CommonAttentionMetadata, query: Any, seq: Any) -> Iterator[Case]:
    table, computed = common.block_table_tensor.numpy(), seq - query

    def floor() -> object:
        if kind == "decode":
            rows, positions = np.arange(len(query)), computed.astype(np.int64)
        else:
            rows, ends = np.repeat(np.arange(len(query)), query), np.cumsum(query)
            positions = np.arange(ends[-1]) + np.repeat(computed - ends + query, query)
        blocks = table[rows, positions // BLOCK].astype(np.int64)
        return blocks * BLOCK + positions % BLOCK

    goal = 25 if kind == "decode" else lambda least: 1.5 * least
    yield Case(
        "compute_slot_mapping", lambda: compute_slot_mapping(table, computed, query, BLOCK), floor, goal=goal
    )


def ubatch_cases(common: CommonAttentionMetadata, seq: Any) -> Iterator[Case]:
    starts = common.query_start_loc_cpu.numpy()
    table, slots = common.block_table_tensor.numpy(), common.slot_mapping.numpy()
    requests, tokens = common.num_reqs, common.num_actual_tokens
    if tokens < 2:
        return
    middle = tokens // 2
    row = int(np.searchsorted(starts, middle, side="right")) - 1
    first = row + 1 if middle > starts[row] else row
    parts = [
        UBatchSlice(slice(0, first), slice(0, middle)),
        UBatchSlice(slice(row, requests), slice(middle, tokens)),
    ]

    def floor() -> object:
        made = []
        for part in parts:
            reqs, part_tokens = part.request_slice, part.token_slice
            local = (
                starts[reqs.start : reqs.stop + 1].clip(part_tokens.start, part_tokens.stop)
                - part_tokens.start
            )
            cut = seq[reqs].copy()
            cut[-1] -= max(int(starts[reqs.stop]) - part_tokens.stop, 0)
            longest = int((local[1:] - local[:-1]).max()), int(cut.max())
            made.append((local, cut, longest, table[reqs], slots[part_tokens]))
        return made

    yield Case(
        "split_attn_metadata, each",
        lambda: split_attn_metadata(parts, common),
        floor,
        parts=len(parts),
        goal=60,
    )


def local_cases(kind: str, common: CommonAttentionMetadata, query: Any, seq: Any) -> Iterator[Case]:
    starts, table = common.query_start_loc_cpu.numpy(), common.block_table_tensor
    pages, last_column = CHUNK // BLOCK, table.shape[1] - 1
    _, make_block_table = make_local_attention_virtual_batches(CHUNK, common, BLOCK)

    def pieces() -> tuple[Any, ...]:
        computed = seq - query
        first, last = computed // CHUNK, (seq - 1) // CHUNK
        counts = last - first + 1
        ends = np.cumsum(counts)
        rows = np.repeat(np.arange(len(query)), counts)
        chunks = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
        begin = np.maximum(chunks * CHUNK, computed[rows])
        end = np.minimum((chunks + 1) * CHUNK, seq[rows])
        cuts = np.concatenate([starts[:-1][rows] + begin - computed[rows], starts[-1:]]).astype(np.int32)
        keys = (end - chunks * CHUNK).astype(np.int32)
        return rows, chunks, cuts, keys, int((end - begin).max()), int(keys.max())

    rows, chunks, *_ = pieces()

    def gather() -> object:
        columns = np.minimum(chunks[:, None] * pages + np.arange(pages), last_column)
        return table.numpy()[rows[:, None], columns]

    def whole() -> object:
        return pieces(), gather()

    goal = {"decode": 120, "prefill": 500}.get(kind)
    yield Case(
        "virtual batches, without the gather",
        lambda: make_local_attention_virtual_batches(CHUNK, common, BLOCK),
        whole,
        less=(lambda: make_block_table(table), gather),
        goal=goal,
    )
    yield Case("virtual batches, the gather", lambda: make_block_table(table), gather)


def other_cases(kind: str, common: CommonAttentionMetadata) -> Iterator[Case]:
    starts, indices = common.query_start_loc_cpu.numpy(), common.logits_indices_padded.numpy()  # type: ignore[union-attr]

    def wanted() -> object:
        local = np.searchsorted(indices, starts).astype(np.int32)
        return local, int((local[1:] - local[:-1]).max())

    def programs() -> object:
        nums = -(-(starts[1:] - starts[:-1]) // 8)
        ends = np.cumsum(nums)
        padded = np.full((2, 2 * max(1024, int(ends[-1]))), -1, dtype=np.int32)
        padded[0, : ends[-1]] = np.repeat(np.arange(len(nums)), nums)
        padded[1, : ends[-1]] = np.arange(ends[-1]) - np.repeat(ends - nums, nums)
        return padded

    if kind != "decode":
        yield Case("fast prefill", lambda: make_kv_sharing_fast_prefill_common_attn_metadata(common), wanted)
    yield Case(
        "compute_causal_conv1d_metadata",
        lambda: compute_causal_conv1d_metadata(common.query_start_loc_cpu),
        programs,
    )


def builder(groups: int, query: Any, seq: Any) -> StepBatchBuilder:
    made = StepBatchBuilder(
        max_num_seqs=len(query),
        max_num_batched_tokens=int(query.sum()),
        max_model_len=CONTEXT,
        block_sizes=[BLOCK] * groups,
    )
    for row, (new, length) in enumerate(zip(query.tolist(), seq.tolist(), strict=True)):
        pages = list(range(1 + row, 1 + row + -(-length // BLOCK)))
        made.add_request(str(row), [pages] * groups, num_computed_tokens=length - new)
    return made


def step_cases(kind: str, common: CommonAttentionMetadata, query: Any, seq: Any) -> Iterator[Case]:
    one, four = builder(1, query, seq), builder(4, query, seq)
    table, computed = common.block_table_tensor.numpy(), (seq - query).astype(np.int64)

    def floor() -> object:
        starts = query.cumsum()
        if kind == "decode":
            rows, positions = np.arange(len(query)), computed
        else:
            rows = np.repeat(np.arange(len(query)), query)
            positions = np.arange(starts[-1]) + np.repeat(computed - starts + query, query)
        return starts, seq.max(), table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK

    goal = 60 if kind == "decode" else None
    yield Case("StepBatchBuilder.step, 1 KV group", lambda: one.step(query), floor, goal=goal)
    yield Case(
        "the same with 4, against 1",
        lambda: four.step(query),
        lambda: one.step(query),
        goal=lambda least: 1.3 * least,
    )


def cases(kind: str, requests: int) -> Iterator[Case]:
    query, seq = lengths(kind, requests)
    common = batch(query, seq)
    if kind == "prefill":
        yield from local_cases(kind, common, query, seq)
        return
    yield from split_cases(common, seq)
    yield from slot_cases(kind, common, query, seq)
    yield from ubatch_cases(common, seq)
    yield from local_cases(kind, common, query, seq)
    yield from other_cases(kind, common)
    yield from step_cases(kind, common, query, seq)


def microseconds(calls: list[Call], rounds: int, least: float = 2e-3) -> list[float]:
    """One call of each: the median over rounds of the mean of as many calls as take `least` seconds."""
    counts = []
    for call in calls:
        call()
        began = time.perf_counter()
        call()
        counts.append(max(1, int(least / (time.perf_counter() - began))))
    means: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, kept in zip(calls, counts, means, strict=True):
            began = time.perf_counter()
            for _ in range(count):
                call()
            kept.append((time.perf_counter() - began) / count)
    return [statistics.median(kept) * 1e6 for kept in means]


def measure(case: Case, kind: str, requests: int, rounds: int) -> Figure:
    ours, floor, *less = microseconds([case.ours, case.floor, *(case.less or ())], rounds)
    if less:
        ours, floor = max(ours - less[0], 0.0), max(floor - less[1], 0.0)
    ours, floor = ours / case.parts, floor / case.parts
    goal = case.goal(floor) if callable(case.goal) else case.goal
    return Figure(case.function, kind, requests, ours, floor, goal if requests == GOAL_SIZE else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help=f"only {GOAL_SIZE} requests, fewer rounds")
    chosen = parser.parse_args()
    sizes, rounds = ((GOAL_SIZE,), 15) if chosen.quick else (SIZES, 31)
    figures = []
    print(f"{'':36} {'batch':>11} {'B':>5} {'us':>8} {'floor':>8} {'ratio':>6} {'goal':>7}")
    for kind in ("decode", "mixed", "speculative", "prefill"):
        for requests in sizes:
            for case in cases(kind, requests):
                figure = measure(case, kind, requests, rounds)
                figures.append(figure)
                ratio = f"{figure.measured / figure.floor:.2f}" if figure.floor else ""
                goal = "" if figure.goal is None else f"{figure.goal:.1f}"
                missed = figure.goal is not None and figure.measured > figure.goal
                print(
                    f"{figure.function:36} {kind:>11} {requests:>5} {figure.measured:8.1f} {figure.floor:8.1f}"
                    f" {ratio:>6} {goal:>7}{'  missed' if missed else ''}"
                )
    if chosen.json:
        data = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "attnplug": importlib.metadata.version("attnplug"),
            "unit": "us",
            "figures": [dataclasses.asdict(figure) for figure in figures],
        }
        chosen.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
