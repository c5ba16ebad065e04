"""Backends that take one request for another, or one step: variants of TORCH, wrong in one way each."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from catching import Wrong, variant

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import CommonAttentionMetadata

__all__ = ["WRONG_BATCHES"]


class Altered(TorchMetadataBuilder):
    """Changes what TORCH's builder made."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TorchMetadata:
        return self.altered(
            super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        )

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        raise NotImplementedError


class NeverIdle(Altered):
    """Divides by the number of new tokens."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if (made.query_lens == 0).any():
            raise ZeroDivisionError("division by zero")
        return made


class NeverEmpty(Altered):
    """Takes the largest of no lengths."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        made.seq_lens.max()
        return made


class WritesForNobody(TorchImpl):
    """Writes at least one row."""

    def attend(self, *args: Any, **more: Any) -> Any:
        found = super().attend(*args, **more)
        if args[5].num_actual_tokens == 0:
            found[:1] = 0
        return found


class KeepsPlan(Altered):
    """Keeps the lengths of the first step with as many requests, where they are shorter."""

    kept: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if self.kept is None or self.kept.size != made.seq_lens.size:
            self.kept = made.seq_lens
        lens = np.maximum(np.minimum(self.kept, made.seq_lens), made.query_lens)
        return dataclasses.replace(made, seq_lens=lens)


class SizedBySecond(Altered):
    """Sizes its scan by the second request, the longest one in its tests."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if made.seq_lens.size < 3:
            return made
        lens = np.maximum(np.minimum(made.seq_lens, made.seq_lens[1]), made.query_lens)
        return dataclasses.replace(made, seq_lens=lens)


class TwoOrMore(Altered):
    """Is never alone."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if made.seq_lens.size == 1:
            return dataclasses.replace(made, seq_lens=np.maximum(made.seq_lens - 1, made.query_lens))
        return made


class FirstPieceOnly(Altered):
    """Takes each long piece for a whole prompt."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        whole = np.where(made.query_lens > 16, made.query_lens, made.seq_lens)
        return dataclasses.replace(made, seq_lens=whole)


class IgnoresCausal(Altered):
    """Goes by the layer, whatever the batch says."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        return dataclasses.replace(made, causal=False)


class NeverWidens(Altered):
    """Goes by the layer where the batch says more."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        return dataclasses.replace(made, causal=True)


class RaisesOnWide(Altered):
    """Refuses what it should, with an error that says nothing."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if not made.causal:
            raise RuntimeError("unreachable")
        return made


def wrong(name: str, check: str, says: str, **parts: Any) -> Wrong:
    return Wrong(name, variant(name, **parts), check, says)


WRONG_BATCHES = [
    wrong("never_idle", "batch/idle", "ZeroDivisionError", builder=NeverIdle),
    wrong("never_empty", "batch/nobody", "without any request: raised ValueError", builder=NeverEmpty),
    wrong("keeps_plan", "batch/no-state", "of one impl and builder, after other batches", builder=KeepsPlan),
    wrong("sized_by_second", "batch/order-decode", "with the requests in the order", builder=SizedBySecond),
    wrong("two_or_more", "batch/alone", "alone, with 1 new tokens", builder=TwoOrMore),
    wrong("first_piece_only", "batch/pieces", "tokens in pieces that end at", builder=FirstPieceOnly),
    wrong("ignores_causal", "batch/narrowed", "mistake: causal=True ignored", builder=IgnoresCausal),
    wrong("never_widens", "batch/widened", "was taken; it must raise a BatchError", builder=NeverWidens),
    wrong("raises_on_wide", "batch/widened", "RuntimeError: unreachable", builder=RaisesOnWide),
    wrong("writes_for_nobody", "batch/nobody", "forward wrote to the output", impl=WritesForNobody),
]
