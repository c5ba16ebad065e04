"""Reads the pattern of a 4-D mask that a caller or a model made: plain causal or full, with padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch

from attnplug.integrations.attention.forward_pass import forward_pass
from attnplug.integrations.attention.step_mask import StepMask
from attnplug.integrations.reader.mask_pattern import MaskPattern

_HIDDEN = -1e4
"""The largest value that hides a key; some models add -1e4 in place of the smallest number of the dtype."""
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
    for offset in _offsets(seen, q_length, kv_length):
        # A single query sees the keys that are tokens; it is causal only if its own key is one of them.
        is_query_seen = q_length > 1 or bool(real[:, offset].all())
        if is_query_seen and _is_causal(seen, real, offset):
            return dataclasses.replace(step, pattern=_CAUSAL, q_offset=offset, keys_only=False)
    if bool((seen == real[:, None]).all()):
        return step
    return "it is neither plain causal nor full with padding"


def _offsets(seen: torch.Tensor, q_length: int, kv_length: int) -> list[int]:
    """Possible positions of the first query: the last keys are the queries', or a static cache has keys after them."""
    last = torch.arange(kv_length, device=seen.device).masked_fill(~seen[:, -1], -1).max()
    found = [kv_length - q_length, int(last) - q_length + 1]
    return sorted({offset for offset in found if offset >= 0}, reverse=True)


def _is_causal(seen: torch.Tensor, real: torch.Tensor, offset: int) -> bool:
    query = offset + torch.arange(seen.shape[1], device=seen.device)
    key = torch.arange(seen.shape[2], device=seen.device)
    expected = (key <= query[:, None]) & real[:, None]
    same = (seen == expected).all(dim=2)
    # A query that is padding has no result to compare; masks hide every key from it, or none.
    unused = ~real[:, offset : offset + seen.shape[1]] & (~seen.any(dim=2) | seen.all(dim=2))
    return bool((same | unused).all())
