"""The prefill kernel with specialised warps, written in Gluon for Hopper: the layers and tensors that it serves."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from attnplug.backends.triton.launch import Specialized, gpu_of, runs_gluon
from attnplug.backends.triton.layout import has_specialized_prefill, specialized_tiles, tile_memory
from attnplug.core.spec import LayerSpec

WIDEST_TURNED = 128
"""Columns of the largest rotation that a multiprocessor has room for beside the tiles."""
_MOST_GROUP = 128
"""The most heads of a group."""


@functools.cache
def specialized_kernel(device: torch.device) -> Any:
    """The kernel, or None for a device, or a version of Triton, that it is not for."""
    if not runs_gluon(device):
        return None
    try:
        from attnplug.backends.triton.kernels.hopper.specialized_prefill import specialized_prefill_kernel
    except ImportError:
        return None
    return specialized_prefill_kernel


def serves(
    spec: LayerSpec, values: Mapping[str, Any], k: torch.Tensor, v: torch.Tensor, launch: Specialized
) -> bool:
    """Whether the kernel serves a layer, and keys and values of such strides.

    Args:
        spec: the layer.
        values: arguments of kernels that BoundLayer has bound: strides, GROUP, COMPUTE and NUMBERS.
        k: pages, or the keys of the call.
        v: as `k`.
        launch: its tiles.
    """
    if not has_specialized_prefill(spec) or values["GROUP"] > _MOST_GROUP or values["COMPUTE"] is not None:
        return False
    strides = (values[name] for name in ("stride_qt", "stride_qh", "stride_ot", "stride_oh"))
    # Triton copies 16 bytes at once if it knows that strides are multiples of 16 elements.
    if any(stride % 16 for stride in (*strides, *k.stride()[:-1], *v.stride()[:-1])):
        return False
    # Keys and values of a page are at the same places, so they are computed once.
    if k.dim() == 4 and k.stride() != v.stride():
        return False
    # The kernel multiplies heads by their strides in 32 bits.
    asked, stored = max(values["stride_qh"], values["stride_oh"]), max(k.stride(-2), v.stride(-2))
    if max(spec.num_heads * asked, spec.num_kv_heads * stored) > 1 << 31:
        return False
    parts = specialized_tiles(spec, values["NUMBERS"])
    columns = sum(parts)
    room = tile_memory(launch.rows, launch.block_n, launch.num_stages, columns * 2)
    if values["NUMBERS"] == 2:
        room += 2 * columns**2
    return room + launch.groups * scratch(parts) <= gpu_of(k.device).shared_memory


def tiles(rows: int, reqs: int, longest: int, tile_rows: int) -> tuple[int, int]:
    """The number of tiles of a batch, and of each request; the second is 0 if the kernel has to look for it.

    Args:
        rows: queries of all requests, times the heads of a group.
        reqs: the requests.
        longest: rows of the longest request.
        tile_rows: rows of a tile.
    """
    # Both are bounds: the host does not read the start locations
    # from the device. The fewer tiles without rows, the better.
    each = -(-longest // tile_rows)
    unlike = rows // tile_rows + reqs
    return (reqs * each, each) if reqs * each <= unlike else (unlike, 0)


# All layers of a step ask for the same.
@functools.lru_cache(maxsize=256)
def launch_for(
    launch: Specialized,
    fewer: Specialized,
    sizes: tuple[int, int, int],
    kv_heads: int,
    multiprocessors: int,
    is_new: bool,
) -> Specialized:
    """The launch of the two whose tiles are done earlier, where a multiprocessor has one at a time.

    Args:
        launch: for most steps.
        fewer: with tiles of fewer rows.
        sizes: rows of all requests, the requests, and rows of the longest, as `tiles` takes them.
        kv_heads: of the layer.
        multiprocessors: of the GPU.
        is_new: whether queries see the keys of their own request up to them, so that tiles have half as many as the longest.
    """

    def time(each: Specialized) -> float:
        waves = tiles(*sizes, each.rows)[0] * kv_heads / multiprocessors
        return each.pace * (max(waves / 2, 1.0) if is_new else math.ceil(waves))

    return launch if time(launch) <= time(fewer) else fewer


def programs(
    works: int, heads: int, multiprocessors: int, has_limit: bool, most_keys: int | None
) -> tuple[int, bool]:
    """The programs that attend `works` tiles of KV heads, one for each multiprocessor or one for each tile.

    The second answer is whether they take tiles by their places in the requests, and not one request after the other.

    Args:
        works: tiles times KV heads.
        heads: requests times KV heads.
        multiprocessors: of the GPU.
        has_limit: whether a window or chunk limits the keys of tiles, so that all have few.
        most_keys: tokens of the longest request; None if the host does not know.
    """
    # Tiles of few keys are taken in turn, so that the copies of the next tile hide the end of one. For tiles
    # of many keys there is a program each, which the GPU starts on the first multiprocessor that is done.
    few = most_keys is not None and most_keys <= _IN_TURN_KEYS
    by_place = few and not has_limit and heads <= _PLACE_SHARE * multiprocessors
    return min(works, multiprocessors) if has_limit or few else works, by_place


# Programs that take tiles in turn are faster for few keys. On an H200, 16 prompts of
# 50 to 3000 tokens took 909 us and not 949, but one of 16k took 3865 and not 3827.
_IN_TURN_KEYS = 4096
"""Tokens of the longest prompt whose tiles have few keys."""
# One request after the other, some programs got only late tiles of long requests: 4 x 1500 tokens took 199 us and not 158. Many
# short requests by place read their keys from memory again for each place: 32 x 300 took 114 us, and 139 by place.
_PLACE_SHARE = 0.67
"""The share of the multiprocessors that has a tile of one place, up to which tiles are taken by place."""


def scratch(parts: tuple[int, int]) -> int:
    """Bytes of shared memory of each group for barriers, and for outputs that warps exchange before they write them.

    Args:
        parts: columns of both parts of a head; the second is 0 for one part.
    """
    # Three groups with heads of 96 take 10,956 each, as Triton 3.6 places what they need.
    return 11_008 if parts[1] else 9_728


class CallTiles:
    """Makes what the kernel copies whole tiles of a call's keys and values by: descriptors, one for each of its parts.

    Args:
        block_n: keys of a tile.
        parts: columns of both parts of a head; the second is 0 for one part.
        k: keys like those of the calls: `[tokens, KV heads, D]`.
    """

    NAMES = ("k_tiles", "v_tiles", "k_tail_tiles", "v_tail_tiles")
    """The kernel's arguments."""

    def __init__(self, block_n: int, parts: tuple[int, int], k: torch.Tensor) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        dtype = gl.bfloat16 if k.dtype == torch.bfloat16 else gl.float16
        self._heads, self._forms = k.shape[1], []
        memory = torch.empty(0, dtype=k.dtype)
        for shape in ([block_n, columns] for columns in parts if columns):
            layout: Any = gl.NVMMASharedLayout.get_default_for(shape, dtype)
            self._forms.append(TensorDescriptor(memory, [1, 1], [16, 1], shape, layout))

    @staticmethod
    def serve(
        launch: Specialized, size: int, parts: tuple[int, int], k: torch.Tensor, v: torch.Tensor
    ) -> bool:
        """Whether such keys and values have tiles that a descriptor names: columns of no other head, in rows of all heads."""
        if not launch.by_blocks or k.dim() != 3 or sum(parts) != size:
            return False
        return all(each.stride(0) >= (each.shape[1] - 1) * each.stride(1) + size for each in (k, v))

    def __call__(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The descriptors for a launch's arguments: those of keys and of values, of each part."""
        made = [self._of(given, tensor, form) for form in self._forms for tensor in given[1:3]]
        return (*made, None, None)[: len(self.NAMES)]

    def _of(self, given: tuple[Any, ...], tensor: torch.Tensor, form: Any) -> Any:
        token, head, _ = tensor.stride()
        # Its constructor takes 4 us to check what `serves` has checked.
        made = object.__new__(type(form))
        made.__dict__.update(form.__dict__)
        # Memory is needed for a name, also where nothing is read: a step without any key.
        made.base = tensor if tensor.shape[0] else given[0]
        made.shape = [max(tensor.shape[0], 1), (self._heads - 1) * head + tensor.shape[2]]
        made.strides = [token, 1]
        return made


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether the tensors begin at multiples of 16 bytes."""
    return not any(tensor.data_ptr() & 15 for tensor in tensors)


def is_near(k: torch.Tensor) -> bool:
    """Whether 32 bits hold the place of each key, in units of 16 elements: pages of up to 128 GiB."""
    return k.shape[0] * k.stride(0) <= 16 << 32
