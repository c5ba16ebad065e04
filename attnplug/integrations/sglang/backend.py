"""The attention backend that SGLang makes for a model runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from attnplug.core.errors import BatchError, SpecError
from attnplug.core.interface.impl_and_builder import checked_metadata
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadataBuilder
from attnplug.integrations.binding import GrowingBuilder
from attnplug.integrations.ordering import run_in_order
from attnplug.integrations.sglang.batches import check_fields
from attnplug.integrations.sglang.bound import Bound, Choice, decide
from attnplug.integrations.sglang.caches import OTHER
from attnplug.integrations.sglang.graphs import GraphBuffers, GraphStep, check_support
from attnplug.integrations.sglang.layers import look
from attnplug.integrations.sglang.runner import check_runner, drafts_of_runner, facts_of
from attnplug.integrations.sglang.steps import CROSS, Rows, Step
from attnplug.integrations.sglang.warm_up import warm_up
from attnplug.registry.selection.decision import Decision


class Backend(AttentionBackend):  # type: ignore[misc]  # SGLang is not there for type checkers
    """One for each model runner. Its constructor refuses a model with a layer that no backend serves.

    Args:
        runner: SGLang's ModelRunner, with its pools.
        name: attnplug's name of the one backend, or None to select for each layer and phase.

    Raises:
        SpecError: the runner, its pool or a layer asks for what is not served in SGLang.
        NoBackendError, BackendUnavailableError: no backend serves a layer; with each candidate's reasons.
    """

    def __init__(self, runner: Any, name: str | None = None) -> None:
        super().__init__()
        check_runner(runner)
        self.runner, self.device = runner, torch.device(runner.device)
        self.pool = runner.token_to_kv_pool
        self.rows = Rows(runner.req_to_token_pool.req_to_token, int(runner.page_size), self.pool)
        self.facts = facts_of(runner)
        drafts = drafts_of_runner(runner)
        self.choice = Choice(name, has_drafts=drafts > 0)
        self.has_image_masks = hasattr(runner.model, "prepare_attn_masks")
        self._config = {
            "num_speculative_tokens": drafts,
            "max_num_seqs": max(1, self.rows.table.shape[0]),
            "max_model_len": self.rows.table.shape[1],
        }
        self._names: dict[int, str] = {
            id(layer): path
            for path, layer in runner.model.named_modules()
            if isinstance(layer, RadixAttention)
        }
        self._bound: dict[int, Bound] = {}
        self._kinds: dict[Any, Bound] = {}
        """One layer of each kind, also of kinds that only graphs still have."""
        self._builders: dict[Any, GrowingBuilder] = {}
        self._graph_builders: dict[Any, GrowingBuilder] = {}
        self._buffers: GraphBuffers | None = None
        self._captured: dict[tuple[int, int], dict[Any, Any]] = {}
        """By requests and their queries, the metadata of each kind that a graph reads."""
        self._capturing = False
        self._step: Step | GraphStep | None = None
        for layer in self.attention_layers():
            decide(layer, self._name(layer), self.pool, self.facts, self.choice, has_sinks=False)

    @property
    def token_to_kv_pool(self) -> Any:
        """SGLang's KV pool."""
        return self.pool

    @token_to_kv_pool.setter
    def token_to_kv_pool(self, pool: Any) -> None:
        if pool is not self.pool:
            limit = "is put in place for a draft that reads another model's pages, which is not served"
            raise SpecError("token_to_kv_pool", type(pool).__name__, limit, OTHER)

    def attention_layers(self) -> Iterator[Any]:
        """The model's attention layers."""
        return (layer for layer in self.runner.model.modules() if isinstance(layer, RadixAttention))

    def decisions(self) -> dict[str, Decision]:
        """The decision for each layer that has run, by its path in the model."""
        return {bound.name: bound.decision for bound in self._bound.values()}

    def _name(self, layer: Any) -> str:
        return self._names.get(id(layer), f"layer{layer.layer_id}")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take a step outside of graphs."""
        self._capturing = False
        self._step = None if forward_batch.forward_mode.is_idle() else self._read(forward_batch)

    def _read(self, batch: Any) -> Step:
        check_fields(batch, self.has_image_masks)
        return Step(batch, self.rows)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of at most so many requests and tokens read.

        Graphs that were captured with smaller sizes are forgotten, and a replay of theirs is an error.
        """
        if self._buffers is None and self.device.type != "cpu":
            warm_up(self)
        tokens, given = max(max_bs, max_num_tokens), self._buffers
        if given is not None and given.max_reqs >= max_bs and given.max_tokens >= tokens:
            return
        windowed = hasattr(self.pool, "swa_kv_pool")
        self._buffers = GraphBuffers(self.rows, max_bs, tokens, windowed=windowed)
        self._graph_builders, self._captured = {}, {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Take a step for a graph, before its capture or before a replay."""
        if self._buffers is None:
            self.init_forward_metadata(forward_batch)
            return
        check_fields(forward_batch, self.has_image_masks)
        self._take(GraphStep(forward_batch, self._buffers, captures=in_capture), in_capture)

    def _take(self, step: GraphStep, in_capture: bool) -> None:
        shape = step.reqs, step.queries
        if in_capture:
            self._captured[shape] = step.made
        elif shape not in self._captured:
            limit = f"of {step.queries} tokens each were not captured since the last init_cuda_graph_state"
            raise BatchError("batch_size", step.reqs, limit)
        self._capturing, self._step = in_capture, step
        # Kinds that appear later are built by the first layer that runs.
        for kind in self._kinds if in_capture else self._captured[shape]:
            self._metadata(self._kinds[kind], step)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """1: a padding request is a decode of one key."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may run its own Triton kernels on the device."""
        return self.device.type == "cuda"

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **asked: Any
    ) -> Any:
        """As `forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, *rest, **asked)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **asked: Any,
    ) -> torch.Tensor:
        """Write the new keys and values, and attend.

        Args:
            q: queries `[T, H * D]` or `[T, H, D]`; rows past the batch's tokens are padding.
            k: `[T, Hkv, D]` or `[T, Hkv * D]`; None if another layer has written them.
            v: the same for values.
            layer: the RadixAttention.
            forward_batch: the batch that `init_forward_metadata` has read.
            save_kv_cache: False if `k` and `v` are in the pages already.
            sinks: `[H]`, or None.
            **asked: what later versions and other kinds of attention ask for; all of it is refused.

        Returns:
            `[T, H * Dv]`; rows of padding are 0.

        Raises:
            BatchError: an argument that is not known, or a batch that was not read.
            SpecError, NoBackendError, BackendUnavailableError: as the constructor.
        """
        for name, value in asked.items():
            if value is not None and value is not False:
                limit = "is an argument that attnplug does not serve in SGLang, and may change the result"
                raise BatchError(name, type(value).__name__, limit, OTHER)
        step = self._step
        if step is None:
            raise BatchError(
                "forward_batch", forward_batch.forward_mode.name, "was not given to init_forward_metadata"
            )
        bound = self.bound(layer, sinks)
        bound.read_sinks(sinks)
        metadata, spec, tokens = self._metadata(bound, step), bound.spec, step.tokens
        query = q.reshape(-1, spec.num_heads, spec.head_size)
        if query.shape[0] != q.shape[0]:
            limit = f"must have {spec.num_heads * spec.head_size} elements for each token"
            raise BatchError("q", tuple(q.shape), limit, OTHER)
        output = query.new_empty(query.shape[0], spec.num_heads, spec.head_size_v)
        if query.shape[0] > tokens:
            output[tokens:].zero_()
        pages = bound.pages()
        key = value = None
        if k is not None and v is not None:
            key = k.reshape(-1, spec.num_kv_heads, spec.head_size)
            value = v.reshape(-1, spec.num_kv_heads, spec.head_size_v)
        if key is not None and value is not None and save_kv_cache and pages is not None:
            slots = step.common(bound.place).slot_mapping
            bound.impl.update_kv_cache(None, key, value, pages, slots)
        # A fused writer may have changed keys of the call, and those of an encoder are not the queries' own.
        if bound.place == CROSS or (pages is not None and not save_kv_cache):
            key = value = None
        run_in_order(bound.impl.attend, None, query, key, value, pages, metadata, output)
        return output.view(q.shape[0], -1)

    def bound(self, layer: Any, sinks: torch.Tensor | None) -> Bound:
        """The layer's impl; a layer that the model has changed since is bound again."""
        found = self._bound.get(id(layer))
        if found is None or found.seen != look(layer) or found.spec.has_sinks is (sinks is None):
            found = self._bound[id(layer)] = Bound(
                layer,
                self._name(layer),
                sinks,
                pool=self.pool,
                facts=self.facts,
                choice=self.choice,
                device=self.device,
            )
            self._kinds.setdefault(found.kind, found)
        return found

    def _metadata(self, bound: Bound, step: Step | GraphStep) -> Any:
        """The step's metadata for the layer's kind; made when the first layer of the kind runs."""
        metadata = step.made.get(bound.kind)
        if metadata is None:
            common = step.common(bound.place).for_layers((bound.spec,))
            if isinstance(step, GraphStep):
                metadata = self._for_graph(bound, step, common)
            else:
                metadata = self._builder(self._builders, bound).build(common)
            step.made[bound.kind] = metadata
        return metadata

    def _for_graph(self, bound: Bound, step: GraphStep, common: Any) -> Any:
        # Builders of graphs are apart: what a graph reads is theirs, and steps outside must not write it.
        growing = self._builder(self._graph_builders, bound)
        builder = growing.fitting(step.buffers.max_reqs, step.buffers.max_tokens)
        backend = bound.decision.get_backend_cls()
        if not self._capturing:
            return checked_metadata(backend, "build", builder.build(0, common))
        if self.device.type != "cpu":  # SGLang prepares graphs on a CPU too, and records none
            cache: Any = kv_cache_spec_for(bound.spec, self.rows.page_size)
            support = type(builder).get_cudagraph_support(builder.config, cache)
            check_support(support, str(bound.decision.backend), step.queries)
        method = "build_for_cudagraph_capture"
        return checked_metadata(backend, method, builder.build_for_cudagraph_capture(common))

    def builder_of(self, bound: Bound) -> AttentionMetadataBuilder[Any]:
        """The builder of a kind's steps outside of graphs, of the first sizes."""
        growing = self._builder(self._builders, bound)
        return growing.fitting(growing.config.max_num_seqs, growing.config.max_num_batched_tokens)

    def _builder(self, builders: dict[Any, GrowingBuilder], bound: Bound) -> GrowingBuilder:
        if bound.kind not in builders:
            layers = {bound.name: bound.engine_layer}
            builders[bound.kind] = GrowingBuilder(bound.decision, layers, self.device, **self._config)
        return builders[bound.kind]
