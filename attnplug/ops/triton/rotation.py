"""The rotation of a format on a device, as a matrix of ones and minus ones, and the launches that turn rows by it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.ops.triton.kernels.rotation import turn_kernel
from attnplug.ops.triton.launch import BoundKernel, power_of_two

_KERNEL: Any = turn_kernel
_TILE, _COLUMNS = 16, 64
"""Rows of a program, and most columns."""


class Rotation:
    """An orthonormal map of rows, which a codec has as `rotate`.

    Args:
        matrix: bfloat16 `[D, D]`, with D a power of two, of -1, 0 and 1: row i is what the i-th unit row turns into.
        factor: the products with it still need this factor.
    """

    __slots__ = ("_bound", "factor", "head_size", "matrix")

    def __init__(self, matrix: torch.Tensor, factor: float, head_size: int) -> None:
        self.matrix, self.factor, self.head_size = matrix, factor, head_size
        self._bound: dict[object, BoundKernel] = {}

    @staticmethod
    def of(codec: Any, device: torch.device) -> Rotation:
        """The rotation of a codec on a device: the same object each time."""
        return _made(codec, device)

    def turn(
        self,
        rows: torch.Tensor,
        output: torch.Tensor,
        query_start_loc: torch.Tensor,
        requests: int,
        tokens: int,
        *,
        back: bool = False,
    ) -> None:
        """Write turned rows `[T, H, D]` of all requests to `output`, or rows that are turned `back`.

        Args:
            rows: with a last stride of 1.
            output: `[T, H, D]`, with a last stride of 1.
            query_start_loc: int32 `[requests + 1]`, on the device: rows of other tokens are not written.
            requests: their number.
            tokens: no fewer than the tokens of all requests.
            back: whether to undo the rotation.
        """
        if not requests or not tokens:
            return
        form = rows.stride(), rows.dtype, output.stride(), output.dtype, rows.shape[1], back
        kernel = self._bound.get(form)
        if kernel is None:
            strides = self.matrix.stride()[::-1] if back else self.matrix.stride()
            values = {
                **dict(zip(("stride_rt", "stride_rh"), rows.stride(), strict=False)),
                **dict(zip(("stride_ot", "stride_oh"), output.stride(), strict=False)),
                **dict(zip(("stride_in", "stride_out"), strides, strict=True)),
                "factor": self.factor,
                "HEADS": rows.shape[1],
                "D": self.head_size,
                "TILE": _TILE,
                "BLOCK_D": self.matrix.shape[0],
                "COLUMNS": min(self.matrix.shape[0], _COLUMNS),
                # Two terms have more bits than an output of 16 bits.
                "PARTS": exact_parts(rows) if output.dtype == torch.float32 else min(exact_parts(rows), 2),
            }
            kernel = self._bound[form] = BoundKernel(_KERNEL, 5, values, num_warps=4)
        programs = -(-tokens * rows.shape[1] // _TILE)
        kernel(
            (programs, -(-self.matrix.shape[0] // _COLUMNS)),
            rows,
            output,
            self.matrix,
            query_start_loc,
            requests,
        )


def exact_parts(rows: torch.Tensor) -> int:
    """Terms of bfloat16 that have the numbers of rows; 0 for the interpreter, which cannot multiply bfloat16."""
    if not rows.is_cuda:
        return 0
    return {torch.bfloat16: 1, torch.float16: 2}.get(rows.dtype, 3)


# Keyed by the codec, of which `make_codec` has one for each format and head size.
@functools.lru_cache(maxsize=64)
def _made(codec: Any, device: torch.device) -> Rotation:
    size = codec.head_size
    rows = codec.rotate(torch.eye(size, dtype=torch.float32, device="cpu"))
    largest = float(rows.abs().max())
    side = max(power_of_two(size), 16)
    matrix = torch.zeros(side, side, dtype=torch.bfloat16, device="cpu")
    matrix[:size, :size] = (rows / largest).round()
    return Rotation(matrix.to(device), largest, size)
