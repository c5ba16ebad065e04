"""Latent attention of TRITON: the decode over equal shares of all latents, in two kernels after a plan."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import triton.language as tl

from attnplug.backends.triton.kernels.latent import (
    latent_decode_kernel,
    merge_shares_kernel,
    plan_shares_kernel,
)
from attnplug.backends.triton.latent_launch import LatentLaunch, latent_launch
from attnplug.backends.triton.launch import gpu_of, tile_side
from attnplug.core.metadata import AttentionCGSupport, CommonAttentionMetadata
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_PLAN: Any = plan_shares_kernel
_DECODE: Any = latent_decode_kernel
_MERGE: Any = merge_shares_kernel
_PARTS = 8
"""Parts of a request that are merged at once."""


@dataclasses.dataclass(eq=False, slots=True)
class LatentStep:
    """The decodes of a step.

    Args:
        query_start_loc: int32 `[R + 1]` on the device.
        seq_lens: int32 `[R]` on the device.
        block_table: int32 `[R, max_blocks]`.
        num_reqs: the number of requests R.
        max_query_len: queries of the longest.
        shares: plans and buffers that the builder's steps share.
        number: of the step.
        is_selecting: whether each layer writes the lengths, so that no plan serves two of them.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_reqs: int
    max_query_len: int
    shares: Shares
    number: int
    is_selecting: bool = False


class Shares:
    """The plans of one builder's steps, and the buffers for parts of requests; they grow with larger batches."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._reqs = max_num_seqs
        self._device = device
        self._plans: dict[tuple[int, int, int, int], _Plan] = {}
        self._asked: dict[tuple[int, int], list[_Plan]] = {}
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._lses = torch.empty(0, dtype=torch.float32, device=device)
        self._outgrown: list[torch.Tensor] = []
        """Kept alive: graphs captured before the batches grew still write there."""

    def begin_step(self, step: LatentStep) -> None:
        """Make the plans that layers used in steps of equally many and long decodes.

        A captured graph always has such a step, so its plans are made here, outside of the graph.
        """
        if step.is_selecting:
            return
        for plan in self._asked.get((step.num_reqs, step.max_query_len), ()):
            plan.make(step)

    def tiles(self, step: LatentStep, launch: LatentLaunch, programs: int) -> torch.Tensor:
        """The first tile of each request, their number and a share of them: int32, at least `[R + 2]`.

        The plan is made once per step, for all layers with the same launch. Steps of as many requests get the same
        memory.
        """
        # Batches past max_num_seqs have buffers of their own, because graphs may read the others.
        reqs = self._reqs if step.num_reqs <= self._reqs else power_of_two(step.num_reqs)
        key = launch.block_n, launch.least, programs, reqs
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(*key, self._device)
        if step.is_selecting:
            plan.make(step)
        elif plan.step != step.number:
            asked = self._asked.setdefault((step.num_reqs, step.max_query_len), [])
            if plan not in asked:
                asked.append(plan)
            plan.make(step)
        return plan.tiles

    def partials(self, programs: int, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat float32 buffers for two parts of `rows` rows of each program, and for their LSEs."""
        lses = 2 * programs * rows
        if self._lses.numel() < lses or self._partials.numel() < lses * size:
            self._outgrown += (self._partials, self._lses)
            self._partials = self._partials.new_empty(max(lses * size, self._partials.numel()))
            self._lses = self._lses.new_empty(max(lses, self._lses.numel()))
        return self._partials, self._lses


class _Plan:
    """The tiles of a step's requests, and the kernel that numbers them."""

    def __init__(self, tile: int, least: int, programs: int, reqs: int, device: torch.device) -> None:
        self.tiles = torch.zeros(reqs + 2, dtype=torch.int32, device=device)
        self.step = -1
        # One width for all batches, so that the kernel compiles once.
        values = {"programs": programs, "least": least, "REQS": power_of_two(reqs), "TILE": tile}
        self._kernel = BoundKernel(_PLAN, 4, values)

    def make(self, step: LatentStep) -> None:
        """Fill `tiles` for a step."""
        with on_device_of(step.seq_lens):
            self._kernel((1,), step.query_start_loc, step.seq_lens, self.tiles, step.num_reqs)
        self.step = step.number


