"""Merging partial attention results by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.ops.checks import check_merge
from attnplug.ops.triton import triton_ops


def merge_attn_states(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint keys, into the tensors given; see `merge`.

    With triton a GPU runs one kernel. A sink belongs to exactly one partial, whose LSE counts it; merging neither
    adds nor removes one.

    Args:
        outputs: `[T, H, Dv]` each.
        lses: float32 `[T, H]` each, natural log.
        output: `[T, H, Dv]`, written where given; may be one of `outputs`.
        output_lse: float32 `[T, H]`, written where given; may be one of `lses`.

    Returns:
        The merged output and LSE.

    Raises:
        BatchError: shapes or devices that do not fit each other; an output that shares memory with another argument.
    """
    check_merge(outputs, lses, output, output_lse)
    return merge_into(outputs, lses, output, output_lse)


def merge_into(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` without its checks, for tensors that the caller made itself."""
    kernels = triton_ops("merging") if outputs[0].is_cuda else None
    if kernels is not None:
        on_gpu: tuple[torch.Tensor, torch.Tensor]
        on_gpu = kernels.merge_into(outputs, lses, output, output_lse)
        return on_gpu
    merged, lse = _merge(outputs, lses)
    return (
        merged if output is None else output.copy_(merged),
        lse if output_lse is None else output_lse.copy_(lse),
    )


def merge(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of partial results over disjoint keys as one: output `[T, H, Dv]` and LSE `[T, H]`.

    It is plain torch on every device, in float32 relative to the largest LSE of each row. Rows that no partial saw
    get output 0 and LSE -inf. The output has the dtype of the first partial.

    Args:
        outputs: `[T, H, Dv]` each.
        lses: float32 `[T, H]` each, natural log, of the logits as softmaxed.

    Raises:
        BatchError: no partial, or shapes that do not fit each other.
    """
    check_merge(outputs, lses)
    return _merge(outputs, lses)


def _merge(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    stacked = torch.stack([lse.float() for lse in lses])
    top = stacked.amax(0)
    # In rows without any key a finite pivot keeps -inf - pivot from becoming NaN.
    pivot = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(stacked - pivot)
    total = weights.sum(0)
    weights = weights / torch.where(total == 0, 1.0, total)
    merged = torch.zeros(outputs[0].shape, dtype=torch.float32, device=outputs[0].device)
    for out, weight in zip(outputs, weights, strict=True):
        seen = weight[..., None]
        # A partial that saw nothing may hold NaN, and NaN times a weight of 0 is NaN.
        merged += torch.where(seen > 0, out.float(), 0.0) * seen
    lse = torch.where(total == 0, -torch.inf, pivot + total.log())
    return merged.to(outputs[0].dtype), lse
