"""The kernels of one layer, with all arguments bound that stay the same from step to step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl

from attnplug.backends.impl import Pages
from attnplug.backends.triton.formats import (
    format_values,
    opened_scale,
    rotation_of,
    row_of,
    scale_step,
    stride_arguments,
)
from attnplug.backends.triton.kernels.prefill import prefill_kernel
from attnplug.backends.triton.launch import (
    SHORT_PROMPT_LAUNCH,
    PrefillLaunch,
    Specialized,
    compile_options,
    gpu_of,
    limit_switches,
    most_rows,
    opened_launch,
    partial_sums,
    prefill_launch,
)
from attnplug.backends.triton.layout import (
    fixed_tile,
    has_specialized_prefill,
    head_tiles,
    limit_class,
    limit_width,
    specialized_tiles,
    tile_side,
    value_parts,
)
from attnplug.backends.triton.opened import Opened, may_round
from attnplug.backends.triton.registers import RegisterLaunch, register_kernel, register_launch, row_tile
from attnplug.backends.triton.share_bindings import ShareDecode, bind_shares, pair_values
from attnplug.backends.triton.share_launch import share_launch
from attnplug.backends.triton.specialized import (
    WIDEST_TURNED,
    CallTiles,
    is_aligned,
    is_near,
    launch_for,
    programs,
    serves,
    specialized_kernel,
)
from attnplug.core.impl import LayerTensors
from attnplug.core.spec import LayerSpec
from attnplug.ops.reach import Reach
from attnplug.ops.storage import compute_dtype
from attnplug.ops.triton.launch import BoundKernel, DerivingKernel, can_overlap, compile_together

_PREFILL: Any = prefill_kernel
_MOST_LAUNCHES = 24
"""Launches of prefill, and of equal shares, that a layer keeps bound: steps of other lengths, and of another cache."""
# Rows of a tile that share a prefix: more of them read it less often, and waste more where requests differ.
_SHARING_ROWS = 64
_PREFILL_ROWS = 128
"""Rows of most tiles of prefill."""
# The share of multiprocessors with a tile above which dividing keys gains less than it costs. It is estimated.
_BUSY = 0.7
_WIDE_WINDOW = 2048
"""Keys of a window from which tiles of requests with tokens before are left to the GPU. It is estimated."""


class Prefill(NamedTuple):
    """The prefill kernel for the longer requests of a step."""

    kernel: BoundKernel
    tokens: int
    """Queries per tile; with specialised warps rows, because such tiles may end between the heads of a query."""
    is_specialized: bool = False
    """Whether the kernel has specialised warps, and asks for its tiles."""
    parts: int = 1
    """Programs that share the values of a KV head."""


class BoundLayer:
    """A layer, for calls whose tensors have the same strides.

    Args:
        spec: the layer.
        tensors: its sinks and slopes; without sinks if the calls do not use them.
        reach: the keys that a query sees.
        query: `[T, H, D]`, with a last stride of 1.
        output: `[T, H, Dv]`, with a last stride of 1.
        output_lse: `[T, H]`, or None.
        scales: of stored keys and values; with `head_scales` float32 `[Hkv]`, those of keys times the softmax scale.
        paged: whether keys are read from pages, and not given with the call.
        form: FORMAT of opened pages whose rows have scales.
        numbers: NUMBERS of the prefill kernel with specialised warps, for opened pages of numbers.
    """

    def __init__(
        self,
        spec: LayerSpec,
        tensors: LayerTensors,
        reach: Reach,
        query: torch.Tensor,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
        scales: tuple[Any, Any],
        paged: bool = True,
        form: tuple[Any, ...] | None = None,
        numbers: int = 0,
    ) -> None:
        self.kv_heads = spec.num_kv_heads
        self.group = spec.num_heads // spec.num_kv_heads
        """Heads of queries that read a head of keys."""
        self.rotation = rotation_of(spec, query.device) if paged else None
        """Turns the queries and outputs of rotated formats; None for other layers."""
        q_strides, out_strides = query.stride(), output.stride()
        if self.rotation is not None:
            # The kernels read and write turned rows, in buffers of their own.
            q_strides = out_strides = (spec.num_heads * spec.head_size, spec.head_size, 1)
        k_scale, v_scale = opened_scale(spec, scales) if paged else scales
        self.reach, self._tensors, self._scales = reach, tensors, scales
        self._form = form
        self._over_opened: dict[bool, tuple[object, BoundLayer]] = {}
        self._gpu, self._device = gpu_of(query.device), query.device
        self._spec = spec
        self._widest = max(spec.head_size, spec.head_size_v)
        if numbers == 2 or form is not None:
            # One kernel turns whole tiles, and codes with the scales of their rows are in whole tiles too.
            self._widest = tile_side(self._widest)
        self._itemsize = compute_dtype(spec).itemsize
        # Layers that ask for equal bits have splits of keys at fixed places, and tiles of equally many keys.
        self._tile = fixed_tile(self._widest, self._itemsize) if spec.invariance else None
        # 64 heads over 256k tokens of 128 elements pass 2**31. Only such layers compute
        # offsets of heads in 64 bits, because registers grow from 168 to 254 with them.
        is_far = spec.num_heads * max(q_strides[1], out_strides[1]) > 1 << 31
        self._values: dict[str, Any] = {
            "scale": k_scale if isinstance(k_scale, torch.Tensor) else spec.scale * k_scale,
            "value_scale": v_scale,
            "cap": spec.logits_soft_cap or 1.0,
            # Windows and chunks are arguments, so layers of other widths share a compiled kernel.
            "left": reach.left,
            "right": reach.right,
            "chunk": reach.chunk,
            "stride_qt": q_strides[0],
            "stride_qh": q_strides[1],
            "stride_ot": out_strides[0],
            "stride_oh": out_strides[1],
            "stride_lse": 0 if output_lse is None else output_lse.stride(0),
            "GROUP": self.group,
            "D": spec.head_size,
            "DV": spec.head_size_v,
            # These switches are compiled in: a feature that a layer does not use costs nothing.
            "HAS_CAP": spec.logits_soft_cap is not None,
            "HAS_SINKS": tensors.sinks is not None,
            "HAS_ALIBI": tensors.alibi_slopes is not None,
            "HAS_LSE": output_lse is not None,
            "COMPUTE": _computed(spec, query.device),
            # Offsets in 64 bits took share_decode_kernel from 168 to 254 registers, compiled for an H200.
            "INDEX": tl.int64 if is_far else tl.int32,
            # Rows that may come in any step have splits by position, others by the lengths of their request.
            "FIXED": self._tile is not None,
            "EVEN": "rows" not in spec.invariance,
            "FORMAT": None,
            "NUMBERS": numbers,
            **limit_switches(reach),
        }
        self._shares: dict[object, ShareDecode] = {}
        self._register_launches: dict[object, RegisterLaunch | None] = {}
        self._prefills: dict[object, Prefill] = {}

    def over_opened(
        self, opened: Opened, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
    ) -> BoundLayer:
        """This layer over opened pages; `lse` counts if the layer was bound with one."""
        has_numbers = opened.powers is not None
        key = opened.form, query.stride(), output.stride()
        known = self._over_opened.get(has_numbers)
        if known is None or known[0] != key:
            # Numbers without scales of rows are those of a cache of the layer's dtype, or of float16.
            spec = self._spec if opened.form else dataclasses.replace(self._spec, kv_cache_dtype="auto")
            if has_numbers:
                spec = dataclasses.replace(spec, dtype="float16")
            scales = self._scales if opened.form else opened_scale(self._spec, self._scales)
            numbers = self.numbers if has_numbers else 0
            if numbers == 2 and self.rotation is not None:
                # The kernel multiplies rows with the matrix of the rotation alone.
                scales = scales[0] * self.rotation.factor, scales[1] * self.rotation.factor
            given = query, output, lse if self._values["HAS_LSE"] else None
            made = BoundLayer(
                spec, self._tensors, self.reach, *given, scales, form=opened.form, numbers=numbers
            )
            known = self._over_opened[has_numbers] = key, made
        return known[1]

    @functools.cached_property
    def numbers(self) -> int:
        """How prefills read pages that are opened as numbers, as NUMBERS of their kernel; 0 if they do not."""
        spec = dataclasses.replace(self._spec, dtype="float16", kv_cache_dtype="auto")
        has_kernel = has_specialized_prefill(spec) and specialized_kernel(self._device) is not None
        if not (may_round(self._spec) and has_kernel):
            return 0
        if self.rotation is None:
            return 1
        return 2 if self.rotation.matrix.shape[0] <= WIDEST_TURNED else 0

    def shares(self, pages: Pages, stride_table: int, longest: int, sharing: int = 0) -> ShareDecode:
        """The kernels over equal shares of keys, for requests of at most `longest` queries.

        Args:
            pages: the cache.
            stride_table: of the block table.
            longest: queries of the longest request.
            sharing: queries that share a prefix, which is read once for each tile of their rows; 0 without.
        """
        itemsize = self._read_itemsize(pages)
        rows = max(longest * self.group, min(sharing * self.group, _SHARING_ROWS))
        if row_of(self._spec):
            # Opened tiles leave no registers for the sums of more rows.
            rows = min(rows, _SHARING_ROWS)
        rows = min(rows, self._most_rows(pages))
        in_registers = None if sharing else self._in_registers(pages, rows)
        launch = (
            share_launch(self._widest, itemsize, rows, self._gpu, self._tile)
            if in_registers is None
            else in_registers.launch
        )
        key = pages.form, stride_table, launch
        found = self._shares.get(key)
        if found is None:
            if len(self._shares) == _MOST_LAUNCHES:
                self._shares.clear()
            values = {**self._values, **self._whole_tiles(pages.k)}
            values |= stride_arguments(pages.k.stride(), pages.v.stride())
            values |= pair_values(pages.v, launch.block_m)
            values |= format_values(self._spec, pages.k, pages.v)
            values |= {"stride_table": stride_table, "BLOCK_SIZE": pages.k.shape[1]}
            values["PDL"] = can_overlap(pages.k.device)
            kernel: Any = None
            if in_registers is not None:
                kernel, values = register_kernel(), values | in_registers.values
            found = bind_shares(self._spec, self.reach, values, launch, self._gpu, kernel)
            self._shares[key] = found
        return found

    def _in_registers(self, pages: Pages, rows: int) -> RegisterLaunch | None:
        """As `register_launch`, which looks at the planes of pages: too long for each step."""
        key = pages.form, row_tile(rows)
        if key not in self._register_launches:
            if len(self._register_launches) == _MOST_LAUNCHES:
                self._register_launches.clear()
            self._register_launches[key] = register_launch(self._spec, pages, rows, pages.k.device)
        return self._register_launches[key]

    @property
    def fixed(self) -> bool:
        """Whether the sums of a row have one order, whatever the step."""
        return self._tile is not None

    @property
    def one_kernel(self) -> bool:
        """Whether only the kernel of shares has the same bits for all steps of a layer that asks for them."""
        # Over 8-bit pages, Triton orders the products of tiles of 64 rows and of fewer differently.
        return self.fixed and self._spec.has_quantized_kv_cache

    def fills_gpu(self, tokens: int, reqs: int) -> bool:
        """Whether prefills of so many tokens have a tile for most multiprocessors without dividing their keys."""
        # More tokens never change that, so a warm-up with the most tokens compiles what steps of fewer need.
        tiles = max(-(-tokens * self.group // _PREFILL_ROWS), reqs) * self.kv_heads
        return tiles >= _BUSY * self._gpu.multiprocessors

    def prefill(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        others: tuple[torch.Tensor, ...],
        stride_table: int,
        longest: int,
        most_keys: int | None = None,
        batch: tuple[int, int] = (1, 1),
    ) -> Prefill:
        """The kernel for requests of at most `longest` queries.

        Args:
            k: pages, or 3-dimensional the keys of the call.
            v: as `k`.
            others: queries and outputs of the call.
            stride_table: of the block table.
            longest: queries of the longest request.
            most_keys: tokens of the longest request; None if the host does not know.
            batch: the queries of all requests, and their number.
        """
        paged, stored = k.dim() == 4, k.dtype.itemsize
        is_whole = self._sees_all(most_keys)
        launch = self._launch(longest * self.group, stored, paged, most_keys)
        block_size = k.shape[1] if paged else 1
        special = launch.specialized
        if special is not None:
            if specialized_kernel(k.device) is None or not (is_near(k) and is_aligned(k, v, *others)):
                special = None
            elif launch.fewer_rows is not None:
                sizes = batch[0] * self.group, batch[1], longest * self.group
                halves = most_keys is not None and self.reach.right >= 0 and not self._limits(most_keys)
                devices = self.kv_heads, self._gpu.multiprocessors
                special = launch_for(special, launch.fewer_rows, sizes, *devices, halves)
        key = k.stride(), v.stride(), stored, block_size, stride_table, is_whole, launch, special
        found = self._prefills.get(key)
        if found is None:
            if len(self._prefills) >= _MOST_LAUNCHES:
                self._prefills.clear()
            values = {**self._values, **stride_arguments(k.stride(), v.stride())}
            values |= {"stride_table": stride_table, "PAGED": paged, "BLOCK_SIZE": block_size}
            if is_whole:
                values |= {"HAS_LEFT": False, "HAS_CHUNK": False}
            if special is not None:
                made = self._specialized_of(k, v, values, launch)
                self._prefills |= {(*key[:-1], each): one for each, one in made.items()}
                if special in made:
                    return made[special]
            block_m = max(launch.block_m, tile_side(self.group))
            parts = value_parts(self._spec.head_size_v, launch.columns, scale_step(self._spec))
            columns = self._spec.head_size_v // parts
            (block_d, tail), (block_dv, tail_v) = head_tiles(self._spec.head_size, columns, stored)
            values |= {
                "DV": columns,
                "PARTS": parts,
                "BLOCK_D": block_d,
                "BLOCK_DV": block_dv,
                "TAIL": tail,
                "TAIL_V": tail_v,
                "BLOCK_M": block_m,
                "BLOCK_N": launch.block_n,
                "SUMS": partial_sums(launch.block_n, block_m, launch.num_warps, self._tile is not None),
                # Nearly all tiles of so short a window are masked anyway.
                "ONE": 0 <= self.reach.left < 2 * launch.block_n,
            }
            if self._form is None:
                values |= format_values(self._spec, k, v, columns)
            else:
                whole = self._whole_tiles(k)
                values |= {"FORMAT": self._form, **whole, "TAIL": 0, "TAIL_V": 0, "ALIKE": False}
            kernel = BoundKernel(_PREFILL, 14, values, **compile_options(launch))
            found = self._prefills[key] = Prefill(kernel, block_m // self.group, parts=parts)
        return found

    def _launch(self, rows: int, stored: int, paged: bool, most_keys: int | None) -> PrefillLaunch:
        """The launch for requests of at most `rows` rows, over keys of `stored` bytes."""
        left = -1 if self._sees_all(most_keys) else self.reach.left
        if self.group > SHORT_PROMPT_LAUNCH.block_m:
            most_keys = None  # all heads of a group are in one tile
        sizes = self._widest, self._itemsize, rows, self._gpu, most_keys, stored, self._tile, self.group
        plain = not (self._values["NUMBERS"] or self._values["HAS_CAP"] or self.reach.chunk > 0)
        launch = prefill_launch(*sizes, left, plain)
        if self._form is not None:
            return dataclasses.replace(launch, specialized=None, fewer_rows=None)
        return opened_launch(launch, self._gpu) if paged and row_of(self._spec) else launch

    def _specialized_of(
        self, k: torch.Tensor, v: torch.Tensor, values: dict[str, Any], launch: PrefillLaunch
    ) -> dict[Specialized, Prefill]:
        """The kernels with specialised warps that serve the layer, by their launch."""
        made = {
            each: found
            for each in (launch.specialized, launch.fewer_rows)
            if each is not None and (found := self._specialized(k, v, values, each)) is not None
        }
        # Later steps of as long requests may need the other launch, which no warm-up may have had.
        compile_together(each.kernel for each in made.values())
        return made

    def programs(self, count: int, reqs: int, most_keys: int | None) -> tuple[int, bool]:
        """Programs with specialised warps for `count` tiles of each KV head, and whether they take tiles by place."""
        works = count * self.kv_heads, reqs * self.kv_heads
        return programs(*works, self._gpu.multiprocessors, self._limits(most_keys), most_keys)

    def _limits(self, most_keys: int | None) -> bool:
        """Whether a window or chunk limits the keys of tiles so much that all tiles have few."""
        # Requests with tokens before have tiles of most of a wide window, as many as without one.
        is_wide = most_keys is None and self._width >= _WIDE_WINDOW
        return self._width > 0 and not is_wide and not self._sees_all(most_keys)

    def _sees_all(self, most_keys: int | None) -> bool:
        """Whether no window or chunk hides a key of new prompts, the longest of which has `most_keys` tokens."""
        return most_keys is not None and not self.fixed and most_keys <= limit_class(self._width)

    @functools.cached_property
    def _width(self) -> int:
        """The most keys that a query sees by its window and chunk; 0 without both."""
        return limit_width(self.reach.left, self.reach.chunk)

    def _specialized(
        self, k: torch.Tensor, v: torch.Tensor, values: dict[str, Any], launch: Specialized
    ) -> Prefill | None:
        """The kernel with specialised warps, if it serves the layer on this device."""
        if not serves(self._spec, self._values, k, v, launch):
            return None
        columns, tail = specialized_tiles(self._spec, values["NUMBERS"])
        # With heads of 64, prompts of 90 x 100 tokens took 141 us when launched while the kernel before ran and 118 after it, and 30 x
        # 300 took 164 and 149, by the same instructions; prompts of other launches took 0.96 to 1.01 of the time.
        is_short = columns <= 64 and launch == SHORT_PROMPT_LAUNCH.specialized
        overlaps = can_overlap(k.device) and not is_short
        values = {
            **values,
            "BLOCK_D": columns,
            "TAIL": tail,
            "KV_HEADS": self.kv_heads,
            "BLOCK_M": launch.rows,
            "BLOCK_N": launch.block_n,
            "STAGES": launch.num_stages,
            "IN_TURN": launch.in_turn,
            "HELD": launch.held,
            "PDL": overlaps,
            **dict.fromkeys(CallTiles.NAMES),
        }
        options = {"num_warps": 4, "launch_pdl": True} if overlaps else {"num_warps": 4}
        kernel, bound = specialized_kernel(k.device), None
        # With splits at fixed places a whole tile may begin before the first key of its request.
        if not self.fixed and CallTiles.serve(launch, self._spec.head_size, (columns, tail), k, v):
            tiles = CallTiles(launch.block_n, (columns, tail), k)
            bound = DerivingKernel(kernel, 19, tiles, len(CallTiles.NAMES), values, **options)
        return Prefill(bound or BoundKernel(kernel, 19, values, **options), launch.rows, True)

    def _whole_tiles(self, k: torch.Tensor) -> dict[str, int]:
        """The columns of the tiles of kernels that hold each head in one."""
        keys, values = head_tiles(self._spec.head_size, self._spec.head_size_v, k.dtype.itemsize, whole=True)
        return {"BLOCK_D": keys[0], "BLOCK_DV": values[0]}

    def _read_itemsize(self, pages: Pages) -> int:
        """Bytes of an element of a tile of keys."""
        # Float32 products convert all that is stored. Opened planes take the registers of 16 bits.
        return 4 if self._itemsize == 4 else 2 if row_of(self._spec) else pages.k.dtype.itemsize

    def _most_rows(self, pages: Pages) -> int:
        """Most rows of a tile of decodes."""
        stored = 4 if self._itemsize == 4 else pages.k.dtype.itemsize
        return most_rows(self._widest, stored, self._gpu, self.fixed)


def _computed(spec: LayerSpec, device: torch.device) -> Any:
    """The type that the kernels multiply in; None for the type of the queries."""
    # Turned queries are float32, whatever the type of the layer.
    if spec.dtype != "bfloat16" and (spec.dtype == "float32" or row_of(spec) is None):
        return None
    if device.type == "cpu":
        return tl.float32  # the interpreter multiplies bfloat16 as integers
    # float16 represents every 8-bit float, and GPUs convert to it fastest.
    return tl.float16 if spec.has_quantized_kv_cache else None
