"""Latent attention of TRITON: the decode over equal shares of all latents, in two kernels after a plan.

Tile sizes, warps and stages of the decode over latents.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import triton.language as tl

from attnplug.backends.triton.kernels.latent import latent_decode_kernel
from attnplug.backends.triton.kernels.shares import merge_shares_kernel
from attnplug.backends.triton.launch import Gpu, compile_options, gpu_of, runs_gluon
from attnplug.backends.triton.layout import head_tiles, tile_side
from attnplug.backends.triton.share_launch import ShareLaunch
from attnplug.backends.triton.shares import ALL, Shares, SharesPlan, SharesStep, merge_grid
from attnplug.core.metadata import AttentionCGSupport, CommonAttentionMetadata
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl
from attnplug.mla.selected import SelectedMetadata
from attnplug.ops.checks import check_step_tensors
from attnplug.ops.triton.launch import (
    BoundKernel,
    can_overlap,
    compile_together,
    on_device_of,
    power_of_two,
    prepare,
)


def hopper_launch(rows: int, itemsize: int, sides: Iterable[int]) -> ShareLaunch:
    """The launch of a kernel of hopper_kernels.

    Args:
        rows: queries of the longest request times heads.
        itemsize: bytes of a stored element.
        sides: rows of a tile, for which there are kernels.
    """
    side = min(each for each in sides if each >= min(rows, 64))
    # Tiles of 8 bits take half of the memory, unless they are converted there: room for two programs, or more tiles.
    if itemsize == 1 and side == 16:
        return ShareLaunch(side, 64, 4, 2, 2, 1, max_registers=128)
    return ShareLaunch(side, 64, 4, 4 if itemsize == 1 and side < 64 else 2, 1, 1)


@functools.cache
def hopper_kernels(
    rank: int, rope: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> Mapping[int, Any]:
    """The kernels for Hopper that serve such latents on a device, by rows of a tile; none elsewhere."""
    # They are written in Gluon, which a version of Triton may lack or change.
    if not runs_gluon(device) or gpu_of(device).shared_memory < _SHARED_MEMORY:
        return {}
    if rank not in (128, 256, 512) or rope not in (0, 16, 32, 64) or dtype.itemsize != 2:
        return {}
    if cache_dtype not in (dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return {}
    # Elements of 8 bits are multiplied 128 at once, of one half.
    if cache_dtype.itemsize == 1 and rank < 256:
        return {}
    try:
        from attnplug.backends.triton.kernels.hopper.latent_narrow import latent_narrow_kernel
        from attnplug.backends.triton.kernels.hopper.latent_wide import latent_wide_kernel
    except ImportError:
        return {}
    kernels = {16: latent_narrow_kernel, 32: latent_narrow_kernel, 64: latent_wide_kernel}
    # The narrow kernel multiplies 32 elements of 8 bits at once, with queries as precise as bfloat16.
    is_narrow = cache_dtype.itemsize == 2 or (dtype == torch.bfloat16 and rope % 32 == 0)
    return kernels if is_narrow else {64: latent_wide_kernel}


_SHARED_MEMORY = 230_400
"""Bytes that 64 rows of queries, two tiles of latents, and weights take."""


def latent_tiles(size: int, rope: int, stored: int) -> tuple[int, int]:
    """The columns of the tiles of a latent without its rope part, and of the rope part.

    Args:
        size: elements of a latent without its rope part.
        rope: elements of the rope part; without any, nothing reads its tile.
        stored: bytes of a stored element.
    """
    if not rope:
        return tile_side(size), tile_side(1)
    (side, _), (rope_side, _) = head_tiles(size, rope, stored, whole=True)
    return side, rope_side


# Each layer asks in each step.
@functools.cache
def latent_launch(rows: int, size: int, rope: int, itemsize: int, gpu: Gpu, stored: int = 2) -> ShareLaunch:
    """The launch for requests of at most `rows` rows.

    Args:
        rows: queries of the longest request times heads.
        size: elements of a latent without its rope part.
        rope: elements of the rope part.
        itemsize: bytes of an element as it is computed.
        gpu: the device.
        stored: bytes of an element as it is stored.
    """
    launch = ShareLaunch(16, 16, 4, 2, 1, 2) if itemsize > 2 else _LAUNCHES[min(tile_side(rows), 64)]
    if launch.block_m >= 64 and gpu.shared_memory < _SHARED_MEMORY:
        # Before Hopper products read registers: compiled for sm80, 64 keys spilled 4,700 bytes of a thread, and 32 keys 112.
        launch = launch._replace(block_n=32, least=2 * launch.least)
    side, rope_side = latent_tiles(size, rope, stored)
    # Without a rope part, what Triton exchanges between warps takes as much.
    width = (side + max(rope_side, side // 8)) * itemsize
    while True:
        # Asynchronous products read a tile as keys and as values, and still do when the next one comes.
        # Compiled for sm100, 64 rows over 512 + 64 elements took 281 KB, where a program has 227.
        is_late = gpu.has_tensor_memory and launch.block_m >= 64 and launch.num_stages > 1
        tiles = launch.num_stages + is_late
        if (launch.block_m + launch.block_n * tiles) * width <= gpu.shared_memory:
            break
        if launch.num_stages > 1:
            launch = launch._replace(num_stages=launch.num_stages - 1)
        elif launch.block_n > 16:
            launch = launch._replace(block_n=launch.block_n // 2)
        elif launch.block_m > 16:
            launch = launch._replace(block_m=launch.block_m // 2)
        else:
            break
    return launch


# The fastest on an H200 by rows of a tile, see benchmarks/results/mla-h200.json.
_LAUNCHES = {
    16: ShareLaunch(16, 32, 4, 3, 2, 2),
    32: ShareLaunch(32, 64, 4, 2, 2, 2),
    64: ShareLaunch(64, 64, 8, 2, 1, 1),
}


class Merge(NamedTuple):
    """The kernel that merges the parts of rows, and the programs that share the columns of a row."""

    kernel: BoundKernel
    pieces: int


# On an H200 one request of 8k with 128 heads has 64 parts of a row and took 21.4 us, 23.2 with 32 of them at once, and 23.7 with
# 128; four have 17, and took 34.0, 37.5 and 45.3 with 16, 32 and 64. Few rows have more programs: 15.4 us and not 16.2.
_MERGES = (8, 512), (16, 512), (32, 256), (64, 128), (128, 64), (128, 32)
"""Parts of a row that are merged at once, and columns of a program; the last is for few rows."""
_FEW_ROWS = 48


def latent_programs(most: int, reqs: int) -> int:
    """The programs of a decode, of at most `most`: as many for each request, where that leaves few out.

    Requests of one length then begin and end with a share, so a program has one of them, and a row has fewer parts.
    """
    # 8 x 4k with 128 heads took 34.3 us with 64 programs and 36.1 with 66, and 16 x 8k with 64 heads 57.0 and 58.9 with 132.
    whole = most // max(reqs, 1) * reqs
    return whole if whole >= _LEAST_PROGRAMS * most else most


_LEAST_PROGRAMS = 0.94
"""The least share of the programs that is not left out."""


def merge_place(programs: int, reqs: int, rows: int) -> int:
    """The place in _MERGES of the merge for a step.

    Args:
        programs: shares of all keys; a row has about as many parts as there are for a request.
        reqs: the requests.
        rows: of the longest request.
    """
    if programs <= 8 * reqs:
        return 0
    if reqs * rows < _FEW_ROWS:
        return len(_MERGES) - 1
    # One or two more than are read at once take a second round, which costs less than rounds of twice as many.
    return next((place for place, most in enumerate((8, 17, 40, 66)) if programs <= most * reqs), 4)


_DECODE: Any = latent_decode_kernel
_MERGE: Any = merge_shares_kernel


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class LatentStep(SharesStep):
    """The decodes of a step.

    Args:
        block_table: int32 `[R, max_blocks]`.
        shares: plans and buffers that the builder's steps share.
    """

    block_table: torch.Tensor
    shares: Shares


class TritonMLABuilder(MLADecodeBuilder):
    """Builds LatentStep, and reads nothing back from the device."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    decode_needs_host_seq_lens: ClassVar[bool] = False
    decodes_drafts: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shares = Shares(self.config.max_num_seqs, self.device)
        self._steps = 0
        prepare(self.device)

    def build_decode(self, common: CommonAttentionMetadata) -> LatentStep:
        """The step of the decodes."""
        return self._divided(common)

    def build_selected(self, common: CommonAttentionMetadata, selected: SelectedMetadata) -> LatentStep:
        """As MLADecodeBuilder.build_selected: one plan serves all layers."""
        selected.write_ends()
        return self._divided(common, selected.ends)

    def _divided(self, common: CommonAttentionMetadata, bounds: torch.Tensor | None = None) -> LatentStep:
        check_step_tensors(common)
        self._steps += 1
        step = LatentStep(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            shares=self._shares,
            number=self._steps,
            bounds=bounds,
        )
        self._shares.begin_step(step)
        return step


