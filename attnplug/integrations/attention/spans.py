"""Multimodal spans of a step, read from the values of a mask function that shows blocks of tokens to each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attnplug.integrations.reader.mask_pattern import MaskFunction, MaskPattern, UnknownMaskError

_Ints = npt.NDArray[np.int64]

_MOST = 1 << 24
"""Values of a mask that are computed at once."""


def read_spans(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> _Ints | None:
    """The keys that each query sees, int64 `[B, Lq, 2]` as positions `[start, stop)`; (0, 0) for those of `pattern`.

    None if all queries see the keys of `pattern`. A query that sees more has one range, with the keys of `pattern`
    in it: an image's tokens see the image, or the part of it that a window leaves.

    Raises:
        UnknownMaskError: a query sees fewer keys, or keys that are not one range, or ranges are out of order.
    """
    keys = range(keys.start, min(keys.stop, queries.stop))
    if not keys or not queries:
        return None
    step = max(_MOST // (batch * len(keys)), 1)
    starts = range(queries.start, queries.stop, step)
    parts = [
        _ranges(function, pattern, batch, range(start, min(start + step, queries.stop)), keys, device)
        for start in starts
    ]
    seen, plain = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    # Kernels scan a tile of queries from the first key of its first query to the last key of its last one.
    if (np.diff(seen, axis=1) < 0).any():
        raise UnknownMaskError("spans of tokens that see each other are not one after the other")
    differ = (seen != plain).any(axis=2)
    return np.where(differ[:, :, None], seen, 0) if differ.any() else None


def _ranges(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> tuple[_Ints, _Ints]:
    """The range of keys of each query, and the one that `pattern` gives: int64 `[B, n, 2]`."""
    seen, plain = seen_by(function, pattern, batch, queries, keys, device)
    if bool((plain & ~seen).any()):
        raise UnknownMaskError("tokens of a block do not see all that the rest of the mask shows them")
    found, is_one = _range_of(seen, keys.start)
    if not is_one:
        raise UnknownMaskError("a token sees keys that are not one range")
    return found, _range_of(plain, keys.start)[0]


def seen_by(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that each query sees, and those that `pattern` shows it: bool `[B, Lq, Lk]`."""
    query = torch.arange(queries.start, queries.stop, device=device)[None, None, :, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, None, None, :]
    rows = torch.arange(batch, device=device)[:, None, None, None]
    shape = batch, 1, len(queries), len(keys)
    seen = function(rows, torch.zeros_like(rows[:1]), query, key).to(torch.bool)
    return seen.expand(shape)[:, 0], pattern.seen(query, key).expand(shape)[:, 0]


def _range_of(seen: torch.Tensor, start: int) -> tuple[_Ints, bool]:
    """The first seen key and one past the last `[B, n, 2]`, and whether all keys between them are seen."""
    count, size = seen.sum(-1), seen.shape[-1]
    first = seen.int().argmax(-1)
    stop = torch.where(count > 0, size - seen.flip(-1).int().argmax(-1), first)
    is_one = bool((stop - first == count).all())
    return (torch.stack([first, stop], -1) + start).cpu().numpy(), is_one
