"""Runs each kind of step once, so that no request waits for the compilation of kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.composite import CompositeBackend
from attnplug.core.interface.answers import answer
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.core.selection import Selection
from attnplug.core.spec import Phase
from attnplug.mla.chunks import long_context
from attnplug.runtime.batch.sharded_step import ShardedStep
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.plan.grouping import cross_groups
from attnplug.runtime.plan.sharding import shares_tokens
from attnplug.runtime.states.state_layers import StateLayer, shapes_of
from attnplug.runtime.states.state_step import StateStep
from attnplug.runtime.steps.dummy_steps import DummyShape, dummy_step, dummy_tensors, shapes_within
from attnplug.runtime.steps.step_checks import needed_inputs, widest_topk

if TYPE_CHECKING:
    from typing import TypeAlias

    from attnplug.runtime.attention_runtime import AttentionRuntime
    from attnplug.runtime.steps.runtime_layer import RuntimeLayer

    AnyLayer: TypeAlias = RuntimeLayer | StateLayer

_log = logging.getLogger("attnplug")


@dataclasses.dataclass(frozen=True, slots=True)
class WarmUpStep:
    """One layer's call in one dummy step.

    Args:
        backend: its backend.
        layer: the first of the layers that compile the same kernels.
        phase: decode or prefill.
        requests: number of requests.
        query_len: queries of each request.
        computed: whether the requests already had tokens in the KV cache.
        compiled: the kernels compiled in it, if the backend reports them.
        seconds: duration of the call; near 0 without compilation.
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
    """The steps of a warm-up, in order."""

    steps: tuple[WarmUpStep, ...]

    @property
    def compiled(self) -> tuple[str, ...]:
        """The compiled kernels in order, as reported by the backends."""
        return tuple(name for step in self.steps for name in step.compiled)

    @property
    def seconds(self) -> float:
        """Total duration of the steps."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to warm up: no backend of the plan compiles anything"
        total = f"{self.seconds:.1f} s in all"
        lines = [f"{len(self.compiled)} kernels compiled in {len(self.steps)} steps, {total}"]
        for step in self.steps:
            size = f"{step.requests} x {step.query_len} tokens{' after others' if step.computed else ''}"
            lines.append(f"  {step.backend} {step.phase} of {step.layer}, {size}: {step.seconds:.2f} s")
            lines += [f"    {name}" for name in step.compiled]
        return "\n".join(lines)


def warm_up(runtime: AttentionRuntime) -> WarmUpReport:
    """Run dummy steps of every kind, once for each group of layers that compile the same kernels.

    The steps are decodes of 1, 8, 64, ... and the most requests, for each number of tokens that speculation allows.
    Prompts have 2, 4, 8, ... 1024 tokens, and the most of a step: one from the start, and one and the most after
    computed tokens, or as many as decodes if they are short. No page of a request is read or written: slots and pages of states are -1, and tables
    have the null block. Compiled kernels are logged at INFO.

    Layers of backends that compile nothing (`compile_key` None) are skipped. An active step ends. Under context
    parallelism all ranks call it at the same time.

    Args:
        runtime: its config limits requests, tokens and speculative tokens.

    Returns:
        The steps and compiled kernels.
    """
    steps: list[WarmUpStep] = []
    for layer, backend, count in distinct_layers(runtime):
        _log.info("warming up %s for layer %s and %d alike", layer.backend, layer.name, count - 1)
        ran = [run_step(runtime, layer, backend, shape) for shape in step_shapes(runtime, layer)]
        steps += ran
        for step in ran:
            for name in step.compiled:
                _log.info("%s compiled %s for %s of %s", layer.backend, name, step.phase, layer.name)
        seconds = sum(step.seconds for step in ran)
        _log.info("%s is ready for %s: %.1f s", layer.backend, layer.name, seconds)
    report = WarmUpReport(tuple(steps))
    _log.info("%s", str(report).partition("\n")[0])
    return report


def distinct_layers(runtime: AttentionRuntime) -> Iterator[tuple[AnyLayer, type[AttentionBackend], int]]:
    """The first layer of each group that compiles the same kernels, its backend, and the size of the group."""
    layers_by_key: dict[Any, list[AnyLayer]] = {}
    every: Mapping[str, AnyLayer] = {**runtime.layers, **runtime.state_layers}
    for name, layer in every.items():
        backend = runtime.plan.decisions[name].get_backend_cls()
        key: Any = answer(backend, "compile_key", layer.spec)
        if name in runtime.plan.new_tokens:
            new = runtime.plan.new_tokens[name]
            # A step runs both backends, so either one may have kernels to compile.
            new_key = answer(new.get_backend_cls(), "compile_key", new.spec)
            key = None if key is None and new_key is None else (key, new.backend, new_key)
        if key is None:
            continue
        spec, cache = layer.spec, layer.states if isinstance(layer, StateLayer) else layer.kv_cache
        # Kernels also depend on the divisibility of strides and on the numbers of heads.
        form = spec.num_heads, spec.num_kv_heads, None if cache is None else cache.stride()
        is_writing = isinstance(layer, StateLayer) or layer.target is None
        layers_by_key.setdefault((backend, key, form, is_writing), []).append(layer)
    for (backend, *_), layers in layers_by_key.items():
        yield layers[0], backend, len(layers)


def step_shapes(runtime: AttentionRuntime, layer: AnyLayer) -> Iterator[DummyShape]:
    """The dummy steps after which a layer compiles nothing more, within the limits of the runtime's config."""
    is_paged = isinstance(layer, StateLayer) or layer.kv_cache is not None
    backend = runtime.plan.decisions[layer.name].get_backend_cls()
    context = long_context(layer.spec, runtime.config.context_chunk_rows)
    return shapes_within(runtime.config, backend, is_paged=is_paged, context=context)


