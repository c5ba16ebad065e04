"""Builders that plan a step from something else than the step: variants of TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionCGSupport, CommonAttentionMetadata
from attnplug.core.kv_cache_spec import SlidingWindowSpec
from mutants.parts import Altered, Respecified
from mutants.table import Table

table = Table("plans")
step = table.on(Altered)
builder = table.on(TorchMetadataBuilder)
impl = table.on(TorchImpl)


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


caching = table.on(Caching)

# fmt: off
# By the numbers of requests and tokens.
caching.key("batch/no-state-decode", "in step 3 of one impl and builder", by_tokens=lambda self, common: (common.num_reqs, common.num_actual_tokens))
# By the lengths: other requests may have the same.
caching.key("builder/build-full", "is not the step's own, so new keys go astray",
    by_lengths=lambda self, common: (common.query_start_loc_cpu.numpy().tobytes(), common.seq_lens.numpy().tobytes()))
# fmt: on


@caching.key("tensors/refilled-decode", "kept by the addresses of its tensors")
def by_tensors(self, common):
    """By the addresses of the step's tensors, which an engine fills anew for each step."""
    tensors = common.seq_lens, common.block_table_tensor, common.slot_mapping, common.query_start_loc
    return tuple((each.data_ptr(), each.shape) for each in tensors)


@step.altered("batch/order-mixed", "with the requests in the order", state={"last": None})
def by_first(self, made, common):
    """Keeps the start locations of the last step with as many requests and tokens."""
    last, self.last = self.last, made.query_starts
    same = last is not None and last.size == made.query_starts.size and last[-1] == made.query_starts[-1]
    return dataclasses.replace(made, query_starts=last) if same else made


@builder.build_for_drafting(
    "builder/build_for_drafting-full", "build_for_drafting with draft_index=1", state={"first": None}
)
def reuses_drafts(right, self, common_attn_metadata, draft_index):
    """Builds the first draft step only, and reuses it for later ones."""
    if draft_index == 0 or self.first is None:
        self.first = right(common_attn_metadata, draft_index)
        return self.first
    made = right(common_attn_metadata, draft_index)
    return dataclasses.replace(made, block_table=self.first.block_table)


@builder.build_for_drafting("builder/build_for_drafting-full", "build_for_drafting with draft_index=1")
def adds_drafts(right, self, common_attn_metadata, draft_index):
    """Adds the index of the draft to the lengths, which have it already."""
    made = right(common_attn_metadata, draft_index)
    return dataclasses.replace(made, seq_lens=made.seq_lens + draft_index)


@builder.update_block_table("builder/update_block_table-full", "another step's block table")
def update_keeps_plans(right, self, metadata, blk_table, slot_mapping):
    """Gives the plans of the old table to the new metadata."""
    made = right(metadata, blk_table, slot_mapping)
    return dataclasses.replace(made, plans=metadata.plans)


@builder.update_block_table("builder/update_block_table-full", "another step's block table")
def update_fills(right, self, metadata, blk_table, slot_mapping):
    """Copies the new table into the old metadata's tensor."""
    made = right(metadata, blk_table, slot_mapping)
    metadata.block_table.copy_(made.block_table)
    return made


@step.altered("refused/never-after-acceptance", "without slot_mapping; copy it from common_attn_metadata")
def no_slots(self, made, common):
    """Gives metadata without slots."""
    made.slot_mapping = None  # type: ignore[assignment]
    return made


@step.altered("correct/decode-*", "request 8 (decode, 1 new of 40 tokens)")
def eight_requests(self, made, common):
    """Has buffers for eight requests, whatever max_num_seqs says."""
    lens = made.seq_lens.copy()
    lens[8:] = made.query_lens[8:]
    return dataclasses.replace(made, seq_lens=lens)


@table.part("builder/order-full", "reorder_batch_threshold='1' must be None or an integer")
class TextThreshold(TorchMetadataBuilder):
    """Declares a threshold that is no number."""

    reorder_batch_threshold: Any = "1"


@table.part("builder/order-full", "reorder_batch_threshold=0 must be None or an integer")
class ZeroThreshold(TorchMetadataBuilder):
    """Declares a threshold below any query."""

    reorder_batch_threshold: Any = 0


