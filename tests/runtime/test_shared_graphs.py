"""Graphs of steps with shared prefixes and with trees: what is captured once serves later steps of any lengths."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fake_backends import offered
from graph_backends import graph_backend
from graph_models import ALWAYS, LONGEST, SINGLE, UNIFORM, config
from model_layers import layer
from served_model import ServedModel
from test_draft_trees import TreeModel

from attnplug.core import AttentionCGSupport, Feature, LayerSpec
from attnplug.core.errors import BatchError
from attnplug.runtime import GraphState, SharedGraph, SharedGraphs, SharingPrices
from attnplug.runtime.steps.shared_step import SharedStep
from attnplug.testing import assert_close

FULL = layer(dtype="float32")
WINDOW = layer(dtype="float32", sliding_window=20)
TREE = (-1, 0, 0, 2, 1)
SHARES = Feature.SLIDING_WINDOW | Feature.CROSS | Feature.NON_CAUSAL | Feature.LSE


def served(
    specs: Mapping[str, LayerSpec],
    level: AttentionCGSupport = UNIFORM,
    prices: Any = None,
    kind: Any = ServedModel,
) -> Any:
    free = SharingPrices.free() if prices is None else prices
    given: dict[str, Any] = {
        "config": config(max_num_batched_tokens=128),
        "max_model_len": LONGEST,
        "debug": False,
    }
    with offered(graph_backend(level, features=SHARES)):
        if kind is TreeModel:
            return TreeModel(specs, free, **given)
        return ServedModel(specs, memory=lambda plan: {"prefix_sharing": free}, **given)


class Graphs:
    """The shared steps that graphs were captured with, and their replays."""

    def __init__(
        self, model: Any, sizes: tuple[int, ...] = (2, 4), parents: tuple[int, ...] | None = None
    ) -> None:
        self.model, runtime = model, model.runtime
        state = GraphState(runtime, LONGEST, max_query_len=len(parents or (0,)))
        self.shared, self.state = SharedGraphs(runtime, state, piece_rows=2), state
        self.captured: dict[SharedGraph, dict[str, SharedStep | None]] = {}
        for size in sizes:
            with self.shared.capture(size, parents) as key:
                self.captured[key] = {name: runtime._active.layers[name].shared for name in runtime.layers}
                for name in runtime.layers:
                    # A warm-up before the capture, whose slots are all -1.
                    rows = key.batch_size * len(parents or (0,))
                    runtime.forward(name, *(torch.randn(rows, heads, 8) for heads in (4, 2, 2)))

    def replay(self, key: SharedGraph, name: str, drawn: Any) -> torch.Tensor | None:
        """The output of a layer's captured parts with what the graph's memory has now; None for a plain layer."""
        step = self.captured[key][name]
        if step is None:
            return None
        rows = key.batch_size * len(key.parents or (0,))
        query, new_key, value = (
            torch.cat([each, torch.randn(rows - each.shape[0], *each.shape[1:])])
            for each in (drawn.query, drawn.key, drawn.value)
        )
        output = torch.full_like(query, torch.nan)
        step.forward(self.model.runtime.layers[name], query, new_key, value, output, None)
        return output[: drawn.query.shape[0]]


def decodes(model: ServedModel, graphs: Graphs, names: list[str]) -> SharedGraph | None:
    """One decode of each request, by a graph where one fits; each layer is compared with the oracle."""
    counts = dict.fromkeys(names, 1)
    batch = model.begin(**counts)
    key = graphs.shared.prepare(batch)
    for name in model._order():
        drawn = model.draw(name, counts)
        found = None if key is None else graphs.replay(key, name, drawn)
        if found is None:
            model.check(name, drawn)
        else:
            assert_close(found, drawn.expected, 1e-5, name)
    model.finish(None, **counts)
    return key


@pytest.mark.parametrize("specs", [{"0": FULL}, {"0": FULL, "1": WINDOW, "2": FULL}], ids=["full", "window"])
@pytest.mark.parametrize("level", [UNIFORM, ALWAYS])
def test_one_capture_serves_decodes_of_any_forest(
    specs: dict[str, LayerSpec], level: AttentionCGSupport
) -> None:
    model = served(specs, level)
    graphs, keys = Graphs(model), set()
    rng = random.Random(0)
    model.add("0")
    model.step(**{"0": 35})
    for number in range(1, 4):
        other = str(rng.randrange(number))
        blocks = min(model.requests[other].computed // 16, 2)
        if blocks and all(all(held[:blocks]) for held in model.requests[other].blocks):
            model.add(str(number), prefix=(other, 16 * blocks))
        else:
            model.add(str(number))
        model.step(**{str(number): rng.choice((1, 5, 9))})
        for _ in range(3):
            keys.add(decodes(model, graphs, list(model.requests)))
    assert keys >= {SharedGraph(2), SharedGraph(4)} if len(specs) == 1 else keys


def test_a_step_that_shares_nothing_has_no_graph() -> None:
    model = served({"0": FULL})
    graphs = Graphs(model)
    for name in ("a", "b"):
        model.add(name)
        model.step(**{name: 20})
    assert decodes(model, graphs, ["a", "b"]) is None
    batch = model.begin(a=2, b=1)
    assert graphs.shared.prepare(batch) is None


def test_more_pieces_than_a_graph_has_room_for_run_without_it() -> None:
    model = served({"0": FULL})
    graphs = Graphs(model)
    model.add("a")
    model.step(a=33)
    model.add("b", prefix=("a", 32))
    model.add("c")
    model.step(b=1, c=33)
    model.add("d", prefix=("c", 32))
    model.step(d=1)
    # Two pieces of two rows each fill the graph of four.
    assert decodes(model, graphs, list("abcd")) == SharedGraph(4)
    wide = SharedGraphs(model.runtime, graphs.state, piece_rows=1)
    with wide.capture(4):
        pass
    assert wide.prepare(model.begin(**dict.fromkeys("abcd", 1))) is None


def test_trees_of_one_shape_replay_one_graph() -> None:
    model = served({"0": FULL}, kind=TreeModel)
    graphs = Graphs(model, (4,), TREE)
    for name, tokens in (("a", 20), ("b", 1), ("c", 17)):
        model.add(name)
        model.step(**{name: tokens})
    key = SharedGraph(4, TREE)
    replayed: list[torch.Tensor] = []
    forward = model.runtime.forward

    def by_graph(name: str, query: torch.Tensor, new_key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        drawn = type("Drawn", (), {"query": query, "key": new_key, "value": value})
        found = graphs.replay(key, name, drawn)
        assert found is not None
        replayed.append(found)
        return found

    begin = model.runtime.begin_step

    def prepared(batch: Any, **asked: Any) -> None:
        if not batch.trees:
            begin(batch, **asked)
            return
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(model.runtime, "begin_step", begin)
            assert graphs.shared.prepare(batch) == key

    model.runtime.begin_step, model.runtime.forward = prepared, by_graph
    model.verify({name: list(TREE) for name in "abc"}, {"a": 3, "b": -1, "c": 0})
    model.runtime.forward = forward
    model.step(a=1, b=1, c=1)
    model.runtime.forward = by_graph
    model.verify({name: list(TREE) for name in "abc"}, {"a": 4, "b": 2, "c": 1})
    assert len(replayed) == 2


def test_trees_of_another_shape_or_of_some_requests_have_no_graph() -> None:
    model = served({"0": FULL}, kind=TreeModel)
    graphs = Graphs(model, (2,), TREE)
    for name in ("a", "b"):
        model.add(name)
        model.step(**{name: 20})
    counts = {"a": 5, "b": 5}
    for blocks in model.requests.values():
        assert blocks.computed == 20
    other = model.batches.step(counts, trees={"a": list(TREE), "b": [-1, 0, 1, 2, 3]})
    assert graphs.shared.prepare(other) is None
    model.batches.finish_step({"a": -1, "b": -1})
    some = model.batches.step(counts, trees={"a": list(TREE)})
    assert graphs.shared.prepare(some) is None


def test_trees_are_refused_where_one_layer_would_run_them_as_a_chain() -> None:
    """A graph of decodes takes such layers, because they read each request's own keys there."""
    free = {"prefix_sharing": SharingPrices.free()}
    given: dict[str, Any] = {
        "config": config(max_num_batched_tokens=128),
        "max_model_len": LONGEST,
        "debug": False,
    }
    with offered(graph_backend(UNIFORM, features=SHARES | Feature.ALIBI)):
        specs = {"0": FULL, "1": layer(dtype="float32", has_alibi=True)}
        model = ServedModel(specs, memory=lambda plan: free, **given)
    shared = SharedGraphs(model.runtime, GraphState(model.runtime, LONGEST, max_query_len=2))
    with shared.capture(2) as key:
        assert [name for name in specs if model.runtime._active.layers[name].shared is not None] == ["0"]
    assert key == SharedGraph(2)
    with pytest.raises(BatchError, match="layer 1: ALiBi"), shared.capture(2, [-1, 0]):
        pass


