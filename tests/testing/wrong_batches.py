"""Backends that mix up requests or steps: variants of TORCH, each with one mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from catching import wrong
from wrong_builders import Altered
from wrong_spans import FillsSpansIn

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import CommonAttentionMetadata

__all__ = ["WRONG_BATCHES"]


class NeverIdle(Altered):
    """Divides by the number of new tokens."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if (made.query_lens == 0).any():
            raise ZeroDivisionError("division by zero")
        return made


class NeverEmpty(Altered):
    """Computes the maximum of an empty array."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        made.seq_lens.max()
        return made


class WritesForNobody(TorchImpl):
    """Writes a row even if there are no requests."""

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
    """Serves a single request wrongly."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if made.seq_lens.size == 1:
            return dataclasses.replace(made, seq_lens=np.maximum(made.seq_lens - 1, made.query_lens))
        return made


class FirstPieceOnly(Altered):
    """Reads each long piece as a whole prompt."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        whole = np.where(made.query_lens > 16, made.query_lens, made.seq_lens)
        return dataclasses.replace(made, seq_lens=whole)


class IgnoresCausal(Altered):
    """Reads causality from the layer and ignores the batch."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        return dataclasses.replace(made, causal=False)


class SilenceIsCausal(Altered):
    """Takes the batch's flag for the layer's, and a batch that says nothing for a causal one."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        return dataclasses.replace(made, causal=common.causal is not False)


class SilenceIsNotCausal(Altered):
    """Takes the batch's flag for the layer's, and a batch that says nothing for one that is not causal."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        return dataclasses.replace(made, causal=bool(common.causal))


class NeverWidens(Altered):
    """Reads causality from the layer if the batch widens it."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        return dataclasses.replace(made, causal=True)


class RaisesOnWide(Altered):
    """Refuses causal=False, but with an unhelpful error."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if not made.causal:
            raise RuntimeError("unreachable")
        return made


WRONG_BATCHES = [
    wrong("never_idle", "batch/idle", "ZeroDivisionError", builder=NeverIdle),
    wrong("never_empty", "batch/nobody", "without any request: raised ValueError", builder=NeverEmpty),
    wrong("keeps_plan", "batch/no-state", "of one impl and builder, after other batches", builder=KeepsPlan),
    wrong("sized_by_second", "batch/order-decode", "with the requests in the order", builder=SizedBySecond),
    wrong("two_or_more", "batch/alone", "alone, with 1 new tokens", builder=TwoOrMore),
    wrong("first_piece_only", "batch/pieces", "tokens in pieces that end at", builder=FirstPieceOnly),
    wrong("ignores_causal", "batch/narrowed", "mistake: causal=True ignored", builder=IgnoresCausal),
    wrong(
        "silence_is_causal",
        "batch/unstated-mixed",
        "common.causal=None taken for True",
        builder=SilenceIsCausal,
    ),
    wrong(
        "silence_is_not_causal", "batch/unstated", "cannot widen a causal layer", builder=SilenceIsNotCausal
    ),
    wrong("never_widens", "batch/widened", "was accepted; it must raise a BatchError", builder=NeverWidens),
    wrong("raises_on_wide", "batch/widened", "RuntimeError: unreachable", builder=RaisesOnWide),
    wrong(
        "fills_spans_in", "batch/no-spans", "was accepted; it must raise a BatchError", builder=FillsSpansIn
    ),
    wrong("writes_for_nobody", "batch/nobody", "forward wrote to the output", impl=WritesForNobody),
]