def run_step(
    runtime: AttentionRuntime, layer: AnyLayer, backend: type[AttentionBackend], shape: DummyShape
) -> WarmUpStep:
    """Run one layer in one dummy step, with and without LSE if it may be asked for one."""
    spec, device = layer.spec, runtime.device
    rows = shape.requests * shape.query_len
    given = _tensors(layer, rows, device)
    lses: list[torch.Tensor | None] = [None]
    if spec.needs_lse:
        # Some kernels are compiled again for calls with LSE, such as those of TRITON.
        lses.append(torch.empty(rows, spec.num_heads, dtype=torch.float32, device=device))
    members = backend.members().values() if issubclass(backend, CompositeBackend) else (backend,)
    began = time.perf_counter()
    with contextlib.ExitStack() as watches, torch.no_grad():
        lists = [
            watches.enter_context(answer(member, "watch_compiling")) for member in dict.fromkeys(members)
        ]
        batch = _batch(runtime, shape)
        if spec.state is not None:
            runtime.begin_step(states=StateStep.padding(batch.common))
        elif spec.direct_kv:
            runtime.begin_step(direct=batch.common)
        else:
            runtime.begin_step(batch)
        try:
            for lse in lses:
                runtime.forward(layer.name, **given, output_lse=lse)
        finally:
            # The dummy step must not stay active: its slots are all -1, so a forward would write nothing.
            runtime.end_step()
        if device.type == "cuda":
            # Kernels run after the call returns; without a wait, their time would not be in `seconds`.
            torch.cuda.synchronize(device)
        compiled = tuple(name for found in lists for name in found)
    seconds = time.perf_counter() - began
    sizes = shape.phase, shape.requests, shape.query_len, shape.computed > 0
    return WarmUpStep(layer.backend, layer.name, *sizes, compiled, seconds)


def _tensors(layer: AnyLayer, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The arguments of a layer's call for so many tokens: zeros."""
    spec, dtype = layer.spec, getattr(torch, layer.spec.dtype)
    if isinstance(layer, StateLayer):
        dtypes = {"decay": torch.float32}
        return {
            name: torch.zeros(rows, *shapes[0], dtype=dtypes.get(name, dtype), device=device)
            for name, shapes in shapes_of(spec).items()
            if name != "output"
        }
    return dummy_tensors(spec, rows, device, writes=layer.target is None)


def _inputs(runtime: AttentionRuntime, reqs: int, rows: int, length: int) -> dict[str, Any]:
    """The optional inputs that layers need: encoders are as long as sequences, and each query picks the first key."""
    device, found = runtime.device, dict[str, Any]()
    specs = {name: layer.spec for name, layer in runtime.layers.items()}
    for each in needed_inputs(specs):
        if each.name == "selection":
            found[each.name] = Selection.allocate(rows, widest_topk(specs.values()), device)
            found[each.name].positions[:, 0] = 0
            found[each.name].counts.fill_(1)
            continue
        host = each.padded(each.count(reqs, rows), "cpu")
        if each.name == "encoder_seq_lens":
            host.fill_(length)
        found[each.name] = host.to(device)
        if each.host is not None:
            found[each.host] = each.on_host(host)
    return found


def _batch(runtime: AttentionRuntime, shape: DummyShape) -> StepBatch:
    """A step of padding: all slots -1, all pages the null block."""
    reqs, device = shape.requests, runtime.device
    groups = runtime.kv_cache_config.kv_cache_groups
    cross = cross_groups(runtime.kv_cache_config)
    length, rows = shape.computed + shape.query_len, reqs * shape.query_len
    smallest = min((group.kv_cache_spec.block_size for group in groups), default=1)
    tables = torch.zeros(max(len(groups), 1), reqs, -(-length // smallest), dtype=torch.int32, device=device)
    slots = torch.full((max(len(groups), 1), rows), PAD_SLOT_ID, dtype=torch.int64, device=device)
    first = next((i for i in range(len(groups)) if i not in cross), 0)
    common = dummy_step(shape, tables[first], slots[first], **_inputs(runtime, reqs, rows, length))
    names = tuple(f"warm-up-{index}" for index in range(reqs))
    sizes = tuple(group.kv_cache_spec.block_size for group in groups)
    place = runtime.plan.context_parallel
    sharded = None
    if place is not None:
        shared = [i for i, group in enumerate(groups) if shares_tokens(group.kv_cache_spec)]
        sharded = ShardedStep.uniform(place, shared, reqs, shape.computed, shape.query_len, device)
    counts = (rows,) * len(groups)
    return StepBatch(common, first, tables, slots, counts, cross, names, sizes, sharded=sharded).sealed()
