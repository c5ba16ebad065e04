"""A backend's KV pages have the shape, the stride order and the views that the contract defines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attnplug.core.errors import LayoutError
from attnplug.core.features import Feature
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import LayerSpec
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.registry.plugins.waiting import describe, guarded_call
from attnplug.runtime.caches.allocation import view_kv_cache
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    SkipKind,
    checks_from,
    error_context,
)
from attnplug.testing.conformance.target import Target

_LAYOUTS = ("NHD", "HND")
_BLOCKS = 3


def checks(target: Target) -> Iterator[Check]:
    """The checks of layouts, and of each kind of page that the backend declares."""
    summary = "the layouts are known, and agree with the required one"
    yield Check.of("declaration/kv-layouts", summary, _check_layouts, target)
    yield from checks_from(_CHECKS, "declaration", target, "latent" if target.is_latent else "plain")
    if Feature.HEAD_SIZE_V in target.backend.features:
        yield from checks_from(_CHECKS, "declaration", target, "head_size_v")


def _check_layouts(target: Target) -> None:
    backend = target.backend
    with error_context("supported_kv_cache_layouts()"):
        layouts = list(backend.supported_kv_cache_layouts())
    if not layouts or len(set(layouts)) != len(layouts) or not set(layouts) <= set(_LAYOUTS):
        raise ConformanceError(f"supported_kv_cache_layouts() is {layouts}; it must name NHD, HND or both")
    with error_context("get_required_kv_cache_layout()"):
        required = backend.get_required_kv_cache_layout()
    if required != (layouts[0] if len(layouts) == 1 else None):
        raise ConformanceError(
            f"get_required_kv_cache_layout() is {required!r}, but supported_kv_cache_layouts() is {layouts}"
        )
    order, error = guarded_call(backend.get_kv_cache_stride_order, layout="NEITHER")
    if not isinstance(error, LayoutError):
        found = f"gave {order}" if error is None else f"raised {describe(error)}"
        raise ConformanceError(
            f"get_kv_cache_stride_order(layout='NEITHER') {found}; it must raise LayoutError"
        )


def _layer(target: Target, kind: str) -> LayerSpec:
    spec = target.paged_spec()
    if kind == "plain" and spec.head_size_v != spec.head_size:
        raise CheckSkipped(f"{target.name} serves no layer whose values have the head size", SkipKind.LAYER)
    if kind == "head_size_v":
        others = [{"head_size_v": size} for size in target.head_sizes if size != spec.head_size]
        wanted = [Feature.HEAD_SIZE_V.fields(spec.head_size), *others]
        served = [each for _, each in target.variants(spec, wanted, set())]
        # Of refused sizes one that the backend lists tells most: the first may just be unlisted.
        spec = served[0] if served else target.changed(spec, **wanted[-1])
    return spec.replace(block_size=target.block_size(spec))


def _layers(target: Target, kind: str) -> list[LayerSpec]:
    """The layer, and the same with one KV head if the backend serves it."""
    spec = _layer(target, kind)
    singles = () if spec.num_kv_heads == 1 else target.variants(spec, [{"num_kv_heads": 1}], set())
    return [spec, *(single for _, single in singles)]


def _check_shape(target: Target, kind: str) -> None:
    for spec in _layers(target, kind):
        _expect_shape(target, kind, spec)


def _expect_shape(target: Target, kind: str, spec: LayerSpec) -> None:
    size = target.block_size(spec)
    expected: tuple[int, ...] = (_BLOCKS, 2, size, spec.num_kv_heads, spec.head_size)
    if kind == "head_size_v":
        expected = (_BLOCKS, size, spec.num_kv_heads, spec.head_size + spec.head_size_v)
    elif kind == "latent":
        expected = (_BLOCKS, size, spec.head_size)
    for name in target.kv_cache_dtypes:
        stored = spec.replace(kv_cache_dtype=name)
        if kv_format(stored.resolved_kv_cache_dtype).fault(stored):
            continue
        if kind == "plain":
            expected = (*expected[:4], kv_format(name).width(spec.head_size))
        heads = f"{spec.num_kv_heads} heads of {spec.head_size}"
        call = f"get_kv_cache_shape of {_BLOCKS} blocks of {size} tokens, {heads}, cache_dtype={name!r}"
        with error_context(call):
            found = target.backend.get_kv_cache_shape(
                _BLOCKS, size, spec.num_kv_heads, spec.head_size, name, spec.head_size_v
            )
        if tuple(found) != expected:
            raise ConformanceError(f"{call} is {tuple(found)}; the contract has {expected}")


def _check_stride_order(target: Target, kind: str) -> None:
    spec, backend = _layer(target, kind), target.backend
    dims = {"head_size_v": 4, "latent": 3}.get(kind, 5)
    token, head = dims - 3, dims - 2
    for layout in backend.supported_kv_cache_layouts():
        for layers in (False, True):
            call = f"get_kv_cache_stride_order({layers}, layout={layout!r}) of {dims} dimensions"
            with error_context(call):
                order = tuple(backend.get_kv_cache_stride_order(layers, layout=layout, spec=spec))
            if sorted(order) != list(range(dims + layers)):
                raise ConformanceError(f"{call} is {order}, not a permutation of them")
            inner = "head" if layout == "NHD" else "token"
            # Latents have no dimension of heads.
            if kind != "latent" and (order.index(token + layers) < order.index(head + layers)) != (
                layout == "NHD"
            ):
                raise ConformanceError(f"{call} is {order}; {layout} has the {inner} inside")
            if layers and order.index(0) < order.index(1):
                raise ConformanceError(
                    f"{call} is {order}: the layers of a block must be adjacent, inside the block"
                )
    with error_context("get_kv_cache_stride_order without layout"):
        default = tuple(backend.get_kv_cache_stride_order(spec=spec))
    first = backend.supported_kv_cache_layouts()[0]
    if default != tuple(backend.get_kv_cache_stride_order(layout=first, spec=spec)):
        found = f"get_kv_cache_stride_order without layout is {default}"
        raise ConformanceError(f"{found}, not that of {first}, the first layout")


def _check_views(target: Target, kind: str) -> None:
    for spec in _layers(target, kind):
        _expect_views(target, spec)


def _expect_views(target: Target, spec: LayerSpec) -> None:
    backend = target.backend
    pages: Any = kv_cache_spec_for(spec, target.block_size(spec))
    for layout in backend.supported_kv_cache_layouts():
        for layers in (None, 2):
            raw = torch.zeros(_BLOCKS * (layers or 1) * pages.page_size_bytes, dtype=torch.uint8)
            with error_context(f"viewing bytes as pages in the layout {layout}"):
                cache = view_kv_cache(raw, pages, spec, backend, layout, layers)
                _check_split(target, spec, cache if layers is None else cache[1])


def _check_split(target: Target, spec: LayerSpec, cache: torch.Tensor) -> None:
    parts = target.backend.split_kv(cache, spec)
    heads = (_BLOCKS, target.block_size(spec), spec.num_kv_heads)
    for name, part, size in zip("KV", parts, (spec.head_size, spec.head_size_v), strict=True):
        if tuple(part.shape) != (*heads, size):
            raise ConformanceError(
                f"split_kv gives {name} of the shape {tuple(part.shape)}, not {(*heads, size)}"
            )
        if part.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr():
            raise ConformanceError(f"split_kv gives a copy of {name}; it must be a view, or writes are lost")
    expected = STORAGE_DTYPES[spec.resolved_kv_cache_dtype]
    if {part.dtype for part in parts} != {expected}:
        raise ConformanceError(
            f"split_kv gives {', '.join(str(part.dtype) for part in parts)}, not {expected}"
        )
    k, v = parts
    k.fill_(1.0)
    v.fill_(2.0)
    if spec.mla is not None:
        if not bool((k[..., : spec.head_size_v] == 2).all()):
            raise ConformanceError("V of split_kv is not the first part of the latents")
        return
    if not (bool((k == 1).all()) and bool((v == 2).all())):
        raise ConformanceError("K and V of split_kv overlap: writing V changed K")
    stored = cache[:, 0] if cache.ndim == 5 else cache[..., : spec.head_size]
    if not bool((stored == 1).all()):
        place = "[:, 0]" if cache.ndim == 5 else f"[..., :{spec.head_size}]"
        raise ConformanceError(
            f"K of split_kv is not the first part of the cache, {place}, for {spec.num_kv_heads} KV heads: "
            "another backend that reads the same pages takes keys for values"
        )


_CHECKS: CheckTable = {
    "kv-shape": (_check_shape, "get_kv_cache_shape gives the logical shape of the contract"),
    "kv-stride-order": (_check_stride_order, "stride orders are permutations that match the layout's name"),
    "kv-views": (_check_views, "split_kv gives K and V as views that do not overlap"),
}
