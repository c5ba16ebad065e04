"""The keys that a query sees, found by evaluating the mask function that a model passes to transformers."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]

# A position so late in a sequence that no window of a real model reaches its beginning.
_FAR = 1 << 24


class UnknownMaskError(Exception):
    """A mask that is neither full, causal, a window nor chunks."""


@dataclasses.dataclass(frozen=True, slots=True)
class MaskPattern:
    """Keys seen by a query: `window` (left, right) around it, -1 without limit, or those of its own chunk.

    With `blockwise`, spans of multimodal tokens also see each other in both directions.
    """

    window: tuple[int, int]
    chunk_size: int | None = None
    blockwise: bool = False

    @property
    def causal(self) -> bool:
        """Whether no key after the query is seen."""
        return self.window[1] == 0

    def seen(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Bool, broadcast over the positions `query` and `key` (int64)."""
        left, right = self.window
        mask = torch.ones_like(query - key, dtype=torch.bool)
        if left >= 0:
            mask &= key >= query - left
        if right >= 0:
            mask &= key <= query + right
        if self.chunk_size is not None:
            mask &= key // self.chunk_size == query // self.chunk_size
        return mask


def read_mask(function: MaskFunction) -> MaskPattern:
    """The pattern of a transformers mask function `f(batch, head, query, key)`; UnknownMaskError if it is not a known one."""
    # Window and chunk are measured at a far position, so the pattern must
    # then agree with the function on a dense grid near the start and around every edge.
    # The reader's run sets the meta device, on which a mask would have no values to read.
    with torch.device("cpu"):
        return _measure(*_on_cpu(function))


def matrix_pattern(mask: torch.Tensor, inverted: bool) -> MaskPattern | None:
    """The pattern of a boolean mask `[..., T, S]` with values; None for another one.

    Args:
        mask: the keys seen, or a slice of a larger square of them, whose size then limits the positions.
        inverted: whether it has the hidden keys instead.
    """
    base = mask if mask._base is None else mask._base
    if base.numel() != math.prod(base.shape[-2:]) or base.shape[-1] != base.shape[-2]:
        return None
    # numpy, because a mode of the run takes large tensors to the meta device.
    seen = base.reshape(base.shape[-2:]).numpy() ^ inverted
    last, first = len(seen) - 1, mask.numpy().reshape(-1, *mask.shape[-2:]) ^ inverted
    left, right = last - int(seen[-1].argmax()), last - int(seen[0][::-1].argmax())
    # A window that is larger than a mask made for these tokens alone would look like none.
    if mask.shape[-1] > last and left == last:
        return None
    pattern = MaskPattern((-1 if left == last else left, -1 if right == last else right))
    for found in (seen[None], first):
        queries, keys = (np.arange(size) for size in found.shape[-2:])
        distance = queries[:, None] - keys
        expected = ((distance <= left) if left < last else True) & (
            (-distance <= right) if right < last else True
        )
        if not (found == expected).all():
            return None
    return pattern


def together(one: MaskPattern, other: MaskPattern) -> MaskPattern | None:
    """The keys that both patterns show; None for two if one has chunks."""
    if one == other or one.chunk_size is not None or other.chunk_size is not None:
        return one if one == other else None
    left, right = (
        min((far for far in pair if far >= 0), default=-1)
        for pair in zip(one.window, other.window, strict=True)
    )
    return MaskPattern((left, right), None, one.blockwise or other.blockwise)


def _measure(function: MaskFunction, blockwise: bool) -> MaskPattern:
    def sees(query: int, key: int) -> bool:
        return bool(_evaluate(function, [query], [key])[0, 0])

    if not sees(_FAR, _FAR):
        raise UnknownMaskError("a query does not see its own key")
    left = _reach(lambda d: sees(_FAR, _FAR - d), _FAR)
    right = _reach(lambda d: sees(_FAR, _FAR + d), _FAR)
    pattern = MaskPattern((-1 if left == _FAR else left, -1 if right == _FAR else right), None, blockwise)
    # Seen from one position, a chunk looks like a window; other positions tell them apart.
    if not _agrees(pattern, function) and pattern.causal and 0 <= left < _FAR:
        start = _FAR - left
        size = 1 + _reach(lambda d: sees(start - 1, start - 1 - d), start - 1)
        pattern = MaskPattern((-1, 0), size, blockwise)
    if not _agrees(pattern, function):
        raise UnknownMaskError("its mask is neither full, causal, a window nor chunks")
    return pattern


def _reach(sees: Callable[[int], bool], limit: int) -> int:
    """The largest d up to `limit` with `sees(d)`; assumes that all smaller distances are seen too."""
    if sees(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sees(middle) else (low, middle)
    return low


def _agrees(pattern: MaskPattern, function: MaskFunction) -> bool:
    edges = [pattern.window[0], pattern.window[1], pattern.chunk_size or 0]
    near = [e + d for e in edges if e >= 0 for d in (-2, -1, 0, 1, 2)] + [1, 2, 3, 5, 17, 97, 4093, 65537]
    for base in (_FAR, _FAR + 1, _FAR // 2 + 12345):
        keys = sorted({base + sign * d for d in near for sign in (-1, 1)} | {base})
        queries = sorted({base + d for d in (0, 1, 2, 7)})
        if not _same(pattern, function, queries, keys):
            return False
    return _same(pattern, function, range(160), range(160))


def _same(pattern: MaskPattern, function: MaskFunction, queries: Iterable[int], keys: Iterable[int]) -> bool:
    queries, keys = list(queries), list(keys)
    expected = pattern.seen(torch.tensor(queries)[:, None], torch.tensor(keys)[None, :])
    return bool(torch.equal(expected, _evaluate(function, queries, keys)))


def _evaluate(function: MaskFunction, queries: list[int], keys: list[int]) -> torch.Tensor:
    """Bool `[len(queries), len(keys)]`."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    seen = function(zero, zero, torch.tensor(queries)[:, None], torch.tensor(keys)[None, :])
    return torch.broadcast_to(seen, (len(queries), len(keys))).to(torch.bool)


def _on_cpu(function: MaskFunction) -> tuple[MaskFunction, bool]:
    """`function` with plain values for the tensors of a run, and whether one of them is of block ids."""
    blockwise = False

    def convert(value: Any, name: str) -> Any:
        nonlocal blockwise
        if isinstance(value, tuple):
            return tuple(convert(item, name) for item in value)
        if isinstance(value, types.FunctionType) and value.__closure__:
            return rebuild(value)
        if isinstance(value, torch.Tensor):
            if name == "left_padding":
                return torch.zeros(value.shape, dtype=value.dtype)
            if name == "block_sequence_ids":
                blockwise = True
                return _NoBlocks()
            raise UnknownMaskError(f"its mask depends on the tensor {name}")
        return value

    def rebuild(value: types.FunctionType) -> types.FunctionType:
        cells = tuple(
            types.CellType(convert(cell.cell_contents, name))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        )
        return types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )

    converted: MaskFunction = convert(function, "")
    return converted, blockwise


class _NoBlocks:
    """Block ids of a text without multimodal spans: every look-up gives -1."""

    def __getitem__(self, index: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.full_like(index[-1], -1)
