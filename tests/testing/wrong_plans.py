"""Builders that plan a step from something else than the step: variants of TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from catching import wrong
from wrong_builders import Altered

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import AttentionCGSupport, CommonAttentionMetadata
from attnplug.core.kv_cache_spec import SlidingWindowSpec

__all__ = ["WRONG_PLANS"]


class Caching(TorchMetadataBuilder):
    """Keeps metadata by a key of the step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: dict[Any, Any] = {}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        at = self.key(common_attn_metadata)
        if at not in self.kept:
            made = super().build(common_prefix_len, common_attn_metadata, fast_build)
            # The step is kept too, so that no other has its address.
            self.kept[at] = made, common_attn_metadata
        return self.kept[at][0]

    def key(self, common: CommonAttentionMetadata) -> Any:
        raise NotImplementedError


class ByTokens(Caching):
    """By the numbers of requests and tokens."""

    def key(self, common: CommonAttentionMetadata) -> Any:
        return common.num_reqs, common.num_actual_tokens


class ByLengths(Caching):
    """By the lengths: other requests may have the same."""

    def key(self, common: CommonAttentionMetadata) -> Any:
        return common.query_start_loc_cpu.numpy().tobytes(), common.seq_lens.numpy().tobytes()


class ByTensors(Caching):
    """By the addresses of the step's tensors, which an engine fills anew for each step."""

    def key(self, common: CommonAttentionMetadata) -> Any:
        tensors = common.seq_lens, common.block_table_tensor, common.slot_mapping, common.query_start_loc
        return tuple((each.data_ptr(), each.shape) for each in tensors)


class ByFirst(Altered):
    """Keeps the start locations of the last step with as many requests and tokens."""

    last: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        last, self.last = self.last, made.query_starts
        same = last is not None and last.size == made.query_starts.size and last[-1] == made.query_starts[-1]
        return dataclasses.replace(made, query_starts=last) if same else made


class ReusesDrafts(TorchMetadataBuilder):
    """Builds the first draft step only, and reuses it for later ones."""

    first: Any = None

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        if draft_index == 0 or self.first is None:
            self.first = super().build_for_drafting(common_attn_metadata, draft_index)
            return self.first
        made = super().build_for_drafting(common_attn_metadata, draft_index)
        return dataclasses.replace(made, block_table=self.first.block_table)


class AddsDrafts(TorchMetadataBuilder):
    """Adds the index of the draft to the lengths, which have it already."""

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        made = super().build_for_drafting(common_attn_metadata, draft_index)
        return dataclasses.replace(made, seq_lens=made.seq_lens + draft_index)


class UpdateKeepsPlans(TorchMetadataBuilder):
    """Gives the plans of the old table to the new metadata."""

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        made = super().update_block_table(metadata, blk_table, slot_mapping)
        return dataclasses.replace(made, plans=metadata.plans)


class UpdateFills(TorchMetadataBuilder):
    """Copies the new table into the old metadata's tensor."""

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        made = super().update_block_table(metadata, blk_table, slot_mapping)
        metadata.block_table.copy_(made.block_table)
        return made


class NoSlots(TorchMetadataBuilder):
    """Gives metadata without slots."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made.slot_mapping = None  # type: ignore[assignment]
        return made


class EightRequests(Altered):
    """Has buffers for eight requests, whatever max_num_seqs says."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        lens = made.seq_lens.copy()
        lens[8:] = made.query_lens[8:]
        return dataclasses.replace(made, seq_lens=lens)


class TextThreshold(TorchMetadataBuilder):
    """Declares a threshold that is no number."""

    reorder_batch_threshold: Any = "1"


class ZeroThreshold(TorchMetadataBuilder):
    """Declares a threshold below any query."""

    reorder_batch_threshold: Any = 0


class MovingThreshold(TorchMetadataBuilder):
    """Raises its threshold after the first build: the engine has read it by then."""

    reorder_batch_threshold: Any = 1

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.reorder_batch_threshold = 8
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class SpeculativeAsPrompt(Altered):
    """Takes the queries of more than one token in a step of equal ones for whole prompts."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        lens = made.query_lens
        if lens.size > 1 and lens[0] > 1 and (lens == lens[0]).all():
            return dataclasses.replace(made, seq_lens=made.query_lens)
        return made


class Captures(TorchMetadataBuilder):
    """Declares graphs, and keeps the lengths of the capture on the host."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class CaptureFills(Captures):
    """Fills the engine's lengths when it builds for a capture."""

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        common_attn_metadata.seq_lens.fill_(7)
        return super().build_for_cudagraph_capture(common_attn_metadata)


class CaptureDrops(Captures):
    """Leaves the block table out of a capture."""

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        made = super().build_for_cudagraph_capture(common_attn_metadata)
        return dataclasses.replace(made, block_table=torch.zeros_like(made.block_table))


class RemembersPrefix(TorchMetadataBuilder):
    """Attends the prefix of an earlier step again."""

    prefix = 0

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        self.prefix = max(self.prefix, common_prefix_len)
        computed = (made.seq_lens - made.query_lens).min(initial=1 << 30)
        kept = self.prefix if self.prefix <= computed else 0
        return dataclasses.replace(made, common_prefix_len=kept)