class TritonMLABuilder(MLADecodeBuilder):
    """Builds LatentStep, and reads nothing back from the device."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    decode_needs_host_seq_lens: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shares = Shares(self.config.max_num_seqs, self.device)
        self._steps = 0

    def build_decode(self, common: CommonAttentionMetadata) -> LatentStep:
        """The step of the decodes."""
        self._steps += 1
        starts, lens, table = common.query_start_loc, common.seq_lens, common.block_table_tensor
        longest = common.max_query_len
        step = LatentStep(starts, lens, table, common.num_reqs, longest, self._shares, self._steps)
        step.is_selecting = self.backend.is_selecting
        self._shares.begin_step(step)
        return step


class TritonMLAImpl(MLADecodeImpl):
    """Latent attention in Triton kernels, bound once for each form of a call."""

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bound: dict[tuple[object, ...], tuple[BoundKernel, BoundKernel]] = {}

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: LatentStep,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """As MLADecodeImpl.decode."""
        heads, size = q_nope.shape[1:]
        rows = heads * metadata.max_query_len
        gpu = gpu_of(q_nope.device)
        launch = latent_launch(rows, size, q_nope.element_size(), gpu)
        row_blocks = -(-rows // launch.block_m)
        programs = max(launch.waves * gpu.multiprocessors // row_blocks, 1)
        decode, merge = self._kernels(launch, kv_cache, heads, output_lse is not None)
        shares = metadata.shares
        partials, partial_lses = shares.partials(programs, rows, size)
        lse = partial_lses if output_lse is None else output_lse
        starts, reqs = metadata.query_start_loc, metadata.num_reqs
        with on_device_of(output):
            tiles = shares.tiles(metadata, launch, programs)
            decode(
                (row_blocks, programs),
                q_nope,
                q_pe if q_pe.shape[2] else q_nope,
                kv_cache,
                output,
                lse,
                starts,
                metadata.seq_lens,
                metadata.block_table,
                tiles,
                partials,
                partial_lses,
                reqs,
                rows,
                metadata.block_table.stride(0),
            )
            merge((reqs, rows), partials, partial_lses, output, lse, starts, tiles, reqs, rows)

    def _kernels(
        self, launch: LatentLaunch, kv_cache: torch.Tensor, heads: int, has_lse: bool
    ) -> tuple[BoundKernel, BoundKernel]:
        form = (launch, heads, has_lse, self.softmax_scale, kv_cache.shape[1], kv_cache.stride())
        bound = self._bound.get(form)
        if bound is None:
            rank, rope = self.dims.kv_lora_rank, self.dims.qk_rope_head_dim
            values = {
                "scale": self.softmax_scale,
                "stride_block": kv_cache.stride(0),
                "stride_token": kv_cache.stride(1),
                "HEADS": heads,
                "BLOCK_SIZE": kv_cache.shape[1],
                "BLOCK_M": launch.block_m,
                "BLOCK_N": launch.block_n,
                "LATENT": rank,
                "ROPE": rope,
                "BLOCK_L": tile_side(rank),
                "BLOCK_R": tile_side(max(rope, 1)),
                "HAS_LSE": has_lse,
                # Triton's interpreter multiplies bfloat16 as integers.
                "COMPUTE": tl.float32 if kv_cache.device.type == "cpu" else None,
                "SIZE": rank,
                "BLOCK": power_of_two(rank),
                "PARTS": _PARTS,
            }
            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
            decode = BoundKernel(_DECODE, 14, values, **options)
            bound = self._bound[form] = decode, BoundKernel(_MERGE, 8, values, num_warps=4)
        return bound
