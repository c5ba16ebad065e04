"""Pages of formats with a codec: encoding rows into their planes, and decoding pages.

A page has the planes of K, and then those of V, each `[block, heads, items]` in NHD or `[heads, block, items]` in HND. The
bytes of a row depend on that row, the layer's scales and the format's version alone, so that prefix caching, cut
prompts, drafts and copies of blocks give the same numbers. Each byte that `decode` needs is in the page.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.kv_format import KVFormat, kv_format
from attnplug.core.spec import LayerSpec

__all__ = ["KVCodec", "codec_of", "make_codec", "page_planes", "read_pages", "write_pages"]


@runtime_checkable
class KVCodec(Protocol):
    """Turns rows of keys or values into planes, and back. It is made for a head size, and has no state.

    A class `Codec(head_size)` of it is named by `KVFormat.codec`. Its functions never wait for a GPU.
    """

    def encode(self, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        """The planes `[..., items]` of float32 `rows [..., head_size]`, each in the dtype of its Plane."""
        ...

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
        """The float32 rows `[..., head_size]` of planes."""
        ...


def codec_of(spec: LayerSpec) -> KVCodec | None:
    """The codec of a layer's keys and values; None where a page has elements of a torch dtype.

    Raises:
        LayoutError: the format's codec cannot be imported or made; the error names it.
    """
    row = kv_format(spec.resolved_kv_cache_dtype)
    return None if row.codec is None else make_codec(row, spec.head_size)


def make_codec(row: KVFormat, head_size: int) -> KVCodec:
    """The codec of a format for rows of `head_size` elements; the same object each time.

    Raises:
        LayoutError: the format has none, or it cannot be imported or made.
    """
    if row.codec is None:
        raise LayoutError(
            "kv_cache_dtype", row.name, "has no codec: its pages have elements of a torch dtype"
        )
    return _codec(row.codec, head_size)


def new_codec(row: KVFormat, head_size: int) -> KVCodec:
    """As `make_codec`, but a new object each time."""
    return _made(row.codec or "", head_size)


def _made(path: str, head_size: int) -> KVCodec:
    try:
        made: Any = pkgutil.resolve_name(path)(head_size)
    except Exception as error:
        limit = f"cannot be made for head_size={head_size}: {type(error).__name__}: {error}"
        raise LayoutError("codec", path, limit) from error
    if not isinstance(made, KVCodec):
        raise LayoutError("codec", path, "must give an object with encode and decode")
    return made


_codec = functools.lru_cache(maxsize=256)(_made)


def page_planes(pages: torch.Tensor, row: KVFormat, head_size: int) -> tuple[torch.Tensor, ...]:
    """The planes of K or of V, as bytes `[num_blocks, block_size, heads, width]` that share the memory of `pages`.

    Args:
        pages: uint8 `[num_blocks, block_size, heads, row.width(head_size)]`, K or V as `split_kv` gives them. They
            may have gaps between blocks; strides and offset are read from the tensor.
        row: the format.
        head_size: elements of a row.

    Raises:
        LayoutError: the bytes of a block's heads are not neighbours in the order NHD or HND.
    """
    blocks, size, heads, width = pages.shape
    of_token, of_head = pages.stride(1), pages.stride(2)
    # The stride of one token, or of one head, says nothing.
    token_first = (size == 1 or of_token == heads * width) and (heads == 1 or of_head == width)
    head_first = (heads == 1 or of_head == size * width) and (size == 1 or of_token == width)
    if pages.dtype != torch.uint8 or not (token_first or head_first) or pages.stride(3) != 1:
        found = f"{pages.dtype} with strides {pages.stride()}"
        limit = f"must be torch.uint8, with the {width} bytes of each row of a block together in NHD or HND"
        raise LayoutError("kv_cache", found, limit)
    planes, start = [], pages.storage_offset()
    for plane in row.planes:
        bytes_ = plane.bytes(head_size) or 0
        inner = (heads * bytes_, bytes_, 1) if token_first else (bytes_, size * bytes_, 1)
        planes.append(pages.as_strided((blocks, size, heads, bytes_), (pages.stride(0), *inner), start))
        start += size * heads * bytes_
    return tuple(planes)


@torch.no_grad()
def write_pages(
    spec: LayerSpec,
    scales: tuple[float, float],
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Encode keys and values `[T, heads, head_size]` into the slots `[T]` of pages; a slot of -1 is not written.

    Raises:
        BatchError: a slot past the pages.
    """
    row = kv_format(spec.resolved_kv_cache_dtype)
    codec = make_codec(row, spec.head_size)
    kept, size = slots >= 0, k_cache.shape[1]
    slots = slots[kept]
    for rows, pages, scale in ((key, k_cache, scales[0]), (value, v_cache, scales[1])):
        planes = encoded(codec, rows[: len(kept)][kept], scale)
        for plane, items in zip(page_planes(pages, row, spec.head_size), planes, strict=True):
            try:
                plane.index_put_((slots // size, slots % size), items)
            except IndexError:
                past = f"is past the {pages.shape[0] * size} slots of the cache"
                remedy = "give slots of the pool's blocks"
                raise BatchError("slot_mapping", int(slots.max()), past, remedy) from None


def bound_codec_write(
    spec: LayerSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float],
) -> Callable[..., None]:
    """`write_pages` with the layer and its scales given, for tensors with the strides and dtypes of these."""
    return functools.partial(write_pages, spec, scales)


def encoded(codec: KVCodec, rows: torch.Tensor, scale: float) -> Iterator[torch.Tensor]:
    """The planes of rows, as bytes `[..., width]`."""
    for plane in codec.encode(rows.float(), scale):
        # A copy, because a dimension of one element may have any stride, which no view of bytes allows.
        items = torch.empty(plane.shape, dtype=plane.dtype, device=plane.device).copy_(plane)
        yield items.view(torch.uint8)


@torch.no_grad()
def read_pages(pages: torch.Tensor, blocks: torch.Tensor, spec: LayerSpec, scale: float) -> torch.Tensor:
    """The keys or values of some blocks, float32 `[len(blocks), block_size, heads, head_size]`.

    Raises:
        BatchError: a block that the pages do not have.
    """
    row = kv_format(spec.resolved_kv_cache_dtype)
    codec = make_codec(row, spec.head_size)
    if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(pages):
        limit = "has a page that is no block of the cache"
        raise BatchError("block_table_tensor", int(blocks.max()), limit, "give blocks of the pool")
    planes = page_planes(pages, row, spec.head_size)
    return codec.decode(
        tuple(
            typed(each.index_select(0, blocks), plane.dtype)
            for each, plane in zip(planes, row.planes, strict=True)
        ),
        scale,
    )


def typed(plane: torch.Tensor, dtype: str) -> torch.Tensor:
    """Bytes of a plane as items of a dtype, by name."""
    # A copy begins at an address that each dtype can have; a view of a page may not.
    return plane.contiguous().view(getattr(torch, dtype))
