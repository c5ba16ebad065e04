"""On a GPU: steps of a backend with step_safe neither wait nor allocate memory that grows with context.

On a GPU: steps up to the declared level are captured in CUDA graphs and replayed with other lengths.

Without a GPU: metadata that was built for a capture serves later steps in the same buffers.

The layers run again with that metadata, as a graph would. So a builder that declares graphs and copies lengths or
tables to the host fails on any machine. The graphs themselves are checked on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Iterator

import torch

from attnplug.core.composite import CompositeBackend
from attnplug.core.features import Feature
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadata, CommonAttentionMetadata
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.graph_state import GraphState
from attnplug.testing.batches import Batch
from attnplug.testing.captures import captured
from attnplug.testing.comparison import assert_close
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    layer_of_kind,
    mixed_lengths,
    step_factory,
    with_lengths,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckUntested,
    ConformanceError,
    error_context,
    reworded,
)
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.serving.runtimes import model_of, wrong_layers
from attnplug.testing.conformance.serving.serving import LayerCall, ServedModel
from attnplug.testing.conformance.target import GPU_TYPES, Target

_WAITS, _GROWS = "waits for the device", "memory grows with context"

# About a second of a GPU's clock; the host needs only milliseconds to launch a step.
_BUSY_CYCLES = 2 * 10**9

_SHORT, _LONG = 4096, 16384
_REQUESTS = 8
# Bytes that a longer context may add: a few more splits, but less than one byte per key.
_SLACK = 1 << 16


def checks(target: Target) -> Iterator[Check]:
    """The checks of `step_safe`, if the backend declares it and the device is a GPU."""
    # A backend without step_safe promises neither of the two.
    if target.device.type not in GPU_TYPES or not target.backend.step_safe:
        return
    for shape in ("decode", "mixed"):
        summary = f"build and forward of a {shape} step do not wait for the GPU"
        yield Check.of(f"gpu/no-wait-{shape}", summary, _check_no_wait, target, shape)
    for shape, new in (("decode", 1), ("extend", 16)):
        summary = f"a {shape} step allocates no more for longer contexts"
        yield Check.of(f"gpu/no-growth-{shape}", summary, _check_no_growth, target, new)


def _check_no_wait(target: Target, shape: str) -> None:
    spec, size = layer_of_kind(target, "full")
    batch = step_factory(target, spec, decode_lengths(size) if shape == "decode" else mixed_lengths(size))()
    harness = Harness.of(target, batch)
    needs = harness.builder.needs_host_seq_lens
    # No more host lengths than the builder declares to need.
    host = None if needs == "none" else batch.common.seq_lens_host
    common = dataclasses.replace(batch.common, seq_lens_host=host, seq_lens_host_exact=needs == "exact")
    with error_context("a step that warms up"):
        # Twice, since a first step may wait while it compiles or allocates.
        _step(harness, batch, common)
        metadata = harness.builder.build(0, common)
        harness.run(batch, metadata)
    parts: dict[str, Callable[[], object]] = {
        "build": lambda: harness.builder.build(0, common),
        "forward": lambda: harness.run(batch, metadata),
    }
    for name, part in parts.items():
        what = f"{name} of a {shape} step, where step_safe is declared"
        torch.cuda.synchronize()
        with error_context(what), _waits_are_errors(what):
            part()
        # torch detects only waits of its own calls. Twice, since the scheduler may have delayed the host.
        if all([_is_waiting(part), _is_waiting(part)]):
            raise ConformanceError(
                f"{what}: it returned only when the GPU had done all work before it", _WAITS
            )


@contextlib.contextmanager
def _waits_are_errors(what: str) -> Iterator[None]:
    """Raise ConformanceError if a torch call makes the host wait."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may miss waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            # Only the error of torch's sync debug mode is about a wait.
            if "synchroniz" not in str(error):
                raise
            raise ConformanceError(f"{what}: {error}", _WAITS) from error
        finally:
            # The mode belongs to the process, and later checks may wait.
            torch.cuda.set_sync_debug_mode(before)


def _is_waiting(part: Callable[[], object]) -> bool:
    """Whether `part` returns only when the GPU has done the work queued before."""
    torch.cuda.synchronize()
    # A busy GPU makes a wait visible: the event is done when `part` returns only if the host waited.
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy.record()
    part()
    waited = bool(busy.query())  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return waited


