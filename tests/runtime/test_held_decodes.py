"""The memory of a graph grows with its decodes, and then has the values of decodes that fill it anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_shared_graphs import FULL, WINDOW, Graphs, served

from attnplug.runtime import SharedGraph, SharedGraphs, shared_graphs
from attnplug.runtime.steps.forest_parts import CutTable
from attnplug.runtime.steps.shared_step import CallPart, SharedStep
from attnplug.testing import assert_close

KINDS = {"full": {"0": FULL}, "full and window": {"0": FULL, "1": WINDOW, "2": FULL}}


class Decodes:
    """Decodes of a model by graphs, beside other graphs of it whose memory each step fills anew."""

    def __init__(self, specs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.fills = served(specs), 0
        self.graphs = Graphs(self.model)
        self.fresh = SharedGraphs(self.model.runtime, self.graphs.state, piece_rows=2)
        for size in (2, 4):
            with self.fresh.capture(size):
                pass
        pieces = shared_graphs.uniform_pieces

        def counted(*given: Any) -> Any:
            self.fills += 1
            return pieces(*given)

        monkeypatch.setattr(shared_graphs, "uniform_pieces", counted)
        self.built: dict[str, Any] = {}
        for each in self.graphs.shared._layers():
            self._watch(each.names[0], each.twins.pieces().builder)

    def _watch(self, name: str, builder: Any) -> None:
        """Keep the last batch of a builder, because graphs may read memory that its last call wrote."""
        build = builder.build

        def watched(prefix: int, common: Any) -> Any:
            self.built[name] = common
            return build(prefix, common)

        builder.build = watched

    def start(self) -> None:
        """Four requests that share 32 tokens."""
        self.model.add("a")
        self.model.step(a=32)
        for name, tokens in (("b", 1), ("c", 5), ("d", 9)):
            self.model.add(name, prefix=("a", 32))
            self.model.step(**{name: tokens})

    def join(self, name: str, tokens: int) -> None:
        """A new request that shares tokens with the first one, unless a window has passed them."""
        held = [blocks[: tokens // 16] for blocks in self.model.requests["a"].blocks]
        self.model.add(name, prefix=("a", tokens) if all(map(all, held)) else None)

    def run(self, count: int = 1, compare: bool = False) -> SharedGraph | None:
        """Steps of one token for all requests, against the oracle; gives the key of the last one's graph."""
        model, key = self.model, None
        for _ in range(count):
            counts = dict.fromkeys(model.requests, 1)
            with pytest.MonkeyPatch.context() as patched:
                # The model's own step would use the builders, too.
                patched.setattr(model.runtime, "begin_step", lambda *_, **__: None)
                batch = model.begin(**counts)
            if compare:
                self.compare(batch)
            key = self.graphs.shared.prepare(batch)
            if key is None:
                model.runtime.begin_step(batch)
            for name, common in self.built.items() if key is not None else ():
                assert model.runtime._active.layers[name].shared.parts[1].metadata.common is common
            for name in model._order():
                drawn = model.draw(name, counts)
                found = None if key is None else self.graphs.replay(key, name, drawn)
                if found is None:
                    model.check(name, drawn)
                else:
                    assert_close(found, drawn.expected, 1e-5, name)
            model.finish(None, **counts)
        return key

    def compare(self, batch: Any) -> None:
        """All values of the step are those of a step that fills its memory anew."""
        layers, found = self.model.runtime._active.layers, []
        for graphs in (self.fresh, self.graphs.shared):
            fills = self.fills
            if graphs is self.fresh:
                for held in graphs._held.values():
                    for each in held.values():
                        each.clear()
            assert graphs.prepare(batch) is not None
            assert graphs is not self.fresh or self.fills > fills
            layers = self.model.runtime._active.layers
            steps = {name: layers[name].shared for name in layers}
            found.append({name: dict(values_of(step)) for name, step in steps.items() if step is not None})
        assert found[0].keys() == found[1].keys()
        for name, values in found[0].items():
            assert values.keys() == found[1][name].keys()
            for what, value in values.items():
                assert torch.equal(value, found[1][name][what]), (name, what)


