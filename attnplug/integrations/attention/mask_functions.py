"""The pattern of positions in a transformers mask function, and the tensors that it depends on.

Reads the pattern of a 4-D mask that a caller or a model made: plain causal or full, with padding.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.integrations.attention.model_hooks import forward_pass
from attnplug.integrations.attention.step_mask import StepMask, read_spans, seen_by
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
        agrees = True
        if walk.foreign and not walk.has_blocks:
            found, expected = seen_by(function, pattern, batch, queries, keys, device)
            agrees = bool((found == expected).all())
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
        parts: list[tuple[Hashable, Any]] = []
        for name, cell in cells:
            value = cell.cell_contents
            # Newer transformers (seen in 5.23) ask the mask of packed rows for the positions in each sequence.
            if is_own and name == "position_ids" and isinstance(value, torch.Tensor):
                self.positions = value
                parts.append((name, _OwnPositions()))
            else:
                parts.append(self.visit(value, name))
        defaults = self.visit(function.__defaults__, "default")
        plain = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            defaults[1],
            tuple(types.CellType(part) for _, part in parts),
        )
        return (function.__code__, defaults[0], tuple(key for key, _ in parts)), plain

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


# The largest value that hides a key; some models add -1e4 in place of the smallest number of the dtype.
_HIDDEN = -1e4
_CAUSAL, _FULL = MaskPattern((-1, 0)), MaskPattern((-1, -1))


def read_given_mask(mask: torch.Tensor, batch: int, q_length: int, kv_length: int) -> StepMask | str:
    """The step that `mask [B or 1, 1, Lq or 1, Lk]` describes, or a reason; cached in a watched model's forward.

    A bool mask is True for keys that a query sees. A float mask is added to the logits: 0 for those keys, and at
    most -1e4 for others.
    """
    version = None if mask.is_inference() else mask._version
    place = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device, version)
    key: Hashable = (*place, batch, q_length, kv_length)
    known = forward_pass.masks.get(key)
    if known is None:
        known = (_read(mask, batch, q_length, kv_length), mask)
        if forward_pass.root is not None:
            # The mask is kept, because another tensor could otherwise get its memory.
            forward_pass.masks[key] = known
    found: StepMask | str = known[0]
    return found


def _read(mask: torch.Tensor, batch: int, q_length: int, kv_length: int) -> StepMask | str:
    if mask.ndim != 4 or mask.shape[1] != 1:
        return "it is not [B, 1, Lq, Lk]"
    fits = mask.shape[0] in (1, batch) and mask.shape[2] in (1, q_length) and mask.shape[3] == kv_length
    if not fits:
        return f"it does not fit ({batch}, 1, {q_length}, {kv_length})"
    if mask.dtype is torch.bool:
        seen = mask
    elif mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= _HIDDEN)).all()):
            return "it adds values other than 0 and minus infinity to the logits"
    else:
        return f"its dtype is {mask.dtype}"
    seen = seen.expand(batch, 1, q_length, kv_length)[:, 0]
    real = seen.any(dim=1)
    padding = None if bool(real.all()) else real
    step = StepMask(
        pattern=_FULL,
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        padding=padding,
        keys_only=padding is not None,
    )
    # The last keys are the queries', or a static cache has keys after them.
    last = int(torch.arange(kv_length, device=seen.device).masked_fill(~seen[:, -1], -1).max())
    offsets = {kv_length - q_length, last - q_length + 1}
    for offset in sorted((offset for offset in offsets if offset >= 0), reverse=True):
        # A single query sees the keys that are tokens; it is causal only if its own key is one of them.
        is_query_seen = q_length > 1 or bool(real[:, offset].all())
        if is_query_seen and _is_causal(seen, real, offset):
            return dataclasses.replace(step, pattern=_CAUSAL, q_offset=offset, keys_only=False)
    if bool((seen == real[:, None]).all()):
        return step
    return "it is neither plain causal nor full with padding"


def _is_causal(seen: torch.Tensor, real: torch.Tensor, offset: int) -> bool:
    query = offset + torch.arange(seen.shape[1], device=seen.device)
    key = torch.arange(seen.shape[2], device=seen.device)
    expected = (key <= query[:, None]) & real[:, None]
    same = (seen == expected).all(dim=2)
    # A query that is padding has no result to compare; masks hide every key from it, or none. At the end of a row it
    # may see the keys before it. Elsewhere such a query may be a token of which only the key is hidden.
    hidden = ~real[:, offset : offset + seen.shape[1]]
    ends = ~real.flip(1).cummax(dim=1).values.flip(1)[:, offset : offset + seen.shape[1]]
    unused = hidden & (~seen.any(dim=2) | seen.all(dim=2))
    return bool((same & (~hidden | ends) | unused).all())