@builder.build(
    "builder/order-full",
    "a build changed reorder_batch_threshold from 1 to 8",
    state={"reorder_batch_threshold": 1},
)
def moving_threshold(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Raises its threshold after the first build: the engine has read it by then."""
    self.reorder_batch_threshold = 8
    return right(common_prefix_len, common_attn_metadata, fast_build)


@step.altered("correct/speculative-*", "the last of the positions that the query can see")
def speculative_as_prompt(self, made, common):
    """Takes the queries of more than one token in a step of equal ones for whole prompts."""
    lens = made.query_lens
    if lens.size > 1 and lens[0] > 1 and (lens == lens[0]).all():
        return dataclasses.replace(made, seq_lens=made.query_lens)
    return made


@table.part("builder/captured", "a graph that keeps what was captured")
class Captures(TorchMetadataBuilder):
    """Declares graphs, and keeps the lengths of the capture on the host."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


captures = table.on(Captures)


@captures.build_for_cudagraph_capture("builder/captured", "a graph that keeps what was captured")
def capture_fills(right, self, common_attn_metadata):
    """Fills the engine's lengths when it builds for a capture."""
    common_attn_metadata.seq_lens.fill_(7)
    return right(common_attn_metadata)


@captures.build_for_cudagraph_capture("builder/captured", "a graph that keeps what was captured")
def capture_drops(right, self, common_attn_metadata):
    """Leaves the block table out of a capture."""
    made = right(common_attn_metadata)
    return dataclasses.replace(made, block_table=torch.zeros_like(made.block_table))


@builder.build(
    "builder/common-prefix-full",
    "build(common_prefix_len=0) after a step with a shared prefix",
    state={"prefix": 0},
)
def remembers_prefix(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Attends the prefix of an earlier step again."""
    made = right(common_prefix_len, common_attn_metadata, fast_build)
    self.prefix = max(self.prefix, common_prefix_len)
    computed = (made.seq_lens - made.query_lens).min(initial=1 << 30)
    kept = self.prefix if self.prefix <= computed else 0
    return dataclasses.replace(made, common_prefix_len=kept)


@builder.use_cascade_attention("builder/common-prefix-full", "use_cascade_attention modified query_lens")
def changes_question(right, self, *given, **named):
    """Sorts the lengths that it is asked about, in place."""
    lens = named.get("query_lens", given[1] if len(given) > 1 else None)
    lens[::-1].sort()
    return right(*given, **named)


@impl._bind("layers/own-window", "the layer with window=(15, 0)", state={"windows": []})
def one_window(right, self, spec, *given, **named):
    """All windowed layers have the window of the first one in the process."""
    if spec.is_windowed and spec.causal:
        self.windows.append(spec.window)
        spec = spec.replace(window=self.windows[0])
    right(spec, *given, **named)


class FirstLayersCap(TorchMetadataBuilder):
    """Plans with the cap of the group's first layer, for all its layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        first = self.config.layers[self.layer_names[0]].impl.spec
        made.plans["cap"] = first.logits_soft_cap
        return made


class CapOfPlan(Respecified):
    """Reads the cap from the plan."""

    def fields(self, *given: Any) -> dict[str, Any]:
        return {"logits_soft_cap": given[5].plans.get("cap", self.spec.logits_soft_cap)}


@step.altered("*", "", state={"steps": []})
def keeps_steps(self, made, common):
    """Keeps every step."""
    self.steps.append((made, np.zeros(1 << 14)))
    return made


@step.altered("batch/pieces-window", "prefilling 53 tokens in pieces")
def window_from_start(self, made, common):
    """For windows, counts the lengths in whole pages."""
    if isinstance(self.kv_cache_spec, SlidingWindowSpec):
        size = self.kv_cache_spec.block_size
        return dataclasses.replace(made, seq_lens=-(-made.seq_lens // size) * size)
    return made


@builder.update_block_table(
    "builder/update_block_table-full",
    "after update_block_table twice, back to the first table",
    state={"supports_update_block_table": True},
)
def updates_once(self, metadata, blk_table, slot_mapping):
    """Swaps the table of a step once; later it gives the first answer again."""
    if "swapped" in metadata.plans:
        return metadata
    swapped = {"swapped": True}
    return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, plans=swapped)


# fmt: off
table.add("first_layers_cap | builder/several-layers-full | the layer with a soft cap", builder=FirstLayersCap, impl=CapOfPlan)
# fmt: on
