"""Runs a plan: caches, impls, builders, and each layer's forward."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BackendFaultError, BatchError, LayoutError
from attnplug.core.impl import AttentionImpl, LayerTensors
from attnplug.core.kv_cache_spec import KVCacheGroupSpec, kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.runtime.allocation import init_kv_cache
from attnplug.runtime.attention_groups import AttentionGroup, build_attn_metadata, init_attn_backend
from attnplug.runtime.block_pool import BlockPool
from attnplug.runtime.model_plan import ModelPlan
from attnplug.runtime.step_batch import StepBatch, StepBatchBuilder

__all__ = ["AttentionRuntime", "RuntimeLayer"]

_DEBUG = "ATTNPLUG_DEBUG"


class RuntimeLayer:
    """One layer as its impl sees it: the AttentionLayer protocol, with its cache."""

    def __init__(self, impl: AttentionImpl[Any], tensors: LayerTensors, device: torch.device) -> None:
        self.impl = impl
        self.kv_cache: torch.Tensor | None = None
        self._q_scale_float = self._prob_scale_float = 1.0
        self._k_scale_float, self._v_scale_float = float(tensors.k_scale), float(tensors.v_scale)
        self._q_scale = self._prob_scale = torch.ones((), device=device)
        self._k_scale = torch.tensor(self._k_scale_float, device=device)
        self._v_scale = torch.tensor(self._v_scale_float, device=device)


@dataclasses.dataclass(slots=True)
class _Step:
    """The step that was begun: each layer's metadata, and how many tokens it has."""

    metadata: dict[str, AttentionMetadata]
    tokens: dict[str, int]


