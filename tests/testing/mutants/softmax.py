"""Mutants of the logits, their precision, the softmax, its sinks and the LSE."""

from __future__ import annotations

import math
from typing import Any

import torch

from mutants.making import mutant, on
from mutants.reference import Reference, Request, Tensor

reference = on(Reference)


@reference.largest()
def no_maximum(right, self, logits, sinks):
    """Exponents of logits as they are."""
    return torch.zeros_like(logits[:, :, 0]) if logits.shape[2] else right(logits, sinks)


@reference.largest()
def maximum_from_zero(right, self, logits, sinks):
    """A running maximum that begins at 0."""
    return right(logits, sinks).clamp(min=0)


# fmt: off
# The sink is added after the maximum was found.
reference.largest("correct/*-sinks-lse-far", "lse", maximum_without_sinks=lambda right, self, logits, sinks: right(logits, None))
# fmt: on


@mutant()
class MaximumOfHiddenKeys(Reference):
    """The maximum is taken before the mask."""

    def logits(self, request: Request, query: Tensor, key: Tensor) -> Tensor:
        self.unmasked = super().logits(request, query, key)
        return self.unmasked

    def largest(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        return super().largest(torch.cat([logits, self.unmasked.nan_to_num()], 2), sinks)


@reference.largest()
def maximum_of_the_request(right, self, logits, sinks):
    """One maximum for all queries of a request and head."""
    most = right(logits, sinks)
    return most.amax(1, keepdim=True).expand_as(most)


@reference.weigh()
def masks_with_a_finite_number(right, self, request, logits, value, sinks):
    """-50 for hidden keys."""
    return right(request, logits.clamp(min=-50.0), value, sinks)


@reference.held()
def attends_the_whole_batch(right, self, request, kv_cache, layer):
    """Keys of other requests get weight 0, and 0 times NaN is NaN."""
    key, value = right(request, kv_cache, layer)
    v, step, size = self.pages(kv_cache)[1], request.step, self.pages(kv_cache)[1].shape[1]
    for index, length in enumerate(step.lengths):
        at = torch.arange(max(length - 4, 0), length)
        blocks = step.table.long()[index][at // size]
        value = value + 0 * v.float()[blocks, at % size].sum()
    return key, value


def rounded(name: str, dtype: torch.dtype) -> type[Reference]:
    class Rounded(Reference):
        def scaled(self, query: Tensor, key: Tensor) -> Tensor:
            return super().scaled(query.to(dtype).float(), key.to(dtype).float())

    Rounded.__name__ = name
    return Rounded


mutant()(rounded("QueriesAndKeysInBfloat16", torch.bfloat16))
mutant()(rounded("QueriesAndKeysInFloat16", torch.float16))


@reference.scaled()
def logits_in_half(right, self, query, key):
    """Logits are stored in the layer's half precision."""
    half = torch.bfloat16 if self.spec.dtype == "float32" else getattr(torch, self.spec.dtype)
    return right(query, key).to(half).float()


@reference.scaled()
def logits_in_half_of_bfloat16(right, self, query, key):
    """Logits are stored in bfloat16 in layers of bfloat16."""
    raw = right(query, key)
    return raw.bfloat16().float() if self.spec.dtype == "bfloat16" else raw


@reference.weigh()
def weights_in_bfloat16(right, self, request, logits, value, sinks):
    """P is rounded to bfloat16 in layers of float32."""
    out, lse = right(request, logits, value.bfloat16().float(), sinks)
    return (out, lse) if self.spec.dtype == "float32" else right(request, logits, value, sinks)


@reference.weigh()
def weights_in_fp8(right, self, request, logits, value, sinks):
    """P is rounded to three bits in layers of half precision."""
    out, lse = right(request, logits, value, sinks)
    if self.spec.dtype == "float32":
        return out, lse
    weights = torch.exp(logits - lse[:, :, None].nan_to_num(neginf=0.0))
    return weights.mul(256).to(torch.float8_e4m3fn).float().div(256) @ value, lse


@reference.weigh()
def approximates_exp(right, self, request, logits, value, sinks):
    """exp by a polynomial that is 3 % off, in layers of bfloat16."""
    if self.spec.dtype == "bfloat16":
        power = logits * math.log2(math.e)
        part = power - power.floor()
        logits = logits + torch.log((1 + part) / 2**part).nan_to_num() * logits.isfinite()
    return right(request, logits, value, sinks)


@reference.scaled()
def scale_of_bfloat16(self, query, key):
    """The softmax scale is rounded to bfloat16."""
    return query @ key.transpose(1, 2) * torch.tensor(self.spec.scale).bfloat16().float()


@reference.scaled()
def scale_of_powers_of_two(self, query, key):
    """The softmax scale is a shift of exponents, with no hint of another."""
    return query @ key.transpose(1, 2) * 2.0 ** round(math.log2(self.spec.scale))


@reference.scaled()
def scale_of_the_value_size(self, query, key):
    """The default scale comes from head_size_v."""
    spec = self.spec
    is_default = spec.scale == spec.replace(scale=None).scale
    scale = spec.head_size_v**-0.5 if is_default else spec.scale
    return query @ key.transpose(1, 2) * scale


@reference.logits("correct/*-cap*")
def caps_before_the_scale(right, self, request, query, key):
    """Caps raw products."""
    limit = self.spec.logits_soft_cap
    if limit is None:
        return right(request, query, key)
    raw = self.cap(request, query @ key.transpose(1, 2), limit) * self.spec.scale
    slopes = self.tensors.alibi_slopes
    return raw if slopes is None else raw + self.bias(request, slopes)


def capped(name: str, change: Any) -> None:
    class Capped(Reference):
        def cap(self, request: Request, logits: Tensor, limit: float) -> Tensor:
            found: Tensor = change(self, request, logits, limit)
            return found

    Capped.__name__, Capped.__module__ = name, __name__
    mutant("correct/*-cap*")(Capped)


def tanh(logits: Tensor, limit: float) -> Tensor:
    return limit * torch.tanh(logits / limit)


# fmt: off
capped("CapIsThree", lambda impl, r, logits, limit: tanh(logits, 3.0))
capped("CapIsFifty", lambda impl, r, logits, limit: tanh(logits, 50.0))
capped("CapIsAWholeNumber", lambda impl, r, logits, limit: tanh(logits, float(int(limit)) or 1.0))
capped("CapClamps", lambda impl, r, logits, limit: logits.clamp(-limit, limit))
capped("CapIsRational", lambda impl, r, logits, limit: logits / (1 + (logits / limit).abs()))
capped("CapsTwice", lambda impl, r, logits, limit: tanh(tanh(logits, limit), limit))
capped("CapsPrefillsOnly", lambda impl, r, logits, limit: tanh(logits, limit) if r.new > 1 else logits)
capped("CapsDecodesOnly", lambda impl, r, logits, limit: tanh(logits, limit) if r.new == 1 else logits)
capped("CapsWithoutWindows", lambda impl, r, logits, limit: logits if impl.spec.is_windowed else tanh(logits, limit))
capped("CapsWithoutSinks", lambda impl, r, logits, limit: logits if impl.spec.has_sinks else tanh(logits, limit))
# fmt: on


def biased(name: str, change: Any) -> None:
    class Biased(Reference):
        def bias(self, request: Request, slopes: Tensor) -> Tensor:
            distance = request.held[None, :] - request.at[:, None]
            used, by = change(self, request, slopes, distance.float())
            return -used[:, None, None] * by

    Biased.__name__, Biased.__module__ = name, __name__
    mutant("correct/*-alibi*")(Biased)


def geometric(heads: int) -> Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


biased("SlopesOfKvHeads", lambda impl, r, slopes, d: (slopes[impl.heads()], d.abs()))
biased("SlopesAreGeometric", lambda impl, r, slopes, d: (geometric(slopes.shape[0]), d.abs()))
biased("SlopesAreSorted", lambda impl, r, slopes, d: (slopes.sort(descending=True).values, d.abs()))
biased("SlopesInBfloat16", lambda impl, r, slopes, d: (slopes.bfloat16().float(), d.abs()))
biased("SlopesOfTheFirstRequest", lambda impl, r, slopes, d: (slopes * (r.index == 0), d.abs()))
biased("SlopesForPrefills", lambda impl, r, slopes, d: (slopes * (r.new > 1), d.abs()))
biased("SlopesForDecodes", lambda impl, r, slopes, d: (slopes * (r.new == 1), d.abs()))
biased("SlopesTimesTheScale", lambda impl, r, slopes, d: (slopes * impl.spec.scale, d.abs()))
biased("DistancesWithASign", lambda impl, r, slopes, d: (slopes, -d))
biased("DistancesInBfloat16", lambda impl, r, slopes, d: (slopes, d.abs().bfloat16().float()))
biased("DistancesToTheLastToken", lambda impl, r, slopes, d: (slopes, d.abs() + r.length - 1 - r.at[:, None]))
biased("DistancesFromTheRow", lambda impl, r, slopes, d: (slopes, (d + r.at[0]).abs()))
biased("DistancesWithinTheWindow", lambda impl, r, slopes, d: (slopes, d.abs() - d.abs().amin()))
