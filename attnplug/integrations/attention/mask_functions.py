"""What a transformers mask function says: a pattern of positions, and the tensors it depends on besides."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable
from typing import Any

import torch

from attnplug.integrations.reader.mask_pattern import (
    MaskFunction,
    MaskPattern,
    UnknownMaskError,
    read_mask,
)

__all__ = ["MaskReading", "UnknownMaskError", "read_mask_function"]

_LIBRARY = "transformers.masking_utils"
_PACKED = "it keeps packed sequences apart (position_ids restart inside a row)"
_BLOCKS = "spans of tokens see each other in both directions"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MaskReading:
    """One mask function as it was read.

    `left_padding` is the int tensor `[B]` of each row's first token, where chunks are counted from it.
    """

    pattern: MaskPattern
    left_padding: torch.Tensor | None


def read_mask_function(
    function: MaskFunction, batch: int, queries: range, keys: range, device: torch.device
) -> MaskReading:
    """The pattern of `function`, asked about rows `0 .. batch - 1` and these positions.

    transformers' own functions are read once for each window and chunk; any other is evaluated at every
    position asked about, as transformers itself would.

    Raises:
        UnknownMaskError: it is neither full, causal, a window nor chunks.
    """
    walk = _Walk()
    code = walk.code(function)
    try:
        pattern = _pattern(code)
    except UnknownMaskError:
        raise
    except Exception as error:
        raise UnknownMaskError(
            f"its function cannot be evaluated ({type(error).__name__}: {error})"
        ) from error
    if walk.foreign:
        _check_everywhere(function, pattern, batch, queries, keys, device)
    return MaskReading(dataclasses.replace(pattern, blockwise=False), walk.left_padding)


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """A mask function without its tensors, equal to any other with the same code and constants."""

    key: Hashable
    function: MaskFunction = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=256)
def _pattern(code: _Code) -> MaskPattern:
    return read_mask(code.function)


class _Walk:
    """Takes a mask function apart: its code and constants make a key, its tensors are judged by name."""

    def __init__(self) -> None:
        self.foreign = False
        self.left_padding: torch.Tensor | None = None

    def code(self, function: MaskFunction) -> _Code:
        key, plain = self._part(function, "mask_function")
        return _Code(key, plain)

    def _part(self, value: Any, name: str) -> tuple[Hashable, Any]:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            parts = [self._part(item, name) for item in value]
            return tuple(key for key, _ in parts), tuple(plain for _, plain in parts)
        if isinstance(value, torch.Tensor):
            return name, self._tensor(value, name)
        if value is None or isinstance(value, (bool, int, float, str)):
            return (type(value), value), value
        raise UnknownMaskError(f"it depends on {name}, a {type(value).__name__}")

    def _function(self, function: types.FunctionType) -> tuple[Hashable, Any]:
        if function.__globals__.get("__name__") != _LIBRARY:
            self.foreign = True
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        parts = [self._part(cell.cell_contents, name) for name, cell in cells]
        defaults = self._part(function.__defaults__, "default")
        plain = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            defaults[1],
            tuple(types.CellType(part) for _, part in parts),
        )
        return (function.__code__, defaults[0], tuple(key for key, _ in parts)), plain

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A meta tensor in place of one that does not change the pattern; the reader makes it real."""
        if name == "left_padding":
            self.left_padding = tensor
        elif name == "packed_sequence_mask":
            raise UnknownMaskError(_PACKED)
        elif name != "block_sequence_ids":
            raise UnknownMaskError(f"it depends on the tensor {name}")
        elif bool((tensor >= 0).any()):
            raise UnknownMaskError(_BLOCKS)
        return tensor.to("meta")


def _check_everywhere(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> None:
    query = torch.arange(queries.start, queries.stop, device=device)[None, None, :, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, None, None, :]
    rows = torch.arange(batch, device=device)[:, None, None, None]
    try:
        found = function(rows, torch.zeros_like(rows[:1]), query, key).to(torch.bool)
    except Exception as error:
        raise UnknownMaskError(
            f"its function cannot be evaluated ({type(error).__name__}: {error})"
        ) from error
    if not bool((found == pattern.seen(query, key)).all()):
        raise UnknownMaskError("its mask is neither full, causal, a window nor chunks")
