"""Steps inside CUDA graphs: their capture, the copies before a replay, and refusals."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import instance, integer
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import MLAAttentionSpec
from attnplug.core.metadata import (
    STEP_INPUTS,
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
)
from attnplug.runtime.attention_runtime import AttentionRuntime
from attnplug.runtime.batch.sharded_step import ShardedStep
from attnplug.runtime.batch.step_batch import Stamp, StepBatch, check_current
from attnplug.runtime.plan.grouping import cross_groups
from attnplug.runtime.plan.sharding import longest_sequence, shares_tokens
from attnplug.runtime.states.state_layers import StateGroup, build_states
from attnplug.runtime.states.state_step import StateStep, check_state_step
from attnplug.runtime.steps.attention_groups import AttentionGroup, build_attn_metadata
from attnplug.runtime.steps.graph_buffers import GraphInputBuffers as GraphInputBuffers
from attnplug.runtime.steps.graph_buffers import ShardedGraphBuffers
from attnplug.runtime.steps.step_checks import check_groups, check_inputs

_Lengths = npt.NDArray[np.int32]


class GraphState(NotCopied):
    """CUDA graphs over a runtime: buffers of the largest captured size, and steps that use them.

    The batch sizes are `config.cudagraph_batch_sizes` of the runtime, which its builders read too. The engine has
    its own graphs, and its own buffers for queries, keys and values:

    ```python
    runtime.warm_up()
    with state.capture(batch_size=8):
        model()  # warm up
        with torch.cuda.graph(graph):
            model()
    buffers = state.get_graph_input_buffers(8)
    state.prepare_graph_input_buffers(buffers, batch)
    graph.replay()
    ```

    Layers that keep a state are captured on no page of a request, and each replay advances the states of its step once.

    Args:
        runtime: layers with pages are captured; direct layers, such as an encoder's, are not.
        max_model_len: longest sequence; by default the configuration's.
        max_query_len: most queries of a request; by default 1 plus the configuration's speculative tokens.
        max_encoder_len: longest encoder sequence, for cross-attention layers.

    Raises:
        BatchError: the configuration has no batch sizes, a length is missing, or the plan has no pages.
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        max_model_len: int | None = None,
        max_query_len: int | None = None,
        max_encoder_len: int = 0,
    ) -> None:
        config = instance("runtime", runtime, AttentionRuntime).config
        self.batch_sizes = tuple(sorted(set(config.cudagraph_batch_sizes)))
        """The batch sizes of graphs, in ascending order."""
        if not self.batch_sizes:
            remedy = "give AttentionRuntime a BuilderConfig that names them"
            raise BatchError("config.cudagraph_batch_sizes", (), "names no size", remedy)
        self.max_model_len = longest_sequence(config, max_model_len)
        if max_query_len is None:
            max_query_len = 1 + config.num_speculative_tokens
        self.max_query_len = integer("max_query_len", max_query_len)
        if not 1 <= self.max_query_len <= self.max_model_len:
            raise BatchError("max_query_len", self.max_query_len, f"must be in 1 .. {self.max_model_len}")
        self._runtime = runtime
        groups = runtime.kv_cache_config.kv_cache_groups
        self._cross = cross_groups(runtime.kv_cache_config)
        if not groups:
            why = (
                "a step without pages of tokens has no batch"
                if runtime.state_layers
                else "nothing to capture"
            )
            raise BatchError("runtime.plan", len(runtime.plan.decisions), f"layers keep no pages: {why}")
        max_encoder_len = integer("max_encoder_len", max_encoder_len)
        if max_encoder_len < 0 or (max_encoder_len == 0) is bool(self._cross):
            limit = "must be at least 1 with cross-attention layers, and 0 without"
            raise BatchError("max_encoder_len", max_encoder_len, limit)
        self.max_encoder_len = max_encoder_len
        self._first = next((i for i in range(len(groups)) if i not in self._cross), 0)
        lengths = [max_encoder_len if i in self._cross else self.max_model_len for i in range(len(groups))]
        self._sizes = tuple(group.kv_cache_spec.block_size for group in groups)
        covered = runtime.plan.tokens_per_block
        blocks = max(-(-length // size) for length, size in zip(lengths, covered, strict=True))
        self._buffers = GraphInputBuffers.allocate(
            self.batch_sizes[-1],
            self.max_query_len,
            groups=len(groups),
            max_blocks=blocks,
            inputs=[each.name for each in runtime.needed_inputs],
            sparse_topk=runtime.sparse_topk,
            has_states=bool(runtime.state_layers),
            device=runtime.device,
        )
        self._views: dict[tuple[int, int], GraphInputBuffers] = {}
        if runtime.plan.context_parallel is not None and runtime.plan.sharded_layers:
            self._buffers = self._with_sharding(runtime.plan.context_parallel)

    @property
    def support(self) -> AttentionCGSupport:
        """The lowest support level of the runtime's builders."""
        return min((level for level, *_ in self._levels()), default=AttentionCGSupport.NEVER)

    def batch_size_for(self, num_reqs: int) -> int | None:
        """The smallest captured batch size of at least `num_reqs` requests; None if there is none.

        Raises:
            BatchError: not an integer of at least 0.
        """
        if (num_reqs := integer("num_reqs", num_reqs)) < 0:
            raise BatchError("num_reqs", num_reqs, "must be at least 0")
        return next((size for size in self.batch_sizes if size >= num_reqs), None)

    @contextlib.contextmanager
    def capture(self, batch_size: int, query_len: int = 1) -> Iterator[dict[str, AttentionMetadata]]:
        """Begin a step of `batch_size` requests with `query_len` queries each, to capture graphs inside the block.

        Inside, `runtime.forward` runs on the buffers. All requests are padding, so it writes no slot. The block
        gets the metadata by layer. No step is active after it.

        Raises:
            BatchError: a builder declares less support (the error names it and its level), or a size is not one to
                be captured. Also in debug mode, because its checks wait for the device.
        """
        # The checks of debug mode copy values to the host, which waits for the device.
        if self._runtime.debug:
            limit = "reads back what layers wrote, which a graph cannot"
            raise BatchError("runtime.debug", True, limit, "make the runtime with debug=False")
        metadata = self.metadata_for_capture(batch_size, query_len)
        buffers = self.get_graph_input_buffers(batch_size, query_len)
        batch = self._capture_batch(buffers)
        states = None if buffers.states is None else buffers.states.step(batch.common)
        self._runtime.begin_step(batch, metadata=metadata, states=states)
        try:
            yield metadata
        finally:
            self._runtime.end_step()
            buffers.clear()

    def metadata_for_capture(self, batch_size: int, query_len: int = 1) -> dict[str, AttentionMetadata]:
        """Each layer's metadata for a capture: a uniform batch over the buffers.

        `max_seq_len` and all host lengths are the longest sequence. Values that a builder derives from them, such
        as a split over the keys, then fit every replayed step.

        Raises:
            BatchError: see `capture`.
        """
        batch_size, query_len = integer("batch_size", batch_size), integer("query_len", query_len)
        self._check_support(batch_size, query_len)
        buffers = self.get_graph_input_buffers(batch_size, query_len)
        buffers.clear()
        if buffers.encoder_seq_lens is not None:
            # Builders take encoder lengths as exact, so the buffer must equal the host's bound.
            buffers.encoder_seq_lens.fill_(self.max_encoder_len)
        batch = self._capture_batch(buffers)
        runtime = self._runtime
        config, states = runtime.kv_cache_config, buffers.states
        made = build_attn_metadata(runtime.attention_groups, batch, config, for_capture=True)
        if states is not None:
            made |= build_states(runtime.state_groups, states.step(batch.common).common, for_capture=True)
        return made

    def get_graph_input_buffers(self, batch_size: int, query_len: int = 1) -> GraphInputBuffers:
        """The input buffers of a graph of this size; always the same memory.

        Raises:
            BatchError: the batch size is not one to be captured, or `query_len` is above `max_query_len`.
        """
        batch_size = integer("batch_size", batch_size)
        if batch_size not in self.batch_sizes:
            sizes = ", ".join(map(str, self.batch_sizes))
            limit = f"must be one of config.cudagraph_batch_sizes: {sizes}"
            raise BatchError("batch_size", batch_size, limit)
        key = batch_size, integer("query_len", query_len)
        if key not in self._views:
            # Kept, because each step asks for them.
            self._views[key] = self._buffers.first(*key)
        return self._views[key]

    def prepare_graph_input_buffers(
        self,
        input_buffers: GraphInputBuffers,
        batch: StepBatch,
        *,
        draft_index: int | None = None,
        states: StateStep | None = None,
    ) -> StepBatch:
        """Copy a step into the buffers before the graph is replayed, and begin the step.

        The step begins with the padded batch, so that builders that plan on the host include the padding. Rows of
        the output past `batch.common.num_actual_tokens` are unspecified.

        Args:
            input_buffers: of the graph to be replayed.
            batch: from `StepBatchBuilder.step`, with at most as many requests as the graph. Each has the graph's
                number of queries, or fewer if all builders support any batch.
            draft_index: of a draft step; see `AttentionRuntime.begin_step`.
            states: of the layers that keep a state, from `StateTable.step(batch)`. A replay counts as a run of each of them:
                replay the graph once, then call `finish_step`.

        Returns:
            The padded batch, whose tensors are the buffers.

        Raises:
            BatchError: the step is out of date, or does not fit the graph; then nothing is copied.
        """
        instance("input_buffers", input_buffers, GraphInputBuffers, remedy="take them from this GraphState")
        instance("batch", batch, StepBatch, remedy="make it by StepBatchBuilder.step")
        check_current("batch", batch.stamps)
        self._check_fits(input_buffers, batch)
        self._check_states(batch, states)
        # A step that began with these buffers ends before they change, so that an interrupt leaves none active.
        self._runtime.end_step()
        input_buffers.copy_from(batch, states)
        padded = self._padded(input_buffers, batch)
        own = None if input_buffers.states is None else input_buffers.states.step(padded.common, states)
        self._runtime.begin_step(padded, draft_index=draft_index, states=own)
        if states is not None:
            # A replay calls no forward that would note them.
            states.ran.update(self._runtime.state_layers)
        return padded

    def _with_sharding(self, place: ContextParallel) -> GraphInputBuffers:
        specs = [group.kv_cache_spec for group in self._runtime.kv_cache_config.kv_cache_groups]
        groups = frozenset(index for index, spec in enumerate(specs) if shares_tokens(spec))
        has_latents = any(isinstance(specs[index], MLAAttentionSpec) for index in groups)
        sizes = self._buffers.block_tables, self.max_query_len, has_latents
        return dataclasses.replace(self._buffers, sharded=ShardedGraphBuffers.allocate(place, groups, *sizes))

    def _levels(self, query_len: int = 1) -> list[tuple[AttentionCGSupport, AttentionCGSupport, str]]:
        """Each builder's level, the level that queries of a length ask for, and its name for errors."""
        single, uniform = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH
        is_sharded = self._runtime.plan.context_parallel is not None
        new = self._runtime.new_token_groups if query_len > 1 else ()
        found = []
        groups: tuple[AttentionGroup | StateGroup, ...] = (
            *self._runtime.attention_groups,
            *new,
            *self._runtime.state_groups,
        )
        for group in groups:
            page = group.builder.kv_cache_spec
            level = group.builder.get_cudagraph_support(self._runtime.config, page)
            owner = f"{group.backend.get_name()} (layer {group.layer_names[0]})"
            # Ranks that share latents decode each new token as a request of its own.
            by_row = is_sharded and isinstance(page, MLAAttentionSpec)
            asked = single if query_len == 1 or by_row else uniform
            found.append((level, asked, f"{type(group.builder).__name__} of {owner}"))
        return found

    def _check_support(self, batch_size: int, query_len: int) -> None:
        single = query_len == 1
        for level, asked, builder in self._levels(query_len):
            if level < asked:
                field, value = ("batch_size", batch_size) if single else ("query_len", query_len)
                limit = f"asks to capture {asked.name}, and {builder} declares {level.name}"
                raise BatchError(field, value, limit, "run such batches without a graph")

    def _check_fits(self, buffers: GraphInputBuffers, batch: StepBatch) -> None:
        common, groups = batch.common, buffers.block_tables.shape[0]
        if batch.trees:
            limit = "are verified by several calls, whose sizes change from step to step"
            raise BatchError("batch.trees", sorted(batch.trees), limit, "run this step without a graph")
        if batch.block_tables.shape[0] != groups or batch.cross_groups != self._cross:
            found = batch.block_tables.shape[0], sorted(batch.cross_groups)
            limit = f"must be {groups} KV groups, with encoder tokens in {sorted(self._cross)}"
            raise BatchError("batch", found, limit)
        check_groups(batch, self._runtime.kv_cache_config)
        if common.num_reqs > buffers.batch_size:
            limit = f"must not pass the graph's batch_size={buffers.batch_size}"
            raise BatchError("batch.num_reqs", common.num_reqs, limit)
        if common.max_seq_len > self.max_model_len:
            limit = f"must not pass max_model_len={self.max_model_len}"
            raise BatchError("batch.max_seq_len", common.max_seq_len, limit)
        check_inputs("batch.common", common, self._runtime.needed_inputs)
        queries = np.diff(common.query_start_loc_cpu.numpy())
        uniform = bool((queries == buffers.query_len).all())
        if not uniform and (
            common.max_query_len > buffers.query_len or self.support < AttentionCGSupport.ALWAYS
        ):
            lengths = sorted(set(queries.tolist()))
            limit = f"must be the graph's query_len={buffers.query_len} for every request"
            raise BatchError("batch.query_lens", lengths, limit, "run this step without a graph")
        self._check_sharded(buffers, batch, uniform)
        for group in sorted(self._cross):
            if batch.num_slots[group]:
                limit = (
                    f"encoder tokens of KV group {group} are written in this step, and a graph writes none"
                )
                remedy = "run this step without a graph"
                raise BatchError("batch.num_slots", batch.num_slots[group], limit, remedy)

    def _check_states(self, batch: StepBatch, states: StateStep | None) -> None:
        """BatchError unless there are the states of this step, if layers keep any."""
        layer = next(iter(self._runtime.state_layers), None)
        if layer is None:
            if states is not None:
                raise BatchError("states", f"{states.common.num_reqs} requests", "and no layer keeps a state")
        elif states is None:
            limit, remedy = f"is required: layer {layer} keeps a state", "give StateTable.step(batch)"
            raise BatchError("states", None, limit, remedy)
        else:
            check_state_step(states, batch, self._runtime.state_pool, batch.common.query_start_loc.device)
            if states.overwrites and states.ran:
                limit = (
                    "ran and overwrote the states that it started from: a replay would add the tokens twice"
                )
                raise BatchError("states", f"{len(states.ran)} layers", limit, "call finish_step first")

    def _check_sharded(self, buffers: GraphInputBuffers, batch: StepBatch, uniform: bool) -> None:
        if buffers.sharded is None:
            return
        step, by_row = batch.sharded, buffers.sharded.row_lens is not None
        if step is None or step.place != buffers.sharded.place or (by_row and step.row_lens is None):
            found = None if step is None else step.place
            limit = f"must be the step of {buffers.sharded.place}"
            remedy = "make batches with the runtime's step_batch_builder()"
            raise BatchError("batch.sharded", found, limit, remedy)
        # New tokens are attended apart from computed ones, or each alone: both need the graph's rows.
        if step.is_decode is not (buffers.query_len == 1) or not (step.is_decode or uniform):
            limit = f"must be the graph's query_len={buffers.query_len} for every request under context parallelism"
            lengths = sorted(set(np.diff(batch.common.query_start_loc_cpu.numpy()).tolist()))
            raise BatchError("batch.query_lens", lengths, limit, "run this step without a graph")

    def _capture_batch(self, buffers: GraphInputBuffers) -> StepBatch:
        reqs = buffers.batch_size
        starts = torch.arange(0, buffers.num_tokens + 1, buffers.query_len, dtype=torch.int32, device="cpu")
        # The longest sequence, so that values which builders derive from it fit every replayed step.
        lengths = np.full(reqs, self.max_model_len, dtype=np.int32)
        host = _host_rows(buffers, None, 0, 0)
        if self._cross:
            host["encoder_seq_lens_cpu"][:] = self.max_encoder_len
        sharded = None
        if buffers.sharded is not None:
            most = buffers.sharded.place.most_local(self.max_model_len)
            local, rows = (np.full(count, most, dtype=np.int32) for count in (reqs, buffers.num_tokens))
            sharded = buffers.sharded.step(local, rows, for_capture=True)
        # The lengths are not exact, because each replay has others.
        return self._batch(buffers, starts, lengths, False, host, (), sharded)

    def _padded(self, buffers: GraphInputBuffers, batch: StepBatch) -> StepBatch:
        common, padding = batch.common, buffers.batch_size - batch.common.num_reqs
        starts = np.empty(buffers.batch_size + 1, dtype=np.int32)
        starts[: common.num_reqs + 1] = common.query_start_loc_cpu.numpy()
        ends = np.arange(1, padding + 1) * buffers.query_len + common.num_actual_tokens
        starts[common.num_reqs + 1 :] = ends
        step, sharded = batch.sharded, None
        if buffers.sharded is not None and step is not None:
            local = np.concatenate([step.local_lens_host, np.ones(padding, dtype=np.int32)])
            by_row = _extended(step.row_lens_host, padding * buffers.query_len)
            sharded = buffers.sharded.step(local, by_row, for_capture=False)
        return self._batch(
            buffers,
            torch.from_numpy(starts),
            _extended(common.seq_lens_host, padding),
            common.seq_lens_host_exact,
            _host_rows(buffers, common, common.num_reqs, common.num_actual_tokens),
            batch.req_ids,
            sharded,
            (*batch.stamps, (buffers.serial, buffers.serial.now)),
        )

    def _batch(
        self,
        buffers: GraphInputBuffers,
        starts: torch.Tensor,
        lengths: _Lengths | None,
        exact: bool,
        host: dict[str, Any],
        req_ids: tuple[str, ...],
        sharded: ShardedStep | None,
        stamps: tuple[Stamp, ...] = (),
    ) -> StepBatch:
        tokens = buffers.num_tokens
        common = CommonAttentionMetadata(
            query_start_loc=buffers.query_start_loc,
            query_start_loc_cpu=starts,
            seq_lens=buffers.seq_lens,
            num_reqs=buffers.batch_size,
            num_actual_tokens=tokens,
            max_query_len=buffers.query_len,
            max_seq_len=self.max_model_len,
            block_table_tensor=buffers.block_tables[self._first],
            slot_mapping=buffers.slot_mappings[self._first, : 0 if self._first in self._cross else tokens],
            seq_lens_host=lengths,
            seq_lens_host_exact=exact,
            **buffers.inputs,
            **host,
        )
        groups = buffers.block_tables.shape[0]
        counts = tuple(0 if group in self._cross else tokens for group in range(groups))
        tables, slots = buffers.block_tables, buffers.slot_mappings
        at = tables, slots, counts, self._cross, req_ids, self._sizes
        return StepBatch(common, self._first, *at, sharded=sharded, stamps=stamps).sealed()


def _extended(lengths: _Lengths | None, padding: int) -> _Lengths | None:
    # Length 1, as in the device buffers that the same padding requests read.
    return None if lengths is None else np.concatenate([lengths, np.ones(padding, dtype=np.int32)])


def _host_rows(
    buffers: GraphInputBuffers, common: CommonAttentionMetadata | None, reqs: int, tokens: int
) -> dict[str, Any]:
    """The optional inputs of a step on the host and padding after them, as in the buffers; None if the step has none."""
    found: dict[str, Any] = {}
    for each in STEP_INPUTS:
        if each.name not in buffers.inputs or each.host is None:
            continue
        rows, given = each.count(reqs, tokens), None if common is None else getattr(common, each.host)
        if common is None or given is not None:
            most = each.count(buffers.batch_size, buffers.num_tokens)
            own = [] if given is None else [torch.as_tensor(given)[:rows]]
            given = each.on_host(torch.cat([*own, each.padded(most - rows, "cpu")]))
        found[each.host] = given
    return found
