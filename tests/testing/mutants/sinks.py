"""Mutants of sinks and of the log-sum-exp."""

from __future__ import annotations

import math
from typing import Any

from mutants.making import mutant, on
from mutants.reference import Reference, Request, Tensor

reference = on(Reference)


def sunk(name: str, change: Any) -> None:
    class Sunk(Reference):
        def sinks(self, request: Request) -> Tensor | None:
            sinks = super().sinks(request)
            return None if sinks is None else change(self, request, sinks)

    Sunk.__name__, Sunk.__module__ = name, __name__
    mutant("correct/*-sinks*")(Sunk)


# fmt: off
sunk("SinksOfKvHeads", lambda impl, r, sinks: sinks[impl.heads()])
sunk("SinksOfTheFirstRequest", lambda impl, r, sinks: sinks if r.index == 0 else None)
sunk("SinksForPrefills", lambda impl, r, sinks: sinks if r.new > 1 else None)
sunk("SinksForDecodes", lambda impl, r, sinks: sinks if r.new == 1 else None)
sunk("SinksTimesTheScale", lambda impl, r, sinks: sinks * impl.spec.scale)
sunk("SinksInBfloat16", lambda impl, r, sinks: sinks.bfloat16().float())
sunk("SinksAtLeastZero", lambda impl, r, sinks: sinks.clamp(min=0))
sunk("SinksAtMostTen", lambda impl, r, sinks: sinks.clamp(max=10))
sunk("SinksUnderTheCap", lambda impl, r, sinks: impl.cap(r, sinks, impl.spec.logits_soft_cap or 1e9))
sunk("SinksWithoutWindows", lambda impl, r, sinks: None if impl.spec.is_windowed else sinks)
sunk("SinksWithoutChunks", lambda impl, r, sinks: None if impl.spec.chunk_size else sinks)
sunk("SinksWithinTheFirstWindow", lambda impl, r, sinks: sinks if r.length > 6 else None)
sunk("SinksReversed", lambda impl, r, sinks: sinks.flip(0))
# Takes a sink for a key at the start that every window sees.
reference.windowed("correct/*-sinks*",
    sinks_are_first_keys=lambda right, self, request, at, held: (right(request, at, held) | (self.spec.has_sinks & (held < 4) & (held <= at))))
# Ignores use_sinks.
reference.answer("merge/use_sinks", sinks_always=lambda right, self, request, query, key, value, use_sinks: right(request, query, key, value, True))
# fmt: on


@reference.weigh("correct/*-sinks*-lse*", "LSE without the sink")
def sinks_in_the_output_only(right, self, request, logits, value, sinks):
    """LSE of the keys alone."""
    return right(request, logits, value, sinks)[0], right(request, logits, value, None)[1]


def logged(name: str, change: Any) -> None:
    class Logged(Reference):
        def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
            out, lse = super().weigh(request, logits, value, sinks)
            return out, change(self, request, lse, logits)

    Logged.__name__, Logged.__module__ = name, __name__
    mutant("correct/*-lse*", "lse")(Logged)


logged("LseOfBaseTwo", lambda impl, r, lse, logits: lse / math.log(2))
logged("LseInBfloat16", lambda impl, r, lse, logits: lse.bfloat16().float())
logged("LseInFloat16", lambda impl, r, lse, logits: lse.half().float())
logged("LseOfZeroWithoutKeys", lambda impl, r, lse, logits: lse.nan_to_num(neginf=0.0))
logged("LseOfDecodesOnly", lambda impl, r, lse, logits: lse if r.new == 1 else lse * 0)
logged("LseIsTheMaximum", lambda impl, r, lse, logits: logits.amax(2) if logits.shape[2] else lse)
logged("LseWithoutTheMaximum", lambda impl, r, lse, logits: lse - impl.largest(logits, impl.sinks(r)))
logged("LseInUnitsOfTheScale", lambda impl, r, lse, logits: lse / impl.spec.scale)
logged("LseNeverEmpty", lambda impl, r, lse, logits: lse.clamp(min=-1e4))


@mutant("correct/*-cap*-lse*", "lse")
class LseBeforeTheCap(Reference):
    """LSE of logits without the cap."""

    def logits(self, request: Request, query: Tensor, key: Tensor) -> Tensor:
        self.raw = self.scaled(query, key)
        return super().logits(request, query, key)

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().weigh(request, logits, value, sinks)
        if self.spec.logits_soft_cap is None:
            return out, lse
        return out, super().weigh(request, self.raw.masked_fill(logits.isneginf(), -math.inf), value, sinks)[
            1
        ]


@mutant("correct/*-alibi*-lse*", "lse")
class LseBeforeAlibi(LseBeforeTheCap):
    """LSE of logits without ALiBi."""

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        out, lse = Reference.weigh(self, request, logits, value, sinks)
        if self.spec.logits_soft_cap or not self.spec.has_alibi:
            return out, lse
        raw = self.raw.masked_fill(logits.isneginf(), -math.inf)
        return out, Reference.weigh(self, request, raw, value, sinks)[1]


@reference.write_lse("correct/*-lse*", "lse")
def lse_heads_first(self, request, output_lse, lse):
    """Writes `[H, T]` to the memory of `[T, H]`."""
    output_lse[request.rows] = lse.float().reshape(lse.shape[1], lse.shape[0])
