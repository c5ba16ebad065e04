"""Mistakes in latent attention: parts of the latent or the query taken from the wrong place, or scaled wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from attnplug.testing.conformance.mistakes.attention_rules import AttentionRules, RequestContents

_Change: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""The tensor that is read in place of the last dimension's parts, from it and the size of its first part."""


def _as_is(tensor: torch.Tensor, first: int) -> torch.Tensor:
    return tensor


def _second_first(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """The parts where a reader finds them that takes the rotated part to be the first."""
    rotated = tensor.shape[-1] - first
    return torch.cat([tensor[..., rotated:], tensor[..., :rotated]], dim=-1)


def _last(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """The last elements in place of the first ones."""
    return torch.cat([tensor[..., tensor.shape[-1] - first :], tensor[..., first:]], dim=-1)


def _unrotate(tensor: torch.Tensor, first: int) -> torch.Tensor:
    return torch.cat([tensor[..., :first], torch.zeros_like(tensor[..., first:])], dim=-1)


def _expand(
    rules: AttentionRules, query: _Change = _as_is, key: _Change = _as_is, value: _Change = _as_is
) -> dict[str, Any]:
    """Rules with which queries, and the latents of keys and of values, are read as the changes say."""
    weights = rules.weights

    def expand(request: RequestContents) -> RequestContents:
        if weights is None or request.latent is None:
            return request
        nope, rank = weights.up_key.shape[1:]
        keys, values = key(request.latent, rank), value(request.latent, rank)
        rotated = keys[:, None, rank:].expand(-1, len(weights.up_key), -1)
        plain = torch.einsum("sl,hpl->shp", keys[:, :rank], weights.up_key)
        return dataclasses.replace(
            request,
            query=query(request.query, nope),
            key=torch.cat([plain, rotated], dim=2),
            value=torch.einsum("sl,hlv->shv", values[:, :rank], weights.up_value),
        )

    return {"expand": expand}


def latent_scale(rules: AttentionRules) -> dict[str, Any]:
    """The scale of the absorbed query, which is longer than the query."""
    if rules.weights is None:
        return {}
    nope, rank = rules.weights.up_key.shape[1:]
    return {"scale": (rules.head_size - nope + rank) ** -0.5}


def values_at_the_end(rules: AttentionRules) -> dict[str, Any]:
    """Values of the last elements of a latent."""
    return _expand(rules, value=_last)


def rotated_latent_first(rules: AttentionRules) -> dict[str, Any]:
    """Latents whose rotated part is taken to be the first."""
    return _expand(rules, key=_second_first, value=_second_first)


def rotated_key_first(rules: AttentionRules) -> dict[str, Any]:
    """Keys, and not values, whose rotated part is taken to be the first; so are absorbed queries in that order."""
    return _expand(rules, key=_second_first)


def rotated_query_first(rules: AttentionRules) -> dict[str, Any]:
    """Queries whose rotated part is taken to be the first."""
    return _expand(rules, query=_second_first)


def without_rotated_part(rules: AttentionRules) -> dict[str, Any]:
    """Keys without their rotated part."""
    return _expand(rules, key=_unrotate)


def rotated_halves_swapped(rules: AttentionRules) -> dict[str, Any]:
    """The halves of the query's rotated part in the other order."""

    def change(tensor: torch.Tensor, first: int) -> torch.Tensor:
        rotated = tensor[..., first:]
        return torch.cat([tensor[..., :first], rotated.roll(rotated.shape[-1] // 2, -1)], dim=-1)

    return _expand(rules, query=change)


def rotated_pairs_as_halves(rules: AttentionRules) -> dict[str, Any]:
    """The query's rotated part in the order of halves, where the keys' is in the order of pairs."""

    def change(tensor: torch.Tensor, first: int) -> torch.Tensor:
        rotated = tensor[..., first:]
        return torch.cat([tensor[..., :first], rotated[..., ::2], rotated[..., 1::2]], dim=-1)

    return _expand(rules, query=change)


def unscaled_rotated_part(rules: AttentionRules) -> dict[str, Any]:
    """The scale of 8-bit latents left out for their rotated part."""

    def change(tensor: torch.Tensor, first: int) -> torch.Tensor:
        return torch.cat([tensor[..., :first], tensor[..., first:] / rules.k_scale], dim=-1)

    return _expand(rules, key=change)


def unscaled_values(rules: AttentionRules) -> dict[str, Any]:
    """The scale of 8-bit latents left out for values."""
    return _expand(rules, value=lambda tensor, first: tensor / rules.k_scale)


def next_heads_values(rules: AttentionRules) -> dict[str, Any]:
    """W_UV of the next head."""
    if rules.weights is None:
        return {}
    weights = rules.weights._replace(up_value=rules.weights.up_value.roll(-1, 0))
    return _expand(dataclasses.replace(rules, weights=weights))
