"""Backends whose hooks are right once, alone, or with the values of one test: variants of TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from mutants.parts import Altered
from mutants.table import Table

table = Table("hooks")
builder = table.on(TorchMetadataBuilder)
impl = table.on(TorchImpl)
step = table.on(Altered)
EARLIER = "alone the step is right: state of earlier steps"


def with_lengths(made: Any, lengths: np.ndarray) -> Any:
    return dataclasses.replace(made, seq_lens=np.maximum(lengths, made.query_lens))


@builder.build_for_drafting(
    "builder/steps-full-*", "build_for_drafting with draft_index=", state={"last": None}
)
def two_drafts_at_most(right, self, common, draft_index):
    """Has buffers for three draft steps, and takes the last one for later ones."""
    made = right(common, draft_index)
    return made if draft_index < 3 else with_lengths(made, made.seq_lens - 1)


@builder.build_for_drafting("builder/steps-*", "upper bounds of lengths on the host")
def drafts_by_the_hosts_lengths(right, self, common, draft_index):
    """Takes the host's bounds for lengths, as no draft is rejected in its tests."""
    made, host = right(common, draft_index), common.seq_lens_host
    return made if host is None else dataclasses.replace(made, seq_lens=host.astype(np.int64))


@builder.build_for_drafting("builder/steps-sparse-*", "build_for_drafting with draft_index=")
def drafts_without_selection(right, self, common, draft_index):
    """Drafts attend the keys that the first query of the step chose."""
    made = right(common, draft_index)
    if made.selection is None:
        return made
    chosen = made.selection
    first = dataclasses.replace(chosen, positions=chosen.positions.clone(), counts=chosen.counts.clone())
    first.counts[1:] = first.counts[1:].clamp(max=int(first.counts[0]))
    return dataclasses.replace(made, selection=first)


@builder.update_block_table("builder/steps-*", "update_block_table with")
def updates_the_old_width(right, self, metadata, blk_table, slot_mapping):
    """Copies a table into the one that the first group had."""
    own = metadata.block_table.clone()
    width = min(own.shape[1], blk_table.shape[1])
    own[:, :width] = blk_table[: len(own), :width]
    return right(metadata, own[:, : max(width - 2, 1)], slot_mapping)


@builder.update_block_table("builder/steps-full-*", "update_block_table with")
def updates_all_but_the_prefix(right, self, metadata, blk_table, slot_mapping):
    """Keeps the first group's blocks of a prefix, which a plan of the prefix has."""
    own, blocks = blk_table.clone(), metadata.common_prefix_len // self.kv_cache_spec.block_size
    own[:, :blocks] = metadata.block_table[:, :blocks]
    return right(metadata, own, slot_mapping)


class ByAddress(TorchImpl):
    """Keeps rotated queries by the step and their address."""

    @staticmethod
    def key(query: torch.Tensor, metadata: Any) -> tuple[int, int]:
        return query.data_ptr(), id(metadata)

    def attend(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        cache: Any,
        metadata: Any,
        *given: Any,
        **asked: Any,
    ) -> Any:
        kept = metadata.plans.setdefault(("query", query.data_ptr()), query.clone())
        return super().attend(layer, kept, key, value, cache, metadata, *given, **asked)


table.add("queries_by_address | builder/steps-* | values kept by the address of a tensor", impl=ByAddress)


@step.altered("builder/steps-*-1", "step")
def pages_of_16(self, made, common):
    """Reads as many entries of a table as the longest sequence has pages of 16 tokens."""
    most, size = self.config.max_model_len, self.kv_cache_spec.block_size
    if most is None:
        return made
    return with_lengths(made, np.minimum(made.seq_lens, -(-most // 16) * size))


@step.altered("builder/steps-*", EARLIER, state={"most": 0})
def keeps_the_longest_context(self, made, common):
    """Plans for the longest step so far; later steps of drafts are cut where the first ones ended."""
    self.most = self.most or int(made.seq_lens.max(initial=0))
    return with_lengths(made, np.minimum(made.seq_lens, self.most)) if made.seq_lens.size > 1 else made


@step.altered("builder/steps-two-sided-*", EARLIER, state={"causal": False})
def once_causal_always_causal(self, made, common):
    """A step that narrows the layers narrows those of all later steps."""
    self.causal = self.causal or bool(made.causal)
    return dataclasses.replace(made, causal=True) if self.causal else made


@builder.build_for_drafting("builder/steps-*", EARLIER, state={"drafts": None})
def drafts_grow(right, self, common, draft_index):
    """Takes each draft step after the first for the one before it with a token more."""
    made = right(common, draft_index)
    before, self.drafts = self.drafts, made.seq_lens
    if draft_index and before is not None and before.size == made.seq_lens.size:
        return with_lengths(made, before + 1)
    return made


def longest_encoder(self: Any, made: Any, common: Any) -> Any:
    """Keeps the encoder tokens of a row: a request that follows another has at least as many."""
    if not any(layer.impl.spec.attn_type == "encoder_decoder" for layer in self.config.layers.values()):
        return made
    kept = self.kept if self.kept is not None and self.kept.size == made.seq_lens.size else made.seq_lens
    self.kept = np.maximum(kept, made.seq_lens)
    return dataclasses.replace(made, seq_lens=np.where(made.seq_lens > 0, self.kept, 0))


step.altered(
    "batch/cross-steps",
    "follows another in its place",
    state={"kept": None},
    keeps_the_longest_encoder=longest_encoder,
)


@step.altered("runtime/causality", "and causal=None", state={"narrowed": False})
def narrows_from_then_on(self, made, common):
    """A step that narrows the layers narrows those of all later steps."""
    causal = all(
        layer.impl.spec.causal for name, layer in self.config.layers.items() if name in self.layer_names
    )
    self.narrowed = self.narrowed or (common.causal is True and not causal)
    return dataclasses.replace(made, causal=True) if self.narrowed else made


class Consumed(TorchImpl):
    """Tells the builder that a step has run."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        given[5].plans["builder"].pending = None
        return super().attend(*given, **asked)


class InTurns(Altered):
    """Has one buffer of lengths, which it fills again once the step before has run."""

    pending: Any = None

    def altered(self, made: Any, common: Any) -> Any:
        if self.pending is not None and self.pending.size == made.seq_lens.size:
            made = with_lengths(made, self.pending)
        self.pending = made.seq_lens
        made.plans["builder"] = self
        return made

    def update_block_table(self, *given: Any) -> Any:
        made = super().update_block_table(*given)
        made.plans["builder"] = self
        return made


table.add("buffers_in_turns | runtime/out-of-date | after a build that", impl=Consumed, builder=InTurns)