def values_of(step: SharedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of all that the calls and merges of a step read."""
    yield "starts", step.starts.clone()
    yield "entries", step.entries.clone()
    yield "slots", step.slots.clone()
    for at, part in enumerate(step.parts):
        assert isinstance(part, CallPart)
        common: Any = part.metadata.common  # type: ignore[attr-defined]
        if part.rows is not None:
            yield f"{at} rows", part.rows.clone()
        for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "slot_mapping"):
            yield f"{at} {name}", getattr(common, name).clone()
        for name in ("max_query_len", "max_seq_len", "num_reqs", "num_actual_tokens", "seq_lens_host_exact"):
            yield f"{at} {name}", torch.tensor(getattr(common, name))
        yield f"{at} host lengths", torch.tensor(common.seq_lens_host)
        assert common.seq_lens.tolist() == common.seq_lens_host.tolist()
        for row, length in enumerate(common.seq_lens.tolist()):
            # Kernels read no columns past these.
            yield f"{at} table {row}", common.block_table_tensor[row, : -(-length // 16)].clone()


@pytest.fixture(params=KINDS)
def decodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decodes:
    made = Decodes(KINDS[request.param], monkeypatch)
    made.start()
    return made


def test_a_table_has_the_blocks_of_rests_that_outgrow_its_columns() -> None:
    whole = torch.arange(3 * 100, dtype=torch.int32).view(3, 100)
    places = torch.tensor([[0, 90], [1, 0], [2, 7]])
    held = torch.full((3, 64), -1, dtype=torch.int32)
    cut = CutTable(held)
    for width in (16, 64, 32, 128):
        whole += 1000
        assert cut.filled(whole, places, width) is held
        for row, first in places.tolist():
            found = held[row, : min(width, 100 - first, 64)]
            assert found.tolist() == whole[row, first : first + found.shape[0]].tolist()
    places[:, 1] += 3
    cut.forget()
    assert cut.filled(whole, places, 16)[:, 0].tolist() == [whole[0, 93], whole[1, 3], whole[2, 10]]


@pytest.mark.parametrize("compare", [False, True], ids=["alone", "with others"])
def test_growth_and_new_blocks_change_the_rest_only(decodes: Decodes, compare: bool) -> None:
    assert decodes.run() == SharedGraph(4)
    before = decodes.fills
    builds = [each.twins.pieces().builds for each in decodes.graphs.shared._layers()]
    tables = [[list(held) for held in request.blocks] for request in decodes.model.requests.values()]
    # Each request gets a new block in these steps.
    decodes.run(16, compare)
    after = [[list(held) for held in request.blocks] for request in decodes.model.requests.values()]
    assert all(len(old[0]) < len(new[0]) for old, new in zip(tables, after, strict=True))
    if not compare:
        assert decodes.fills == before
        assert [each.twins.pieces().builds for each in decodes.graphs.shared._layers()] == builds
    decodes.run(3, compare=True)


def test_a_request_that_ends_and_a_new_one_fill_the_memory_again(decodes: Decodes) -> None:
    decodes.run(3)
    before = decodes.fills
    decodes.model.remove("b")
    assert decodes.run() == SharedGraph(4)
    assert decodes.fills > before
    decodes.run(3, compare=True)
    decodes.join("e", 32)
    assert decodes.run(2) == SharedGraph(4)
    decodes.run(3, compare=True)
    # The same name with fewer shared blocks, which a graph may have no room for.
    decodes.model.remove("e")
    decodes.join("e", 16)
    decodes.run(2)
    decodes.model.remove("e")
    decodes.join("e", 32)
    assert decodes.run(2) == SharedGraph(4)
    decodes.run(2, compare=True)


def test_another_order_fills_the_memory_again(decodes: Decodes) -> None:
    decodes.run(2)
    before = decodes.fills
    decodes.model.batches.swap_states(0, 3)
    decodes.run()
    assert decodes.fills > before
    decodes.run(2, compare=True)
    decodes.model.batches.swap_states(0, 3)
    decodes.run(2, compare=True)


def test_steps_of_other_kinds_between_decodes_leave_the_memory_right(decodes: Decodes) -> None:
    decodes.run(2)
    # A prompt's tokens without a graph, whose pieces the same builders build.
    decodes.model.step(a=2, b=3, c=1, d=1)
    decodes.run(2)
    decodes.model.rollback(a=2, b=2, d=1)
    decodes.run(1)
    decodes.run(2, compare=True)
    for name in ("c", "d"):
        decodes.model.remove(name)
    assert decodes.run(2) == SharedGraph(2)
    decodes.run(2, compare=True)
    decodes.join("c", 32)
    assert decodes.run(2) == SharedGraph(4)
    decodes.run(2, compare=True)


def test_a_new_capture_of_a_graph_fills_its_memory(decodes: Decodes) -> None:
    decodes.run(2)
    before = decodes.fills
    with decodes.graphs.shared.capture(4) as key:
        layers = decodes.model.runtime._active.layers
        decodes.graphs.captured[key] = {name: layers[name].shared for name in layers}
    decodes.run()
    assert decodes.fills > before
    decodes.run(2, compare=True)


class Broken(Exception):
    """What a builder raises once."""


@pytest.mark.parametrize("part", ["rest", "pieces"])
@pytest.mark.parametrize("is_anew", [False, True], ids=["grown", "filled anew"])
def test_a_builder_that_raises_once_leaves_the_memory_right(
    decodes: Decodes, part: str, is_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, raised = decodes.graphs.shared, 0
    prepare = graphs.prepare

    def broken(*_: Any) -> None:
        nonlocal raised
        raised += 1
        raise Broken

    def prepared_again(batch: Any) -> SharedGraph | None:
        for each in graphs._layers():
            # Pieces that nobody built since the last step are not built again.
            with monkeypatch.context() as patched, contextlib.suppress(Broken):
                patched.setattr(getattr(each.twins, part)().builder, "build", broken)
                prepare(batch)
        return prepare(batch)

    decodes.run(2)
    # A step without the graph, after which the pieces are built again.
    decodes.model.step(a=1, b=2, c=1, d=1)
    if is_anew:
        decodes.model.batches.swap_states(0, 3)
    monkeypatch.setattr(graphs, "prepare", prepared_again)
    assert decodes.run() == SharedGraph(4)
    monkeypatch.setattr(graphs, "prepare", prepare)
    assert raised
    decodes.run(2)
    decodes.run(2, compare=True)
