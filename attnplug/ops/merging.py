"""Merging partial attention results by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.core.arguments import checked
from attnplug.core.errors import BatchError
from attnplug.ops.checks import check_apart, check_lengths, check_merge, check_numbers, check_written
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


@checked(
    outputs="N H Dv: floats",
    lses="N H: float32",
    starts="T+1: int32",
    entries="E: int32",
    output="S H Dv: floats",
    output_lse="?S H: float32",
)
def merge_rows(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    starts: torch.Tensor,
    entries: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """Merge for each row the partial results that its list names, over disjoint keys.

    With triton a GPU runs one kernel, for lists of any lengths. Rows with an empty list, or without any key, get output
    0 and LSE -inf.

    Args:
        outputs: `[N, H, Dv]`, the rows of all partial results, in any order.
        lses: float32 `[N, H]`, natural log; -inf where a row saw no key, whose output is not read.
        starts: int32 `[T + 1]`: row t merges the partial rows `entries[starts[t] : starts[t + 1]]`.
        entries: int32 `[E]`, numbers of partial rows.
        output: `[at least T, H, Dv]`, written up to row T.
        output_lse: float32 `[at least T, H]`, written where given.

    Raises:
        BatchError: tensors of other shapes, dtypes or devices; fewer rows than lists; an output that shares memory with
            another argument. On a CPU also a list that does not end with the entries, or an entry without a partial row.
    """
    rows = starts.shape[0] - 1
    if output.shape[0] < rows:
        raise BatchError("output", tuple(output.shape), f"must have at least {rows} rows, one for each list")
    given = {"outputs": outputs, "lses": lses, "starts": starts, "entries": entries}
    check_written("output", output)
    check_apart("output", output, **given, output_lse=output_lse)
    if output_lse is not None:
        check_written("output_lse", output_lse)
        check_apart("output_lse", output_lse, **given)
    if output.device.type == "cpu":
        check_lengths("starts", starts, "entries", entries.shape[0])
        limit = f"must be in 0 .. {outputs.shape[0] - 1}, the rows of outputs"
        check_numbers("entries", entries, 0, outputs.shape[0], limit)
    if outputs.stride(2) != 1 or output.stride(2) != 1:
        name, found = ("outputs", outputs) if outputs.stride(2) != 1 else ("output", output)
        raise BatchError(f"{name}.stride()", found.stride(), "must end in 1", "make it contiguous")
    rows_into(outputs, lses, starts, entries, output, output_lse)


def rows_into(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    starts: torch.Tensor,
    entries: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    """`merge_rows` without its checks, for tensors that the caller made itself."""
    kernels = triton_ops("merging") if outputs.is_cuda else None
    if kernels is not None:
        kernels.rows_into(outputs, lses, starts, entries, output, output_lse)
        return
    rows = starts.shape[0] - 1
    # Entries past all lists, which pad the lists of a graph, go to one more row.
    owners = torch.searchsorted(
        starts[1:], torch.arange(entries.shape[0], dtype=torch.int32, device=starts.device), right=True
    )
    lse = lses[entries]
    top = torch.full((rows + 1, lses.shape[1]), -torch.inf, device=lses.device)
    top.scatter_reduce_(0, owners[:, None].expand_as(lse), lse, "amax")
    pivot = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(lse - pivot[owners])
    total = torch.zeros_like(top).index_add_(0, owners, weights)
    # A partial that saw nothing may hold NaN, and NaN times a weight of 0 is NaN.
    parts = torch.where(weights[..., None] > 0, outputs[entries].float(), 0.0) * weights[..., None]
    merged = torch.zeros((rows + 1, *outputs.shape[1:]), device=outputs.device).index_add_(0, owners, parts)
    output[:rows] = (merged / torch.where(total == 0, 1.0, total)[..., None])[:rows]
    if output_lse is not None:
        output_lse[:rows] = torch.where(total == 0, -torch.inf, pivot + total.log())[:rows]


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
