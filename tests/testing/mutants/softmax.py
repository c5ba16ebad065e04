"""Mutants of the logits, their precision, the softmax, its sinks and the LSE."""

from __future__ import annotations

import math
from typing import Any

import torch

from mutants.making import mutant
from mutants.reference import Reference, Request, Tensor


@mutant()
class NoMaximum(Reference):
    """Exponents of logits as they are."""

    def largest(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        return torch.zeros_like(logits[:, :, 0]) if logits.shape[2] else super().largest(logits, sinks)


@mutant()
class MaximumFromZero(Reference):
    """A running maximum that begins at 0."""

    def largest(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        return super().largest(logits, sinks).clamp(min=0)


@mutant("correct/*-sinks-lse-far", "lse")
class MaximumWithoutSinks(Reference):
    """The sink is added after the maximum was found."""

    def largest(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        return super().largest(logits, None)


@mutant()
class MaximumOfHiddenKeys(Reference):
    """The maximum is taken before the mask."""

    def logits(self, request: Request, query: Tensor, key: Tensor) -> Tensor:
        self.unmasked = super().logits(request, query, key)
        return self.unmasked

    def largest(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        return super().largest(torch.cat([logits, self.unmasked.nan_to_num()], 2), sinks)


@mutant()
class MaximumOfTheRequest(Reference):
    """One maximum for all queries of a request and head."""

    def largest(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        most = super().largest(logits, sinks)
        return most.amax(1, keepdim=True).expand_as(most)


@mutant()
class MasksWithAFiniteNumber(Reference):
    """-50 for hidden keys."""

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        return super().weigh(request, logits.clamp(min=-50.0), value, sinks)


@mutant()
class AttendsTheWholeBatch(Reference):
    """Keys of other requests get weight 0, and 0 times NaN is NaN."""

    def held(self, request: Request, kv_cache: Tensor, layer: Any) -> Any:
        key, value = super().held(request, kv_cache, layer)
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


@mutant()
class LogitsInHalf(Reference):
    """Logits are stored in the layer's half precision."""

    def scaled(self, query: Tensor, key: Tensor) -> Tensor:
        half = torch.bfloat16 if self.spec.dtype == "float32" else getattr(torch, self.spec.dtype)
        return super().scaled(query, key).to(half).float()


@mutant()
class LogitsInHalfOfBfloat16(Reference):
    """Logits are stored in bfloat16 in layers of bfloat16."""

    def scaled(self, query: Tensor, key: Tensor) -> Tensor:
        raw = super().scaled(query, key)
        return raw.bfloat16().float() if self.spec.dtype == "bfloat16" else raw


@mutant()
class WeightsInBfloat16(Reference):
    """P is rounded to bfloat16 in layers of float32."""

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().weigh(request, logits, value.bfloat16().float(), sinks)
        return (out, lse) if self.spec.dtype == "float32" else super().weigh(request, logits, value, sinks)


@mutant()
class WeightsInFp8(Reference):
    """P is rounded to three bits in layers of half precision."""

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().weigh(request, logits, value, sinks)
        if self.spec.dtype == "float32":
            return out, lse
        weights = torch.exp(logits - lse[:, :, None].nan_to_num(neginf=0.0))
        return weights.mul(256).to(torch.float8_e4m3fn).float().div(256) @ value, lse


@mutant()
class ApproximatesExp(Reference):
    """exp by a polynomial that is 3 % off, in layers of bfloat16."""

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        if self.spec.dtype == "bfloat16":
            power = logits * math.log2(math.e)
            part = power - power.floor()
            logits = logits + torch.log((1 + part) / 2**part).nan_to_num() * logits.isfinite()
        return super().weigh(request, logits, value, sinks)


@mutant()
class ScaleOfBfloat16(Reference):
    """The softmax scale is rounded to bfloat16."""

    def scaled(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(1, 2) * torch.tensor(self.spec.scale).bfloat16().float()


@mutant()
class ScaleOfPowersOfTwo(Reference):
    """The softmax scale is a shift of exponents, with no hint of another."""

    def scaled(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(1, 2) * 2.0 ** round(math.log2(self.spec.scale))


@mutant()
class ScaleOfTheValueSize(Reference):
    """The default scale comes from head_size_v."""

    def scaled(self, query: Tensor, key: Tensor) -> Tensor:
        spec = self.spec
        is_default = spec.scale == spec.replace(scale=None).scale
        scale = spec.head_size_v**-0.5 if is_default else spec.scale
        return query @ key.transpose(1, 2) * scale


@mutant("correct/*-cap*")
class CapsBeforeTheScale(Reference):
    """Caps raw products."""

    def logits(self, request: Request, query: Tensor, key: Tensor) -> Tensor:
        limit = self.spec.logits_soft_cap
        if limit is None:
            return super().logits(request, query, key)
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


capped("CapIsThree", lambda impl, r, logits, limit: tanh(logits, 3.0))
capped("CapIsFifty", lambda impl, r, logits, limit: tanh(logits, 50.0))
capped("CapIsAWholeNumber", lambda impl, r, logits, limit: tanh(logits, float(int(limit)) or 1.0))
capped("CapClamps", lambda impl, r, logits, limit: logits.clamp(-limit, limit))
capped("CapIsRational", lambda impl, r, logits, limit: logits / (1 + (logits / limit).abs()))
capped("CapsTwice", lambda impl, r, logits, limit: tanh(tanh(logits, limit), limit))
capped("CapsPrefillsOnly", lambda impl, r, logits, limit: tanh(logits, limit) if r.new > 1 else logits)
capped("CapsDecodesOnly", lambda impl, r, logits, limit: tanh(logits, limit) if r.new == 1 else logits)
capped(
    "CapsWithoutWindows",
    lambda impl, r, logits, limit: logits if impl.spec.is_windowed else tanh(logits, limit),
)
capped(
    "CapsWithoutSinks",
    lambda impl, r, logits, limit: logits if impl.spec.has_sinks else tanh(logits, limit),
)


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
