"""Runs a plan: caches, impls, builders, and each layer's forward."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, cast

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError, LayoutError, PolicyError
from attnplug.core.impl import LayerTensors
from attnplug.core.kv_cache_spec import CrossAttentionSpec, KVCacheSpec, kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.runtime.allocation import init_kv_cache
from attnplug.runtime.attention_groups import (
    AttentionGroup,
    build_attn_metadata,
    init_attn_backend,
    share_workspace,
)
from attnplug.runtime.block_pool import BlockPool
from attnplug.runtime.model_plan import ModelPlan
from attnplug.runtime.runtime_layer import RuntimeLayer, tensors_of_layers
from attnplug.runtime.step_batch import StepBatch, StepBatchBuilder
from attnplug.runtime.warm_up import WarmUpReport, warm_up

__all__ = ["AttentionRuntime", "RuntimeLayer", "longest_sequence"]

_DEBUG = "ATTNPLUG_DEBUG"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LayerStep:
    """What the step that was begun is for one layer.

    Args:
        metadata: made by its builder.
        tokens: its queries.
        keys: the keys that must come with the call.
    """

    metadata: AttentionMetadata
    tokens: int
    keys: int


class AttentionRuntime:
    """The attention of a whole model over paged KV caches.

    `begin_step(batch)` once per step, then `forward(layer, q, k, v)` for each layer. A forward that raised
    can be repeated: it writes the same pages again. A `begin_step` that raised leaves no step begun. Use it
    as a context manager, or `close()` it. One thread at a time; runtimes of different threads are apart.

    Args:
        plan: made by `attnplug.plan` with `num_blocks` or `memory`.
        layer_tensors: sinks, slopes and scales of the layers that have any. A layer that reads another's
            pages has that layer's scales.
        config: what builders are told of the engine; its layers are filled in.
        device: where tensors live, as torch names it; by default the plan's type.
        debug: poison outputs and check what each backend leaves; default is ATTNPLUG_DEBUG=1.

    Raises:
        LayoutError: a plan without a number of blocks, tensors for a layer that is none, a device of another
            type than the plan's, layers that share pages and read them differently.
        SpecError: a tensor missing, not asked for, or of another shape; it names the layer.
        PolicyError: a configuration with context parallelism.
    """

    def __init__(
        self,
        plan: ModelPlan,
        layer_tensors: Mapping[str, LayerTensors] | None = None,
        *,
        config: BuilderConfig | None = None,
        device: torch.device | str | None = None,
        debug: bool | None = None,
    ) -> None:
        self.plan = plan
        self.device = _device(plan, device)
        self.debug = os.environ.get(_DEBUG, "") not in ("", "0") if debug is None else debug
        self.kv_cache_config = plan.kv_cache_config
        groups = self.kv_cache_config.kv_cache_groups
        if groups and plan.num_blocks is None:
            raise LayoutError("plan.num_blocks", None, "is required", "plan with num_blocks or memory")
        config = config or BuilderConfig()
        if config.decode_context_parallel_size > 1:
            limit = "must be 1: this runtime keeps all of a request's KV on one device"
            raise PolicyError(
                "config.decode_context_parallel_size", config.decode_context_parallel_size, limit
            )
        self.layers = {
            name: RuntimeLayer(name, plan.decisions[name], tensors, self.device, plan.kv_sharing.get(name))
            for name, tensors in tensors_of_layers(plan, layer_tensors or {}).items()
        }
        self.config = dataclasses.replace(config, layers=self.layers)
        paged = {n: d for n, d in plan.decisions.items() if not d.spec.direct_kv}
        self.attention_groups = init_attn_backend(groups, paged, self.config, self.device)
        """The layers with pages that share a builder."""
        self._direct_groups = self._make_direct_groups()
        backends = {name: decision.get_backend_cls() for name, decision in paged.items()}
        layouts = {name: str(decision.kv_cache_layout) for name, decision in paged.items()}
        self.kv_caches = init_kv_cache(self.kv_cache_config, plan.specs, backends, self.device, layouts)
        for name, cache in self.kv_caches.items():
            self.layers[name].kv_cache = cache
        self._check_shared_pages()
        self.block_pool = BlockPool(plan.num_blocks or 1)
        self._step: dict[str, _LayerStep] = {}
        self._closed = False

    def step_batch_builder(
        self, max_model_len: int | None = None, max_encoder_len: int = 0
    ) -> StepBatchBuilder:
        """A StepBatchBuilder for this plan's KV groups and this runtime's limits.

        Args:
            max_model_len: longest sequence; default the configuration's.
            max_encoder_len: longest encoder sequence, where there are cross-attention layers.

        Raises:
            BatchError: lengths missing or past the configuration's, a plan without pages, a closed runtime.
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
            device=self.device,
            cross_groups=[
                i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, CrossAttentionSpec)
            ],
            max_encoder_len=max_encoder_len,
        )

    def warm_up(self) -> WarmUpReport:
        """Have the backends compile what the plan's steps need, before the first request; see `warm_up`.

        Call it before requests are served and before graphs are captured.

        Raises:
            BatchError: a closed runtime.
        """
        self._check_open()
        return warm_up(self)

    def begin_step(
        self,
        batch: StepBatch | None = None,
        direct: CommonAttentionMetadata | None = None,
        *,
        metadata: Mapping[str, AttentionMetadata] | None = None,
    ) -> None:
        """Build the metadata of a step for all layers.

        Args:
            batch: for the layers with pages, from `StepBatchBuilder.step`.
            direct: for the layers whose K and V come with the call, such as an encoder's.
            metadata: by layer, where that of `batch` was built already, as for a graph's capture.

        Raises:
            BatchError: neither, a batch that does not fit the plan or the pool, direct K and V for a plan
                without such layers, or a closed runtime.
        """
        self._check_open()
        self._step = {}
        if batch is None and direct is None:
            raise BatchError("batch", None, "is required: give batch, direct, or both")
        if direct is not None and not self._direct_groups:
            raise BatchError(
                "direct", direct.num_reqs, "requests, and no layer of the plan has direct K and V"
            )
        step: dict[str, _LayerStep] = {}
        if batch is not None:
            built = metadata or build_attn_metadata(self.attention_groups, batch, self.kv_cache_config)
            self._check_slots(batch)
            for group in self.attention_groups:
                written = batch.num_slots[group.kv_cache_group_id]
                for name in group.layer_names:
                    step[name] = _LayerStep(built[name], batch.common.num_actual_tokens, written)
        if direct is not None:
            keys = _direct_keys(direct)
            for group in self._direct_groups:
                made = group.builder.build(0, direct)
                for name in group.layer_names:
                    step[name] = _LayerStep(made, direct.num_actual_tokens, keys)
        self._step = step

    def forward(
        self,
        layer_name: str,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the layer's new K and V and attend.

        Args:
            layer_name: one of the plan's.
            query: `[T, H, D]`; rows past the step's tokens are not read.
            key: `[T, Hkv, D]`; None for layers that share another's KV, and for cross attention once the
                encoder's tokens are written.
            value: as `key`.
            output: `[T, H, Dv]`, written; made where it is not given.
            output_lse: float32 `[T, H]`, written where given.

        Returns:
            The output; its rows past the step's tokens are unspecified.

        Raises:
            BatchError: no step begun for the layer, an unknown layer, tensors that do not fit the layer or
                the step, a closed runtime; in debug mode also NaN in what was given.
            BackendFaultError: in debug mode, a backend that left another shape or dtype, or NaN.
        """
        self._check_open()
        layer = self.layers.get(layer_name)
        if layer is None:
            raise BatchError("layer_name", layer_name, f"is none of the plan's {len(self.layers)} layers")
        step = self._step.get(layer_name)
        if step is None:
            what = "direct=..." if layer.spec.direct_kv else "a batch"
            raise BatchError("layer_name", layer_name, "has no step", f"call begin_step with {what} first")
        layer.check_call(query, key, value, output, output_lse, step.tokens, step.keys)
        if output is None:
            output = layer.new_output(query)
        if self.debug:
            layer.refuse_nan(step.tokens, step.keys, query=query, key=key, value=value)
            output[: step.tokens] = torch.nan
            if output_lse is not None:
                output_lse[: step.tokens] = torch.nan
        found = layer.impl.forward(
            layer, query, key, value, layer.kv_cache, step.metadata, output, output_lse=output_lse
        )
        if self.debug:
            layer.check_result(found, output, output_lse, step.tokens)
        return output

    def end_step(self) -> None:
        """Forget the step that was begun: `forward` raises until the next one."""
        self._step = {}

    def close(self) -> None:
        """Give up caches and workspaces; anything but `close` raises afterwards."""
        self._closed = True
        self._step = {}
        self.kv_caches.clear()
        self.attention_groups.clear()
        self._direct_groups.clear()
        for layer in self.layers.values():
            layer.kv_cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make_direct_groups(self) -> list[AttentionGroup]:
        alike: dict[Any, list[str]] = {}
        for name, decision in self.plan.decisions.items():
            if decision.spec.direct_kv:
                alike.setdefault((decision.get_backend_cls(), decision.spec), []).append(name)
        made = []
        for (backend, spec), names in alike.items():
            # No pages are kept, but a builder is told of the layer's heads in the form of a page.
            cache = cast(KVCacheSpec, kv_cache_spec_for(spec.replace(direct_kv=False), spec.block_size or 1))
            builder = backend.get_builder_cls()(cache, names, self.config, self.device)
            made.append(AttentionGroup(backend, tuple(names), cache, -1, builder, frozenset({spec})))
        share_workspace(group.builder for group in (*self.attention_groups, *made))
        return made

    def _check_shared_pages(self) -> None:
        """Two backends may see the same bytes differently: a reader must see what the writer wrote."""
        for name, target in self.plan.kv_sharing.items():
            views = []
            for layer in (name, target):
                backend = self.plan.decisions[layer].get_backend_cls()
                both = backend.split_kv(self.kv_caches[layer], self.layers[layer].spec)
                views.append([(view.data_ptr(), view.shape, view.stride()) for view in both])
            if views[0] != views[1]:
                reader, writer = self.layers[name].backend, self.layers[target].backend
                limit = f"on {reader} would read the pages of {target} otherwise than {writer} writes them"
                raise LayoutError("kv_sharing", name, limit, "ask for one backend for both")

    def _check_slots(self, batch: StepBatch) -> None:
        # On a GPU the host would have to wait for the largest slot.
        if self.device.type != "cpu" and not self.debug:
            return
        for index, group in enumerate(self.kv_cache_config.kv_cache_groups):
            slots = batch.of_group(index)[1]
            held = self.kv_cache_config.num_blocks * group.kv_cache_spec.block_size
            if slots.numel() and int(slots.max()) >= held:
                limit = f"of KV group {index} is past the {held} slots of {self.plan.num_blocks} blocks"
                raise BatchError("batch.slot_mappings", int(slots.max()), limit)

    def _check_open(self) -> None:
        if self._closed:
            raise BatchError("runtime", "closed", "cannot be used any more", "make another one")


def _direct_keys(direct: CommonAttentionMetadata) -> int:
    """The keys that a call must bring; 0 where only the device knows."""
    if direct.key_start_loc_cpu is not None:
        return int(direct.key_start_loc_cpu[direct.num_reqs])
    return direct.num_actual_tokens if direct.key_start_loc is None else 0


def longest_sequence(config: BuilderConfig, max_model_len: int | None) -> int:
    """`max_model_len`, or the configuration's.

    Raises:
        BatchError: neither, or more than the configuration's.
    """
    limit = config.max_model_len
    if max_model_len is None:
        if limit is None:
            raise BatchError("max_model_len", None, "is required: config.max_model_len is None too")
        return limit
    if limit is not None and max_model_len > limit:
        raise BatchError("max_model_len", max_model_len, f"must be at most config.max_model_len={limit}")
    return max_model_len


def _device(plan: ModelPlan, device: torch.device | str | None) -> torch.device:
    planned = {"rocm": "cuda"}.get(plan.device.type, plan.device.type)
    where = torch.device(planned if device is None else device)
    if where.type != planned:
        raise LayoutError("device", str(where), f"is not what was planned for: {plan.device}", "plan for it")
    return where