def test_what_no_graph_can_hold_is_refused_at_its_capture() -> None:
    for level, parents, match in (
        (
            SINGLE,
            None,
            "asks to capture UNIFORM_BATCH, and DeclaringBuilder declares UNIFORM_SINGLE_TOKEN_DECODE",
        ),
        (UNIFORM, [], "parents"),
        (UNIFORM, [-1, 1], "must be in -1 .. 0"),
    ):
        model = served({"0": FULL}, level)
        shared = SharedGraphs(model.runtime, GraphState(model.runtime, LONGEST))
        with pytest.raises(BatchError, match=match), shared.capture(2, parents):
            pass
    model = served({"0": WINDOW})
    shared = SharedGraphs(model.runtime, GraphState(model.runtime, LONGEST, max_query_len=2))
    with pytest.raises(BatchError, match="the window or chunk of layer 0"), shared.capture(2, [-1, 0]):
        pass
    model = served({"0": layer(dtype="float32")}, prices=False)
    with offered(graph_backend(UNIFORM)):
        plain = ServedModel({"0": FULL}, config=config(), max_model_len=LONGEST, debug=False)
    shared = SharedGraphs(plain.runtime, GraphState(plain.runtime, LONGEST))
    with pytest.raises(BatchError, match="has no layer that shares prefixes"), shared.capture(2):
        pass
    with pytest.raises(BatchError, match="piece_rows=0"):
        SharedGraphs(plain.runtime, GraphState(plain.runtime, LONGEST), piece_rows=0)
