"""Compares a modelling file's own attention with softmax attention of its scale, soft cap, mask and sinks."""

from __future__ import annotations

import math
from typing import Any

import torch

from attnplug.integrations.reader.mask_pattern import MaskPattern
from attnplug.integrations.reader.own_attention import LOGITS, MASK, OwnAttention
from attnplug.integrations.reader.trace import AttentionCall

_TOKENS = 6
_MOST_ELEMENTS = 1 << 23
"""Elements of one real tensor: 128 heads of 512 have 393,216 here, and more would take seconds."""


class CheckFailedError(Exception):
    """The file's own attention cannot be run, or its arguments do not describe its result."""


def check_eager(call: AttentionCall) -> bool:
    """Run the file's own attention on small random tensors and compare; True if it uses sinks.

    If the function reads a parameter of its module (sinks), it gets random values of the same shape.
    CheckFailedError if the result differs from softmax attention with the call's arguments.
    """
    if call.eager is None:
        raise CheckFailedError("the modelling file has no attention function of its own to compare with")
    generator = torch.Generator(device="cpu").manual_seed(0)
    module = _Standin(call.module, generator)
    keywords = {name: module.real(value) for name, value in call.keywords.items()}
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    size, size_v = call.query.shape[3], call.value.shape[3]
    # Meta tensors have no values to compare, so the check needs real tensors on the CPU.
    with torch.device("cpu"), torch.no_grad():
        query = _random((1, heads, _TOKENS, size), generator)
        key = _random((1, kv_heads, _TOKENS, size), generator)
        value = _random((1, kv_heads, _TOKENS, size_v), generator)
        # Some functions that never get a mask would not add one.
        mask = None if call.mask is None else torch.full((_TOKENS, _TOKENS), -1e9).triu(1)[None, None]
        try:
            found, _ = call.eager(
                module, query, key, value, mask, dropout=0.0, scaling=call.scaling, **keywords
            )
        except CheckFailedError:
            raise
        except Exception as error:
            raise CheckFailedError(f"its attention function cannot be run ({error})") from error
        sinks = keywords.get("s_aux")
        if sinks is None:
            sinks = module.sinks_read(heads)
        scale = size**-0.5 if call.scaling is None else call.scaling
        expected = _attention(query * scale, key, value, mask, keywords.get("softcap"), sinks)
    if found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=1e-3, atol=1e-4):
        raise CheckFailedError("its attention function gives other numbers than its arguments say")
    return sinks is not None


def check_own(call: AttentionCall) -> None:
    """Run the operations that a module's own attention applies to its logits, and compare likewise.

    CheckFailedError if the result differs from softmax attention with the scale and the mask of `call`.
    """
    own = call.own
    if own is None or call.scaling is None:
        return
    generator = torch.Generator(device="cpu").manual_seed(0)
    # An operation with a shape or a mask of its own needs the number of tokens of the recorded run.
    free = own.whole or all(func in (torch.mul, torch.add) for func, _, _ in own.operations)
    queries, keys = (_TOKENS, _TOKENS) if free else (own.query.shape[-2], own.key.shape[-2])
    with torch.device("cpu"), torch.no_grad():
        query = _random((*own.query.shape[:-2], queries, own.query.shape[-1]), generator)
        key = _random((*own.key.shape[:-2], keys, own.key.shape[-1]), generator)
        value = _random((*own.key.shape[:-2], keys, call.value.shape[-1]), generator)
        mask = None
        if isinstance(call.mask, MaskPattern):
            seen = call.mask.seen(torch.arange(queries)[:, None], torch.arange(keys))
            mask = torch.zeros(queries, keys).masked_fill(~seen, -1e9)
        found = _own_output(own, query, key, value, mask)
        heads = [
            each.reshape(-1, recorded.shape[1], *each.shape[-2:])
            for each, recorded in ((query, call.query), (key, call.key), (value, call.value))
        ]
        expected = _attention(heads[0] * call.scaling, heads[1], heads[2], mask, None, None).transpose(1, 2)
    if not torch.allclose(found.reshape(expected.shape), expected, rtol=1e-3, atol=1e-4):
        raise CheckFailedError("its operations give other numbers than the scale and the mask that were read")


def _own_output(
    own: OwnAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The product of weights and values, `[..., H, T, Dv]`."""
    query = query * own.before
    if own.whole:
        ((func, _, given),) = own.operations
        output: torch.Tensor = func(
            query, key, value, **{name: mask if each is MASK else each for name, each in given.items()}
        )
        return output
    logits = query @ key.transpose(-1, -2)
    for func, args, given in own.operations:
        replaced = {id(LOGITS): logits, id(MASK): mask}
        logits = func(*(replaced.get(id(each), each) for each in args), **given)
    weights = logits.softmax(dim=-1)
    if weights.dim() != value.dim():
        weights = weights.reshape(*value.shape[:-2], *weights.shape[-2:])
    return weights @ value


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random numbers; CheckFailedError for a shape that a configuration with too large sizes gives."""
    if math.prod(shape) > _MOST_ELEMENTS:
        raise CheckFailedError(f"a tensor of the shape {shape} has more than {_MOST_ELEMENTS} elements")
    return torch.randn(shape, generator=generator, device="cpu")


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`[1, T, H, Dv]` of scaled `query [1, H, T, D]` and `key`, `value` `[1, Hkv, T, D or Dv]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    logits = query @ key.transpose(2, 3)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if mask is not None:
        logits = logits + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(1, query.shape[1], query.shape[2], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


class _Standin:
    """An attention module with random tensors in place of meta tensors; records the tensors read."""

    def __init__(self, module: torch.nn.Module, generator: torch.Generator) -> None:
        self._module = module
        self._generator = generator
        self._real: dict[int, torch.Tensor] = {}
        self._read: list[torch.Tensor] = []

    def real(self, value: Any) -> Any:
        """`value`; for a meta tensor, its random replacement."""
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        if id(value) not in self._real:
            shape = tuple(value.shape)
            drawn = _random(shape, self._generator)
            self._real[id(value)] = drawn if value.is_floating_point() else drawn.to(value.dtype)
        return self._real[id(value)]

    def sinks_read(self, heads: int) -> torch.Tensor | None:
        """The tensor of one number per head that the function read from its module, if any."""
        return next((tensor for tensor in self._read if tensor.numel() == heads), None)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, torch.Tensor):
            value = self.real(value)
            self._read.append(value)
        return value
