"""Trees of drafts: each node sees the context and its path, and the accepted path goes on as if it had been a chain."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug.core import BuilderConfig, LayerSpec, LayerTensors
from attnplug.core.errors import BatchError
from attnplug.runtime import GraphState, StepBatch, StepBatchBuilder
from attnplug.runtime.batch.draft_trees import DraftTree, TreeShape
from attnplug.runtime.batch.forest_prices import SharingPrices
from attnplug.runtime.steps import forest_parts, prefix_sharing
from attnplug.testing import assert_close, attention_oracle, stored_values, tolerance
from attnplug.testing.drawn_values import stored_scale

FULL = layer(dtype="float32")
TREE = [-1, 0, 0, 1, 1, 2, 5, 3]

KINDS = {
    "full": FULL,
    "groups": layer(dtype="float32", num_heads=6, num_kv_heads=2, head_size_v=4),
    "cap-sinks": layer(dtype="float32", logits_soft_cap=2.0, has_sinks=True),
    "window": layer(dtype="float32", sliding_window=21, has_sinks=True),
    "window-in-the-tree": layer(dtype="float32", sliding_window=3),
    "chunk": layer(dtype="float32", chunk_size=32),
    "uneven-chunk": layer(dtype="float32", chunk_size=7),
    "bfloat16": layer(dtype="bfloat16"),
    "fp8": layer(dtype="bfloat16", kv_cache_dtype="fp8"),
    "fp8 heads": layer(dtype="bfloat16", kv_cache_dtype="fp8", head_scales=True),
}


class TreeModel(ServedModel):
    """Verifies trees, beside ordinary requests."""

    def __init__(self, specs: Mapping[str, LayerSpec] | LayerSpec, prices: Any = True, **asked: Any) -> None:
        specs = {"0": specs} if isinstance(specs, LayerSpec) else specs
        asked = {"max_model_len": 160, "num_blocks": 400, **asked}
        super().__init__(specs, memory=lambda plan: {"prefix_sharing": prices}, **asked)

    def verify(
        self, trees: Mapping[str, Sequence[int]], accepted: Mapping[str, int], **others: int
    ) -> StepBatch:
        """A step with trees, checked by the oracle; the accepted paths are kept."""
        counts = others | {name: len(parents) for name, parents in trees.items()}
        for name, count in counts.items():
            fresh: list[list[int]] = [[] for _ in self.groups]
            for group, held in enumerate(self.requests[name].blocks):
                missing = -(-(self.requests[name].computed + count) // self._size(group)) - len(held)
                fresh[group] = self.runtime.block_pool.allocate(max(missing, 0))
                held += fresh[group]
            self.batches.append_blocks(name, fresh)
        batch = self.batches.step(counts, trees=trees)
        self.runtime.begin_step(batch)
        for name in self._order():
            self.check_trees(name, batch, counts)
        self.runtime.keep_path(batch, accepted)
        self.batches.finish_step({**counts, **accepted})
        for name, count in counts.items():
            request = self.requests[name]
            path = list(range(count)) if name not in trees else batch.trees[name].path(accepted[name])
            places = [*range(request.computed), *(request.computed + node for node in path)]
            request.keys = {at: (k[places], v[places]) for at, (k, v) in request.keys.items()}
            request.computed += len(path)
        return batch

    def check_trees(self, name: str, batch: StepBatch, counts: Mapping[str, int]) -> None:
        spec = self.plan.specs[name]
        dtype = getattr(torch, spec.dtype)
        queries, keys, values, lengths, given = [], [], [], [], []
        for req_id in batch.req_ids:
            request, count = self.requests[req_id], counts.get(req_id, 0)
            new = self._keys(spec, count)
            given.append(new)
            old = request.keys.get(name)
            known = new if old is None else tuple(torch.cat(pair) for pair in zip(old, new, strict=True))
            request.keys[name] = known
            stored = [
                stored_values(each, spec, stored_scale(spec, scale))
                for each, scale in zip(known, self.scales, strict=True)
            ]
            query = 2 * torch.randn(count, spec.num_heads, spec.query_size, generator=self.generator).to(
                dtype
            )
            if req_id not in batch.trees:
                queries.append(query)
                keys.append(stored[0])
                values.append(stored[1])
                lengths.append(known[0].shape[0])
                continue
            for node, path in enumerate(paths_of(batch.trees[req_id].shape)):
                places = [*range(request.computed), *(request.computed + each for each in path)]
                queries.append(query[node : node + 1])
                keys.append(stored[0][places])
                values.append(stored[1][places])
                lengths.append(len(places))
        tensors = self.tensors.get(name, LayerTensors())
        expected = attention_oracle(spec, queries, keys, values, lengths, tensors=tensors).output
        key, value = (torch.cat(each) for each in zip(*given, strict=True))
        found = self.runtime.forward(name, torch.cat(queries), key, value)
        assert_close(found, expected, tolerance(spec).output, name)


def paths_of(shape: TreeShape) -> list[list[int]]:
    found = list[list[int]]()
    for node, parent in enumerate(shape.parents.tolist()):
        found.append([*(found[parent] if parent >= 0 else ()), node])
    return found


def random_tree(rng: random.Random, size: int) -> list[int]:
    return [-1, *(rng.randint(max(-1, node - rng.choice((1, 4, 63))), node - 1) for node in range(1, size))]


@pytest.mark.parametrize("prices", [True, SharingPrices.free()], ids=["plain", "shared"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_have_the_numbers_of_the_oracle_and_so_do_the_steps_after_them(
    kind: str, seed: int, prices: Any
) -> None:
    rng = random.Random(seed)
    scales = (0.5, 0.25) if kind.startswith("fp8") else (1.0, 1.0)
    model = TreeModel(KINDS[kind], prices, scales=scales, seed=seed)
    model.add("a")
    model.step(a=rng.choice((1, 17, 40)))
    model.add("b")
    model.step(a=1, b=33)
    model.add("c", prefix=("b", 32))
    for _ in range(3):
        trees = {"a": random_tree(rng, rng.choice((1, 8, 24))), "b": TREE}
        accepted = {"a": rng.randint(-1, len(trees["a"]) - 1), "b": rng.randint(0, 7)}
        model.verify(trees, accepted, c=1)
    model.step(a=1, b=2, c=1)


def test_several_kv_groups_each_keep_their_path() -> None:
    specs = {"0": FULL, "1": layer(dtype="float32", sliding_window=33), "2": FULL, "3": FULL}
    model = TreeModel(specs, num_blocks=800)
    model.add("a")
    model.step(a=40)
    for node in (4, 7, 0, 6):
        model.verify({"a": TREE}, {"a": node})
    model.step(a=3)


def test_positions_are_those_of_the_path() -> None:
    model = TreeModel(FULL)
    model.add("a")
    model.step(a=5)
    model.add("b")
    batch = model.verify({"a": TREE}, {"a": 3}, b=3)
    by_name = dict(zip(batch.req_ids, batch.common.query_start_loc_cpu.tolist(), strict=False))
    positions = batch.positions
    assert positions is not None
    assert positions[by_name["a"] :][:8].tolist() == [5, 6, 6, 7, 7, 7, 8, 8]
    assert positions[by_name["b"] :][:3].tolist() == [0, 1, 2]
    assert model.batches.num_computed_tokens_cpu.tolist() == [8, 3]


def test_the_note_of_a_tree_step_says_what_was_shared() -> None:
    model = TreeModel(FULL)
    model.add("a")
    model.step(a=5)
    model.verify({"a": TREE}, {"a": 0})
    assert model.runtime.step_notes == (
        "KV group 0, TORCH: trees of 1 requests; plain, no blocks are shared",
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (layer(dtype="float32", has_alibi=True), "ALiBi"),
        (layer(dtype="float32", invariance=("batch",)), "invariance batch"),
    ],
)
def test_layers_that_cannot_verify_a_tree_refuse_it(spec: LayerSpec, reason: str) -> None:
    model = TreeModel({"good": FULL, "bad": spec})
    model.add("a")
    model.step(a=5)
    with pytest.raises(
        BatchError, match=f"cannot be verified by layer bad: {reason}.*verify drafts as a chain"
    ):
        model.verify({"a": TREE}, {"a": 0})


def test_a_path_that_was_not_moved_is_refused() -> None:
    batches = builder()
    batches.step(4, trees={"a": [-1, 0, 0, 2]})
    with pytest.raises(BatchError, match=r"accepted\['a'\]=2 is a node whose keys .* call runtime.keep_path"):
        batches.finish_step({"a": 2})
    with pytest.raises(BatchError, match="must be a mapping with a node for each tree"):
        batches.finish_step()
    with pytest.raises(BatchError, match=r"must be in -1 .. 3, the nodes of its tree"):
        batches.finish_step({"a": 4})
    # The first nodes in their order are in their places already.
    batches.finish_step({"a": 1})
    assert batches.num_computed_tokens_cpu.tolist() == [5]


def builder() -> StepBatchBuilder:
    batches = StepBatchBuilder(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_sizes=[4])
    batches.add_request("a", [[1, 2, 3]], 3)
    return batches


@pytest.mark.parametrize(
    ("trees", "reason"),
    [
        ({"a": [-1, 1, 0, 0]}, r"trees\['a'\]\[1\]=1 must be in -1 .. 0, the nodes before it"),
        ({"a": [-1, -2, 0, 0]}, r"=-2 must be in -1"),
        ({"a": [-1, 0]}, r"must be the 4 scheduled tokens of the request"),
        ({"b": [-1]}, "are not in flight"),
        ([-1, 0, 0, 0], "trees"),
        ({"a": "abcd"}, "trees"),
    ],
)
def test_trees_that_are_none_are_refused_and_move_nothing(trees: Any, reason: str) -> None:
    batches = builder()
    with pytest.raises(BatchError, match=reason):
        batches.step(4, trees=trees)
    with pytest.raises(BatchError, match="is required before finish_step"):
        batches.finish_step()


def test_only_nodes_of_the_step_are_kept_and_each_tree_once() -> None:
    model = TreeModel(FULL)
    model.add("a")
    model.step(a=5)
    with pytest.raises(BatchError, match="batch"):
        model.runtime.keep_path(None, {})  # type: ignore[arg-type]
    held = model.runtime.block_pool.allocate(2)
    model.requests["a"].blocks[0] += held
    model.batches.append_blocks("a", [held])
    batch = model.batches.step({"a": 8}, trees={"a": TREE})
    with pytest.raises(BatchError, match="has no tree in this step"):
        model.runtime.keep_path(batch, {"b": 0})
    with pytest.raises(BatchError, match=r"must be in -1 .. 7"):
        model.runtime.keep_path(batch, {"a": 8})
    model.runtime.keep_path(batch, {"a": 6})
    model.runtime.keep_path(batch, {"a": 6})
    with pytest.raises(BatchError, match="is not 6, whose path was moved already"):
        model.runtime.keep_path(batch, {"a": 7})
    model.batches.finish_step({"a": 6})
    with pytest.raises(BatchError, match=r"finish_step|out of date"):
        model.batches.finish_step({"a": 6})


def test_a_node_whose_keys_a_moved_path_replaced_is_refused() -> None:
    model = TreeModel(FULL)
    model.add("a")
    model.step(a=4)
    batch = model.batches.step({"a": 4}, trees={"a": [-1, 0, 0, 2]})
    model.runtime.keep_path(batch, {"a": 3})
    # Node 1 was behind node 0, where the keys of node 2 are now.
    with pytest.raises(
        BatchError, match=r"accepted\['a'\]=1 is a node whose keys are not behind the computed"
    ):
        model.batches.finish_step({"a": 1})
    # A part of the path that was moved is there.
    model.batches.finish_step({"a": 2})
    assert model.batches.num_computed_tokens_cpu.tolist() == [6]


def test_graphs_draft_steps_and_given_metadata_refuse_trees() -> None:
    config = BuilderConfig(
        max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=2, cudagraph_batch_sizes=(1,)
    )
    model = TreeModel(FULL, config=config)
    model.add("a")
    model.step(a=5)
    batch = model.batches.step({"a": 3}, trees={"a": [-1, 0, 0]})
    with pytest.raises(BatchError, match="draft step"):
        model.runtime.begin_step(batch, draft_index=0)
    graphs = GraphState(model.runtime, max_model_len=64)
    with pytest.raises(BatchError, match="trees"):
        graphs.prepare_graph_input_buffers(graphs.get_graph_input_buffers(1), batch)


def test_quantised_outputs_of_a_tree_are_refused() -> None:
    model = TreeModel(FULL)
    model.add("a")
    model.step(a=5)
    batch = model.batches.step({"a": 3}, trees={"a": [-1, 0, 0]})
    model.runtime.begin_step(batch)
    query, key = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    output = torch.empty(3, 4, 8, dtype=torch.float8_e4m3fn)
    with pytest.raises(BatchError, match="a step with trees merges outputs that are not quantised"):
        model.runtime.forward("0", query, key, key, output, output_scale=torch.ones(1))


# Mistakes that the oracle must see


def siblings(shape: TreeShape) -> list[list[int]]:
    return [list(range(node + 1)) for node in range(shape.parents.size)]


def without_self(shape: TreeShape) -> list[list[int]]:
    return [path[:-1] or path for path in paths_of(shape)]


def without_parents(shape: TreeShape) -> list[list[int]]:
    return [path[-1:] for path in paths_of(shape)]


@pytest.mark.parametrize("mistake", [siblings, without_self, without_parents])
def test_a_wrong_path_is_seen(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TreeModel(FULL)
    model.add("a")
    model.step(a=20)
    right = forest_parts.node_paths

    def wrong(host: Any, table: Any, size: int, first: Any, trees: Any, *window: Any) -> Any:
        changed = {}
        for request, tree in trees.items():
            paths = mistake(tree.shape)
            members, counts = np.array([*itertools.chain(*paths)]), np.array([*map(len, paths)])
            changed[request] = DraftTree(tree.shape._replace(members=members, counts=counts))
        return right(host, table, size, first, changed, *window)

    monkeypatch.setattr(prefix_sharing, "node_paths", wrong)
    with pytest.raises(AssertionError):
        model.verify({"a": TREE}, {"a": 0})


def test_a_path_that_stays_where_it_was_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TreeModel(FULL)
    model.add("a")
    model.step(a=20)
    monkeypatch.setattr("attnplug.runtime.steps.kept_paths._move", lambda *_: None)
    model.verify({"a": TREE}, {"a": 6})
    with pytest.raises(AssertionError):
        model.step(a=1)
