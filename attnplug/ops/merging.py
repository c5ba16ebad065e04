"""Putting partial attention results together by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.core.errors import BatchError

__all__ = ["merge", "merge_attn_states"]


def merge_attn_states(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint keys, into the tensors given; see `merge`.

    A sink belongs to exactly one partial: its LSE counts it, and merging neither adds nor removes one.

    Args:
        outputs: `[T, H, Dv]` each.
        lses: float32 `[T, H]` each, natural log.
        output: `[T, H, Dv]`, written where given; may be one of `outputs`.
        output_lse: float32 `[T, H]`, written where given; may be one of `lses`.

    Returns:
        The merged output and LSE.

    Raises:
        BatchError: shapes that do not fit each other.
    """
    merged = merge(outputs, lses)
    given = (("output", output, merged[0]), ("output_lse", output_lse, merged[1]))
    for name, tensor, result in given:
        if tensor is not None and tensor.shape != result.shape:
            raise BatchError(name, tuple(tensor.shape), f"must have the shape {tuple(result.shape)}")
    filled = [result if tensor is None else tensor.copy_(result) for _, tensor, result in given]
    return filled[0], filled[1]


def merge(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of partial results over disjoint keys as one: output `[T, H, Dv]` and LSE `[T, H]`.

    Computed in float32 from the largest LSE of each row; rows that no partial saw give output 0 and
    LSE -inf. The output has the dtype of the first partial.

    Args:
        outputs: `[T, H, Dv]` each.
        lses: float32 `[T, H]` each, natural log, of the logits as softmaxed.

    Raises:
        BatchError: no partial, or shapes that do not fit each other.
    """
    if not len(outputs) or len(outputs) != len(lses):
        raise BatchError("outputs", len(outputs), f"must be as many as lses ({len(lses)}), at least one")
    shape = outputs[0].shape
    for index, (out, lse) in enumerate(zip(outputs, lses, strict=True)):
        if out.shape != shape or lse.shape != shape[:-1]:
            found = (tuple(out.shape), tuple(lse.shape))
            limit = f"must have the shapes {tuple(shape)} and {tuple(shape[:-1])}"
            raise BatchError(f"outputs[{index}], lses[{index}]", found, limit)
    stacked = torch.stack([lse.float() for lse in lses])
    top = stacked.amax(0)
    # Rows that nothing saw: any finite pivot keeps -inf - pivot from becoming NaN.
    pivot = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(stacked - pivot)
    total = weights.sum(0)
    weights = weights / torch.where(total == 0, 1.0, total)
    merged = torch.zeros(shape, dtype=torch.float32, device=outputs[0].device)
    for out, weight in zip(outputs, weights, strict=True):
        seen = weight[..., None]
        merged += torch.where(seen > 0, out.float(), 0.0) * seen
    lse = torch.where(total == 0, -torch.inf, pivot + total.log())
    return merged.to(outputs[0].dtype), lse
