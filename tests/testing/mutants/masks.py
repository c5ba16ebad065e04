"""Mutants of causality, windows, chunks, multimodal spans and selections."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.core.selection import Selection
from mutants.making import mutant, on
from mutants.reference import Reference, Request, Tensor

reference = on(Reference)


def windowed(name: str, change: Any) -> None:
    """A window that a function of the request changes."""

    class Windowed(Reference):
        def windowed(self, request: Request, at: Tensor, held: Tensor) -> Tensor:
            left, right = self.spec.window
            left, right = change(self, request, left, right)
            seen = torch.ones(at.shape[0], held.shape[1], dtype=torch.bool)
            if self.spec.causal or request.step.causal:
                seen &= held <= at
            if left >= 0:
                seen &= held >= at - left
            if right >= 0:
                seen &= held <= at + right
            return seen

    Windowed.__name__, Windowed.__module__ = name, __name__
    mutant("correct/*-window*")(Windowed)


# fmt: off
windowed("WindowOfZeroIsNone", lambda impl, r, left, right: (left or -1, right))
windowed("WindowOfDecodesOneLonger", lambda impl, r, left, right: (left + (left >= 0 and r.new == 1), right))
windowed("WindowIsSymmetric", lambda impl, r, left, right: (left, left) if not impl.spec.causal else (left, right))
windowed("WindowHasNoRightSide", lambda impl, r, left, right: (left, -1))
windowed("WindowHasNoLeftSide", lambda impl, r, left, right: (left, right) if impl.spec.causal else (-1, right))
windowed("WindowNeedsItsLeftSide", lambda impl, r, left, right: (left, right if left >= 0 else -1))
windowed("WindowNeedsItsRightSide", lambda impl, r, left, right: (left if right >= 0 else -1, right))
windowed("WindowAtMost128", lambda impl, r, left, right: (min(left, 127), right))
windowed("WindowAtMost64", lambda impl, r, left, right: (min(left, 63), right))
windowed("WindowIsSeven", lambda impl, r, left, right: (6 if left >= 0 else -1, right))
windowed("WindowOfFirstRequest", lambda impl, r, left, right: (left if r.index == 0 else -1, right))
windowed("WindowNotForPrompts", lambda impl, r, left, right: (-1 if r.new == r.length else left, right))
windowed("WindowNotForLongDecodes", lambda impl, r, left, right: (-1 if r.new == 1 and r.length > 128 else left, right))
windowed("WindowWithSinksOneLonger", lambda impl, r, left, right: (left + (left >= 0 and impl.spec.has_sinks), right))
windowed("WindowNotWithSinks", lambda impl, r, left, right: (-1 if impl.spec.has_sinks else left, right))
windowed("WindowNotWithAlibi", lambda impl, r, left, right: (-1 if impl.spec.has_alibi else left, right))
windowed("WindowNotOverFp8", lambda impl, r, left, right: (-1 if impl.spec.has_quantized_kv_cache else left, right))
windowed("WindowNotDirect", lambda impl, r, left, right: (-1 if impl.spec.direct_kv else left, right))
windowed("WindowNotForNarrowedSteps", lambda impl, r, left, right: (left if impl.spec.causal or not r.step.causal else -1, right))
# fmt: on


@reference.windowed()
def window_of_whole_pages(right, self, request, at, held):
    """The window begins at a page."""
    left, _ = self.spec.window
    seen = right(request, at, held)
    if left < 0 or not self.spec.causal:
        return seen
    return (held >= (at - left).clamp(min=0) // 16 * 16) & (held <= at)


@reference.windowed()
def window_of_the_last_query(right, self, request, at, held):
    """All queries of a request see the keys of the last query's window."""
    left, _ = self.spec.window
    seen = right(request, at, held)
    if left < 0 or not self.spec.causal:
        return seen
    return (held >= at[-1] - left) & (held <= at)


@reference.windowed()
def window_of_the_first_query(right, self, request, at, held):
    """The window of all queries begins where that of the first one does."""
    left, _ = self.spec.window
    seen = right(request, at, held)
    if left < 0 or not self.spec.causal:
        return seen
    return (held >= at[0] - left) & (held <= at)


@reference.windowed()
def causal_tiles_of_rows(right, self, request, at, held):
    """Later rows of a tile of 128 see the keys up to the tile's end."""
    seen = right(request, at, held)
    if not self.spec.causal or request.new <= 128 or self.spec.is_windowed:
        return seen
    row = torch.arange(request.new)[:, None]
    return seen | ((row >= 128) & (held <= at + 1))


@reference.windowed()
def causal_from_the_first_key(right, self, request, at, held):
    """Aligns queries with the first keys where keys are fewer than tokens."""
    return right(request, at - request.held[:1].sum(), held)


@reference.windowed("correct/*-cross*")
def cross_is_causal(right, self, request, at, held):
    """Applies the decoder's mask to encoder keys."""
    seen = right(request, at, held)
    return seen & (held <= at) if self.spec.attn_type == "encoder_decoder" else seen


def chunked(name: str, change: Any) -> None:
    class Chunked(Reference):
        def chunked(self, request: Request, at: Tensor, held: Tensor, size: int) -> Tensor:
            seen: Tensor = change(self, request, at, held, size)
            return seen

    Chunked.__name__, Chunked.__module__ = name, __name__
    mutant("correct/*-chunk*")(Chunked)


