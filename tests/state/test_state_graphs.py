"""Steps of a hybrid model in graphs: static pages of states, padding, drafts, and captures that advance nothing.

Without a GPU a replay runs the layers again, with the metadata that was built for the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fake_backends import offered
from families import FAMILIES, draw
from graph_backends import graph_backend

import attnplug
from attnplug.core import AttentionCGSupport, BuilderConfig, LayerSpec, LayerTensors
from attnplug.errors import BatchError
from attnplug.runtime import AttentionRuntime, GraphState, StateStep, StepBatch, serving_states
from attnplug.testing.state_oracle import StateInputs, reference_states

SIZES, LONGEST, DRAFTS, HIDDEN = (2, 4), 64, 2, 8
SPECS = {
    "conv": FAMILIES["conv"],
    "gdn": FAMILIES["gdn"],
    "mamba": FAMILIES["mamba"],
    "full": LayerSpec(num_heads=2, num_kv_heads=1, head_size=HIDDEN, dtype="float32"),
}
STATES = tuple(name for name, spec in SPECS.items() if spec.state is not None)
WEIGHTS = LayerTensors(conv_weight=draw("conv", 1).weight.float(), conv_bias=draw("conv", 1).bias.float())
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Waits = Callable[[], contextlib.AbstractContextManager[None]]
ON_TRITON = "*=GRAPHS,state=TRITON,conv=TRITON"


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def runtime_on(device: str, backend: str = ON_TRITON, drafts: int = DRAFTS) -> AttentionRuntime:
    config = BuilderConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=LONGEST,
        cudagraph_batch_sizes=SIZES,
        num_speculative_tokens=drafts,
    )
    specs = serving_states(SPECS, drafts=drafts, block_size=16)
    with offered(graph_backend(AttentionCGSupport.UNIFORM_BATCH, device_types=("cpu", "cuda"))):
        plan = attnplug.plan(specs, device, backend=backend, num_blocks=64, num_states=40)
        return AttentionRuntime(plan, {"conv": WEIGHTS}, config=config)


class Captured:
    """Requests whose decodes of `queries` tokens run in graphs, and whose prompts do not."""

    def __init__(self, device: str, queries: int = 1, without_waits: Waits = contextlib.nullcontext) -> None:
        self.device, self.queries, self.without_waits = device, queries, without_waits
        self.runtime = runtime_on(device)
        self.builder, self.table = self.runtime.step_batch_builder(), self.runtime.state_table()
        for layer in self.runtime.state_layers.values():
            # Stale pages have NaN, which must reach nothing.
            layer.states.fill_(torch.nan)
        self.state = GraphState(self.runtime)
        self.inputs: dict[str, dict[str, StateInputs]] = {}
        self.right: dict[str, dict[str, torch.Tensor]] = {}
        self.done: dict[str, int] = {}
        rows = SIZES[-1] * queries
        self.buffers = {name: self._zeros(name, rows) for name in SPECS}
        self.outputs = {
            name: torch.zeros_like(self.buffers[name]["value" if name != "conv" else "query"])
            for name in STATES
        }
        self.replays: dict[int, Callable[[StepBatch, StateStep], None]] = {}
        self.kept: list[Any] = []

    def _zeros(self, name: str, rows: int) -> dict[str, torch.Tensor]:
        if name == "full":
            heads = {"query": 2, "key": 1, "value": 1}
            return {each: torch.zeros(rows, n, HIDDEN, device=self.device) for each, n in heads.items()}
        given = self._given(draw(name, 1))
        return {each: torch.zeros(rows, *rest.shape[1:], device=self.device) for each, rest in given.items()}

    def _given(self, inputs: StateInputs) -> dict[str, torch.Tensor]:
        found = inputs.by_token().items()
        return {name: each.float().to(self.device) for name, each in found if each is not None}

    def capture(self) -> None:
        for size in SIZES:
            with self.state.capture(size, self.queries) as metadata:
                self._layers(size)
                self.kept.append(metadata)
                if self.device == "cuda":
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        self._layers(size)
                    self.replays[size] = lambda *_, graph=graph: graph.replay()
                else:
                    self.replays[size] = lambda *step, size=size, made=metadata: self._again(
                        size, made, *step
                    )

    def _again(self, size: int, metadata: Any, padded: StepBatch, states: StateStep) -> None:
        own = self.state.get_graph_input_buffers(size, self.queries).states
        assert own is not None
        self.runtime.begin_step(padded, metadata=metadata, states=own.step(padded.common, states))
        self._layers(size)

    def _layers(self, size: int) -> None:
        rows = size * self.queries
        for name, given in self.buffers.items():
            output = None if name == "full" else self.outputs[name][:rows]
            self.runtime.forward(name, **{n: each[:rows] for n, each in given.items()}, output=output)

    def add(self, name: str, prompt: int) -> None:
        """Add a request and run its prompt without a graph."""
        seed = len(self.inputs)
        self.inputs[name] = {layer: draw(layer, LONGEST, seed=seed) for layer in STATES}
        self.right[name] = {
            layer: reference_states(SPECS[layer], each)[0] for layer, each in self.inputs[name].items()
        }
        self.done[name] = 0
        self.builder.add_request(name, [self._blocks()])
        self.table.add_request(name)
        batch = self.builder.step({name: prompt})
        self.runtime.begin_step(batch, states=self.table.step(batch))
        for layer in STATES:
            given = self._given(self.inputs[name][layer].rows(slice(0, prompt)))
            self._check(layer, name, self.runtime.forward(layer, **given), prompt)
        self._finish({name: prompt})

    def remove(self, name: str) -> None:
        """Remove a request; a step would have it as one without tokens, which no graph has."""
        self.builder.remove_request(name)
        self.table.remove_request(name)

    def _blocks(self) -> list[int]:
        return list(self.runtime.block_pool.allocate(LONGEST // 16))

    def _finish(self, accepted: dict[str, int]) -> None:
        self.builder.finish_step(accepted)
        self.table.finish_step(accepted)
        for name, count in accepted.items():
            self.done[name] += count

    def _check(self, layer: str, name: str, found: torch.Tensor, good: int) -> None:
        right = self.right[name][layer][self.done[name] :][:good]
        assert torch.allclose(found[:good].double().cpu(), right, atol=1e-4, rtol=1e-4), (layer, name)

    def replay(self, *names: str, accepted: dict[str, int] | None = None, finish: bool = True) -> None:
        """Run a decode of these requests in the smallest graph, compare it with the oracle, and finish it."""
        counts = dict.fromkeys(names, self.queries)
        good = {**counts, **(accepted or {})}
        batch = self.builder.step(counts)
        step = self.table.step(batch, dict.fromkeys(names, self.queries - 1) if self.queries > 1 else None)
        size = self.state.batch_size_for(len(names))
        assert size is not None
        for layer, buffers in self.buffers.items():
            for buffer in buffers.values():
                buffer.fill_(torch.nan if layer != "full" else 0.0)
        for layer in STATES:
            self.outputs[layer].fill_(torch.nan)
            for row, name in enumerate(batch.req_ids):
                part = self.inputs[name][layer].rows(slice(self.done[name], self.done[name] + self.queries))
                for field, rows in self._given(part).items():
                    # Tokens that will be rejected are others than the right ones.
                    rows[good[name] :] *= -0.5
                    self.buffers[layer][field][row * self.queries : (row + 1) * self.queries] = rows
        buffers = self.state.get_graph_input_buffers(size, self.queries)
        if self.device == "cuda":
            torch.cuda.synchronize()
        with self.without_waits():
            padded = self.state.prepare_graph_input_buffers(buffers, batch, states=step)
            self.replays[size](padded, step)
        for layer in STATES:
            for row, name in enumerate(batch.req_ids):
                self._check(layer, name, self.outputs[layer][row * self.queries :], good[name])
        if finish:
            self._finish(good)

    def pages(self) -> dict[str, torch.Tensor]:
        return {name: layer.states.clone() for name, layer in self.runtime.state_layers.items()}


@pytest.fixture
def waits(device: str, sync_errors: Waits) -> Waits:
    """Nothing within may wait for the GPU."""
    return sync_errors if device == "cuda" else contextlib.nullcontext


@pytest.fixture
def served(device: str, waits: Waits) -> Captured:
    return Captured(device, without_waits=waits)


def equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one)


def test_decodes_replay_on_the_pages_of_each_step(served: Captured) -> None:
    served.add("a", 5)
    served.capture()
    served.add("b", 1)
    for _ in range(3):
        served.replay("a", "b")
    # Three requests are padded to the graph of four.
    served.add("c", 20)
    served.replay("c", "a", "b")
    served.remove("a")
    served.replay("b", "c")
    served.remove("b")
    served.replay("c")


def test_captures_and_warm_ups_advance_no_state(served: Captured) -> None:
    served.add("a", 5)
    before = served.pages()
    served.runtime.warm_up()
    served.capture()
    assert equal_bits(served.pages(), before)
    buffers = served.state.get_graph_input_buffers(4).states
    assert buffers is not None
    assert set(buffers.pages.tolist()) == set(buffers.slots.tolist()) == {-1}
    served.replay("a")
    assert not equal_bits(served.pages(), before)


def test_drafts_replay_with_fewer_accepted(device: str, waits: Waits) -> None:
    served = Captured(device, 1 + DRAFTS, waits)
    served.capture()
    for name, prompt in (("a", 4), ("b", 9), ("c", 2)):
        served.add(name, prompt)
    served.replay("a", "b", "c", accepted={"a": 1, "b": 3, "c": 2})
    served.remove("b")
    served.replay("c", "a", accepted={"a": 2, "c": 1})
    served.replay("a", "c")


def test_a_replay_counts_as_a_run(served: Captured) -> None:
    served.add("a", 5)
    served.capture()
    served.replay("a", finish=False)
    with pytest.raises(BatchError, match="ran on the pages that it started from, and was not finished"):
        served.table.step({"a": 1})


def test_a_second_replay_of_a_step_that_overwrote_its_states_is_refused(served: Captured) -> None:
    served.add("a", 5)
    served.capture()
    batch = served.builder.step({"a": 1})
    states = served.table.step(batch)
    buffers = served.state.get_graph_input_buffers(2)
    served.state.prepare_graph_input_buffers(buffers, batch, states=states)
    with pytest.raises(BatchError, match="a replay would add the tokens twice"):
        served.state.prepare_graph_input_buffers(buffers, batch, states=states)


def test_a_step_without_its_states_is_refused_and_copies_nothing(served: Captured) -> None:
    served.add("a", 5)
    batch = served.builder.step({"a": 1})
    buffers = served.state.get_graph_input_buffers(2)
    before = buffers.seq_lens.clone()
    with pytest.raises(
        BatchError, match=r"states=None is required: layer conv keeps a state; give StateTable.step"
    ):
        served.state.prepare_graph_input_buffers(buffers, batch)
    other = served.table.step({"a": 1})
    with pytest.raises(BatchError, match="is of another batch"):
        served.state.prepare_graph_input_buffers(buffers, batch, states=other)
    assert torch.equal(buffers.seq_lens, before)


def test_states_of_a_model_without_any_are_refused() -> None:
    config = BuilderConfig(max_model_len=LONGEST, cudagraph_batch_sizes=SIZES)
    with offered(graph_backend(AttentionCGSupport.UNIFORM_BATCH)):
        plan = attnplug.plan({"full": SPECS["full"]}, "cpu", backend="GRAPHS", num_blocks=9)
        runtime = AttentionRuntime(plan, config=config)
    builder, state, other = runtime.step_batch_builder(), GraphState(runtime), Captured("cpu")
    builder.add_request("a", [[1]])
    other.table.add_request("a")
    batch = builder.step({"a": 1})
    with pytest.raises(BatchError, match="and no layer keeps a state"):
        state.prepare_graph_input_buffers(
            state.get_graph_input_buffers(2), batch, states=other.table.step({"a": 1})
        )


def test_a_builder_that_graphs_cannot_hold_is_named() -> None:
    state = GraphState(runtime_on("cpu", "*=GRAPHS,state=TORCH,conv=TRITON"))
    assert state.support is AttentionCGSupport.NEVER
    limit = (
        r"asks to capture UNIFORM_SINGLE_TOKEN_DECODE, and TorchStateBuilder of TORCH \(layer gdn\) declares"
    )
    with pytest.raises(BatchError, match=limit), state.capture(2):
        pass


def test_graphs_need_metadata_of_every_layer_with_a_state(served: Captured) -> None:
    served.add("a", 5)
    batch = served.builder.step({"a": 1})
    metadata = served.state.metadata_for_capture(2)
    lacking = {name: each for name, each in metadata.items() if name != "gdn"}
    with pytest.raises(BatchError, match="has none of this layer, which keeps a state"):
        served.runtime.begin_step(batch, metadata=lacking, states=served.table.step(batch))
