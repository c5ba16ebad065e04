"""Runs the layers whose tokens the ranks share: partial results on this rank, their exchange, and the new tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from attnplug._system.one_commit import NotCopied
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError, LayoutError, RankFailureError
from attnplug.core.impl import LayerTensors
from attnplug.core.metadata import AttentionMetadata
from attnplug.ops.combining import ExchangeBuffers, combine_partials, gather_rows, without_nan
from attnplug.ops.merging import merge_into
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.batch.sharded_step import SplitQueries, most_rows
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.plan.model_plan import ModelPlan
from attnplug.runtime.ranks.new_tokens import LEAST_QUERIES, NewLatents, NewTokens
from attnplug.runtime.ranks.rank_groups import ContextParallelGroup, check_same_plan
from attnplug.runtime.steps.attention_groups import AttentionGroup
from attnplug.runtime.steps.runtime_layer import RuntimeLayer
from attnplug.runtime.steps.step_checks import refuse_output_scales

# The memory of weighted sums, which such a step does not need.
_OUTPUTS, _LSES = "weighted", "lses"


class ShardedLayers(NotCopied):
    """The sharded layers of a plan on one rank.

    Args:
        plan: with `context_parallel`.
        tensors: of all layers.
        device: of the layers.
        max_tokens: most tokens in a step; the exchange never needs more memory than for these.
        max_requests: most requests in a step.
        place: the rank with its process group, if the plan's own has none, such as one from JSON.
        make_groups: builders for layers with direct K and V, by decision.
        groups: the builders of the layers with pages.
        layers: all layers by name.

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
        max_requests: int,
        place: ContextParallel | None,
        make_groups: Callable[[Mapping[str, Decision]], list[AttentionGroup]],
        groups: Sequence[AttentionGroup],
        layers: Mapping[str, RuntimeLayer],
    ) -> None:
        self.place, self.group = _group(plan, place)
        # Ranks with other decisions would wait for each other in an exchange, or merge results of other layers.
        check_same_plan(plan, self.group)
        self.names = frozenset(plan.sharded_layers)
        self._latents = NewLatents(groups, layers, {name: plan.specs[name] for name in self.names})
        readers = set(plan.kv_sharing.values())
        self._new = NewTokens(plan.new_tokens, tensors, readers, device, make_groups, self._latents)
        self._step: StepBatch | None = None
        self._buffers = ExchangeBuffers(device)
        size, most = self.group.size(), most_rows(max_tokens, max_requests, self.group.size())
        for spec in {plan.specs[name] for name in self.names}:
            dtype: torch.dtype = getattr(torch, spec.dtype)
            self._buffers.reserve(max_tokens, spec.num_heads, spec.output_size, dtype, self.group)
            if self._new.groups or self._latents.names:
                self._buffers.take(_OUTPUTS, (size, most, spec.num_heads, spec.output_size), dtype)
                self._buffers.take(_LSES, (size, most, spec.num_heads), torch.float32)
        # CUDA graphs keep addresses, so memory that grows after a capture would be lost to them.
        self._buffers.freeze()

    @property
    def groups(self) -> list[AttentionGroup]:
        """The builders for the new tokens of a step."""
        return self._new.groups

    def with_parts(self, batch: StepBatch) -> StepBatch:
        """The batch of a step for which no metadata is built yet; in a long one, latents attend new tokens apart."""
        step = batch.sharded
        if not self._latents.names or step is None or step.is_decode or step.in_graph:
            return batch
        if batch.common.max_query_len < LEAST_QUERIES:
            return batch
        return dataclasses.replace(batch, sharded=dataclasses.replace(step, apart=True))

    def begin(self, batch: StepBatch, draft_index: int | None) -> None:
        """Build the metadata of the new tokens of a step; BatchError for a batch of another place."""
        self.end()
        if not self.names:
            # All layers are whole on each rank, so a step has no part for this one.
            return
        step = batch.sharded
        if step is None or step.place != self.place:
            found = None if step is None else step.place
            remedy = "make batches with the runtime's step_batch_builder()"
            raise BatchError("batch.sharded", found, f"must be the step of {self.place}", remedy)
        if not step.is_decode:
            self._new.begin(step, batch.common, draft_index)
        self._step = batch

    def end(self) -> None:
        """Forget the step."""
        self._step = None
        self._new.end()

    def refuse_scales(self, layer_name: str, scales: Mapping[str, object]) -> None:
        """BatchError for the quantisation of an output, which no merge of partial results does."""
        refuse_output_scales(layer_name, scales, "ranks merge")

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
        if step.is_decode or (layer.spec.mla is not None and not step.apart):
            # The sinks count on exactly one rank.
            self._attend_and_combine(*call, self.place.rank == 0, output, output_lse)
            return
        keys = self._new.keys_of(layer, key, value)
        split = self._new.split
        if not step.has_context:
            self._write(layer, key, value, metadata)
            if split is None:
                self._new.attend(layer.name, query, keys, output, output_lse)
            else:
                self._attend_and_gather(layer.name, query, keys, split, output, output_lse)
            return
        if split is not None:
            part, lse = self._attend_pages(*call, False, output)
            mine = part.new_empty(split.rows.shape[0], *part.shape[1:])
            rows = mine, _new_lse(mine)
            self._new.attend(layer.name, query, keys, *rows)
            # Each row is on one rank, so all its new keys and its sinks count once.
            own = part.index_select(0, split.rows), without_nan(lse.index_select(0, split.rows))
            merge_into((own[0], rows[0]), (own[1], rows[1]), *rows)
            part.index_copy_(0, split.rows, rows[0])
            lse.index_copy_(0, split.rows, rows[1])
            self._combine(layer.name, part, lse, output, output_lse)
            return
        context, context_lse = torch.empty_like(output), _new_lse(output)
        self._attend_and_combine(*call, False, context, context_lse)
        fresh, fresh_lse = torch.empty_like(output), _new_lse(output)
        self._new.attend(layer.name, query, keys, fresh, fresh_lse)
        merge_into((context, fresh), (context_lse, fresh_lse), output, output_lse)

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
        part, lse = self._attend_pages(layer, query, key, value, metadata, use_sinks, output)
        self._combine(layer.name, part, lse, output, output_lse)

    def _attend_pages(
        self,
        layer: RuntimeLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: AttentionMetadata,
        use_sinks: bool,
        like: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new K and V of this rank, and attend its keys: an output shaped as `like`, and its LSE."""
        part, lse = self._buffers.partial_or_new(like, self.group)
        # Given keys, an impl takes as many of them as a request has for its whole sequence; these are of other tokens.
        self._write(layer, key, value, metadata)
        call = layer, query, None, None, layer.kv_cache, metadata, part
        layer.impl.attend(*call, output_lse=lse, use_sinks=use_sinks)
        return part, lse

    def _combine(
        self,
        name: str,
        part: torch.Tensor,
        lse: torch.Tensor,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        given: dict[str, Any] = {"buffers": self._buffers, "output": output, "output_lse": output_lse}
        with self._exchange_of(name):
            combine_partials(part, lse, self.group, **given)

    def _attend_and_gather(
        self,
        name: str,
        query: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        split: SplitQueries,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend the rows of this rank, and take those of the others from them."""
        shape = self.group.size(), split.most_rows, *output.shape[1:]
        own = self._buffers.take(_OUTPUTS, shape, output.dtype)[self.place.rank, : split.rows.shape[0]]
        lse = None if output_lse is None else _new_lse(own)
        self._new.attend(name, query, keys, own, lse)
        for rows, buffer, into in ((own, _OUTPUTS, output), (lse, _LSES, output_lse)):
            if rows is None or into is None:
                continue
            with self._exchange_of(name):
                every = gather_rows(rows, split.most_rows, self.group, self._buffers, buffer)
            into.copy_(every.index_select(0, split.gathered))

    @contextlib.contextmanager
    def _exchange_of(self, name: str) -> Iterator[None]:
        """Name the layer in errors of torch.distributed."""
        try:
            yield
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise RankFailureError(
                f"rank {self.place.rank} of {self.place.size} could not exchange the partial results of layer "
                f"{name}: {first}"
            ) from error

    def _write(
        self,
        layer: RuntimeLayer,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> None:
        # The value of a latent is a part of it.
        value = key if layer.spec.mla is not None else value
        if layer.target is None and key is not None and value is not None and layer.kv_cache is not None:
            layer.impl.update_kv_cache(layer, key, value, layer.kv_cache, metadata.slot_mapping)


def _new_lse(output: torch.Tensor) -> torch.Tensor:
    return torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)


def _group(plan: ModelPlan, place: ContextParallel | None) -> tuple[ContextParallel, Any]:
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
