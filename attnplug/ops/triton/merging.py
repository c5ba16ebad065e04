"""Merging partial attention results by one kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from attnplug.ops.checks import check_merge
from attnplug.ops.triton.kernels.merging import merge_kernel, merge_rows_kernel
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_KERNEL: Any = merge_kernel
_ROWS_KERNEL: Any = merge_rows_kernel

# Partials per launch: the compiler unrolls the kernel's loops over them.
_MAX_PARTIALS = 16
# Elements of the result per program: with four warps, 8 per thread, or 16 bytes of a 16-bit type.
_TILE = 1024
_NUM_WARPS = 4


def merge_attn_states(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint keys, into the tensors given.

    It has the arguments, result and errors of `attnplug.ops.merge_attn_states`. It launches once for up to 16 partials,
    and once for every 15 more. Tensors may have any strides. Outputs of rows with LSE -inf are not read.
    """
    check_merge(outputs, lses, output, output_lse)
    return merge_into(outputs, lses, output, output_lse)


def merge_into(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` without its checks."""
    shape = outputs[0].shape
    if output is None:
        output = torch.empty(shape, dtype=outputs[0].dtype, device=outputs[0].device)
    if output_lse is None:
        output_lse = torch.empty(shape[:-1], dtype=torch.float32, device=outputs[0].device)
    outs, logs = tuple(outputs), tuple(lses)
    while len(outs) > _MAX_PARTIALS:
        # Intermediate results are float32, to round to the result's dtype only once.
        between = torch.empty(shape, dtype=torch.float32, device=output.device)
        between_lse = torch.empty(shape[:-1], dtype=torch.float32, device=output.device)
        _launch(outs[:_MAX_PARTIALS], logs[:_MAX_PARTIALS], between, between_lse)
        outs, logs = (between, *outs[_MAX_PARTIALS:]), (between_lse, *logs[_MAX_PARTIALS:])
    _launch(outs, logs, output, output_lse)
    return output, output_lse


def _launch(
    outputs: tuple[torch.Tensor, ...],
    lses: tuple[torch.Tensor, ...],
    output: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    num_tokens, heads, head_size = output.shape
    num_rows = num_tokens * heads
    if not num_rows or not head_size:
        return
    strides = [
        stride for o, lse in zip(outputs, lses, strict=True) for stride in (*o.stride(), *lse.stride())
    ]
    block_d = power_of_two(head_size)
    rows = max(_TILE // block_d, 1)
    with on_device_of(output):
        _KERNEL[(-(-num_rows // rows),)](
            outputs,
            lses,
            output,
            output_lse,
            num_rows,
            tuple(strides),
            (*output.stride(), *output_lse.stride()),
            len(outputs),
            heads,
            head_size,
            rows,
            block_d,
            num_warps=_NUM_WARPS,
        )


def rows_into(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    starts: torch.Tensor,
    entries: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    """`attnplug.ops.merge_rows` without its checks: one launch. The last dimension of each output is contiguous."""
    tokens, (heads, head_size) = starts.shape[0] - 1, output.shape[1:]
    if not tokens or not heads or not head_size:
        return
    lse = lses if output_lse is None else output_lse
    strides = *outputs.stride()[:2], *lses.stride(), *output.stride()[:2], *lse.stride()
    dtypes = outputs.dtype, output.dtype
    rows, bound = _bound_rows(strides, dtypes, heads, head_size, output_lse is not None)
    with on_device_of(output):
        bound((tokens, -(-heads // rows)), outputs, lses, starts, entries, output, lse)


@functools.lru_cache(maxsize=256)
def _bound_rows(
    strides: tuple[int, ...], dtypes: tuple[torch.dtype, ...], heads: int, head_size: int, has_lse: bool
) -> tuple[int, BoundKernel]:
    # Cached, because layers have one form.
    block_d = power_of_two(head_size)
    rows = min(max(_TILE // block_d, 1), power_of_two(heads))
    names = [
        "part_token",
        "part_head",
        "lse_token",
        "lse_head",
        "out_token",
        "out_head",
        "out_lse_token",
        "out_lse_head",
    ]
    sizes = {"HEADS": heads, "D": head_size, "ROWS": rows, "BLOCK_D": block_d, "HAS_LSE": has_lse}
    values = dict(zip(names, strides, strict=True)) | sizes
    return rows, BoundKernel(_ROWS_KERNEL, 6, values, num_warps=_NUM_WARPS)
