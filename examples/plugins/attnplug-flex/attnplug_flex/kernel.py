"""The calls of FlexAttention: score modifications, and the compiled and uncompiled ways to run it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

__all__ = ["ScoreMod", "attend_piece", "score_mod"]

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_KERNELS = 256
"""Kernels that one process may compile; past it torch raises. (Its own limit of 8 is less than a model may need.)"""
_TRACER = threading.Lock()
"""Around each call torch sets switches of its tracer and sets them back, for the whole process."""


def score_mod(
    soft_cap: torch.Tensor | None, slopes: torch.Tensor | None, places: torch.Tensor
) -> ScoreMod | None:
    """Soft cap, then ALiBi; None where there is neither. Numbers are tensors, so that no kernel is made for each.

    Args:
        soft_cap: c of `c * tanh(score / c)`, float32 scalar.
        slopes: float32 `[num_heads]`.
        places: int32 `[rows]`, the place of each row on the axis of the keys.
    """
    if soft_cap is None and slopes is None:
        return None

    def modified(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if slopes is not None:
            score = score - slopes[head] * (key - places[row]).abs()
        return score

    return modified


def attend_piece(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    modification: ScoreMod | None,
    mask: BlockMask,
    scale: float,
    *,
    compiled: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[rows, H, Dv]` and natural LSE `[rows, H]`; 0 and -inf in rows that see nothing.

    Args:
        query: `[rows, H, D]`.
        key: `[keys, Hkv, D]`.
        value: `[keys, Hkv, Dv]`.
        modification: of scaled scores.
        mask: rows x keys.
        scale: softmax scale.
        compiled: whether to run a kernel of torch.compile.
    """
    arguments = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    with _TRACER:
        run = _compiled() if compiled else _uncompiled()
        with _limit():
            output, aux = run(
                *arguments,
                score_mod=modification,
                block_mask=mask,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
                return_aux=AuxRequest(lse=True),
            )
    return output[0].transpose(0, 1), aux.lse[0].transpose(0, 1)


@functools.cache
def _limit() -> contextlib.AbstractContextManager[Any]:
    # One for all calls: each that torch makes stays in the thread's context for ever.
    return torch._dynamo.config.patch(recompile_limit=_KERNELS)


@functools.cache
def _compiled() -> Callable[..., Any]:
    # fullgraph: without it a layer past the limit would run uncompiled, and nobody would know.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@functools.cache
def _uncompiled() -> Callable[..., Any]:
    # flex_attention by itself compiles a new function in each call, and torch keeps each of them.
    return torch.compile(flex_attention, backend="eager", dynamic=True, fullgraph=True)
