"""The host's time in TRITON: building a step's metadata, and a layer's eager call over its bare launches.

Run as `python benchmarks/triton_host.py [--quick] [--json FILE]`. With a GPU the calls are real, and "launches" are
the same kernels, launched as Triton is called, with the same arguments at hand. Without one the kernels do nothing:
what is left is Python's part, and that of dispatching a launch is not in it. Figures are medians of rounds, the two
interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from host_time import ON_GPU, device_name, kernels, launched, microseconds, replay, write_report

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.runtime import AttentionRuntime

PAGE = 16
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=PAGE)
NAME, CONTEXT = "layer", 96
GOAL_BUILD, GOAL_CALL = 50.0, 10.0
GOAL_SIZE = 256
BATCHES = {
    "decode": lambda size: [1] * size,
    "speculative": lambda size: [4] * size,
    "mixed": lambda size: [1] * (size - 1) + [64],
    "prefill": lambda size: [64] * min(size, 64),
}


@dataclasses.dataclass
class Figure:
    """One row of the table, in microseconds."""

    what: str
    batch: str
    requests: int
    measured: float
    launches: float
    num_launches: int
    goal: float | None

    @property
    def over(self) -> float:
        return self.measured - self.launches


class Step:
    """A step of a runtime with one layer on TRITON, and what was launched in it."""

    def __init__(self, query_lens: list[int]) -> None:
        device = "cuda" if ON_GPU else "cpu"
        pages = 2 + sum(-(-(CONTEXT + new) // PAGE) for new in query_lens)
        plan = attnplug.plan({NAME: SPEC}, device=device, backend="TRITON", num_blocks=pages)
        most = max(query_lens)
        config = BuilderConfig(
            max_num_seqs=len(query_lens),
            max_num_batched_tokens=sum(query_lens),
            max_model_len=CONTEXT + most,
            num_speculative_tokens=most - 1 if most < 16 else 0,
        )
        self.runtime = AttentionRuntime(plan, config=config)
        requests = self.runtime.step_batch_builder()
        page = 1
        for index, new in enumerate(query_lens):
            count = -(-(CONTEXT + new) // PAGE)
            requests.add_request(str(index), [list(range(page, page + count))], num_computed_tokens=CONTEXT)
            page += count
        self.batch = requests.step(query_lens)
        self.runtime.begin_step(self.batch)
        self.builder = self.runtime.attention_groups[0].builder
        tokens = sum(query_lens)
        draw = torch.randn(tokens, SPEC.num_heads + 2 * SPEC.num_kv_heads, SPEC.head_size, device=device)
        split = draw.bfloat16().split([SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads], 1)
        self.query, self.key, self.value = split
        self.output = torch.empty_like(self.query)

    def build(self) -> None:
        self.builder.build(0, self.batch.common)

    def forward(self) -> None:
        self.runtime.forward(NAME, self.query, self.key, self.value, self.output)

    def layer(self) -> None:
        """The impl alone, without what the runtime checks of a call."""
        layer = self.runtime.layers[NAME]
        metadata = self.runtime._active.layers[NAME].metadata
        layer.impl.forward(layer, self.query, self.key, self.value, layer.kv_cache, metadata, self.output)


def measure(kind: str, requests: int, rounds: int) -> Iterator[Figure]:
    step = Step(BATCHES[kind](requests))
    step.forward()  # binds, and on a GPU compiles
    counts = len(step.batch.req_ids)
    for what, call, goal in (
        ("build", step.build, GOAL_BUILD),
        ("impl.forward", step.layer, GOAL_CALL),
        ("runtime.forward", step.forward, GOAL_CALL),
    ):
        call()
        launches = launched(call)
        measured, bare = microseconds([call, replay(launches)], rounds)
        has_goal = what != "build" or requests == GOAL_SIZE
        yield Figure(what, kind, counts, measured, bare, len(launches), goal if has_goal else None)
    step.runtime.close()


def run(sizes: Sequence[int], rounds: int) -> list[Figure]:
    figures = []
    print(f"{'':18}{'batch':>12} {'B':>5} {'us':>8} {'launches':>9} {'of them':>8} {'over':>7} {'goal':>6}")
    for kind in BATCHES:
        for requests in sizes:
            for figure in measure(kind, requests, rounds):
                figures.append(figure)
                found = figure.measured if figure.what == "build" else figure.over
                goal = "" if figure.goal is None else f"{figure.goal:.0f}"
                missed = "  missed" if figure.goal is not None and found > figure.goal else ""
                print(
                    f"{figure.what:18}{kind:>12} {figure.requests:>5} {figure.measured:8.1f}"
                    f" {figure.launches:9.1f} {figure.num_launches:>8} {figure.over:7.1f} {goal:>6}{missed}"
                )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help=f"only {GOAL_SIZE} requests, fewer rounds")
    chosen = parser.parse_args()
    sizes, rounds = ((GOAL_SIZE,), 25) if chosen.quick else ((1, 16, GOAL_SIZE), 101)
    print(f"{device_name()}, triton {importlib.metadata.version('triton')}, torch {torch.__version__}")
    print(f"goals: build at most {GOAL_BUILD:.0f} us; calls at most {GOAL_CALL:.0f} us over their launches")
    with contextlib.nullcontext() if ON_GPU else kernels(lambda *_: None):
        figures = run(sizes, rounds)
    if chosen.json:
        write_report(chosen.json, [{**dataclasses.asdict(figure), "over": figure.over} for figure in figures])


if __name__ == "__main__":
    main()
