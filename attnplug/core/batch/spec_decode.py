"""Tokens of a uniform decode batch with a dimension per request, and back."""

from __future__ import annotations

import torch

from attnplug.core.arguments import Shape
from attnplug.core.batch.host import check_count
from attnplug.core.errors import BatchError

_ROWS = Shape("*")


def reshape_query_for_spec_decode(query: torch.Tensor, batch_size: int) -> torch.Tensor:
    """`query [T, H, D]` as `[batch_size, T / batch_size, H, D]`, a view.

    Raises:
        BatchError: another number of dimensions, or tokens that do not divide among the requests.
    """
    _ROWS.check("query", query, {})
    if query.ndim != 3:
        raise BatchError("query", tuple(query.shape), "must be [tokens, heads, head_size]")
    check_count("batch_size", batch_size, 1)
    num_tokens, num_heads, head_size = query.shape
    if num_tokens % batch_size:
        raise BatchError(
            "batch_size", batch_size, f"must divide the {num_tokens} tokens: as many per request"
        )
    # No -1: its size cannot be told where there are no elements.
    return query.view(batch_size, num_tokens // batch_size, num_heads, head_size)


def reshape_attn_output_for_spec_decode(attn_output: torch.Tensor) -> torch.Tensor:
    """`[B, n, H, D]` as `[B * n, H, D]`; three dimensions pass through.

    Raises:
        BatchError: another number of dimensions.
    """
    _ROWS.check("attn_output", attn_output, {})
    if attn_output.ndim == 3:
        return attn_output
    if attn_output.ndim != 4:
        limit = "must be [requests, tokens, heads, head_size] or [tokens, heads, head_size]"
        raise BatchError("attn_output", tuple(attn_output.shape), limit)
    return attn_output.flatten(0, 1)
