"""Runs the layers whose tokens the ranks share: partial results on this rank, their exchange, and the new tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError, LayoutError, RankFailureError
from attnplug.core.impl import LayerTensors
from attnplug.core.metadata import AttentionMetadata
from attnplug.ops.combining import ExchangeBuffers, combine_partials
from attnplug.ops.merging import merge_attn_states
from attnplug.registry.decision import Decision
from attnplug.runtime.attention_groups import AttentionGroup, build_step
from attnplug.runtime.model_plan import ModelPlan
from attnplug.runtime.rank_groups import ContextParallelGroup, check_same_plan
from attnplug.runtime.runtime_layer import RuntimeLayer
from attnplug.runtime.step_batch import StepBatch

_Keys = tuple[torch.Tensor, torch.Tensor]


class ShardedLayers:
    """The sharded layers of a plan on one rank.

    Args:
        plan: with `context_parallel`.
        tensors: of all layers.
        device: of the layers.
        max_tokens: most tokens in a step; the exchange never needs more memory than for these.
        place: the rank with its process group, if the plan's own has none, such as one from JSON.
        make_groups: builders for layers with direct K and V, by decision.

    Raises:
        LayoutError: no process group, or a place that is not the plan's.
        RankFailureError: another rank planned otherwise.
    """

    def __init__(
        self,
        plan: ModelPlan,
        tensors: Mapping[str, LayerTensors],
        device: torch.device,
        max_tokens: int,
        place: ContextParallel | None,
        make_groups: Callable[[Mapping[str, Decision]], list[AttentionGroup]],
    ) -> None:
        self.place, self.group = _group(plan, place)
        check_same_plan(plan, self.group)
        self.names = frozenset(plan.sharded_layers)
        self._new = {
            # K and V of the call are as computed: the scales are those of stored ones.
            name: RuntimeLayer(
                name, decision, dataclasses.replace(tensors[name], k_scale=1.0, v_scale=1.0), device
            )
            for name, decision in plan.new_tokens.items()
        }
        self.groups = make_groups(plan.new_tokens)
        """The builders for the new tokens of a step."""
        self._readers = set(plan.kv_sharing.values())
        self._metadata: dict[str, AttentionMetadata] = {}
        self._keys: dict[str, _Keys] = {}
        self._step: StepBatch | None = None
        self._buffers = ExchangeBuffers(device)
        for spec in {plan.specs[name] for name in self.names}:
            dtype: torch.dtype = getattr(torch, spec.dtype)
            self._buffers.reserve(max_tokens, spec.num_heads, spec.output_size, dtype, self.group)
        self._buffers.freeze()

    def begin(self, batch: StepBatch, draft_index: int | None) -> None:
        """Build the metadata of the new tokens of a step; BatchError for a batch of another place."""
        self.end()
        step = batch.sharded
        if step is None or step.place != self.place:
            found = None if step is None else step.place
            remedy = "make batches with the runtime's step_batch_builder()"
            raise BatchError("batch.sharded", found, f"must be the step of {self.place}", remedy)
        if not step.is_decode:
            common = step.new_tokens(batch.common)
            for group in self.groups:
                causal = next(iter(group.specs)).causal
                made = build_step(group.builder, dataclasses.replace(common, causal=causal), draft_index)
                self._metadata.update(dict.fromkeys(group.layer_names, made))
        self._step = batch

    def end(self) -> None:
        """Forget the step."""
        self._step = None
        self._metadata.clear()
        self._keys.clear()

    def refuse_scales(self, layer_name: str, scales: Mapping[str, object]) -> None:
        """BatchError for the quantisation of an output, which no merge of partial results does."""
        limit = f"of layer {layer_name} must be None: ranks merge outputs that are not quantised"
        raise BatchError(next(iter(scales)), "given", limit, "quantise the output after attention")

    def forward(
        self,
        layer: RuntimeLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: AttentionMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Write the new K and V of this rank, attend, and merge over the ranks into `output`."""
        step = None if self._step is None else self._step.sharded
        if self._step is None or step is None:
            raise BatchError("layer_name", layer.name, "has no step", "call begin_step with a batch first")
        tokens = self._step.common.num_actual_tokens
        output = output[:tokens]
        output_lse = None if output_lse is None else output_lse[:tokens]
        call = layer, query, key, value, metadata
        if step.is_decode or layer.spec.mla is not None:
            # The sinks count on exactly one rank.
            self._attend_and_combine(*call, self.place.rank == 0, output, output_lse)
            return
        new_keys = self._new_keys(layer, key, value)
        new, made = self._new[layer.name], self._metadata[layer.name]
        if not step.has_context:
            self._write(layer, key, value, metadata)
            new.impl.attend(new, query, *new_keys, None, made, output, output_lse=output_lse, use_sinks=True)
            return
        context, context_lse = torch.empty_like(output), self._new_lse(output)
        self._attend_and_combine(*call, False, context, context_lse)
        fresh, fresh_lse = torch.empty_like(output), self._new_lse(output)
        new.impl.attend(new, query, *new_keys, None, made, fresh, output_lse=fresh_lse, use_sinks=True)
        merge_attn_states((context, fresh), (context_lse, fresh_lse), output, output_lse)

    def _attend_and_combine(
        self,
        layer: RuntimeLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: AttentionMetadata,
        use_sinks: bool,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend the keys of this rank, and merge the partial results of all ranks into `output`."""
        part, lse = self._buffers.partial_or_new(output, self.group)
        layer.impl.forward(
            layer, query, key, value, layer.kv_cache, metadata, part, output_lse=lse, use_sinks=use_sinks
        )
        try:
            combine_partials(
                part, lse, self.group, buffers=self._buffers, output=output, output_lse=output_lse
            )
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise RankFailureError(
                f"rank {self.place.rank} of {self.place.size} could not exchange the partial results of layer "
                f"{layer.name}: {first}"
            ) from error

    def _new_keys(self, layer: RuntimeLayer, key: torch.Tensor | None, value: torch.Tensor | None) -> _Keys:
        """K and V of the new tokens: of the call, or of the layer whose pages this one reads."""
        if key is not None and value is not None:
            if layer.name in self._readers:
                self._keys[layer.name] = key, value
            return key, value
        found = self._keys.get(layer.target or "")
        if found is None:
            limit = f"reads the pages of {layer.target}, whose new keys are not known in this step"
            raise BatchError("layer_name", layer.name, limit, f"call forward of {layer.target} first")
        return found

    def _write(
        self,
        layer: RuntimeLayer,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> None:
        if layer.target is None and key is not None and value is not None and layer.kv_cache is not None:
            layer.impl.update_kv_cache(layer, key, value, layer.kv_cache, metadata.slot_mapping)

    def _new_lse(self, output: torch.Tensor) -> torch.Tensor:
        return torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)


def _group(plan: ModelPlan, place: ContextParallel | None) -> tuple[ContextParallel, Any]:
    """The place of the plan, and its process group."""
    planned = plan.context_parallel
    given = planned if place is None else place
    if planned is None or given is None or given != planned:
        limit = f"must be the place of the plan, {planned}"
        raise LayoutError("context_parallel", given, limit, "plan with this context_parallel")
    group = given.group if isinstance(given, ContextParallelGroup) else None
    if not isinstance(group, dist.ProcessGroup):
        limit = "has no process group, and ranks exchange their partial results over one"
        remedy = "give context_parallel=attnplug.runtime.context_parallel(group, interleave)"
        raise LayoutError("context_parallel", given, limit, remedy)
    return given, group