def _check_no_growth(target: Target, new: int) -> None:
    spec, size = layer_of_kind(target, "full")
    batch = target.batch(spec, [new] * _REQUESTS, [new] * _REQUESTS)
    harness = Harness.of(target, batch)
    # All requests use one page, since only sizes matter here.
    table = batch.common.block_table_tensor[:, :1].repeat(1, -(-(_LONG + size) // size) + 1)
    kept, peaks = [], []
    for context in (_SHORT, _LONG):
        with error_context(f"a step of {context} tokens of context"):
            common = with_lengths(batch.common, torch.full((_REQUESTS,), context + new))
            common = dataclasses.replace(common, block_table_tensor=table)
            # Compilation and the growth of workspaces happen in these runs, before the peak is measured.
            for _ in range(2):
                _step(harness, batch, common)
            # Garbage of other checks in this process, freed in one of both measurements, would look like growth.
            gc.collect()
            kept.append(_allocated("current"))
            peaks.append(_peak(functools.partial(_step, harness, batch, common)))
    for what, (short, long) in {"keeps": kept, "takes": peaks}.items():
        if long - short > _SLACK:
            raise ConformanceError(
                f"a step {what} {long - short:,} bytes more with {_LONG} tokens of context than with {_SHORT}, "
                f"where step_safe is declared: {_GROWS}",
                _GROWS,
            )


def _step(harness: Harness, batch: Batch, common: CommonAttentionMetadata) -> None:
    harness.run(batch, harness.builder.build(0, common))


def _peak(work: Callable[[], None]) -> int:
    """The peak of bytes that `work` asked torch for, beyond those held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = _allocated("current")
    work()
    torch.cuda.synchronize()
    return _allocated("peak") - before


def _allocated(metric: str) -> int:
    """The "current" or "peak" bytes of all tensors."""
    # They are as asked for: torch's allocator hands out free blocks that are up to a MiB larger, whichever it finds.
    stats = torch.cuda.memory_stats()
    # Other allocators of torch count only what they hand out.
    asked = stats.get("requested_bytes.all.current", 0) > 0
    return int(stats.get(f"{'requested' if asked else 'allocated'}_bytes.all.{metric}", 0))


_SIZES = (2, 4)
_FAR = 700
"""Keys of a request of a graph that was captured with few."""
_KEPT = "a graph that keeps what was captured"

LEVELS = {
    "single": (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, 1, "decodes of one token"),
    "uniform": (AttentionCGSupport.UNIFORM_BATCH, 3, "decodes of three tokens"),
    "any": (AttentionCGSupport.ALWAYS, 3, "batches of up to three tokens a request"),
}


def graph_checks(target: Target) -> Iterator[Check]:
    """One check for each level of CUDA-graph support, if the device is a GPU."""
    if target.device.type not in GPU_TYPES:
        return
    for name, (_, _, steps) in LEVELS.items():
        summary = f"{steps} are captured once and replayed with other lengths"
        yield Check.of(f"gpu/graph-{name}", summary, check_level, target, name)


def check_level(target: Target, name: str) -> None:
    """Capture the steps of one of LEVELS and replay them; CheckSkipped if the backend declares less."""
    level, queries, _ = LEVELS[name]
    try:
        specs, kv_sharing = model_of(target)
    except CheckSkipped as why:
        raise CheckUntested(f"CUDA graphs: {why}") from None
    served = ServedModel(
        target,
        specs,
        kv_sharing,
        least_tokens=_FAR + 4 * queries,
        cudagraph_batch_sizes=_SIZES,
        num_speculative_tokens=queries - 1,
    )
    state = GraphState(served.runtime, served.max_model_len, queries)
    # The backend promises no level above the declared one, so such a level is skipped.
    if state.support < level:
        raise CheckSkipped(f"{target.name} declares {state.support.name}, which is below {level.name}")
    graphs = _Graphs(served, state, queries)
    size, fewer = served.block_size, 1 if name == "any" else queries
    for prompt, count in (("a", size + 3), ("b", 5)):
        served.add(prompt, count)
        graphs.eager(**{prompt: count})
    graphs.replay(a=queries, b=fewer)
    # The lengths change places, so a graph that kept those of the last step fails.
    graphs.replay(a=fewer, b=queries)
    served.add("c")
    graphs.eager(c=2 * size - 1)
    for _ in range(3):
        graphs.replay(a=queries, b=queries, c=fewer)
    served.remove("b")
    graphs.replay(a=queries, c=queries)
    served.remove("a")
    graphs.replay(c=queries)
    served.add("e")
    graphs.eager(e=_FAR)
    for _ in range(2):
        graphs.replay(c=queries, e=queries)
    served.remove("e")
    if Feature.MM_PREFIX in target.backend.features:
        # A short prompt in a graph has spans among the tokens of decodes.
        served.add("d", queries)
        graphs.replay(c=queries, d=queries)
        graphs.replay(c=queries, d=queries)


def record(work: Callable[[], None]) -> Callable[[], None]:
    """Capture `work` in a graph; returns a function that replays it and waits for the GPU."""
    torch.cuda.synchronize()
    replay = captured(work)

    def finished() -> None:
        replay()
        torch.cuda.synchronize()

    return finished


class _Graphs:
    """A model with its small steps in graphs, one for each batch size, over fixed inputs and outputs."""

    # Without a GPU a replay runs the layers again, with the metadata that was built for the capture.

    def __init__(self, served: ServedModel, state: GraphState, queries: int) -> None:
        self._served, self._state, self._queries = served, state, queries
        self._replays: dict[int, Callable[[], None]] = {}
        # Kept alive, since freed metadata memory could be reused with values of a later step.
        self._captured: list[dict[str, AttentionMetadata]] = []
        rows = _SIZES[-1] * queries
        self._inputs: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._padded: StepBatch
        for name, spec in served.plan.specs.items():
            query, self._outputs[name], key, value = (
                torch.zeros(
                    (rows, heads, size), dtype=getattr(torch, spec.dtype), device=served.runtime.device
                )
                for heads, size in (
                    (spec.num_heads, spec.query_size),
                    (spec.num_heads, spec.output_size),
                    (spec.num_kv_heads, spec.head_size),
                    (spec.num_kv_heads, spec.head_size_v),
                )
            )
            # A layer that shares another layer's cache gets no keys and values of its own.
            shares = name in served.plan.kv_sharing
            self._inputs[name] = (query, None, None) if shares else (query, key, value)
        for size in _SIZES:
            what = f"capture of {size} requests of {queries} tokens, {state.support.name} declared"
            layers = functools.partial(self._layers, size)
            with error_context(what), state.capture(size, queries) as metadata:
                self._captured.append(metadata)
                layers()
                if served.runtime.device.type != "cuda":
                    self._replays[size] = functools.partial(self._run_again, layers, metadata)
                else:
                    self._replays[size] = record(layers)

    def eager(self, **tokens: int) -> None:
        """Run a step without a graph; ConformanceError if its answer is wrong."""
        self._served.begin(**tokens)
        wrong = wrong_layers(self._served, self._calls(), f"without a graph, new tokens {tokens}")
        if wrong:
            raise ConformanceError(wrong)
        self._served.finish()

    def replay(self, **tokens: int) -> None:
        """Run a step in the smallest graph for it.

        Raises:
            ConformanceError: the answer is wrong; the error says whether it is also wrong without the graph.
        """
        size = self._state.batch_size_for(len(tokens)) or _SIZES[-1]
        what = f"replay of a graph of {size} requests with new tokens {tokens}"
        batch, calls = self._served.schedule(**tokens), self._calls()
        for name, call in calls.items():
            for buffer, rows in zip(self._inputs[name], (call.query, call.key, call.value), strict=True):
                if buffer is not None and rows is not None:
                    # A graph reads fixed addresses, so inputs are copied to the buffers that it captured.
                    buffer[: rows.shape[0]] = rows
            # A replay that writes nothing would otherwise pass with the output of the step before.
            self._outputs[name].fill_(torch.nan)
        with error_context(what):
            buffers = self._state.get_graph_input_buffers(size, self._queries)
            self._padded = self._state.prepare_graph_input_buffers(buffers, batch)
            self._replays[size]()
        problem = self._problem(calls)
        if problem:
            # A second run without the graph shows whether the graph or the backend is wrong.
            self._served.runtime.begin_step(batch)
            eager = wrong_layers(self._served, calls, "without the graph")
            why = f"; {eager}" if eager else f"; without the graph it is right: {_KEPT}"
            raise ConformanceError(f"{what}: {problem}{why}", None if eager else _KEPT)
        self._served.finish()

    def _run_again(self, layers: Callable[[], None], metadata: dict[str, AttentionMetadata]) -> None:
        self._served.runtime.begin_step(self._padded, metadata=metadata)
        layers()

    def _calls(self) -> dict[str, LayerCall]:
        return {name: self._served.call(name) for name in self._inputs}

    def _layers(self, size: int) -> None:
        rows = size * self._queries
        for name, (query, key, value) in self._inputs.items():
            new = None if key is None else key[:rows], None if value is None else value[:rows]
            self._served.runtime.forward(name, query[:rows], new[0], new[1], self._outputs[name][:rows])

    def _problem(self, calls: dict[str, LayerCall]) -> str | None:
        for name, call in calls.items():
            output = self._outputs[name][: call.expected.shape[0]]
            try:
                assert_close(output, call.expected, self._served.bound(name), name)
            except AssertionError as problem:
                return str(problem)
        return None


_RULE = (
    "rule: a builder that declares CUDA graphs plans in build, and forward reads lengths, tables and slots from the "
    "tensors of the step, because a graph runs no Python again; declare AttentionCGSupport.NEVER otherwise"
)


def capture_checks(target: Target) -> Iterator[Check]:
    """One check, at the level that the builder declares; the halves of a composite are checked on their own."""
    if (
        target.device.type in GPU_TYPES
        or target.phase is not None
        or issubclass(target.backend, CompositeBackend)
    ):
        return
    summary = "metadata that was built for a capture serves later steps in the same buffers"
    yield Check.of("builder/captured", summary, _check_captured, target)


def _check_captured(target: Target) -> None:
    *higher, lowest = reversed(LEVELS)
    try:
        for name in higher:
            with contextlib.suppress(CheckSkipped):
                check_level(target, name)
                return
        check_level(target, lowest)
    except ConformanceError as problem:
        raise reworded(problem, f"{problem}\n{_RULE}") from problem