# fmt: off
chunked("ChunksOfNewTokens", lambda impl, r, at, held, c: (held - r.at[0]) // c == (at - r.at[0]) // c)
chunked("ChunksOfGivenKeys", lambda impl, r, at, held, c: (held - r.held[0]) // c == (at - r.held[0]) // c)
chunked("ChunksOfPowersOfTwo", lambda impl, r, at, held, c: held // (1 << (c - 1).bit_length()) == at // (1 << (c - 1).bit_length()))
chunked("ChunksOfWholePages", lambda impl, r, at, held, c: held // (-(-c // 16) * 16) == at // (-(-c // 16) * 16))
chunked("ChunksWithTheKeyBefore", lambda impl, r, at, held, c: (held // c == at // c) | (held == at // c * c - 1))
chunked("ChunksOfTheLastQuery", lambda impl, r, at, held, c: held // c == at[-1] // c)
chunked("ChunksForPrefills", lambda impl, r, at, held, c: (held // c == at // c) | torch.tensor(r.new == 1))
chunked("ChunksForDecodes", lambda impl, r, at, held, c: (held // c == at // c) | torch.tensor(r.new > 1))
chunked("ChunksAtMost128", lambda impl, r, at, held, c: held // min(c, 128) == at // min(c, 128))
chunked("ChunksUpTo128", lambda impl, r, at, held, c: (held // c == at // c) | torch.tensor(c > 128))
chunked("ChunksAreWindows", lambda impl, r, at, held, c: held > at - c)
chunked("ChunksNotWithSpans", lambda impl, r, at, held, c: (held // c == at // c) | torch.tensor(impl.spec.mm_prefix))
# fmt: on


def spanned(name: str, change: Any) -> None:
    class Spanned(Reference):
        def together(self, request: Request, spans: Tensor, at: Tensor, held: Tensor) -> Tensor:
            seen: Tensor = change(self, request, spans[:, :1], spans[:, 1:], at, held)
            return seen

    Spanned.__name__, Spanned.__module__ = name, __name__
    mutant("correct/*-spans*")(Spanned)


# fmt: off
spanned("SpansWithTheirStop", lambda impl, r, start, stop, at, held: (held >= start) & (held <= stop) & (stop > start))
spanned("SpansWithoutTheirStart", lambda impl, r, start, stop, at, held: (held > start) & (held < stop))
spanned("SpansWithoutTheirLast", lambda impl, r, start, stop, at, held: (held >= start) & (held < stop - 1))
spanned("SpansOnlyTheFirst", lambda impl, r, start, stop, at, held: ((held >= start) & (held < stop) & (start == start[stop > 0][:1].sum())))
spanned("SpansOnlyInPrompts", lambda impl, r, start, stop, at, held: (held >= start) & (held < stop) & torch.tensor(r.new == r.length))
spanned("SpansOnlyOfTheFirstRequest", lambda impl, r, start, stop, at, held: (held >= start) & (held < stop) & torch.tensor(r.index == 0))
spanned("SpansAllTogether",
    lambda impl, r, start, stop, at, held: ((stop > start) & (held >= start[stop > 0].min() if (stop > 0).any() else held < 0) & (held < stop.max())))
spanned("SpansOfRows", lambda impl, r, start, stop, at, held: (held - r.at[0] >= start) & (held - r.at[0] < stop))
spanned(
    "SpansWithinWindows",
    lambda impl, r, start, stop, at, held: (
        (held >= start)
        & (held < stop)
        & ((held >= at - impl.spec.window[0]) | torch.tensor(impl.spec.window[0] < 0))
    ),
)
spanned("SpansOfManyTokens", lambda impl, r, start, stop, at, held: (held >= start) & (held < stop) & (stop - start > 4))
# fmt: on


def picked(name: str, change: Any) -> None:
    class Picked(Reference):
        def chosen(self, request: Request, selection: Selection, held: Tensor) -> Tensor:
            assert self.spec.sparse is not None
            kept = torch.arange(selection.positions.shape[1]) < selection.counts[:, None]
            seen: Tensor = change(
                self, request, selection.positions.masked_fill(~kept, -1), held, self.spec.sparse
            )
            return seen

    Picked.__name__, Picked.__module__ = name, __name__
    mutant("correct/*")(Picked)


def among(held: Tensor, picked: Tensor, block: int) -> Tensor:
    return (held[:, :, None] // block == picked[:, None, :]).any(-1)


def whole(held: Tensor, picked: Tensor) -> Tensor:
    return (picked.amax(1) < 0)[:, None].expand(-1, held.shape[1])


# fmt: off
picked("EmptySelectionsAreAll", lambda impl, r, p, held, s: among(held, p, s.block) | whole(held, p))
picked("SelectionsOf16", lambda impl, r, p, held, s: among(held, p[:, :16], s.block))
picked("SelectionsAreARange",
    lambda impl, r, p, held, s: ((held // s.block >= p.masked_fill(p < 0, 10**6).amin(1)[:, None]) & (held // s.block <= p.amax(1)[:, None])))
picked("SelectionsOfTheFirstQuery", lambda impl, r, p, held, s: among(held, p[:1], s.block).expand(r.new, -1))
picked("SelectionsNotForPrefills", lambda impl, r, p, held, s: among(held, p, s.block) | torch.tensor(r.new == r.length))
picked("SelectionsEndWithTheLast", lambda impl, r, p, held, s: among(held, p, s.block) | ((p < 0).any(1)[:, None] & (held == r.length - 1)))
picked("SelectionsOfWholeBlocks", lambda impl, r, p, held, s: among(held, p, s.block) & (held < r.length // s.block * s.block))
picked("SelectionsWithTheOwnKey", lambda impl, r, p, held, s: among(held, p, s.block) | (held == r.at[:, None]))
picked("SelectionsNotForShortContexts", lambda impl, r, p, held, s: among(held, p, s.block) | torch.tensor(r.length <= s.topk * s.block))
picked("SelectionsOfBlocksOf16", lambda impl, r, p, held, s: among(held, p, 16 if s.block > 1 else 1))
# fmt: on
