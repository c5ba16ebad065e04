"""Backends that mix up requests or steps: variants of TORCH, each with one mistake."""

from __future__ import annotations

import dataclasses

import numpy as np

from attnplug.backends.torch_native.impl import TorchImpl
from mutants.parts import Altered
from mutants.table import Table

table = Table("batches")
step = table.on(Altered)
impl = table.on(TorchImpl)


@step.altered("batch/idle", "ZeroDivisionError")
def never_idle(self, made, common):
    """Divides by the number of new tokens."""
    if (made.query_lens == 0).any():
        raise ZeroDivisionError("division by zero")
    return made


@step.altered("batch/nobody", "without any request: raised ValueError")
def never_empty(self, made, common):
    """Computes the maximum of an empty array."""
    made.seq_lens.max()
    return made


@impl.attend("batch/nobody", "forward wrote to the output")
def writes_for_nobody(right, self, *args, **more):
    """Writes a row even if there are no requests."""
    found = right(*args, **more)
    if args[5].num_actual_tokens == 0:
        found[:1] = 0
    return found


@step.altered("batch/no-state", "of one impl and builder, after other batches", state={"kept": None})
def keeps_plan(self, made, common):
    """Keeps the lengths of the first step with as many requests, where they are shorter."""
    if self.kept is None or self.kept.size != made.seq_lens.size:
        self.kept = made.seq_lens
    lens = np.maximum(np.minimum(self.kept, made.seq_lens), made.query_lens)
    return dataclasses.replace(made, seq_lens=lens)


@step.altered("batch/order-decode", "with the requests in the order")
def sized_by_second(self, made, common):
    """Sizes its scan by the second request, the longest one in its tests."""
    if made.seq_lens.size < 3:
        return made
    lens = np.maximum(np.minimum(made.seq_lens, made.seq_lens[1]), made.query_lens)
    return dataclasses.replace(made, seq_lens=lens)


@step.altered("batch/alone", "alone, with 1 new tokens")
def two_or_more(self, made, common):
    """Serves a single request wrongly."""
    if made.seq_lens.size == 1:
        return dataclasses.replace(made, seq_lens=np.maximum(made.seq_lens - 1, made.query_lens))
    return made


@step.altered("batch/pieces", "tokens in pieces that end at")
def first_piece_only(self, made, common):
    """Reads each long piece as a whole prompt."""
    whole = np.where(made.query_lens > 16, made.query_lens, made.seq_lens)
    return dataclasses.replace(made, seq_lens=whole)


# fmt: off
# Reads causality from the layer and ignores the batch.
step.altered("batch/narrowed", "mistake: causal=True ignored", ignores_causal=lambda self, made, common: dataclasses.replace(made, causal=False))
# Takes the batch's flag for the layer's, and a batch that says nothing for a causal one.
step.altered("batch/unstated-mixed", "common.causal=None taken for True",
    silence_is_causal=lambda self, made, common: dataclasses.replace(made, causal=common.causal is not False))
# Takes the batch's flag for the layer's, and a batch that says nothing for one that is not causal.
step.altered("batch/unstated", "cannot widen a causal layer",
    silence_is_not_causal=lambda self, made, common: dataclasses.replace(made, causal=bool(common.causal)))
# Reads causality from the layer if the batch widens it.
step.altered("batch/widened", "was accepted; it must raise a BatchError", never_widens=lambda self, made, common: dataclasses.replace(made, causal=True))
# fmt: on


@step.altered("batch/widened", "RuntimeError: unreachable")
def raises_on_wide(self, made, common):
    """Refuses causal=False, but with an unhelpful error."""
    if not made.causal:
        raise RuntimeError("unreachable")
    return made


@step.altered("batch/no-spans", "was accepted; it must raise a BatchError")
def fills_spans_in(self, made, common):
    """Takes a step without spans as text."""
    if made.spans is not None:
        return made
    return dataclasses.replace(made, spans=np.zeros((made.num_actual_tokens, 2), dtype=np.int64))
