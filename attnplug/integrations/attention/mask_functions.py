"""The pattern of positions in a transformers mask function, and the tensors that it depends on."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.integrations.attention.spans import read_spans, seen_by
from attnplug.integrations.reader.mask_pattern import MaskFunction, MaskPattern, UnknownMaskError, read_mask

_LIBRARY = "transformers.masking_utils"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReadMask:
    """A mask function: its pattern, and the tensors that it depends on.

    `left_padding` is each row's first token, int `[B]`, if chunks begin there. `segments` are the numbers of the
    sequences that are packed in each row, int `[B, L]`; a query sees its own sequence only. `spans` are the keys
    that tokens of multimodal blocks see, int64 `[B, Lq, 2]` as positions, (0, 0) for text; None if all is text.
    """

    pattern: MaskPattern
    left_padding: torch.Tensor | None
    segments: torch.Tensor | None
    spans: npt.NDArray[np.int64] | None = None


def read_mask_function(
    function: MaskFunction, batch: int, queries: range, keys: range, device: torch.device
) -> ReadMask:
    """The pattern of `function` for rows `0 .. batch - 1` and these positions.

    transformers' own functions are read once for each window and chunk. Other functions are also evaluated at
    every given position.

    Raises:
        UnknownMaskError: it is neither full, causal, a window nor chunks, with spans or without.
    """
    walk = _Walk()
    key, plain = walk.visit(function, "mask_function")
    try:
        pattern = _pattern(_Code(key, plain))
        spans = None
        if walk.has_blocks:
            spans = read_spans(function, pattern, batch, queries, keys, device)
        agrees = (
            walk.has_blocks or not walk.foreign or _agrees(function, pattern, batch, queries, keys, device)
        )
    except UnknownMaskError:
        raise
    except Exception as error:
        raise UnknownMaskError(
            f"its function cannot be evaluated ({type(error).__name__}: {error})"
        ) from error
    if not agrees:
        raise UnknownMaskError("its mask is neither full, causal, a window nor chunks")
    if walk.positions is not None:
        _check_positions(walk.positions, walk.segments, pattern.chunk_size)
    pattern = dataclasses.replace(pattern, blockwise=spans is not None)
    return ReadMask(pattern, walk.left_padding, walk.segments, spans)


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """A mask function without its tensors; equal to all others with the same code and constants."""

    key: Hashable
    function: MaskFunction = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=256)
def _pattern(code: _Code) -> MaskPattern:
    return read_mask(code.function)


class _Walk:
    """Takes a mask function apart: code and constants make a cache key, and tensors are judged by name.

    `foreign` is set if a part of the function is not transformers' own, `has_blocks` if blocks of tokens see each
    other in it.
    """

    def __init__(self) -> None:
        self.foreign = False
        self.has_blocks = False
        self.left_padding: torch.Tensor | None = None
        self.segments: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None

    def visit(self, value: Any, name: str) -> tuple[Hashable, Any]:
        """The cache key of `value`, and `value` with meta tensors."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            parts = [self.visit(item, name) for item in value]
            return tuple(key for key, _ in parts), tuple(plain for _, plain in parts)
        if isinstance(value, torch.Tensor):
            return name, self._tensor(value, name)
        if value is None or isinstance(value, (bool, int, float, str)):
            return (type(value), value), value
        raise UnknownMaskError(f"it depends on {name}, a {type(value).__name__}")

    def _function(self, function: types.FunctionType) -> tuple[Hashable, Any]:
        # A caller's function may treat rows or positions differently, so it is evaluated at all of them.
        is_own = function.__globals__.get("__name__") == _LIBRARY
        if not is_own:
            self.foreign = True
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        parts = [self._cell(cell.cell_contents, name, is_own) for name, cell in cells]
        defaults = self.visit(function.__defaults__, "default")
        plain = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            defaults[1],
            tuple(types.CellType(part) for _, part in parts),
        )
        return (function.__code__, defaults[0], tuple(key for key, _ in parts)), plain

    def _cell(self, value: Any, name: str, is_own: bool) -> tuple[Hashable, Any]:
        # Newer transformers (seen in 5.23) ask the mask of packed rows for the positions in each sequence.
        if is_own and name == "position_ids" and isinstance(value, torch.Tensor):
            self.positions = value
            return name, _OwnPositions()
        return self.visit(value, name)

    def _tensor(self, tensor: torch.Tensor, name: str) -> Any:
        """A meta tensor in place of one that does not change the pattern; `read_mask` makes it real."""
        # These names are variables in the mask functions of transformers.masking_utils, seen in 5.17.
        if name == "left_padding":
            self.left_padding = tensor
        elif name == "packed_sequence_mask":
            self.segments = tensor
            return _OneSegment()
        elif name != "block_sequence_ids":
            raise UnknownMaskError(f"it depends on the tensor {name}")
        elif bool((tensor >= 0).any()):
            self.has_blocks = True
        return tensor.to("meta")


class _OneSegment:
    """The sequence numbers of a row without packed sequences: every look-up gives 0."""

    def __getitem__(self, index: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.zeros_like(index[-1])


class _OwnPositions:
    """Positions that are each token's place in its row, so that a pattern is read as of one sequence."""

    def __getitem__(self, index: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return index[-1]


def _check_positions(positions: torch.Tensor, segments: torch.Tensor | None, chunk: int | None) -> None:
    """UnknownMaskError unless positions ascend by one in each sequence, and chunks begin where it begins."""
    where = segments.expand_as(positions) if segments is not None else torch.zeros_like(positions)
    continues = where[:, 1:] == where[:, :-1]
    if bool((continues & (positions.diff(dim=-1) != 1)).any()):
        raise UnknownMaskError("its position_ids do not ascend by one in each sequence")
    begins = torch.nn.functional.pad(~continues, (1, 0), value=True)
    if chunk is not None and bool((begins & (positions % chunk != 0)).any()):
        raise UnknownMaskError(f"its position_ids begin inside a chunk of {chunk}")


def _agrees(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> bool:
    found, expected = seen_by(function, pattern, batch, queries, keys, device)
    return bool((found == expected).all())
