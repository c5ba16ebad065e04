"""Backends that are right for numbers of one bell curve: each is wrong for zeros, equal or extreme ones."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from plain_attention import KernelImpl, PlainImpl
from torch import Tensor

from mutants.table import Methods, Table

table = Table("values")
OF_ONE_BELL = "correct/mixed-h4x2-d64-float32-b16-NHD"


def on(base: type) -> Methods:
    """Rows by one method, of backends that are right for the plain case."""
    return Methods(lambda method: functools.partial(table.method(base, method), passes=OF_ONE_BELL))


plain, kernel = on(PlainImpl), on(KernelImpl)
ZEROS = "numbers: one of three keys, queries and values is zero"
EQUAL = "numbers: all keys of a request are equal"
RANGE = "numbers: stored keys and values up to the largest of their type"
BEYOND = "numbers: products of queries and keys beyond 65504"


@plain.one("correct/mixed-*-zeros", ZEROS)
def zero_keys_are_padding(right, self, query, keys, values, scales, sinks, span):
    """Takes a key of zeros for a row without a token."""
    held = keys.any(-1).any(0)
    own = type(span)(span.request, span.rows, span.at, span.held[held], span.meta)
    return right(query, keys[:, held], values[:, held], scales, sinks, own)


@plain.products("correct/mixed-*-zeros", ZEROS)
def divides_by_the_norm(right, self, query, keys, k_scale):
    """Takes the size out of a query and puts it in again: 0 / 0 for a query of zeros."""
    norm = query.norm(dim=-1, keepdim=True)
    return right(query / norm, keys, k_scale) * norm


@plain.one("correct/mixed-*-zeros", ZEROS)
def zero_values_are_padding(right, self, query, keys, values, scales, sinks, span):
    """Takes a value of zeros for a row without a token."""
    held = values.any(-1).any(0)
    own = type(span)(span.request, span.rows, span.at, span.held[held], span.meta)
    return right(query, keys[:, held], values[:, held], scales, sinks, own)


@kernel.online("correct/mixed-*-equal", EQUAL)
def one_of_equal_logits(right, self, logits, values):
    """Finds the largest logits by their values, so equal ones count once."""
    order = logits.sort(dim=-1, stable=True)
    again = torch.zeros_like(logits, dtype=torch.bool)
    again[..., 1:] = order.values.diff(dim=-1) == 0
    seen_before = torch.zeros_like(again).scatter(-1, order.indices, again)
    return right(logits.masked_fill(seen_before, -math.inf), values)


@kernel.online("correct/long-*-float16-*equal", EQUAL)
def sums_in_float16(right, self, logits, values):
    """Keeps weighted sums in the layer's dtype, and divides at the end."""
    if self.spec.dtype != "float16":
        return right(logits, values)
    top = logits.amax(2, keepdim=True).nan_to_num(neginf=0.0)
    weights = (logits - top).exp()
    total = weights.sum(2, keepdim=True)
    return (weights @ values).half().float() / total.clamp_min(1e-30), (top + total.log())[..., 0]


@kernel.online("correct/mixed-*-negative", "numbers: logits and sinks around -100")
def starts_at_zero(right, self, logits, values):
    """The running maximum begins at 0, so exponentials of small logits vanish."""
    total = logits.exp().sum(2, keepdim=True)
    if bool((logits.amax(2) > -20).all()):
        return right(logits, values)
    return (logits.exp() @ values) / total.clamp_min(1e-30), total.log()[..., 0]


def reads_up_to(most: float) -> Any:
    def one(right, self, query, keys, values, scales, sinks, span):
        if self.spec.has_quantized_kv_cache:
            keys, values = keys.clamp(-most, most), values.clamp(-most, most)
        return right(query, keys, values, scales, sinks, span)

    return one


# The largest numbers of e4m3fnuz and of e4m3.
plain.one("correct/mixed-*-fp8-*range", RANGE, reads_e4m3_of_another_vendor=reads_up_to(240.0))
plain.one("correct/mixed-*-fp8_e5m2-*range", RANGE, reads_e5m2_as_e4m3=reads_up_to(448.0))


@kernel.products("correct/mixed-*-float16-*beyond", BEYOND)
def products_in_float16(right, self, query, keys, k_scale):
    """Rounds products to float16 before the scale."""
    raw = query @ keys.mT
    raw = raw.half().float() if self.spec.dtype == "float16" else raw
    return raw * (self.spec.scale * k_scale)


@kernel.products("correct/mixed-*-float16-*beyond", BEYOND)
def clamps_products(right, self, query, keys, k_scale):
    """Keeps products within float16."""
    most = torch.finfo(torch.float16).max
    raw = query @ keys.mT
    raw = raw.clamp(-most, most) if self.spec.dtype == "float16" else raw
    return raw * (self.spec.scale * k_scale)


@plain.weigh("correct/mixed-*-tiny", "numbers: queries and values of about 2**-10")
def flushes_small(right, self, logits, values, sinks, span):
    """Takes outputs whose rows are below 2**-8 for zero."""
    out, lse = right(logits, values, sinks, span)
    return out.where(out.abs().amax(2, keepdim=True) > 2.0**-8, 0.0), lse


class TopOfFirst(KernelImpl):
    """Subtracts the largest logit of the first request from those of all."""

    top: Any = None

    def in_order(self, requests: list[int]) -> list[int]:
        self.top = None
        return requests

    def online(self, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.top = logits.amax(2, keepdim=True).amax() if self.top is None else self.top
        top = self.top.clamp_min(-80)
        weights = (logits - top).exp()
        total = weights.sum(2, keepdim=True)
        return weights @ values / total.where(total > 0, 1.0), (top + total.log())[..., 0]


OTHERS = "numbers: each request has other numbers"
table.row("top_of_first", "correct/mixed-*-each", OTHERS, passes=OF_ONE_BELL, impl=TopOfFirst)
