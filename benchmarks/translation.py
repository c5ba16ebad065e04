"""The cost of engines' steps and layers in attnplug's adapters, in CPU time on the host.

Run as `python benchmarks/translation.py [--quick] [--json FILE]`. A figure is the median of rounds. It contains neither
the engine's own work nor that of a builder or an impl. vLLM's layers and groups are measured where vLLM is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from attnplug.integrations.attention.paged import PagedStep
from attnplug.integrations.attention.paged_cache import LayerCache
from attnplug.integrations.flash_attn.pages import Pages
from attnplug.integrations.flash_attn.steps import Lengths, paged_step
from attnplug.integrations.vllm.steps import translate

SIZES = (1, 64, 256, 1024)
GOAL_SIZE, GOAL, FORWARD_GOAL = 256, 15.0, 3.0
PAGE, CONTEXT = 256, 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds of CPU time for one step, or one call of a layer."""

    engine: str
    step: str
    requests: int
    cpu_us: float
    goal_us: float | None


def main() -> None:
    """Print the figures, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 15")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for requests in SIZES:
        for engine, step, call in cases(requests):
            goal = GOAL if engine == "vLLM" and requests == GOAL_SIZE else None
            figure = Figure(engine, step, requests, cpu_us(call, 3 if options.quick else 15), goal)
            figures.append(figure)
            print(f"{engine:14}{step:34}{requests:6} requests {figure.cpu_us:10.1f} us")
    for step, call, base, goal in vllm_parts():
        rounds = 3 if options.quick else 15
        figure = Figure("vLLM", step, GOAL_SIZE, cpu_us(call, rounds) - cpu_us(base, rounds), goal)
        figures.append(figure)
        print(f"{'vLLM':14}{step:34}{GOAL_SIZE:6} requests {figure.cpu_us:10.2f} us")
    if options.json:
        options.json.write_text(json.dumps(report(figures), indent=2) + "\n")


def cases(requests: int) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Engine, step and call for decodes of `requests` with `CONTEXT` tokens each."""
    starts = torch.arange(requests + 1, dtype=torch.int32)
    lens = torch.full((requests,), CONTEXT, dtype=torch.int32)
    blocks = CONTEXT // PAGE
    table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    slots = table[:, -1].long() * PAGE + PAGE - 1
    given = SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=requests,
        num_actual_tokens=requests,
        max_query_len=1,
        max_seq_len=CONTEXT,
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
        logits_indices_padded=None,
        num_logits_indices=None,
        encoder_seq_lens=None,
        encoder_seq_lens_cpu=None,
        seq_lens_cpu_upper_bound=lens,
    )
    yield "vLLM", "each group of layers", lambda: translate(given, exact=True)

    caches = torch.empty(2, table.numel(), PAGE, 1, 1)
    pages = Pages(caches[0], caches[1], table)
    part = LayerCache(None, 0, 0, "full_attention", None)
    key_starts = torch.arange(requests + 1, dtype=torch.int32) * CONTEXT
    common = {"cu_seq_lens_q": starts, "cu_seq_lens_k": key_starts}
    tables = {**common, "block_table": table[None]}
    places = (table.long()[:, :, None] * PAGE + torch.arange(PAGE)).flatten()
    indices = {**common, "block_table": None, "read_index": [places], "write_index": [slots]}
    for step, arguments in (("block tables", tables), ("an index for each token", indices)):

        def call(arguments: dict[str, object] = arguments) -> object:
            return PagedStep.read(arguments, part.kind, requests).paged(part, pages, "exact")

        yield "transformers", step, call

    query_lens, key_lens = np.ones(requests, dtype=np.int64), lens.numpy().astype(np.int64)
    lengths = Lengths(lens, key_lens)
    yield (
        "flash-attn",
        "flash_attn_with_kvcache",
        lambda: paged_step(query_lens, lengths, pages, True, "exact"),
    )


def vllm_parts() -> Iterator[tuple[str, Callable[[], object], Callable[[], object], float]]:
    """The adapter's share of builders and layers: step, call, the call of the inner part alone, and the goal."""
    if importlib.util.find_spec("vllm") is None:
        print("vLLM's groups and layers are not measured: vllm is not installed")
        return
    import vllm.platforms

    if not torch.cuda.is_available():
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backend import CommonAttentionMetadata as Given
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from attnplug.integrations.vllm.backends import backend_class
    from attnplug.integrations.vllm.impl import HAS_CACHE_SHAPE

    config, cpu, names = VllmConfig(), torch.device("cpu"), [f"layer.{index}" for index in range(36)]
    backend = backend_class("ATTNPLUG_TORCH")
    with set_current_vllm_config(config):
        layers = {name: SimpleNamespace(impl=backend.get_impl_cls()(8, 64, 0.125, 2)) for name in names}
    for layer in layers.values():
        layer.impl.see(torch.bfloat16)
    config.compilation_config.static_forward_context = layers
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    cache = torch.zeros((4, 2, 16, 2, 64) if HAS_CACHE_SHAPE else (4, 2, 16, 128), dtype=torch.bfloat16)
    for label, queries in (("decodes", [1] * GOAL_SIZE), ("mixed", [1] * (GOAL_SIZE - 8) + [256] * 8)):
        builder = backend.get_builder_cls()(spec, names, config, cpu)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        lens, tokens = torch.full((GOAL_SIZE,), CONTEXT).int(), sum(queries)
        given = Given(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=GOAL_SIZE,
            num_actual_tokens=tokens,
            max_query_len=max(queries),
            max_seq_len=CONTEXT,
            block_table_tensor=torch.zeros(GOAL_SIZE, CONTEXT // 16, dtype=torch.int32),
            slot_mapping=torch.full((tokens,), -1),
            seq_lens_cpu_upper_bound=lens,
        )
        step, layer = builder.build(0, given), layers[names[0]]
        inner: Any = layer.impl.bound(16, cpu).inner
        inner.attend = inner.update_kv_cache = _nothing
        builder.inner(layer.impl.bound(16, cpu)).build = _nothing
        rows, keys = torch.zeros(tokens, 8, 64), torch.zeros(tokens, 2, 64)
        call = functools.partial(layer.impl.forward, layer, rows, keys, keys, cache, step, rows)
        base = functools.partial(inner.attend, layer, rows, None, None, cache, step, rows)
        yield f"build of a group, {label}", functools.partial(builder.build, 0, given), _nothing, GOAL
        yield f"forward of a layer, {label}", call, base, FORWARD_GOAL


def _nothing(*given: object) -> object:
    return given


def cpu_us(call: Callable[[], object], rounds: int) -> float:
    """The median of the rounds' CPU time for one call."""
    call()
    begin = time.process_time()
    call()
    calls = max(1, int(0.02 / max(time.process_time() - begin, 1e-6)))
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.process_time() - begin) / calls)
    return statistics.median(found)


def report(figures: list[Figure]) -> dict[str, object]:
    """The figures as JSON."""
    return {
        "benchmark": "translation",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": {"type": "cpu", "machine": platform.machine(), "threads": 1},
        "versions": {
            "Python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("attnplug", "torch", "transformers")},
        },
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }


if __name__ == "__main__":
    main()
