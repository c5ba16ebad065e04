"""Whether two backends can share one KV cache: equal shape, strides, split and block size."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attnplug.core.blocks import MultipleOf
from attnplug.core.reasons import Reason

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec

_BLOCKS = 4
"""Any number serves: shapes are compared, nothing is allocated."""


def common_block_sizes(
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
    spec: LayerSpec | None = None,
    device: Device | None = None,
) -> tuple[int | MultipleOf, ...]:
    """Tokens per page that both can read; without `spec` for any layer."""
    sizes = (backend.get_supported_kernel_block_sizes(spec, device) for backend in (decode, prefill))
    return MultipleOf.common(*sizes)


def common_layouts(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> tuple[str, ...]:
    """Physical orders that both can read, in the decoding backend's order of preference: it reads the most."""
    readable = prefill.supported_kv_cache_layouts()
    return tuple(layout for layout in decode.supported_kv_cache_layouts() if layout in readable)


def disagreements(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: LayerSpec, device: Device
) -> list[Reason]:
    """Why the two cannot share one KV cache of a layer, each with both names; empty if they can.

    The storage dtype is not compared: a backend that does not store it refuses the layer.
    """
    if spec.direct_kv:
        fact = f"K and V come with the call: there are no pages that {_both(prefill, decode)} could share"
        return [Reason(fact, code="feature.direct_kv", field="direct_kv")]
    return [*_pages(prefill, decode, spec, device), *_orders(prefill, decode, spec)]


def _pages(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: LayerSpec, device: Device
) -> Iterator[Reason]:
    sizes = common_block_sizes(prefill, decode, spec, device)
    if not sizes and spec.block_size is None:  # each backend checks a given size itself
        own = [each.get_supported_kernel_block_sizes(spec, device) for each in (prefill, decode)]
        yield _differ("block sizes", prefill, decode, *map(_listed, own), code="block_size")
    if _split(prefill) is not _split(decode):
        fact = f"{_both(prefill, decode)} split K and V of a page differently"
        yield Reason(fact, code="kv_cache_layout", field="split_kv")
    size = spec.block_size or MultipleOf.nearest(sizes or (1,), 16)
    shapes = [
        tuple(
            each.get_kv_cache_shape(
                _BLOCKS, size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
            )
        )
        for each in (prefill, decode)
    ]
    if shapes[0] != shapes[1]:
        what = f"cache shapes of {_BLOCKS} blocks of {size}"
        yield _differ(what, prefill, decode, *map(str, shapes), code="kv_cache_layout", field="shape")


def _split(backend: type[AttentionBackend]) -> object:
    found: object = inspect.getattr_static(backend, "split_kv")
    return getattr(found, "__func__", found)


def _orders(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: LayerSpec
) -> Iterator[Reason]:
    layouts = common_layouts(prefill, decode)
    if not layouts:
        own = [each.supported_kv_cache_layouts() for each in (prefill, decode)]
        yield _differ("KV layouts", prefill, decode, *map(_listed, own), code="kv_cache_layout")
    for layout in layouts:
        orders = [
            [
                tuple(each.get_kv_cache_stride_order(layers, layout=layout, spec=spec))
                for layers in (False, True)
            ]
            for each in (prefill, decode)
        ]
        if orders[0] != orders[1]:
            ways = [" and ".join(map(str, order)) for order in orders]
            what = f"stride orders of {layout}"
            yield _differ(what, prefill, decode, *ways, code="kv_cache_layout", field="stride_order")
            return


def _differ(
    what: str,
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
    first: str,
    second: str,
    *,
    code: str,
    field: str | None = None,
) -> Reason:
    fact = f"{what} differ: {prefill.get_name()} has {first}, {decode.get_name()} has {second}"
    return Reason(fact, code=code, field=field or code)


def _both(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> str:
    return f"{prefill.get_name()} and {decode.get_name()}"


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"