class TritonMLAImpl(MLADecodeImpl):
    """Latent attention in Triton kernels, bound once for each form of a call."""

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bound: dict[tuple[object, ...], tuple[BoundKernel, list[Merge]]] = {}

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
        hopper = self._hopper_kernels(q_nope, q_pe, kv_cache)
        if hopper:
            launch = hopper_launch(rows, kv_cache.element_size(), hopper)
        else:
            sizes = rows, size, self.dims.qk_rope_head_dim, q_nope.element_size()
            launch = latent_launch(*sizes, gpu, kv_cache.element_size())
        row_blocks = -(-rows // launch.block_m)
        reqs = metadata.num_reqs
        programs = latent_programs(max(launch.waves * gpu.multiprocessors // row_blocks, 1), reqs)
        decode, merges = self._kernels(launch, hopper, kv_cache, heads, output_lse is not None)
        merge = merges[merge_place(programs, reqs, rows)]
        shares, sparse = metadata.shares, self.spec.sparse
        division = launch.block_n, programs, launch.least
        plan = SharesPlan(*division, most=ALL if sparse is None else sparse.topk * sparse.block)
        partials, partial_lses = shares.partials(2 * programs * rows, size)
        lse = partial_lses if output_lse is None else output_lse
        starts = metadata.query_start_loc
        with on_device_of(output):
            tiles = shares.tiles(metadata, plan)
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
            merged, by_share = merge_grid(reqs, rows, programs, rows)
            numbers = reqs, 0, 1, rows, by_share, 0
            merge.kernel(
                (*merged, merge.pieces), partials, partial_lses, output, lse, starts, tiles, *numbers
            )

    def _hopper_kernels(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor
    ) -> Mapping[int, Any]:
        """The kernels for Hopper, if they serve the tensors of a call: they copy 16 bytes at once."""
        rank, rope = self.dims.kv_lora_rank, self.dims.qk_rope_head_dim
        kernels = hopper_kernels(rank, rope, q_nope.dtype, kv_cache.dtype, kv_cache.device)
        if not kernels:
            return kernels
        block, token, _ = kv_cache.stride()
        # Triton copies 16 bytes at once if it knows that strides are multiples of 16 elements.
        starts = q_nope.data_ptr() | q_pe.data_ptr() | kv_cache.data_ptr()
        return {} if (starts | block | token) & 15 else kernels

    def _kernels(
        self,
        launch: ShareLaunch,
        hopper: Mapping[int, Any],
        kv_cache: torch.Tensor,
        heads: int,
        has_lse: bool,
    ) -> tuple[BoundKernel, list[Merge]]:
        form = (
            launch,
            len(hopper),
            heads,
            has_lse,
            self.softmax_scale,
            kv_cache.shape[1],
            kv_cache.stride(),
        )
        bound = self._bound.get(form)
        if bound is None:
            rank, rope = self.dims.kv_lora_rank, self.dims.qk_rope_head_dim
            block_l, block_r = latent_tiles(rank, rope, kv_cache.element_size())
            # The merge is launched while the decode runs. Over 8 bits three requests of 8k took 23.3 us and not 21.9 then.
            overlaps = can_overlap(kv_cache.device) and kv_cache.element_size() > 1
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
                "BLOCK_L": block_l,
                "BLOCK_R": block_r,
                "HAS_LSE": has_lse,
                # Triton's interpreter multiplies bfloat16 as integers.
                "COMPUTE": tl.float32 if kv_cache.device.type == "cpu" else None,
                "value_scale": 1.0,
                "stride_ot": heads * rank,
                "stride_oh": rank,
                "stride_lse": heads,
                "GROUP": heads,
                "TILE": launch.block_n,
                "SIZE": rank,
                "PDL": overlaps,
                "STAGES": launch.num_stages,
            }
            kernel = hopper.get(launch.block_m, _DECODE)
            options = {"launch_pdl": True} if overlaps else {}
            decode = BoundKernel(kernel, 14, values, **compile_options(launch), **options)
            merges = []
            for parts, columns in _MERGES:
                form_of = {"PARTS": parts, "BLOCK": min(columns, power_of_two(rank))}
                merging = BoundKernel(_MERGE, 12, values | form_of, num_warps=4, **options)
                merges.append(Merge(merging, -(-rank // form_of["BLOCK"])))
            # Steps of other numbers of requests need others.
            compile_together(each.kernel for each in merges)
            bound = self._bound[form] = decode, merges
        return bound
