"""Steps captured in CUDA graphs and replayed, against the oracle."""

from __future__ import annotations

import pytest
import torch
from fake_backends import offered
from graph_backends import GraphImpl, graph_backend
from model_layers import layer
from served_model import ServedModel

from attnplug.core import (
    AttentionCGSupport,
    BuilderConfig,
    Phase,
    StepKind,
    StepPriority,
    StepRange,
)
from attnplug.runtime import GraphState
from attnplug.testing import assert_close

pytestmark = pytest.mark.gpu

FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
CROSS = layer(dtype="float32", attn_type="encoder_decoder")
LONGEST = 64
SIZES = (2, 4)


class Captured:
    """A model whose decode steps of `queries` tokens run in graphs, one for each batch size."""

    def __init__(
        self, specs, queries: int = 1, max_encoder_len: int = 0, backends=(), drafts: int = 0
    ) -> None:
        config = BuilderConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            cudagraph_batch_sizes=SIZES,
            num_speculative_tokens=drafts,
        )
        with offered(
            *(backends or (graph_backend(AttentionCGSupport.UNIFORM_BATCH, device_types=("cuda",)),))
        ):
            self.model = ServedModel(
                specs,
                device="cuda",
                config=config,
                debug=False,
                max_model_len=LONGEST,
                max_encoder_len=max_encoder_len,
            )
        self.state = GraphState(self.model.runtime, LONGEST, queries, max_encoder_len)
        self.queries, self.graphs = queries, {}
        rows = SIZES[-1] * queries
        self.inputs = {
            name: [torch.zeros(rows, heads, 8, device="cuda") for heads in (4, 2, 2)] for name in specs
        }
        self.outputs = {name: torch.zeros(rows, 4, 8, device="cuda") for name in specs}
        for size in SIZES:
            self._capture(size)

    def _capture(self, size: int) -> None:
        with self.state.capture(size, self.queries):
            self._layers(size)
            torch.cuda.synchronize()
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size]):
                self._layers(size)

    def _layers(self, size: int) -> None:
        rows = size * self.queries
        for name, (query, key, value) in self.inputs.items():
            cross = "cross" in self.model.plan.specs[name].kinds
            given = (None, None) if cross else (key[:rows], value[:rows])
            self.model.runtime.forward(name, query[:rows], *given, self.outputs[name][:rows])

    def step(self, sync_errors, accepted=None, **scheduled: int) -> None:
        """Copy a step in, replay its graph, and check every layer."""
        size = self.state.batch_size_for(len(self.model.requests))
        assert size is not None
        batch = self.model.begin(**scheduled)
        drawn = {name: self.model.draw(name, scheduled) for name in self.inputs}
        for name, (query, key, value) in self.inputs.items():
            tensors = (query, drawn[name].query), (key, drawn[name].key), (value, drawn[name].value)
            for buffer, rows in tensors:
                if rows is not None:
                    buffer[: rows.shape[0]] = rows
        torch.cuda.synchronize()
        with sync_errors():
            self.state.prepare_graph_input_buffers(
                self.state.get_graph_input_buffers(size, self.queries), batch
            )
            self.graphs[size].replay()
        for name, output in self.outputs.items():
            assert_close(output[: batch.common.num_actual_tokens], drawn[name].expected, 1e-5, name)
        self.model.finish(accepted, **scheduled)


def test_decodes_replay_with_other_lengths_pages_and_numbers_of_requests(sync_errors):
    captured = Captured({"0": FULL, "1": SLIDING, "2": FULL})
    for name, tokens in (("a", 20), ("b", 3), ("c", 17)):
        captured.model.add(name)
        captured.model.step(**{name: tokens})
    for _ in range(18):
        captured.step(sync_errors, a=1, b=1, c=1)
    captured.model.remove("a")
    captured.step(sync_errors, b=1, c=1)
    captured.model.remove("b")
    captured.step(sync_errors, c=1)
    captured.model.step(c=5)
    captured.step(sync_errors, c=1)
    assert all(not cache[0].any() for cache in captured.model.runtime.kv_caches.values())


class Notes(GraphImpl):
    """Attends as its base does, and notes its backend each time that it is called."""

    ran: list[tuple[str, int]] = []  # noqa: RUF012  (one list for all impls of a test)

    def attend(self, layer, query, key, value, kv_cache, attn_metadata, output, **asked):
        self.ran.append((self.backend.get_name(), attn_metadata.common.num_reqs))
        return super().attend(layer, query, key, value, kv_cache, attn_metadata, output, **asked)


def ranked(name, prefill, decode, *ranges):
    """A backend that graphs hold, with a priority for each phase and for ranges of steps."""
    priorities = {Phase.PREFILL: prefill, Phase.DECODE: decode, None: min(prefill, decode)}
    made = graph_backend(
        AttentionCGSupport.UNIFORM_BATCH,
        name,
        device_types=("cuda",),
        get_priority=lambda spec, device, phase: priorities[phase],
        get_step_priorities=lambda spec, device: tuple(StepPriority(*each) for each in ranges),
    )
    made.get_impl_cls = staticmethod(lambda: Notes)
    return made


@pytest.mark.parametrize(("queries", "members"), [(1, {2: "S", 4: "D"}), (3, {2: "S", 4: "S"})])
def test_each_graph_replays_the_member_that_it_was_captured_with(sync_errors, queries, members):
    few, drafts = StepRange(StepKind.DECODE, requests=(1, 2)), StepRange(StepKind.DRAFT)
    backends = ranked("P", 900, 20), ranked("D", 20, 900), ranked("S", 30, 30, (few, 910), (drafts, 920))
    Notes.ran.clear()
    captured = Captured({"0": FULL, "1": SLIDING}, queries, backends=backends, drafts=queries - 1)
    assert {size: name for name, size in Notes.ran} == members
    for name, tokens in (("a", 20), ("b", 13), ("c", 17)):
        captured.model.add(name)
        captured.model.step(**{name: tokens})
    for _ in range(4):
        # Three requests are padded to the graph of four.
        captured.step(sync_errors, **dict.fromkeys("abc", queries))
    captured.model.remove("a")
    captured.step(sync_errors, b=queries, c=queries)
    captured.model.remove("b")
    captured.step(sync_errors, c=queries)


def test_speculative_verification_replays_with_fewer_accepted(sync_errors):
    captured = Captured({"0": FULL, "1": SLIDING}, queries=3)
    for name, tokens in (("a", 20), ("b", 3), ("c", 7)):
        captured.model.add(name)
        captured.model.step(**{name: tokens})
    captured.step(sync_errors, {"a": 1, "b": 3, "c": 2}, a=3, b=3, c=3)
    captured.step(sync_errors, {"a": 2, "b": 0}, a=3, b=3, c=3)
    captured.model.remove("b")
    captured.step(sync_errors, a=3, c=3)


def test_cross_attention_replays_with_the_encoder_lengths_of_each_step(sync_errors):
    captured = Captured({"self": FULL, "cross": CROSS}, max_encoder_len=40)
    captured.model.add("a", encoder_len=33)
    captured.model.step(a=4)
    captured.step(sync_errors, a=1)
    captured.model.add("b", encoder_len=7)
    captured.model.step(a=1, b=2)
    captured.step(sync_errors, a=1, b=1)
