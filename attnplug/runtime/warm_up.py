"""Running each kind of step once before the first request, so that nothing is compiled while one waits."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.composite import CompositeBackend
from attnplug.core.kv_cache_spec import CrossAttentionSpec
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.core.spec import Phase
from attnplug.runtime.step_batch import StepBatch

if TYPE_CHECKING:
    from attnplug.runtime.attention_runtime import AttentionRuntime
    from attnplug.runtime.runtime_layer import RuntimeLayer

__all__ = ["WarmUpReport", "WarmUpStep", "warm_up"]

_log = logging.getLogger("attnplug")

_LONGEST = 1024
"""Queries of the longest request: kernels differ by tiles, and no tile has as many rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class WarmUpStep:
    """One layer's call in one made-up step.

    Args:
        backend: who ran it.
        layer: the layer, which stands for all that compile the same.
        phase: decode, or prefill.
        requests: how many.
        query_len: queries of each.
        computed: whether they had tokens in the KV cache before.
        compiled: what the backend's library compiled in it, as far as it tells.
        seconds: how long it took; where nothing was compiled, about nothing.
    """

    backend: str
    layer: str
    phase: Phase
    requests: int
    query_len: int
    computed: bool
    compiled: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class WarmUpReport:
    """What a warm-up ran, in order."""

    steps: tuple[WarmUpStep, ...]

    @property
    def compiled(self) -> tuple[str, ...]:
        """What was compiled, in order, as far as the backends tell."""
        return tuple(name for step in self.steps for name in step.compiled)

    @property
    def seconds(self) -> float:
        """How long the steps took in all."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to warm up: no backend of the plan compiles anything"
        lines = [
            f"{len(self.compiled)} kernels compiled in {len(self.steps)} steps, {self.seconds:.1f} s in all"
        ]
        for step in self.steps:
            after = " after others" if step.computed else ""
            what = f"{step.requests} x {step.query_len} tokens{after}"
            found = "".join(f"\n    {name}" for name in step.compiled)
            lines.append(
                f"  {step.backend} {step.phase} of {step.layer}, {what}: {step.seconds:.2f} s{found}"
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    requests: int
    query_len: int
    computed: int
    phase: Phase


def warm_up(runtime: AttentionRuntime) -> WarmUpReport:
    """Run made-up steps of every kind, once for each group of layers whose kernels are the same.

    Decodes of one token, and of each number that speculation allows, of one request and of the most; prompts of
    2, 4, 8, ... tokens, from the start and after computed ones. No page of a request is read or written: slots
    are -1 and tables name the null block. What is compiled is logged at INFO, and in the report.

    Layers of backends that compile nothing (`compile_key` None) are passed over. Steps that were begun end.

    Args:
        runtime: its config says how many requests, tokens and speculative tokens there are at most.

    Returns:
        What was run and compiled.
    """
    steps: list[WarmUpStep] = []
    for layer, backend, alike in _distinct(runtime):
        _log.info("warming up %s for layer %s and %d alike", layer.backend, layer.name, alike - 1)
        ran = [_run(runtime, layer, backend, shape) for shape in _shapes(runtime, layer)]
        steps += ran
        _log_compiled(layer, ran)
    report = WarmUpReport(tuple(steps))
    _log.info("%s", str(report).partition("\n")[0])
    return report


def _log_compiled(layer: RuntimeLayer, steps: Sequence[WarmUpStep]) -> None:
    for step in steps:
        for name in step.compiled:
            _log.info("%s compiled %s for %s of %s", layer.backend, name, step.phase, layer.name)
    _log.info("%s is ready for %s: %.1f s", layer.backend, layer.name, sum(step.seconds for step in steps))


def _distinct(runtime: AttentionRuntime) -> Iterator[tuple[RuntimeLayer, type[AttentionBackend], int]]:
    """One layer of each group that compiles the same, and how many they are."""
    alike: dict[Any, list[RuntimeLayer]] = {}
    for name, layer in runtime.layers.items():
        backend = runtime.plan.decisions[name].get_backend_cls()
        key = backend.compile_key(layer.spec)
        if key is None:
            continue
        spec, cache = layer.spec, layer.kv_cache
        # Divisors of sizes and strides are compiled in too, and numbers of heads choose between kernels.
        form = spec.num_heads, spec.num_kv_heads, None if cache is None else cache.stride()
        alike.setdefault((backend, key, form, layer.target is None), []).append(layer)
    for (backend, *_), layers in alike.items():
        yield layers[0], backend, len(layers)


def _shapes(runtime: AttentionRuntime, layer: RuntimeLayer) -> Iterator[_Shape]:
    config = runtime.config
    most, tokens = config.max_num_seqs, config.max_num_batched_tokens
    longest = min(tokens, config.max_model_len or tokens, _LONGEST)
    decodes = 0
    if layer.kv_cache is not None:
        decodes = min(1 + config.num_speculative_tokens, longest)
        for query_len in range(1, decodes + 1):
            for requests in sorted({1, max(min(most, tokens // query_len), 1)}):
                yield _Shape(requests, query_len, 1, Phase.DECODE)
    lengths = {decodes + 1, *(1 << power for power in range(11)), longest}
    for query_len in sorted(length for length in lengths if decodes < length <= longest):
        for computed in (0, 1) if layer.kv_cache is not None else (0,):
            yield _Shape(1, query_len, computed, Phase.PREFILL)


def _run(
    runtime: AttentionRuntime, layer: RuntimeLayer, backend: type[AttentionBackend], shape: _Shape
) -> WarmUpStep:
    spec, device = layer.spec, runtime.device
    rows = shape.requests * shape.query_len
    dtype: torch.dtype = getattr(torch, spec.dtype)
    query = torch.zeros(rows, spec.num_heads, spec.head_size, dtype=dtype, device=device)
    key = value = None
    if layer.target is None:
        key = torch.zeros(rows, spec.num_kv_heads, spec.head_size, dtype=dtype, device=device)
        value = torch.zeros(rows, spec.num_kv_heads, spec.head_size_v, dtype=dtype, device=device)
        value = None if spec.mla is not None else value
    lses: list[torch.Tensor | None] = [None]
    if spec.needs_lse:
        lses.append(torch.empty(rows, spec.num_heads, dtype=torch.float32, device=device))
    members = backend.members().values() if issubclass(backend, CompositeBackend) else (backend,)
    compiled: list[str] = []
    began = time.perf_counter()
    with contextlib.ExitStack() as watches, torch.no_grad():
        lists = [watches.enter_context(member.watch_compiling()) for member in dict.fromkeys(members)]
        # Encoders see both ways; of requests in pages a StepBatchBuilder says that they are causal.
        batch = _batch(runtime, shape, causal=spec.causal or not spec.direct_kv)
        if spec.direct_kv:
            runtime.begin_step(direct=batch.common)
        else:
            runtime.begin_step(batch)
        try:
            for lse in lses:
                runtime.forward(layer.name, query, key, value, output_lse=lse)
        finally:
            runtime.end_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for found in lists:
            compiled += found
    return WarmUpStep(
        layer.backend,
        layer.name,
        shape.phase,
        shape.requests,
        shape.query_len,
        shape.computed > 0,
        tuple(compiled),
        time.perf_counter() - began,
    )


def _batch(runtime: AttentionRuntime, shape: _Shape, *, causal: bool) -> StepBatch:
    """A step of padding: all slots -1, all pages the null block."""
    reqs, device = shape.requests, runtime.device
    groups = runtime.kv_cache_config.kv_cache_groups
    cross = frozenset(i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, CrossAttentionSpec))
    length, rows = shape.computed + shape.query_len, reqs * shape.query_len
    smallest = min((group.kv_cache_spec.block_size for group in groups), default=1)
    starts = torch.arange(0, rows + 1, shape.query_len, dtype=torch.int32)
    lengths = np.full(reqs, length, dtype=np.int32)
    seq_lens = torch.from_numpy(lengths).to(device)
    tables = torch.zeros(max(len(groups), 1), reqs, -(-length // smallest), dtype=torch.int32, device=device)
    slots = torch.full((max(len(groups), 1), rows), PAD_SLOT_ID, dtype=torch.int64, device=device)
    first = next((i for i in range(len(groups)) if i not in cross), 0)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=reqs,
        num_actual_tokens=rows,
        max_query_len=shape.query_len,
        max_seq_len=length,
        block_table_tensor=tables[first],
        slot_mapping=slots[first],
        causal=causal,
        seq_lens_host=lengths,
        encoder_seq_lens=seq_lens if cross else None,
        encoder_seq_lens_cpu=lengths if cross else None,
    )
    names = tuple(f"warm-up-{index}" for index in range(reqs))
    return StepBatch(common, first, tables, slots, (rows,) * len(groups), cross, names)
