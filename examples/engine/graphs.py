"""CUDA graphs of the engine's steps: decodes, those with shared prefixes, and drafts of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel

from attnplug.errors import BatchError
from attnplug.runtime import AttentionRuntime, GraphState, SharedGraph, SharedGraphs, StepBatch


def batch_sizes(most: int) -> tuple[int, ...]:
    """The requests of graphs for at most `most` requests: powers of two, and `most`. Steps are padded to the next."""
    return (*(2**power for power in range((most - 1).bit_length())), most)


def refuse_waiting(model: PreTrainedModel) -> None:
    """BatchError for a model whose layers wait for the device, which no graph can hold."""
    reason = ""
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        reason = "has experts, and the host waits for the tokens of each"
    rope = getattr(model.config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if kinds & {"dynamic", "longrope"}:
        reason = "has a rotary embedding that depends on the longest request"
    if reason:
        raise BatchError("graphs", True, f"{type(model).__name__} {reason}", "run without graphs=True")


class GraphSteps:
    """Runs steps in which each request computes one token, or one token and drafts of the shape `parents`.

    A graph is captured when a step first needs it. Steps of other shapes run without one, and `refusals` says which
    graphs the layers do not allow. `parents` is a chain or a tree, as `StepBatchBuilder.step` takes them.

    Raises:
        BatchError: decodes of this model or runtime cannot be captured.
    """

    def __init__(
        self, model: PreTrainedModel, runtime: AttentionRuntime, longest: int, parents: Sequence[int]
    ) -> None:
        refuse_waiting(model)
        self.model, self.runtime, self.parents = model, runtime, tuple(parents)
        self.is_tree = self.parents != tuple(range(-1, len(self.parents) - 1))
        self.state = GraphState(runtime, longest, min(len(self.parents), longest))
        self.shared = SharedGraphs(runtime, self.state)
        self.refusals: list[str] = []
        self.replays = self.shared_replays = 0
        self._verifies = True
        self._most = runtime.config.max_num_batched_tokens
        with self.state.capture(self.state.batch_sizes[0]):
            pass  # refuses at once what no step could do
        self._inputs = torch.zeros(2, self._most, dtype=torch.int64, device=runtime.device)
        self._seen: set[tuple[int, int]] = set()
        self._graphs: dict[tuple[Any, ...], tuple[Callable[[], None], torch.Tensor]] = {}
        # One graph runs at a time, so all can use the same memory.
        self._pool = torch.cuda.graph_pool_handle() if runtime.device.type == "cuda" else None

    def has_room(self, requests: int) -> bool:
        """Whether a graph verifies the drafts of so many requests."""
        size = self.state.batch_size_for(requests)
        return self._verifies and size is not None and size * len(self.parents) <= self._most

    def logits(self, batch: StepBatch, ids: torch.Tensor) -> torch.Tensor | None:
        """Run a step and give the wanted rows of its logits; None, and nothing was run, if it has no graph.

        Args:
            batch: the step.
            ids: int64 `[2, T]`, its tokens and their positions.
        """
        key = self._prepared(batch)
        if key is None:
            return None
        replay, logits = self._graphs[key]
        self._inputs[:, : ids.shape[1]].copy_(ids)
        replay()
        self.replays += 1
        self.shared_replays += isinstance(key, SharedGraph)
        return logits[batch.common.logits_indices_padded]

    def _prepared(self, batch: StepBatch) -> tuple[Any, ...] | None:
        common, size = batch.common, self.state.batch_size_for(len(batch.req_ids))
        length = common.max_query_len
        if size is None or length not in (1, len(self.parents)) or size * length > self._most:
            return None
        if common.num_actual_tokens != length * common.num_reqs:
            return None
        is_tree = length > 1 and self.is_tree
        if is_tree is not bool(batch.trees):
            return None
        if (size, length) not in self._seen:
            self._capture(size, length, is_tree)
        key: tuple[Any, ...] | None = self.shared.prepare(batch)
        if key is None and (size, length) in self._graphs:
            key = size, length
            self.state.prepare_graph_input_buffers(self.state.get_graph_input_buffers(*key), batch)
        return key

    def _capture(self, size: int, length: int, is_tree: bool) -> None:
        self._seen.add((size, length))
        captures: dict[tuple[Any, ...], AbstractContextManager[object]] = {}
        if not is_tree:
            captures[size, length] = self.state.capture(size, length)
        # Chains share no prefixes in graphs, and no other step does without prices.
        if is_tree or (length == 1 and any(each.prices for each in self.runtime.prefix_sharing.layers)):
            parents = self.parents if is_tree else None
            captures[SharedGraph(size, parents)] = self.shared.capture(size, parents)
        for key, capture in captures.items():
            try:
                with capture:
                    self._graphs[key] = self.record(size * length)
            except BatchError as error:
                self.refusals.append(str(error))
                self._verifies = self._verifies and length == 1

    def record(self, rows: int) -> tuple[Callable[[], None], torch.Tensor]:
        """The replay of a graph with so many tokens, and the memory of its logits `[rows, vocabulary]`."""
        self.run(rows)  # libraries allocate in their first call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self.run(rows)
        return graph.replay, logits

    def run(self, rows: int) -> torch.Tensor:
        """The logits of the first tokens in the memory of graphs, by the step that has begun."""
        ids, positions = self._inputs[:, None, :rows]
        return self.model(ids, position_ids=positions, use_cache=False).logits[0]
