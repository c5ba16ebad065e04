"""The heads of attention that a module computes itself, or the reason why they are unknown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from attnplug.integrations.reader.own_attention import OwnAttention

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nheads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def by_heads(
    attention: OwnAttention,
    value: torch.Tensor | None,
    modules: Sequence[torch.nn.Module],
    factors: Collection[float],
) -> Heads | str:
    """Queries, keys and values `[B, H, T, D]`, or a reason.

    Args:
        attention: what was followed.
        value: the values; None if the weights met none.
        modules: the module that attends, and those around it, the innermost first.
        factors: the numbers by which the module multiplied any tensor.
    """
    if attention.unknown or value is None:
        return attention.unknown or "does not multiply its weights with values"
    heads = _named(modules[:1], _HEADS)
    query, key, value = (_unfolded(each, heads) for each in (attention.query, attention.key, value))
    if not query.dim() == key.dim() == value.dim() == 4:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        return f"has queries, keys and values of the shapes {shapes}, whose heads are unknown"
    if query.shape[2] == key.shape[2] == 1:
        # Some decoders run the last token alone when they get a cache.
        return "has one query and one key, which show no mask"
    # Attention may see a copy of a KV head for every query head, and a cache would keep one.
    kv_heads = _named((modules[0], getattr(modules[0], "config", None)), _KV_HEADS)
    if kv_heads not in (None, key.shape[1]):
        return f"attends {key.shape[1]} KV heads, but names {kv_heads}"
    rest = sorted(set(factors) - attention.factors)
    if rest:
        return f"multiplies tensors by {', '.join(f'{each:.6g}' for each in rest)} in an unknown place"
    if not _projects(modules, query.shape[1] * query.shape[3]):
        return "has queries of a size that no weight of it has, so that they may be no tokens"
    return query, key, value


def _named(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _unfolded(tensor: torch.Tensor, heads: int | None) -> torch.Tensor:
    """`[B, H, T, D]` of `[B * H, T, D]`."""
    if tensor.dim() == 3 and heads and tensor.shape[0] % heads == 0:
        return tensor.reshape(-1, heads, *tensor.shape[1:])
    return tensor


def _projects(modules: Sequence[torch.nn.Module], size: int) -> bool:
    """Whether one weight makes queries of `size`, maybe with keys and values: those of channels do not fit.

    A module without weights gets its queries from the one around it.
    """
    weights = next((found for module in modules if (found := list(module.parameters()))), [])
    return any(length in (size, 2 * size, 3 * size) for weight in weights for length in weight.shape)
