"""Backends that go wrong after something unusual: a refusal, a draft step, a flag that changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import CommonAttentionMetadata
from attnplug.errors import BatchError
from mutants.parts import Altered, Around, Call, Respecified
from mutants.table import Table

table = Table("edges")
impl = table.on(TorchImpl)
call = table.on(Around)
step = table.on(Altered)


@impl.attend(
    "batch/after-refusal",
    "after one with causal=False was refused: raised RuntimeError",
    state={"busy": False},
)
def broken_by_refusal(right, self, *given, **asked):
    """Its guard against a second call at once stays locked after a refusal."""
    if self.busy:
        raise RuntimeError("called at once by two threads")
    self.busy = True
    found = right(*given, **asked)
    self.busy = False
    return found


@table.part("batch/after-refusal", "after one with causal=False was refused")
class StaleAfterRefusal(Altered):
    """Keeps the lengths of a step that was refused."""

    refused: Any = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        self.refused = None if common_attn_metadata.causal else made.query_lens
        return made

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if self.refused is not None and self.refused.size == made.seq_lens.size:
            return dataclasses.replace(made, seq_lens=self.refused)
        return made


@table.part("builder/after-drafts", "a plain build after draft steps")
class AfterDrafts(TorchMetadataBuilder):
    """Takes a plain step after a draft for one more draft."""

    drafted: Any = None

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        self.drafted = super().build(0, common_attn_metadata, True)
        return self.drafted

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.drafted is not None and self.drafted.seq_lens.size == made.seq_lens.size:
            made = dataclasses.replace(made, block_table=self.drafted.block_table)
        return made


class FirstOfModel(TorchMetadataBuilder):
    """Plans with the scale of the model's first layer, which may be of another group."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        first = next(iter(self.config.layers.values())).impl.spec
        made.plans["window"] = first.window
        return made


class WindowOfPlan(Respecified):
    """Reads the window from the plan."""

    def fields(self, *given: Any) -> dict[str, Any]:
        return {"window": given[5].plans.get("window", self.spec.window)} if self.spec.causal else {}


# fmt: off
# Inverts the scale of the output in place.
call.after("tensors/output-scale-kept", "forward modified output_scale",
    eats_scale=lambda self, call: call.more.get("output_scale") is None or call.more["output_scale"].reciprocal_())
# Clears the LSE of padding rows.
call.after("tensors/lse-padding", "rows of output_lse past num_actual_tokens",
    lse_padding=lambda self, call: call.lse[call.metadata.num_actual_tokens :].zero_())
# fmt: on


@call.before("merge/2-parts", "use_sinks=False is for layers with sinks")
def flag_without_sinks(self, call):
    """Refuses use_sinks=False for a layer that has none, as a merge of partial results may give."""
    if not call.more.get("use_sinks", True) and not self.spec.has_sinks:
        raise BatchError("use_sinks", False, "is for layers with sinks")


@impl.attend("cache/cross-later-steps", "a later step of a cross layer without keys", state={"kept": None})
def first_encoder(right, self, layer, query, key, value, cache, metadata, *given, **asked):
    """Keeps the pages of an encoder from its first step, for steps that write none."""
    if self.spec.attn_type == "encoder_decoder":
        if key is not None or self.kept is None:
            self.kept = metadata.block_table, metadata.seq_lens
        elif self.kept[1].size == metadata.seq_lens.size:
            metadata = dataclasses.replace(metadata, block_table=self.kept[0], seq_lens=self.kept[1])
    return right(layer, query, key, value, cache, metadata, *given, **asked)


@table.part("builder/common-prefix-full", "build(common_prefix_len=0)")
class OwnerOfBlock(Altered):
    """Knows one request for each block, though requests may share blocks."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        table = made.block_table.clone()
        if not len(table):
            return made
        first = table[:, :1]
        shared = (first == first[0]) & (torch.arange(len(table))[:, None] > 0)
        lens = np.where(
            shared[:, 0].numpy() & (made.seq_lens > made.query_lens), made.query_lens, made.seq_lens
        )
        return dataclasses.replace(made, seq_lens=lens) if len(table) > 1 else made


@step.altered("batch/idle-decode", "with requests of [0, 1, 0, 1, 1] new tokens")
def forgets_slots_of_idle(self, made, common):
    """Drops the slots of a step whose first request is idle."""
    if made.query_lens.size and made.query_lens[0] == 0:
        return dataclasses.replace(made, slot_mapping=torch.full_like(made.slot_mapping, -1))
    return made


@step.altered("merge/2-parts", "part 1 alone")
def longest_only(self, made, common):
    """Reads the table of the longest request for requests of its length."""
    if made.seq_lens.size < 2:
        return made
    longest = int(made.seq_lens.argmax())
    same = torch.from_numpy(made.seq_lens == made.seq_lens[longest])
    table = torch.where(same[:, None], made.block_table[longest], made.block_table)
    return dataclasses.replace(made, block_table=table)


# fmt: off
# Has room for 64 rows; others see the last of them.
call.after("cache/block-size-64", "with pages of 64 tokens", biggest=lambda self, call: call.rows[64:].copy_(call.rows[63:64]))
# fmt: on


@call.after("*", "", state={"kept": {}})
def hashed_names(self, call):
    """Layers whose names have equal hashes share their sinks."""
    if self.kept.setdefault(sum(map(ord, self.layer_name)) % 7, self.spec) != self.spec:
        call.rows.mul_(1.02)


@impl.update_kv_cache(
    "tensors/misfits-written",
    "update_kv_cache with one row of keys and values was accepted; it must raise a BatchError",
)
def broadcasts_keys(right, self, layer, key, value, kv_cache, slot_mapping):
    """Writes keys and values of one head or one row to all heads and slots."""
    rows, spec = max(len(key), len(slot_mapping)), self.spec
    key = key.expand(rows, spec.num_kv_heads, spec.head_size)
    value = value.expand(rows, spec.num_kv_heads, spec.head_size_v)
    right(layer, key, value, kv_cache, slot_mapping)


@table.part(
    "tensors/misfits-attended",
    "attend with an output of half the size was accepted; it must raise a BatchError",
)
class CutsOutputs(Around):
    """Writes as much of the result as the output has room for."""

    def before(self, call: Call) -> None:
        self.given = call.output
        spec = self.spec
        call.output = call.output.new_empty(call.output.shape[0], spec.num_heads, spec.head_size_v)

    def after(self, call: Call) -> None:
        rows = call.metadata.num_actual_tokens
        _, heads, size = self.given.shape
        self.given[:rows] = call.output[:rows, :heads, :size]
        call.output = self.given


table.add("first_of_model | runtime/steps | window (19, 0)) of KV group", builder=FirstOfModel, impl=WindowOfPlan)  # fmt: skip