class AttentionRuntime:
    """The attention of a whole model over paged KV caches.

    `begin_step(batch)` once per step, then `forward(layer, q, k, v)` for each layer. A forward that raised
    can be repeated: it writes the same pages again. Use it as a context manager, or `close()` it.

    Args:
        plan: made by `attnplug.plan` with `num_blocks` or `memory`.
        layer_tensors: sinks, slopes and scales of the layers that have any.
        config: what builders are told of the engine; its layers are filled in.
        device: where tensors live, as torch names it; by default the plan's type.
        debug: poison outputs and check what each backend leaves; default is ATTNPLUG_DEBUG=1.

    Raises:
        LayoutError: a plan without a number of blocks, tensors for a layer that is none.
        SpecError: a tensor missing, not asked for, or of another shape; it names the layer.
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
        tensors = dict(layer_tensors or {})
        for name in tensors:
            if name not in plan.decisions:
                raise LayoutError(
                    "layer_tensors", name, f"is none of the plan's {len(plan.decisions)} layers"
                )
        self.plan = plan
        self.device = torch.device(device or {"rocm": "cuda"}.get(plan.device.type, plan.device.type))
        self.debug = os.environ.get(_DEBUG, "") not in ("", "0") if debug is None else debug
        self.kv_cache_config = plan.kv_cache_config
        groups = self.kv_cache_config.kv_cache_groups
        if groups and plan.num_blocks is None:
            raise LayoutError("plan.num_blocks", None, "is required", "plan with num_blocks or memory")
        self.layers = {name: self._layer(name, tensors.get(name, LayerTensors())) for name in plan.decisions}
        settled = dataclasses.replace(config or BuilderConfig(), layers=self.layers)
        paged = {n: d for n, d in plan.decisions.items() if not d.spec.direct_kv}
        self._groups = init_attn_backend(groups, paged, settled, self.device)
        self._direct = self._direct_groups(settled)
        backends = {name: decision.get_backend_cls() for name, decision in paged.items()}
        layouts = {name: str(decision.kv_cache_layout) for name, decision in paged.items()}
        self.kv_caches = init_kv_cache(self.kv_cache_config, plan.specs, backends, self.device, layouts)
        for name, cache in self.kv_caches.items():
            self.layers[name].kv_cache = cache
        self.block_pool = BlockPool(plan.num_blocks or 1)
        self.config = settled
        self._step: _Step | None = None
        self._closed = False

    def step_batch_builder(self, max_model_len: int, max_encoder_len: int = 0) -> StepBatchBuilder:
        """A StepBatchBuilder for this plan's KV groups and this runtime's limits."""
        groups = self.kv_cache_config.kv_cache_groups
        cross = [i for i, group in enumerate(groups) if self._is_cross(group)]
        return StepBatchBuilder(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_sizes=[group.kv_cache_spec.block_size for group in groups],
            device=self.device,
            cross_groups=cross,
            max_encoder_len=max_encoder_len,
        )

    def begin_step(
        self, batch: StepBatch | None = None, direct: CommonAttentionMetadata | None = None
    ) -> None:
        """Build the metadata of a step for all layers.

        Args:
            batch: for the layers with pages, from `StepBatchBuilder.step`.
            direct: for the layers whose K and V come with the call, such as an encoder's.

        Raises:
            BatchError: neither, a batch that does not fit the plan, or a closed runtime.
        """
        self._check_open()
        if batch is None and direct is None:
            raise BatchError("batch", None, "is required: give batch, direct, or both")
        metadata: dict[str, AttentionMetadata] = {}
        tokens: dict[str, int] = {}
        if batch is not None:
            metadata = build_attn_metadata(self._groups, batch, self.kv_cache_config)
            tokens = dict.fromkeys(metadata, batch.common.num_actual_tokens)
        if direct is not None:
            for group in self._direct:
                built = group.builder.build(0, direct)
                metadata.update(dict.fromkeys(group.layer_names, built))
                tokens.update(dict.fromkeys(group.layer_names, direct.num_actual_tokens))
        self._step = _Step(metadata, tokens)

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

        Raises:
            BatchError: no step begun for the layer, an unknown layer, too few rows, a closed runtime.
            BackendFaultError: in debug mode, a backend that left another shape or dtype, or NaN.
        """
        self._check_open()
        layer, metadata, tokens = self._at(layer_name, query)
        spec = self.plan.decisions[layer_name].spec
        shape = (query.shape[0], spec.num_heads, spec.head_size_v)
        if output is None:
            output = query.new_empty(shape)
        if self.debug:
            output[:tokens] = torch.nan
        found = layer.impl.forward(
            layer, query, key, value, layer.kv_cache, metadata, output, output_lse=output_lse
        )
        if self.debug:
            self._check_output(layer_name, found, output, shape, tokens)
        return output

    def close(self) -> None:
        """Give up the caches; anything but `close` raises afterwards."""
        self._closed = True
        self._step = None
        self.kv_caches.clear()
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

    def _layer(self, name: str, tensors: LayerTensors) -> RuntimeLayer:
        decision = self.plan.decisions[name]
        impl = (
            decision.get_backend_cls()
            .get_impl_cls()
            .from_spec(
                decision.spec,
                layer_name=name,
                tensors=tensors,
                kv_sharing_target_layer_name=self.plan.kv_sharing.get(name),
                options=decision.get_options(),
            )
        )
        return RuntimeLayer(impl, tensors, self.device)

    def _direct_groups(self, config: BuilderConfig) -> list[AttentionGroup]:
        alike: dict[Any, list[str]] = {}
        for name, decision in self.plan.decisions.items():
            if decision.spec.direct_kv:
                alike.setdefault((decision.get_backend_cls(), decision.spec), []).append(name)
        made = []
        for (backend, spec), names in alike.items():
            # No pages are kept, but a builder is told of the layer's heads in the form of a page.
            cache = kv_cache_spec_for(spec.replace(direct_kv=False), 1)
            if cache is None:
                raise LayoutError("spec", spec, "has no page to describe it by")
            builder = backend.get_builder_cls()(cache, names, config, self.device)
            made.append(AttentionGroup(backend, tuple(names), cache, -1, builder, frozenset({spec})))
        return made

    def _is_cross(self, group: KVCacheGroupSpec) -> bool:
        return "cross" in self.plan.decisions[group.layer_names[0]].spec.kinds

    def _check_open(self) -> None:
        if self._closed:
            raise BatchError("runtime", "closed", "cannot be used any more", "make another one")

    def _at(self, name: str, query: torch.Tensor) -> tuple[RuntimeLayer, AttentionMetadata, int]:
        if name not in self.layers:
            raise BatchError("layer_name", name, f"is none of the plan's {len(self.layers)} layers")
        if self._step is None or name not in self._step.metadata:
            what = "direct=..." if self.plan.decisions[name].spec.direct_kv else "a batch"
            raise BatchError("layer_name", name, "has no step", f"call begin_step with {what} first")
        tokens = self._step.tokens[name]
        if query.shape[0] < tokens:
            limit = f"must have a row for each of the step's {tokens} tokens (layer {name})"
            raise BatchError("query", tuple(query.shape), limit)
        return self.layers[name], self._step.metadata[name], tokens

    def _check_output(
        self, name: str, found: object, output: torch.Tensor, shape: tuple[int, ...], tokens: int
    ) -> None:
        backend = self.plan.decisions[name].backend
        if not isinstance(found, torch.Tensor) or found.shape != shape or found.dtype != output.dtype:
            seen = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            raise BackendFaultError(f"{backend} gave {seen} for layer {name}, not {output.dtype} {shape}")
        rows = output[:tokens].isnan().flatten(1).any(1)
        if rows.any():
            row = int(rows.int().argmax())
            raise BackendFaultError(
                f"{backend} left NaN in {int(rows.sum())} rows of layer {name}, the first {row}"
            )
