"""Steps with shared prefixes, or with draft trees of one shape, inside CUDA graphs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import instance, integer
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionCGSupport
from attnplug.runtime.attention_runtime import AttentionRuntime
from attnplug.runtime.batch.draft_trees import TreeShape, checked_shape
from attnplug.runtime.batch.forest import Forest
from attnplug.runtime.batch.step_batch import HostRows, StepBatch
from attnplug.runtime.graph_state import GraphState
from attnplug.runtime.states.state_step import StateStep
from attnplug.runtime.steps.forest_parts import (
    CutTable,
    Paths,
    Rows,
    begins_of,
    piece_rows,
    rest_rows,
    uniform_pieces,
    width_of,
)
from attnplug.runtime.steps.graph_buffers import GraphInputBuffers
from attnplug.runtime.steps.prefix_sharing import SharingLayers, note_of, parts_of
from attnplug.runtime.steps.shared_step import Held, HeldDecodes, SharedStep, arrays_of, shared_step
from attnplug.runtime.steps.twin_layers import Twins


class SharedGraph(NamedTuple):
    """Which graph a step replays."""

    batch_size: int
    """Requests."""
    parents: tuple[int, ...] | None = None
    """Of the nodes of each request's tree; None for decodes that share prefixes."""


class SharedGraphs(NotCopied):
    """CUDA graphs of steps whose requests read shared prefixes together, or verify trees of one shape.

    They are captured and replayed beside the plain graphs of a GraphState, whose buffers they use:

    ```python
    shared = SharedGraphs(runtime, state)
    with shared.capture(batch_size=64):
        model()  # warm up
        with torch.cuda.graph(graphs[SharedGraph(64)]):
            model()
    key = shared.prepare(batch)  # None: the step is better run by a plain graph, or without one
    if key is not None:
        graphs[key].replay()
    ```

    A graph has room for a quarter as many pieces as requests. A piece is a shared prefix, read for up to `piece_rows` requests.

    Args:
        runtime: its layers.
        state: the plain graphs of the same runtime.
        piece_rows: new tokens of a piece.

    Raises:
        BatchError: an argument of another type, or `piece_rows` below 1.
    """

    def __init__(self, runtime: AttentionRuntime, state: GraphState, piece_rows: int = 16) -> None:
        self._runtime = instance("runtime", runtime, AttentionRuntime)
        self._state = instance("state", state, GraphState)
        self._rows = integer("piece_rows", piece_rows)
        if self._rows < 1:
            raise BatchError("piece_rows", self._rows, "must be at least 1")
        self._held: dict[SharedGraph, dict[str, Held]] = {}
        """By graph, what each of its layers reads; layers that cannot share are plain in it."""

    @contextlib.contextmanager
    def capture(self, batch_size: int, parents: Sequence[int] | None = None) -> Iterator[SharedGraph]:
        """Begin a step to capture inside the block, as `GraphState.capture`; the block gets the graph's key.

        Args:
            batch_size: one of the state's.
            parents: of the nodes of trees, as `StepBatchBuilder.step` takes them; None for decodes of one token.

        Raises:
            BatchError: no layer can share, or a builder declares less support than a graph needs. Windows and chunks end
                at other nodes in each step, so no graph has trees in such layers. See also `GraphState.capture`.
        """
        shape = None if parents is None else checked_shape("parents", parents)
        nodes = None if shape is None else tuple(shape.parents.tolist())
        key = SharedGraph(integer("batch_size", batch_size), nodes)
        query_len = 1 if nodes is None else len(nodes)
        self._check(shape)
        with self._state.capture(key.batch_size, query_len):
            buffers = self._state.get_graph_input_buffers(key.batch_size, query_len)
            held, steps = dict[str, Held](), dict[str, SharedStep]()
            for each in self._layers():
                calls, paths = self._parts(key, shape, each, buffers, None, None)
                made = held[each.names[0]] = self._hold(calls, paths, each, buffers)
                step = self._step(calls, paths, each, buffers, made, self._state.max_model_len)
                steps.update(dict.fromkeys(each.names, step))
            self._held[key] = held
            self._runtime.share_step(steps)
            yield key

    def prepare(self, batch: StepBatch, *, states: StateStep | None = None) -> SharedGraph | None:
        """Copy a step into the memory of the graph that it should replay, and begin the step; None if it has none.

        Then run the step by a plain graph or without one. The step's decodes share no prefix that is worth it, or more
        prefixes than the graph has room for; its trees have other shapes, or a request has no computed tokens.

        Args:
            batch: from `StepBatchBuilder.step`.
            states: of the layers that keep a state, which share nothing.

        Raises:
            BatchError: see `GraphState.prepare_graph_input_buffers`.
        """
        instance("batch", batch, StepBatch, remedy="make it by StepBatchBuilder.step")
        key, host = self._key(batch), batch.host
        if key is None or host is None:
            return None
        shape = next(iter(batch.trees.values())).shape if batch.trees else None
        query_len = 1 if shape is None else shape.parents.size
        buffers = self._state.get_graph_input_buffers(key.batch_size, query_len)
        held, notes = self._held[key], list[str]()
        forests = [
            each
            for each in self._runtime.prefix_sharing.forests(batch, piece_rows=self._rows)
            if each[0].names[0] in held
        ]
        if not batch.trees and all(isinstance(forest, str) for _, forest in forests):
            return None
        found: list[tuple[SharingLayers, Forest | None, list[tuple[Twins, Rows]], Paths | None]] = []
        for each, forest in forests:
            notes.append(note_of(each, forest, len(batch.trees)))
            # Each tree has a piece of its own, so that the rows of all are in order.
            nodes = forest if isinstance(forest, Forest) and shape is None else None
            decodes = held[each.names[0]].decodes
            if decodes is not None and decodes.forest is nodes:
                found.append((each, nodes, [], None))
                continue
            calls, paths = self._parts(key, shape, each, buffers, batch, nodes)
            if not calls:
                return None
            found.append((each, nodes, calls, paths))
        plain = dataclasses.replace(batch, trees={}) if batch.trees else batch
        self._state.prepare_graph_input_buffers(buffers, plain, states=states)
        steps: dict[str, SharedStep] = {}
        for each, nodes, calls, paths in found:
            own = held[each.names[0]]
            if own.decodes is not None and not calls:
                spec = each.group.kv_cache_spec
                table = buffers.block_tables[each.group.kv_cache_group_id]
                grown = host.computed, buffers.seq_lens, table, spec.block_size, own.cut
                own.decodes = own.decodes.grown(*grown)
                step = own.decodes.shared_step()
            else:
                own.clear()
                step = self._step(calls, paths, each, buffers, own, None)
                own.decodes = HeldDecodes.of(nodes, step) if shape is None else None
            steps.update(dict.fromkeys(each.names, step))
        self._runtime.share_step(steps)
        self._runtime.prefix_sharing.notes = tuple(notes)
        return key

    def _key(self, batch: StepBatch) -> SharedGraph | None:
        host = batch.host
        size = self._state.batch_size_for(len(batch.req_ids))
        if host is None or size is None or not batch.is_as_made:
            return None
        if not batch.trees:
            key = SharedGraph(size)
            return key if key in self._held and (host.scheduled == 1).all() else None
        shapes = {tuple(tree.shape.parents.tolist()) for tree in batch.trees.values()}
        key = SharedGraph(size, min(shapes))
        is_alike = len(shapes) == 1 and len(batch.trees) == len(batch.req_ids)
        return key if is_alike and key in self._held and host.computed.min() > 0 else None

    def _layers(self) -> list[SharingLayers]:
        return [each for each in self._runtime.prefix_sharing.layers if each.refusal is None]

    def _check(self, shape: TreeShape | None) -> None:
        layers = self._layers()
        if not layers:
            reasons = {each.refusal for each in self._runtime.prefix_sharing.layers}
            limit = f"has no layer that shares prefixes: {'; '.join(sorted(filter(None, reasons)))}"
            raise BatchError("runtime", "its layers", limit, "capture plain graphs")
        if shape is not None and (reason := self._runtime.tree_refusal) is not None:
            # Such a layer would run as a chain in the graph, and see siblings.
            limit = f"cannot be verified by {reason}"
            raise BatchError("parents", shape.parents.tolist(), limit, "verify drafts as a chain")
        for each in layers:
            if shape is not None and (each.left >= 0 or each.chunk is not None):
                limit = f"have no graph: the window or chunk of layer {each.names[0]} ends at other nodes in each step"
                raise BatchError("parents", shape.parents.tolist(), limit, "run such steps without a graph")
            needed = [each.twins.pieces(), *([] if shape is not None else [each.twins.rest()])]
            for twins in needed:
                builder = twins.builder
                level = builder.get_cudagraph_support(builder.config, builder.kv_cache_spec)
                if level < AttentionCGSupport.UNIFORM_BATCH:
                    limit = (
                        f"asks to capture UNIFORM_BATCH, and {type(builder).__name__} declares {level.name}"
                    )
                    raise BatchError(
                        "batch_size", "pieces of several rows", limit, "run such steps without a graph"
                    )

    def _parts(
        self,
        key: SharedGraph,
        shape: TreeShape | None,
        each: SharingLayers,
        buffers: GraphInputBuffers,
        batch: StepBatch | None,
        forest: Forest | None,
    ) -> tuple[list[tuple[Twins, Rows]], Paths | None]:
        """The parts of a step, padded to the sizes of its graph; of padding alone without a batch, none if they do not fit."""
        count = key.batch_size
        size, width = each.group.kv_cache_spec.block_size, buffers.block_tables.shape[2]
        kept = np.zeros(count, dtype=np.int64)
        pieces, paths = None, None
        if batch is not None and batch.host is not None:
            if forest is not None:
                kept[: forest.kept.size] = forest.kept
                table = batch.host.tables[each.group.kv_cache_group_id]
                pieces = piece_rows(batch.host, table, size, forest.nodes, kept, {})
            elif shape is not None:
                ((_, pieces),), paths = parts_of(batch, batch.host, each, None)
        if shape is None:
            made = uniform_pieces(pieces, max(count // 4, 2), self._rows, width)
            if made is None:
                return [], None
            rest = rest_rows(_padded(batch, count), size, kept, np.zeros(count, dtype=bool))
            return [(each.twins.rest(), rest), (each.twins.pieces(), made)], None
        ordered = uniform_pieces(pieces, count, shape.parents.size, width)
        if ordered is None:
            return [], None
        total = count * shape.parents.size
        rows = np.arange(total)
        slots = np.zeros(count * shape.members.size, dtype=np.int64)
        if paths is not None:
            slots[: paths.slots.size] = paths.slots
        starts = np.concatenate([[0], np.tile(shape.counts, count).cumsum()]).astype(np.int32)
        return [(each.twins.pieces(), ordered._replace(rows=rows))], Paths(rows, starts, slots)

    def _hold(
        self,
        calls: list[tuple[Twins, Rows]],
        paths: Paths | None,
        each: SharingLayers,
        buffers: GraphInputBuffers,
    ) -> Held:
        tables = buffers.block_tables
        count = begins_of(arrays_of(calls, paths, buffers.num_tokens))[-1]
        numbers = torch.zeros(count, dtype=torch.uint8, device=tables.device)
        blocks = np.array([self._state.max_model_len])
        width = width_of(blocks, each.group.kv_cache_spec.block_size)
        cut = torch.zeros(buffers.batch_size, width, dtype=torch.int32, device=tables.device)
        return Held(numbers, CutTable(cut))

    def _step(
        self,
        calls: list[tuple[Twins, Rows]],
        paths: Paths | None,
        each: SharingLayers,
        buffers: GraphInputBuffers,
        held: Held,
        longest: int | None,
    ) -> SharedStep:
        at = each.group.kv_cache_group_id
        table, slots = buffers.block_tables[at], buffers.slot_mappings[at]
        return shared_step(calls, paths, table, slots, buffers.num_tokens, held, longest)


def _padded(batch: StepBatch | None, count: int) -> HostRows:
    """The requests of a step of decodes, and after them those of padding, of one token."""
    computed, scheduled = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    host = None if batch is None else batch.host
    if host is not None:
        computed[: host.computed.size] = host.computed
    return HostRows(np.zeros((0, count, 0), dtype=np.int32), computed, scheduled)
