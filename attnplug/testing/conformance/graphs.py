"""On a GPU: steps up to the declared level are captured in CUDA graphs and replayed with other lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from attnplug.core.features import Feature
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadata
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.graph_state import GraphState
from attnplug.testing.captures import captured
from attnplug.testing.comparison import assert_close, tolerance
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckUntested,
    ConformanceError,
    error_context,
)
from attnplug.testing.conformance.gpu import GPU_TYPES
from attnplug.testing.conformance.runtimes import model_of, wrong_layers
from attnplug.testing.conformance.serving import Call, ServedModel
from attnplug.testing.conformance.target import Target

_SIZES = (2, 4)
_KEPT = "a graph that keeps what was captured"

LEVELS = {
    "single": (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, 1, "decodes of one token"),
    "uniform": (AttentionCGSupport.UNIFORM_BATCH, 3, "decodes of three tokens"),
    "any": (AttentionCGSupport.ALWAYS, 3, "batches of up to three tokens a request"),
}


def checks(target: Target) -> Iterator[Check]:
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
        target, specs, kv_sharing, cudagraph_batch_sizes=_SIZES, num_speculative_tokens=queries - 1
    )
    state = GraphState(served.runtime, served.max_model_len, queries)
    # A level above the declared one is no promise of the backend, so it is skipped.
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
    """A model with its small steps in graphs, one for each batch size, over fixed inputs and outputs.

    Without a GPU a replay runs the layers again, with the metadata that was built for the capture.
    """

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

    def _calls(self) -> dict[str, Call]:
        return {name: self._served.call(name) for name in self._inputs}

    def _layers(self, size: int) -> None:
        rows = size * self._queries
        for name, (query, key, value) in self._inputs.items():
            new = None if key is None else key[:rows], None if value is None else value[:rows]
            self._served.runtime.forward(name, query[:rows], new[0], new[1], self._outputs[name][:rows])

    def _problem(self, calls: dict[str, Call]) -> str | None:
        for name, call in calls.items():
            output = self._outputs[name][: call.expected.shape[0]]
            try:
                assert_close(output, call.expected, tolerance(self._served.plan.specs[name]).output, name)
            except AssertionError as problem:
                return str(problem)
        return None
