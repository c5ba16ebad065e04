"""Whether backends can share one KV cache: equal shape, strides, split and block size.

The declarations of a composite, and its options: those of all members, each prefixed by its phase, or its place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.core.blocks import MultipleOf
from attnplug.core.composite.pair import in_each, of_each
from attnplug.core.dtypes import bare_dtype_name
from attnplug.core.features import Feature
from attnplug.core.interface.answers import answer
from attnplug.core.reasons import Reason
from attnplug.core.validation import depends_on_capability, stored_dtypes

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.composite.backend import CompositeBackend
    from attnplug.core.composite.pair import Routes
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec

    _Pair = tuple[type[AttentionBackend], type[AttentionBackend]]

# Any number serves, because shapes are compared and nothing is allocated.
_BLOCKS = 4


def common_block_sizes(
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
    spec: LayerSpec | None = None,
    device: Device | None = None,
    *,
    others: Iterable[type[AttentionBackend]] = (),
) -> tuple[int | MultipleOf, ...]:
    """Tokens per page that both, and the `others`, can read; without `spec` for any layer."""
    first, second, *rest = (
        answer(backend, "get_supported_kernel_block_sizes", spec, device)
        for backend in (decode, prefill, *others)
    )
    common = MultipleOf.common(first, second)
    for sizes in rest:
        common = MultipleOf.common(common, sizes)
    return common


def common_layouts(
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
    others: Iterable[type[AttentionBackend]] = (),
) -> tuple[str, ...]:
    """Physical orders that all can read, in the decoding backend's order of preference: it reads the most."""
    preferred, *readable = (answer(each, "supported_kv_cache_layouts") for each in (decode, prefill, *others))
    return tuple(layout for layout in preferred if all(layout in each for each in readable))


def disagreements(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: LayerSpec, device: Device
) -> list[Reason]:
    """Why the two cannot share one KV cache of a layer, each with both names; empty if they can.

    The storage dtype is not compared: a backend that does not store it refuses the layer.
    """
    pair = (prefill, decode)
    if spec.direct_kv:
        fact = f"K and V come with the call: there are no pages that {_both(pair)} could share"
        return [Reason(fact, code="feature.direct_kv", field="direct_kv")]
    return [*_pages(pair, spec, device), *_layout_reasons(pair, spec)]


def _pages(pair: _Pair, spec: LayerSpec, device: Device) -> Iterator[Reason]:
    sizes = common_block_sizes(*pair, spec, device)
    if not sizes and spec.block_size is None:  # each backend checks a given size itself
        own = [answer(each, "get_supported_kernel_block_sizes", spec, device) for each in pair]
        yield _differ("block sizes", pair, map(_listed, own), code="block_size")
    if _split(pair[0]) is not _split(pair[1]):
        fact = f"{_both(pair)} split K and V of a page differently"
        yield Reason(fact, code="kv_cache_layout", field="split_kv")
    size = spec.block_size or MultipleOf.nearest(sizes or (1,), 16)
    sizes_of_cache = (_BLOCKS, size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v)
    shapes = [answer(each, "get_kv_cache_shape", *sizes_of_cache) for each in pair]
    if shapes[0] != shapes[1]:
        yield _differ(f"cache shapes of {_BLOCKS} blocks of {size}", pair, map(str, shapes), field="shape")


def _split(backend: type[AttentionBackend]) -> object:
    # Not bound: a bound method of one class never is that of another, also if both inherit it.
    found: object = inspect.getattr_static(backend, "split_kv")
    return getattr(found, "__func__", found)


def _layout_reasons(pair: _Pair, spec: LayerSpec) -> Iterator[Reason]:
    layouts = common_layouts(*pair)
    if not layouts:
        own = [answer(each, "supported_kv_cache_layouts") for each in pair]
        yield _differ("KV layouts", pair, map(_listed, own))
    for layout in layouts:
        orders = [
            [
                answer(each, "get_kv_cache_stride_order", layers, layout=layout, spec=spec)
                for layers in (False, True)
            ]
            for each in pair
        ]
        if orders[0] != orders[1]:
            ways = (" and ".join(map(str, order)) for order in orders)
            yield _differ(f"stride orders of {layout}", pair, ways, field="stride_order")
            return


def _differ(
    what: str, pair: _Pair, found: Iterable[str], *, code: str = "kv_cache_layout", field: str | None = None
) -> Reason:
    sides = (f"{answer(backend, 'get_name')} has {own}" for backend, own in zip(pair, found, strict=True))
    return Reason(f"{what} differ: {', '.join(sides)}", code=code, field=field or code)


def _both(pair: _Pair) -> str:
    return " and ".join(answer(each, "get_name") for each in pair)


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


def declared_by(every: Sequence[type[AttentionBackend]], routes: Routes) -> dict[str, Any]:
    """The attributes of a composite of some members, but those of its halves: what all of them declare."""
    dtypes = (
        [bare_dtype_name(each, "supported_dtypes") for each in found]
        for found in of_each("supported_dtypes", every)
    )
    served = functools.reduce(operator.and_, of_each("features", every))
    # Prompts and decodes of two backends have other bits, so a row depends on the member that computes it. With
    # routes, that member depends on the other requests too.
    lost = {"rows", "batch"} if routes else {"rows"}
    kept = tuple(word for word in in_each(*of_each("supported_invariances", every)) if word not in lost)
    if routes and not kept:
        served &= ~Feature.INVARIANCE
    attributes: dict[str, Any] = {
        "routes": routes,
        "supported_dtypes": in_each(*dtypes),
        "supported_kv_cache_dtypes": in_each(*map(stored_dtypes, every)),
        "features": served,
        "supported_sparse_kinds": in_each(*of_each("supported_sparse_kinds", every)),
        "supported_invariances": kept,
        "serves_dense": all(of_each("serves_dense", every)),
    }
    if any(map(depends_on_capability, every)):

        def supports(cls: type[CompositeBackend], capability: Any) -> bool:
            return cls._both_answer("supports_compute_capability", capability)

        attributes["supports_compute_capability"] = classmethod(supports)
    return attributes


def composite_options(name: str, members: Mapping[str, type[AttentionBackend]]) -> type[Any] | None:
    """A frozen dataclass of the members' options as `prefill_...`, `decode_...`, `third_...`; None without any."""
    fields: list[tuple[str, Any, Any]] = []
    for place, member in members.items():
        if member.Options is None:
            continue
        hints = typing.get_type_hints(member.Options)
        for each in dataclasses.fields(member.Options):
            if each.init:
                default = dataclasses.field(default=each.default, default_factory=each.default_factory)
                fields.append((f"{place}_{each.name}", hints[each.name], default))
    if not fields:
        return None

    # Each member's own Options may refuse values, so both are made once.
    def check(self: Any) -> None:
        for place, member in members.items():
            member_options(self, place, member)

    title = "".join(part for part in name.title() if part.isalnum()) + "Options"
    made = dataclasses.make_dataclass(title, fields, frozen=True, namespace={"__post_init__": check})
    made.__doc__ = f"The options of {'both' if len(members) == 2 else 'all'} members of {name}."
    return made


def member_options(options: Any, place: str, member: type[AttentionBackend]) -> Any:
    """A member's Options from the composite's `options` (None: its defaults); None if it has no Options."""
    declared = member.Options
    if declared is None:
        return None
    if options is None:
        return declared()
    names = (field.name for field in dataclasses.fields(declared) if field.init)
    return declared(**{name: getattr(options, f"{place}_{name}") for name in names})