class ChangesQuestion(TorchMetadataBuilder):
    """Sorts the lengths that it is asked about, in place."""

    def use_cascade_attention(self, *given: Any, **named: Any) -> bool:
        lens = named.get("query_lens", given[1] if len(given) > 1 else None)
        lens[::-1].sort()
        return super().use_cascade_attention(*given, **named)


class OneWindow(TorchImpl):
    """All windowed layers have the window of the first one in the process."""

    windows: ClassVar[list[Any]] = []

    def _bind(self, spec: Any, *given: Any, **named: Any) -> None:
        if spec.is_windowed and spec.causal:
            self.windows.append(spec.window)
            spec = spec.replace(window=self.windows[0])
        super()._bind(spec, *given, **named)


class FirstLayersCap(TorchMetadataBuilder):
    """Plans with the cap of the group's first layer, for all its layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        first = self.config.layers[self.layer_names[0]].impl.spec
        made.plans["cap"] = first.logits_soft_cap
        return made


class CapOfPlan(TorchImpl):
    """Reads the cap from the plan."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        own, plans = self.spec, given[5].plans
        self.spec = self.spec.replace(logits_soft_cap=plans.get("cap", own.logits_soft_cap))
        try:
            return super().attend(*given, **asked)
        finally:
            self.spec = own


class KeepsSteps(Altered):
    """Keeps every step."""

    steps: ClassVar[list[Any]] = []

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        self.steps.append((made, np.zeros(1 << 14)))
        return made


class WindowFromStart(Altered):
    """For windows, counts the lengths in whole pages."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if isinstance(self.kv_cache_spec, SlidingWindowSpec):
            size = self.kv_cache_spec.block_size
            return dataclasses.replace(made, seq_lens=-(-made.seq_lens // size) * size)
        return made


class UpdatesOnce(TorchMetadataBuilder):
    """Swaps the table of a step once; later it gives the first answer again."""

    supports_update_block_table = True

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        if "swapped" in metadata.plans:
            return metadata
        swapped = {"swapped": True}
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, plans=swapped)


WRONG_PLANS = [
    wrong(
        "updates_once",
        "builder/update_block_table-full",
        "after update_block_table twice, back to the first table",
        builder=UpdatesOnce,
    ),
    wrong("by_tokens", "batch/no-state-decode", "in step 3 of one impl and builder", builder=ByTokens),
    wrong(
        "by_lengths", "builder/build-full", "is not the step's own, so new keys go astray", builder=ByLengths
    ),
    wrong("by_tensors", "tensors/refilled-decode", "kept by the addresses of its tensors", builder=ByTensors),
    wrong("by_first", "batch/order-mixed", "with the requests in the order", builder=ByFirst),
    wrong(
        "reuses_drafts",
        "builder/build_for_drafting-full",
        "build_for_drafting with draft_index=1",
        builder=ReusesDrafts,
    ),
    wrong(
        "adds_drafts",
        "builder/build_for_drafting-full",
        "build_for_drafting with draft_index=1",
        builder=AddsDrafts,
    ),
    wrong(
        "update_keeps_plans",
        "builder/update_block_table-full",
        "another step's block table",
        builder=UpdateKeepsPlans,
    ),
    wrong(
        "update_fills", "builder/update_block_table-full", "another step's block table", builder=UpdateFills
    ),
    wrong(
        "no_slots",
        "refused/never-after-acceptance",
        "without slot_mapping; copy it from common_attn_metadata",
        builder=NoSlots,
    ),
    wrong(
        "eight_requests",
        "correct/decode-*",
        "the last of the positions that the query can see",
        builder=EightRequests,
    ),
    wrong(
        "text_threshold",
        "builder/order-full",
        "reorder_batch_threshold='1' must be None or an integer",
        builder=TextThreshold,
    ),
    wrong(
        "zero_threshold",
        "builder/order-full",
        "reorder_batch_threshold=0 must be None or an integer",
        builder=ZeroThreshold,
    ),
    wrong(
        "moving_threshold",
        "builder/order-full",
        "a build changed reorder_batch_threshold from 1 to 8",
        builder=MovingThreshold,
    ),
    wrong(
        "speculative_as_prompt",
        "correct/speculative-*",
        "the last of the positions that the query can see",
        builder=SpeculativeAsPrompt,
    ),
    wrong("captures", "builder/captured", "a graph that keeps what was captured", builder=Captures),
    wrong(
        "capture_fills",
        "builder/captured",
        "a graph that keeps what was captured",
        builder=CaptureFills,
    ),
    wrong(
        "capture_drops",
        "builder/captured",
        "a graph that keeps what was captured",
        builder=CaptureDrops,
    ),
    wrong(
        "remembers_prefix",
        "builder/common-prefix-full",
        "build(common_prefix_len=0) after a step with a shared prefix",
        builder=RemembersPrefix,
    ),
    wrong(
        "changes_question",
        "builder/common-prefix-full",
        "use_cascade_attention modified query_lens",
        builder=ChangesQuestion,
    ),
    wrong("one_window", "layers/own-window", "the layer with window=(15, 0)", impl=OneWindow),
    wrong(
        "first_layers_cap",
        "builder/several-layers-full",
        "the layer with a soft cap",
        builder=FirstLayersCap,
        impl=CapOfPlan,
    ),
    wrong("keeps_steps", "*", "", builder=KeepsSteps),
    wrong(
        "window_from_start", "batch/pieces-window", "prefilling 53 tokens in pieces", builder=WindowFromStart
    ),
]
