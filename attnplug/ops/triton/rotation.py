"""The rotation of a format on a device, as a matrix of ones and minus ones, and the launches that turn rows by it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.ops.triton.kernels.rotation import turn_kernel
from attnplug.ops.triton.launch import BoundKernel, power_of_two

_KERNEL: Any = turn_kernel
# Each program loads the columns of the matrix that it multiplies with. Few rows need small tiles for enough programs, and many
# rows large tiles, which load the matrix less often. TRITON refuses formats to layers with `invariance`, whose bits would differ.
_TILE, _COLUMNS = 16, 64
"""Rows of a program, and its most columns, for few rows."""
_MOST_ROWS, _MOST_ELEMENTS = 128, 1 << 14
"""Most rows of a program for many rows, and most elements of them and of its columns of the matrix."""
_LEAST_MANY = 1 << 14
"""Rows that are many: most multiprocessors of a large GPU have a program of them."""


class Rotation:
    """An orthonormal map of rows, which a codec has as `rotate`.

    Args:
        matrix: bfloat16 `[D, D]`, with D a power of two, of -1, 0 and 1: row i is what the i-th unit row turns into.
        factor: the products with it still need this factor.
    """

    __slots__ = ("_bound", "factor", "head_size", "matrix")

    def __init__(self, matrix: torch.Tensor, factor: float, head_size: int) -> None:
        self.matrix, self.factor, self.head_size = matrix, factor, head_size
        self._bound: dict[object, tuple[BoundKernel, int, int]] = {}

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
        is_run: bool = True,
    ) -> None:
        """Write turned rows `[T, H, D]` of all requests to `output`, or rows that are turned `back`.

        Args:
            rows: with a last stride of 1.
            output: `[T, H, D]`, with a last stride of 1.
            query_start_loc: int32 `[requests + 1]`, on the device: rows of other tokens are not written.
            requests: their number.
            tokens: no fewer than the tokens of all requests.
            back: whether to undo the rotation.
            is_run: whether to launch the kernels that such rows need, or only to compile them.
        """
        if not requests or not tokens:
            return
        given = rows, output, self.matrix, query_start_loc, requests
        count = tokens * rows.shape[1]
        kernel, tile, parts = self._launch(rows, output, back, count >= _LEAST_MANY)
        if is_run:
            kernel((-(-count // tile), parts), *given)
        else:
            kernel.compile(*given)

    def _launch(
        self, rows: torch.Tensor, output: torch.Tensor, back: bool, is_many: bool
    ) -> tuple[BoundKernel, int, int]:
        """The kernel for such rows, the rows of a program, and the programs that share the columns of a row."""
        form = rows.stride(), rows.dtype, output.stride(), output.dtype, rows.shape[1], back, is_many
        found = self._bound.get(form)
        if found is None:
            side = self.matrix.shape[0]
            tile, columns = _TILE, min(side, _COLUMNS)
            if is_many:
                most = max(_MOST_ELEMENTS // side, _TILE)
                tile, columns = min(most, _MOST_ROWS), min(most, side)
            strides = self.matrix.stride()[::-1] if back else self.matrix.stride()
            values = {
                **dict(zip(("stride_rt", "stride_rh"), rows.stride(), strict=False)),
                **dict(zip(("stride_ot", "stride_oh"), output.stride(), strict=False)),
                **dict(zip(("stride_in", "stride_out"), strides, strict=True)),
                "factor": self.factor,
                "HEADS": rows.shape[1],
                "D": self.head_size,
                "TILE": tile,
                "BLOCK_D": side,
                "COLUMNS": columns,
                # Two terms have more bits than an output of 16 bits.
                "PARTS": exact_parts(rows) if output.dtype == torch.float32 else min(exact_parts(rows), 2),
            }
            kernel = BoundKernel(_KERNEL, 5, values, num_warps=8 if is_many else 4)
            if is_many:
                # A later step may have few rows, which those of a warm-up never have.
                kernel.siblings = (self._launch(rows, output, back, False)[0],)
            found = self._bound[form] = kernel, tile, side // columns
        return found


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
