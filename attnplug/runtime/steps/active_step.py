"""The active step of a runtime: each layer's part of it, and the call of a layer of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheConfig
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.core.precision import without_autocast
from attnplug.runtime.batch.step_batch import Stamp, StepBatch, check_current
from attnplug.runtime.steps.attention_groups import AttentionGroup
from attnplug.runtime.steps.layer_steps import LayerStep, direct_steps, paged_steps
from attnplug.runtime.steps.prefix_sharing import PrefixSharing
from attnplug.runtime.steps.runtime_layer import RuntimeLayer
from attnplug.runtime.steps.step_checks import (
    check_arguments,
    check_batch,
    check_groups,
    check_inputs,
    check_order,
    check_step,
    needed_inputs,
)
from attnplug.runtime.steps.step_values import DeviceComparison, check_pool, check_values

if TYPE_CHECKING:
    from attnplug.runtime.ranks.sharded_layers import ShardedLayers


class ActiveStep(NotCopied):
    """What the layers of attention need between `begin_step` and `end_step` of a runtime.

    Args:
        kv_cache_config: the KV groups of the plan.
        layers: the attention layers, by name.
        groups: those with pages, by builder.
        direct_groups: those that get K and V with the call.
        prefix_sharing: finds the prefixes that requests read together.
        sharded: the layers whose tokens ranks share; None without context parallelism.
        device: of a step's tensors.
        num_speculative_tokens: of draft steps.
        debug: whether values are checked.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        layers: Mapping[str, RuntimeLayer],
        groups: Sequence[AttentionGroup],
        direct_groups: Sequence[AttentionGroup],
        prefix_sharing: PrefixSharing,
        sharded: ShardedLayers | None,
        device: torch.device,
        num_speculative_tokens: int,
        *,
        debug: bool,
    ) -> None:
        self._config, self._device, self._debug = kv_cache_config, device, debug
        self._groups, self._direct_groups, self._sharing = groups, direct_groups, prefix_sharing
        self._sharded = sharded
        self._has = sharded is not None, bool(direct_groups), num_speculative_tokens
        specs = {name: layer.spec for name, layer in layers.items()}
        self.needed_inputs = needed_inputs({n: spec for n, spec in specs.items() if not spec.direct_kv})
        """The optional inputs that layers with pages need, and the first layer that needs each."""
        self._needed_direct = needed_inputs({n: spec for n, spec in specs.items() if spec.direct_kv})
        self.layers: dict[str, LayerStep] = {}
        """Each layer's part; empty if no step is active."""
        self._given: tuple[CommonAttentionMetadata | None, CommonAttentionMetadata | None] = (None, None)
        self._stamps: tuple[Stamp, ...] = ()
        self._comparison = DeviceComparison()

    def begin(
        self,
        batch: StepBatch | None,
        direct: CommonAttentionMetadata | None,
        metadata: Mapping[str, AttentionMetadata] | None,
        draft_index: int | None,
    ) -> None:
        """Build the metadata of a step for all layers of attention.

        Raises:
            BatchError: as of `AttentionRuntime.begin_step`.
        """
        check_arguments(batch, direct, metadata, draft_index, *self._has, self._device)
        layers: dict[str, LayerStep] = {}
        if batch is not None:
            check_current("batch", batch.stamps)
            check_groups(batch, self._config)
            is_as_made = batch.is_as_made
            if not is_as_made:
                check_batch(batch)
                self._comparison.begin("batch.common", batch.common)
            if self._device.type == "cpu" or self._debug:
                # On a GPU the host would wait for the tables, so only debug mode checks them.
                check_pool(batch, self._config, not is_as_made, self._debug)
            check_order(batch, self._groups)
            check_inputs("batch.common", batch.common, self.needed_inputs)
            if self._sharded is not None and metadata is None:
                batch = self._sharded.with_parts(batch)
            given = self._config, metadata, draft_index, self._sharing
            layers |= paged_steps(self._groups, batch, *given)
            if self._sharded is not None:
                self._sharded.begin(batch, draft_index)
        if direct is not None:
            check_step("direct", direct)
            self._comparison.begin("direct", direct)
            check_inputs("direct", direct, self._needed_direct)
            layers |= direct_steps(self._direct_groups, direct, draft_index)
        self._given = None if batch is None else batch.common, direct
        self._stamps = () if batch is None else batch.stamps
        # Set last: if a builder raises, or an interrupt does, no step is active.
        self.layers = layers

    def end(self) -> None:
        """End the step."""
        self.layers, self._given, self._stamps = {}, (None, None), ()
        if self._sharded is not None:
            self._sharded.end()

    def check_device_values(self) -> None:
        """BatchError if the device found a difference between the host's and its own copy of an earlier step."""
        # A GPU's answer comes after the step that asked for it.
        self._comparison.check()

    def check_current(self) -> None:
        """BatchError if the batch was built anew since the step began."""
        check_current("batch", self._stamps)

    def forward(
        self,
        layer: RuntimeLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor | None,
        output_lse: torch.Tensor | None,
        scales: Mapping[str, torch.Tensor | None],
    ) -> torch.Tensor:
        """Write the layer's new K and V and attend; the arguments are those of `AttentionRuntime.forward`.

        Args:
            layer: that is called.
            query: `[T, H, D]`.
            key: `[T, Hkv, D]`, or None.
            value: `[T, Hkv, Dv]`, or None.
            output: `[T, H, Dv]` to write to, or None.
            output_lse: float32 `[T, H]` to write to, or None.
            scales: `output_scale` and `output_block_scale`; None for an output that is not quantised.

        Raises:
            BatchError, BackendFaultError: as of `AttentionRuntime.forward`.
        """
        step = self.layers.get(layer.name)
        if step is None:
            argument = "direct=..." if layer.spec.direct_kv else "a batch"
            raise BatchError(
                "layer_name", layer.name, "has no step", f"call begin_step with {argument} first"
            )
        self.check_current()
        self._comparison.check()
        metadata, tokens, keys, shared = step
        # It reads shapes and dtypes only, so the host never waits, and it runs outside of debug mode too.
        sharded = self._sharded if self._sharded and layer.name in self._sharded.names else None
        given: dict[str, Any] = {name: scale for name, scale in scales.items() if scale is not None}
        if given:
            read = {"query": query, "key": key, "value": value, "output_lse": output_lse}
            if metadata is None and shared is not None:
                shared.refuse_scales(layer.name, given)
            elif sharded is not None:
                sharded.refuse_scales(layer.name, given)
            else:
                scale, block_scale = scales.values()
                layer.check_quantised(output, scale, block_scale, tokens, **read)
        layer.check_call(query, key, value, None if given else output, output_lse, tokens, keys)
        if output is None:
            output = layer.new_output(query)
        # Outputs that are quantised are not merged, so their layers run plainly.
        shared = None if given else shared
        # A layer of fast prefill has no rows in a step that wants no logits.
        if metadata is None and shared is None:
            return output
        if self._debug:
            # A search for NaN waits for the device.
            layer.refuse_nan(tokens, keys, query=query, key=key, value=value)
            common = self._given[layer.spec.direct_kv]
            if common is not None:
                check_values(common, layer.spec)
            layer.poison(output, output_lse, tokens)
        found = output
        with without_autocast(self._device):
            if shared is not None:
                shared.forward(layer, query, key, value, output, output_lse)
            elif sharded is not None and metadata is not None:
                sharded.forward(layer, query, key, value, metadata, output, output_lse)
            else:
                call = layer, query, key, value, layer.kv_cache, metadata, output
                found = layer.impl.forward(*call, output_lse=output_lse, **given)
        if self._debug:
            layer.check_result(found, output, output_lse, tokens)
        return output
