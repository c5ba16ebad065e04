"""The kernels over equal shares of keys, with all arguments bound that stay the same from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from attnplug.backends.triton.kernels.fixed_splits import merge_splits_kernel
from attnplug.backends.triton.kernels.share_decode import share_decode_kernel
from attnplug.backends.triton.kernels.shares import merge_shares_kernel
from attnplug.backends.triton.kernels.split_places import most_splits
from attnplug.backends.triton.launch import Gpu, compile_options, is_one_range, partial_sums
from attnplug.backends.triton.share_launch import ShareLaunch
from attnplug.backends.triton.shares import Shares, SharesPlan, SharesStep, merge_grid
from attnplug.core.spec import LayerSpec
from attnplug.ops.reach import Reach
from attnplug.ops.triton.launch import BoundKernel, power_of_two

_DECODE: Any = share_decode_kernel
_MERGE: Any = merge_shares_kernel
_MERGE_SPLITS: Any = merge_splits_kernel
# If rows have more parts than these on average, 128 parts of a row are merged at once.
_MANY_PARTS = 48
# A multiprocessor runs 16 programs of four warps at the same time. From so many on, one warp adds up each row instead: with
# 15.5 programs an H200 took 126.6 us in place of 129.8 for 16 x 7.75k.
_AT_ONCE = 15


class Merge(NamedTuple):
    """A form of the kernel that merges partial results.

    Args:
        kernel: takes partial results, outputs, LSE, query starts, tiles, the number of requests, the prefix, streams per
            request, rows of a stream, whether the grid has shares, and whether it is followed by a kernel that overlaps.
        pieces: programs for each row.
    """

    kernel: BoundKernel
    pieces: int


@dataclasses.dataclass(slots=True, eq=False)
class ShareDecode:
    """The kernels of one launch.

    Args:
        kernel: attends; it takes queries, K, V, outputs, LSE, query starts, lengths, pages, tiles, sinks, slopes, spans,
            partial results, the number of requests, the prefix, streams per request, and places and rows of parts.
        merges: for few rows of few parts, for rows of many parts, and for many rows.
        plan: the division of the keys.
        kv_heads: KV heads of the layer.
        size: elements of a value.
        multiprocessors: of the GPU.
        sums: of weights of a part, with `fixed`.
        fixed: whether cuts are at the fixed places of splits.
        even: whether a request's lengths say where those are, and not a row's position alone.
        has_run: whether all forms of the merge are compiled.
    """

    kernel: BoundKernel
    merges: tuple[Merge, ...]
    plan: SharesPlan
    kv_heads: int
    size: int
    multiprocessors: int
    sums: int
    fixed: bool = False
    even: bool = False
    has_run: bool = False

    def __call__(
        self,
        step: SharesStep,
        shares: Shares,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        block_table: torch.Tensor,
        features: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tokens: int,
        *,
        is_followed: bool = False,
    ) -> None:
        """Attend the requests of `step`.

        Args:
            step: the requests.
            shares: plans and buffers of the builder.
            tensors: queries, K, V, outputs and LSE.
            block_table: of the requests.
            features: sinks, slopes and spans.
            tokens: no fewer than the queries of all requests.
            is_followed: whether the next kernel of the stream reads no result of this one, and waits for it at its end.
        """
        reqs, block_m = step.num_reqs, self.plan.block_m
        max_rows = step.max_query_len * self.plan.group
        max_blocks = -(-max_rows // block_m)
        places = 2 * self.plan.programs
        merged, by_share = merge_grid(reqs, max_rows, self.plan.programs, block_m)
        if step.prefix >= self.plan.tile:
            # Each row has a part for the prefix.
            merged, by_share = (reqs, max_rows), 0
            places = self.plan.programs + reqs * max_blocks - (-tokens * self.plan.group // block_m)
        slots, block_rows, sums = 0, block_m, 1
        if self.fixed:
            # A share has a place for the stream that begins in it, and one for each split of another one.
            slots = 1 + most_splits(block_table.shape[1] * tensors[1].shape[1], self.even)
            block_rows = min(block_m, max_rows)
            places, sums = self.plan.programs * slots, 1 + self.sums
        partials = shares.partials(places * self.kv_heads * block_rows, self.size, sums)
        tiles = shares.tiles(step, self.plan)
        starts, output, lse = step.query_start_loc, *tensors[3:]
        # The grid depends on no length, so a captured graph serves any lengths.
        grid = self.kv_heads, self.plan.programs
        batch = starts, step.seq_lens, block_table, tiles
        numbers = reqs, step.prefix, max_blocks
        self.kernel(grid, *tensors, *batch, *features, *partials, *numbers, slots, block_rows)
        few, of_many_parts, many = self.merges
        merge = few
        if self.plan.programs > _MANY_PARTS * reqs * max_blocks:
            merge = of_many_parts
        elif merged[0] * merged[1] * self.kv_heads * few.pieces > _AT_ONCE * self.multiprocessors:
            merge = many
        ends = by_share, int(is_followed)
        given: tuple[Any, ...] = *partials, output, lse, starts, tiles, *numbers, block_m, *ends
        if self.fixed:
            rest = starts, step.seq_lens, tiles, features[2], reqs, slots, block_rows, *ends
            given = *partials, output, lse, *rest
        merge.kernel((*merged, self.kv_heads * merge.pieces), *given)
        if not self.has_run:
            self.has_run = True
            # Other batches need the other forms. A grid without programs compiles them, and runs nothing.
            for each in self.merges:
                each.kernel((0, 1, 1), *given)


def bind_shares(
    spec: LayerSpec,
    reach: Reach,
    values: Mapping[str, Any],
    launch: ShareLaunch,
    gpu: Gpu,
    kernel: Any = None,
) -> ShareDecode:
    """The kernels of a launch.

    Args:
        spec: the layer.
        reach: the keys that a query sees.
        values: the other arguments of the kernels by name.
        launch: their launch.
        gpu: the device.
        kernel: takes what share_decode_kernel does, and attends in its place.
    """
    fixed = values["FIXED"]
    values = {
        **values,
        "ahead": launch.ahead,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "SUMS": partial_sums(launch.block_n, launch.block_m, launch.num_warps, fixed),
        "TILE": launch.block_n,
        "SIZE": spec.head_size_v,
        "ONE": is_one_range(launch.block_m, launch.block_n, reach.left, values["PAIRS"]),
    }
    overlap = {"launch_pdl": True} if values["PDL"] else {}
    size = power_of_two(spec.head_size_v)

    def merge(parts: int, width: int, num_warps: int) -> Merge:
        form = {"PARTS": parts, "BLOCK": min(size, width)}
        merging, given = (_MERGE_SPLITS, 13) if fixed else (_MERGE, 12)
        kernel = BoundKernel(merging, given, {**values, **form}, num_warps=num_warps, **overlap)
        return Merge(kernel, -(-spec.head_size_v // form["BLOCK"]))

    # Few rows are merged by many programs, which read many parts at once; of many rows, a warp merges each.
    merges = merge(32, 32, 4), merge(128, 32, 4), merge(1, 256, 1)
    if fixed:
        # One warp folds the splits of a row one after the other, whatever their number.
        few = merge(32, 64, 1)
        merges = few, few, merge(16, 128, 1)
    plan = SharesPlan(
        tile=launch.block_n,
        programs=max(gpu.multiprocessors * launch.waves // spec.num_kv_heads, 1),
        least=launch.least,
        ahead=launch.ahead,
        group=spec.num_heads // spec.num_kv_heads,
        block_m=launch.block_m,
        left=reach.left,
        right=reach.right,
        chunk=reach.chunk,
        has_spans=reach.spans,
    )
    return ShareDecode(
        kernel=BoundKernel(kernel or _DECODE, 19, values, **compile_options(launch), **overlap),
        merges=merges,
        plan=plan,
        kv_heads=spec.num_kv_heads,
        size=spec.head_size_v,
        multiprocessors=gpu.multiprocessors,
        sums=values["SUMS"],
        fixed=fixed,
        even=values["EVEN"],
    )


def pair_values(v: torch.Tensor, block_m: int) -> dict[str, Any]:
    """Whether decodes read 8-bit values in pairs, which needs even addresses and strides; the strides of pairs."""
    # Pairs took fp8 decodes from 582 to 264 us on an H200 (see docs/performance/triton-history.md). From 64 rows on
    # Hopper's wgmma multiplies them, for which Triton 3.6 compiles pairs to addresses outside of shared memory.
    if (
        block_m > 32
        or v.dtype.itemsize > 1
        or v.data_ptr() % 2
        or any(stride % 2 for stride in v.stride()[:3])
    ):
        return {"PAIRS": False, "PTX": False}
    nvidia = v.is_cuda and torch.version.hip is None
    vb, vt, vh, _ = (stride // 2 for stride in v.stride())
    return {
        "PAIRS": True,
        "PTX": nvidia and torch.cuda.get_device_capability(v.device) >= (8, 9),
        "ALIKE": False,
        "stride_vb": vb,
        "stride_vt": vt,
        "stride_vh": vh,
    }
