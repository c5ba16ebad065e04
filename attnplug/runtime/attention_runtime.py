"""Runs a plan: caches, impls, builders, and the forward of each layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import instance
from attnplug.core.config import BuilderConfig
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError, LayoutError, PolicyError, SpecError
from attnplug.core.impl import LayerTensors
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.core.state.impl import refuse_of_attention
from attnplug.registry.plugins.switches import DEBUG, is_on
from attnplug.runtime.batch.cascade import may_cascade
from attnplug.runtime.batch.forest_prices import SharingPrices
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.batch.step_batch_builder import StepBatchBuilder
from attnplug.runtime.caches.block_pool import BlockPool
from attnplug.runtime.caches.engine_caches import Allocator, groups_share_memory
from attnplug.runtime.caches.layer_caches import layer_caches
from attnplug.runtime.caches.memory_overlap import NO_CACHES, CacheMemory
from attnplug.runtime.plan.grouping import cross_groups
from attnplug.runtime.plan.model_plan import ModelPlan
from attnplug.runtime.plan.sharding import (
    check_sharing,
    context_chunk_rows,
    device_of,
    last_readers,
    longest_sequence,
)
from attnplug.runtime.states.state_layers import StateGroup, StateLayer, StateLayers
from attnplug.runtime.states.state_step import StateStep, check_state_step
from attnplug.runtime.states.state_table import StateTable
from attnplug.runtime.steps.active_step import ActiveStep
from attnplug.runtime.steps.attention_groups import (
    AttentionGroup,
    init_attn_backend,
    init_direct_groups,
    share_workspace,
)
from attnplug.runtime.steps.kept_paths import keep_paths
from attnplug.runtime.steps.layer_steps import LayerStep
from attnplug.runtime.steps.prefix_sharing import PrefixSharing
from attnplug.runtime.steps.runtime_layer import RuntimeLayer, tensors_of_layers
from attnplug.runtime.steps.step_checks import NeededInputs, widest_topk
from attnplug.runtime.steps.warm_up import WarmUpReport, warm_up

if TYPE_CHECKING:
    from attnplug.runtime.ranks.sharded_layers import ShardedLayers
    from attnplug.runtime.steps.shared_step import SharedStep


class AttentionRuntime(NotCopied):
    """The attention of a whole model over paged KV caches.

    Call `begin_step(batch)` once per step, then `forward(layer, q, k, v)` for each layer. A forward that raised
    can be repeated, because it writes the same pages again. A layer that keeps a state can be repeated in a step if no
    page is both read and written: see `state_table`. If `begin_step` raises, no step is active. Use the
    runtime as a context manager, or `close()` it. Use one thread at a time; separate runtimes are independent.

    Args:
        plan: from `attnplug.plan` with `num_blocks` or `memory`.
        layer_tensors: sinks, slopes and scales of the layers that have any. A layer that reads the pages of
            another layer uses that layer's scales.
        config: the engine's settings for builders; the runtime fills in its layers.
        device: of the tensors, a torch name; by default the plan's type.
        kv_sharing_fast_prefill: let the last layers of the plan, which all read the pages of other layers, compute
            only the tokens whose logits are wanted. In a step with `num_logits` these `fast_prefill_layers` take
            the rows `batch.common.logits_indices_padded`, in that order; in other steps all rows.
        debug: poison outputs and check the results of each backend; the default is ATTNPLUG_DEBUG=1.
        kv_caches: the engine's memory for each layer with pages, instead of an own allocation. A tensor is
            either raw or a cache. A raw one is 1-D uint8 or int8 of `num_blocks` pages. A cache has the backend's
            logical shape and the strides of the plan's layout. Each block is contiguous, and there may be gaps between
            blocks. Layers that share KV get the same memory. The runtime writes zeros to block 0, the null block. To other blocks
            it writes only the K and V of tokens; they may have any content, also NaN.
        allocator: gives that memory as raw bytes: called with a number of bytes and the device, once for each
            tensor of `plan.kv_cache_config`.
        context_parallel: for a plan with `context_parallel` that has no process group, such as one from JSON: the same
            place with its group. All ranks make their runtimes at the same time, and run the same steps and layers.
        prefix_sharing: whether requests may read the blocks that they share together, in steps where that pays by the
            prices of the backend on the device; False for never, or prices of your own. `step_notes` says what a step shared.

    Raises:
        LayoutError: memory of the engine does not fit its layer (device, dtype, shape, strides, 16-byte
            alignment) or overlaps that of another. The plan has no number of blocks; tensors are given for an
            unknown layer; the device has another type than the plan's; layers that share pages read them
            differently; fast prefill is requested and the last layer of the plan has its own pages.
        SpecError: a tensor is missing, not needed, or of another shape; the error names the layer.
        PolicyError: the configuration has context parallelism, which the plan has instead; ATTNPLUG_DEBUG is
            neither 1 nor 0.
        RankFailureError: another rank of the plan's `context_parallel` planned otherwise.
    """

    def __init__(
        self,
        plan: ModelPlan,
        layer_tensors: Mapping[str, LayerTensors] | None = None,
        *,
        config: BuilderConfig | None = None,
        device: torch.device | str | None = None,
        kv_sharing_fast_prefill: bool = False,
        debug: bool | None = None,
        kv_caches: Mapping[str, torch.Tensor] | None = None,
        allocator: Allocator | None = None,
        context_parallel: ContextParallel | None = None,
        prefix_sharing: SharingPrices | bool = True,
    ) -> None:
        self.plan = instance("plan", plan, ModelPlan, LayoutError, "make one by attnplug.plan")
        instance("kv_sharing_fast_prefill", kv_sharing_fast_prefill, bool, LayoutError)
        if debug is not None:
            instance("debug", debug, bool, LayoutError)
        self.fast_prefill_layers = last_readers(plan) if kv_sharing_fast_prefill else ()
        """The layers of fast prefill, in the order of the plan."""
        self.device = device_of(plan, device)
        # "cuda" means the current GPU, which only a tensor's device tells.
        self._home = torch.empty(0, device=self.device).device
        self.debug = is_on(DEBUG) if debug is None else debug
        self.kv_cache_config = plan.kv_cache_config
        groups = self.kv_cache_config.kv_cache_groups
        if groups and plan.num_blocks is None:
            raise LayoutError("plan.num_blocks", None, "is required", "plan with num_blocks or memory")
        config = BuilderConfig() if config is None else instance("config", config, BuilderConfig, SpecError)
        rows = context_chunk_rows(plan, config)
        ranks = config.decode_context_parallel_size
        if ranks > 1:
            limit = "must be 1: the builders of this runtime see the keys of one rank as an ordinary batch"
            remedy = "plan with context_parallel=attnplug.runtime.context_parallel(group)"
            raise PolicyError("config.decode_context_parallel_size", ranks, limit, remedy)
        check_sharing(plan, context_parallel, self.fast_prefill_layers)
        tensors_by_layer = tensors_of_layers(plan, {} if layer_tensors is None else layer_tensors)
        self.layers = {
            name: RuntimeLayer(name, plan.decisions[name], tensors, self.device, plan.kv_sharing.get(name))
            for name, tensors in tensors_by_layer.items()
            if plan.decisions[name].spec.state is None
        }
        """The attention layers, by name."""
        # The layers are made first, because builders read their impls.
        self.config = dataclasses.replace(config, layers=self.layers, context_chunk_rows=rows)
        paged = {n: d for n, d in plan.decisions.items() if d.spec.has_pages}
        self.attention_groups = init_attn_backend(
            groups, paged, self.config, self.device, self.fast_prefill_layers
        )
        """The layers with pages, grouped by builder."""
        make_direct = functools.partial(init_direct_groups, config=self.config, device=self.device)
        self._direct_groups = make_direct({n: d for n, d in plan.decisions.items() if d.spec.direct_kv})
        states = plan.states
        self._states = (
            None
            if states is None
            else StateLayers(plan, states, tensors_by_layer, self.config, self._home, allocator)
        )
        self._sharded: ShardedLayers | None = None
        if plan.context_parallel is not None:
            # Only here, because torch may be built without torch.distributed.
            from attnplug.runtime.ranks.sharded_layers import ShardedLayers

            most = self.config.max_num_batched_tokens, self.config.max_num_seqs
            made = tensors_by_layer, self.device, *most, context_parallel, make_direct
            self._sharded = ShardedLayers(plan, *made, self.attention_groups, self.layers)
        sharded = () if self._sharded is None else self._sharded.names
        if not isinstance(prefix_sharing, SharingPrices):
            instance("prefix_sharing", prefix_sharing, bool, SpecError)
        own = self.attention_groups, self.layers, plan.decisions, self.config, self._home
        self.prefix_sharing = PrefixSharing(*own, prefix_sharing, sharded)
        """The layers whose requests may read a prefix together."""
        # Layers run one after another, so all builders of the runtime can use one workspace.
        share_workspace(
            group.builder for group in (*self.attention_groups, *self._direct_groups, *self.new_token_groups)
        )
        self.kv_caches = layer_caches(
            self.kv_cache_config, plan.decisions, plan.kv_sharing, self.device, kv_caches, allocator
        )
        memory = CacheMemory(self.kv_caches)
        for name, layer in self.layers.items():
            layer.kv_cache, layer.cache_memory = self.kv_caches.get(name), memory
        # Without pages the pool has the null block alone.
        self.block_pool = BlockPool(plan.num_blocks or 1)
        parts = self.layers, self.attention_groups, self._direct_groups, self.prefix_sharing, self._sharded
        drafts = self.config.num_speculative_tokens
        self._active = ActiveStep(self.kv_cache_config, *parts, self._home, drafts, debug=self.debug)
        self._closed = False

    @property
    def needed_inputs(self) -> NeededInputs:
        """The optional inputs that layers with pages need, and the first layer that needs each."""
        return self._active.needed_inputs

    def step_batch_builder(
        self,
        max_model_len: int | None = None,
        max_encoder_len: int = 0,
        mm_prefix_modalities: Collection[str] | None = None,
    ) -> StepBatchBuilder:
        """A StepBatchBuilder for the KV groups of the plan and the limits of this runtime.

        Args:
            max_model_len: longest sequence; by default the configuration's.
            max_encoder_len: longest encoder sequence, for cross-attention layers.
            mm_prefix_modalities: for layers with mm_prefix, the modalities whose placeholders are spans; None for
                all.

        Raises:
            BatchError: a length is missing or above the configuration's; the plan has no pages; modalities are
                given and no layer has mm_prefix; the runtime is closed.
        """
        self._check_open()
        groups = self.kv_cache_config.kv_cache_groups
        if not groups:
            raise BatchError("plan", len(self.layers), "layers keep no pages", "begin_step(direct=...)")
        return StepBatchBuilder(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=longest_sequence(self.config, max_model_len),
            block_sizes=[group.kv_cache_spec.block_size for group in groups],
            kv_cache_specs=[group.kv_cache_spec for group in groups],
            device=self.device,
            cross_groups=sorted(cross_groups(self.kv_cache_config)),
            max_encoder_len=max_encoder_len,
            num_blocks=self.kv_cache_config.num_blocks,
            reorder_batch_thresholds=[
                threshold
                for group in self.attention_groups
                if (threshold := group.builder.reorder_batch_threshold) is not None
            ],
            # The comparison of long tables costs host time, so it is left out where nobody would ask.
            cascade_groups={g.kv_cache_group_id for g in self.attention_groups if may_cascade(g.builder)},
            mm_prefix=self.has_mm_prefix,
            sparse_topk=self.sparse_topk,
            mm_prefix_modalities=mm_prefix_modalities,
            context_parallel=self.plan.context_parallel,
            one_pool=groups_share_memory(self.kv_cache_config, self.kv_caches),
        )

    @property
    def state_layers(self) -> Mapping[str, StateLayer]:
        """The layers that keep a state, by name."""
        return {} if self._states is None else self._states.layers

    @property
    def state_groups(self) -> Sequence[StateGroup]:
        """The layers that keep a state, grouped by builder."""
        return () if self._states is None else self._states.groups

    @property
    def state_pool(self) -> BlockPool:
        """The pages of states. A number is a page of each layer; a prefix cache adds users to those of checkpoints.

        Raises:
            BatchError: no layer keeps a state.
        """
        return self._own_states().pool

    def state_table(self, *, in_place: bool = True) -> StateTable:
        """A StateTable of the pages of the plan; its steps are the `states` of `begin_step`.

        Args:
            in_place: whether a step may write the pages that it reads. Layers then run once in a step.

        Raises:
            BatchError: no layer keeps a state, or the runtime is closed.
        """
        self._check_open()
        states = self._own_states()
        return StateTable(states.plan, states.pool, in_place=in_place, device=self._home)

    def _own_states(self) -> StateLayers:
        if self._states is None:
            raise BatchError("plan", len(self.plan.decisions), "layers keep no states")
        return self._states

    @property
    def new_token_groups(self) -> tuple[AttentionGroup, ...]:
        """The builders for the new tokens of layers whose tokens ranks share; empty without context parallelism."""
        return () if self._sharded is None else tuple(self._sharded.groups)

    @property
    def has_mm_prefix(self) -> bool:
        """Whether a layer with pages needs the multimodal spans of a step."""
        return any(each.name == "mm_prefix_spans" for each in self.needed_inputs)

    @property
    def sparse_topk(self) -> int:
        """The width of a step's selection: the most positions that a layer with pages chooses; 0 if none is sparse."""
        return widest_topk(layer.spec for layer in self.layers.values() if not layer.spec.direct_kv)

    @property
    def step_notes(self) -> tuple[str, ...]:
        """The prefixes that requests read together in the last step with pages, or why none: for each group of layers."""
        return self.prefix_sharing.notes

    @property
    def tree_refusal(self) -> str | None:
        """Why steps cannot verify trees of drafts: the first layer that refuses, and its reason; None if they can."""
        if self._states is not None:
            return f"layer {next(iter(self._states.layers))}: it keeps a state, which a chain of tokens has and no tree"
        return self.prefix_sharing.tree_refusal

    def warm_up(self) -> WarmUpReport:
        """Let the backends compile the kernels of the plan's steps; see `warm_up`.

        Call it before the first request and before the capture of graphs.

        Raises:
            BatchError: the runtime is closed.
        """
        self._check_open()
        return warm_up(self)

    def begin_step(
        self,
        batch: StepBatch | None = None,
        direct: CommonAttentionMetadata | None = None,
        *,
        metadata: Mapping[str, AttentionMetadata] | None = None,
        draft_index: int | None = None,
        states: StateStep | None = None,
    ) -> None:
        """Build the metadata of a step for all layers.

        Args:
            batch: for the layers with pages, from `StepBatchBuilder.step`.
            direct: for the layers that get K and V with the call, such as an encoder's.
            metadata: by layer, if that of `batch` was already built, such as for the capture of a graph.
            draft_index: the number of a draft step, below `config.num_speculative_tokens`: 0 for the step that
                gives the first draft token. Builders then build by `build_for_drafting`, which is cheap. The step
                that verifies the drafts is a plain one.
            states: for the layers that keep a state, from `StateTable.step`. Without it they have no step.

        Raises:
            BatchError: none of batch, direct and states is given; states of another batch; the batch does not fit the plan, its device or its pool (on a
                GPU, only debug mode checks the pool); no layer has direct K and V; a layer with mm_prefix gets no
                spans, or a sparse layer no selection; the draft step is out of range or given with metadata; the
                runtime is closed.
        """
        self._check_open()
        # Ended first: if this call raises, no step is active.
        self.end_step()
        self._active.check_device_values()
        if states is not None:
            check_state_step(states, batch, self.state_pool, self._home)
        # If a builder raises, or an interrupt does, no step is active.
        try:
            if states is None or batch is not None or direct is not None:
                self._active.begin(batch, direct, metadata, draft_index)
            if states is not None:
                self._own_states().begin(states, metadata)
        except BaseException:
            self.end_step()
            raise

    def forward(
        self,
        layer_name: str,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the layer's new K and V and attend, or advance the states of a layer that keeps one.

        A layer with a state takes the arguments of `StateImpl.advance`: `query [T, Hk, K]`, `key`, `value [T, Hv, V]`, a
        `decay`, and `beta` with the delta rule; a convolution takes its input `[T, C]` as `query`.

        Args:
            layer_name: a layer of the plan.
            query: `[T, H, D]`, with MLA of nope + rope elements; rows past the step's tokens are not read. A
                layer of fast prefill takes the rows of the wanted logits, so T is `batch.common.num_logits_indices` if the step has it.
            key: `[T, Hkv, D]`; None for layers that share the KV of another layer, and for cross attention after
                the encoder's tokens are written.
            value: like `key`, with head size Dv; with MLA None, since the key is the latent.
            output: `[T, H, Dv]` to write to, with MLA of v_head_dim elements; by default a new tensor.
            output_lse: float32 `[T, H]` to write to, if given.
            output_scale: one float32, to get an `output` of 8 bits: written x output_scale = output. The dtype of
                `output` says the quantisation, which the layer's impl must support.
            output_block_scale: scales of the blocks of each row, for the kernel to write, with as many rows as
                `output`.
            decay: of a layer with a state, float32 `[T, Hv]` or `[T, Hv, K]`: the logarithm of what stays of it.
            beta: of such a layer, `[T, Hv]`.

        Returns:
            The output; its rows past the step's tokens are unspecified.

        Raises:
            BatchError: no step is active for the layer; the layer is unknown; a layer with a state runs a second time on
                states that it overwrote; tensors do not fit the layer or the step;
                the layer's impl does not support the output's quantisation; the runtime is closed. Debug mode also
                refuses NaN in the arguments, and a selection of a sparse layer that is missing or not allowed.
            BackendFaultError: in debug mode, if a backend gives another shape or dtype, or NaN.
        """
        self._check_open()
        if self._states is not None and layer_name in self._states.layers:
            scaled = {"output_scale": output_scale, "output_block_scale": output_block_scale}
            refuse_of_attention(layer_name, output_lse=output_lse, **scaled)
            self._active.check_current()
            given = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
            return self._states.forward(layer_name, given, output, self.debug)
        layer = self._attention_layer(layer_name, decay=decay, beta=beta)
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        return self._active.forward(layer, query, key, value, output, output_lse, scales)

    def _attention_layer(self, layer_name: object, **given: torch.Tensor | None) -> RuntimeLayer:
        """The layer; BatchError if it is unknown, or if arguments of layers with a state are given."""
        layer = self.layers.get(layer_name) if isinstance(layer_name, str) else None
        if layer is None:
            known = len(self.plan.decisions)
            raise BatchError("layer_name", layer_name, f"is not one of the plan's {known} layers")
        for field, tensor in given.items():
            if tensor is not None:
                raise BatchError(field, "given", f"must be None: layer {layer_name} keeps no state")
        return layer

    def keep_path(self, batch: StepBatch, accepted: Mapping[str, int]) -> None:
        """Move the keys of accepted paths of drafts behind the computed tokens, in all layers.

        Call it after the layers of the step have run, and before `finish_step` with the same nodes. A path whose nodes are
        the first of its tree, in order, need not be moved.

        Args:
            batch: the step, from `StepBatchBuilder.step(trees=...)`.
            accepted: by request, the last node of its path; -1 keeps none.

        Raises:
            BatchError: the batch is out of date, or has no tree for a request; a node is not in its tree, or another path
                of it was kept; the runtime is closed.
        """
        self._check_open()
        keep_paths(batch, accepted, self.attention_groups, self.layers, self.device)

    def share_step(self, shared: Mapping[str, SharedStep]) -> None:
        """Let layers of the active step run in these parts, as a graph does; `SharedGraphs` calls it."""
        layers = self._active.layers
        # A field is replaced in a third of the time of `_replace`, and each step has all layers here.
        layers |= {name: LayerStep(*layers[name][:3], step) for name, step in shared.items()}

    def end_step(self) -> None:
        """End the active step: `forward` raises until the next one begins."""
        self._active.end()
        if self._states is not None:
            self._states.end()

    def close(self) -> None:
        """Release caches and workspaces; all methods except `close` raise afterwards."""
        self._closed = True
        self.end_step()
        self.kv_caches.clear()
        self.attention_groups.clear()
        self._direct_groups.clear()
        self.prefix_sharing.close()
        self._sharded = None
        if self._states is not None:
            self._states.close()
        for layer in self.layers.values():
            layer.kv_cache, layer.cache_memory = None, NO_CACHES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BatchError("runtime", "closed", "cannot be used any more", "make another one")
