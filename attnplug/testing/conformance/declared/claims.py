"""The values that a backend declares, and the layers that try each one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from attnplug.core.features import Feature
from attnplug.core.interface.signatures import overrides
from attnplug.core.kv_format import kv_format, kv_formats
from attnplug.core.sparse import SPARSE_KINDS
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.cases.case_axes import KINDS, samples_of
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.search import compile_key, spread
from attnplug.testing.oracle import COMPUTED

Fixed: TypeAlias = Mapping[str, Any]
"""Values of some axes of the cases."""

_MOST_SIZES = {Level.SMOKE: 16, Level.FULL: 200}
_SHAPES_OF_SIZES = ("mixed",)
_MOST_COMPILED = {Level.SMOKE: 3, Level.FULL: 24}
_NO_CASE = "the kit has no numeric case for it: nothing proves that it is honoured"
_SMALL = LayerSpec(num_heads=1, num_kv_heads=1, head_size=2)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeclaredValue:
    """One declared value.

    Args:
        name: its name in ids, such as "kv_cache_dtype-fp8_e5m2".
        rows: values of axes that make a layer ask for it; one such layer has to be served.
        is_own: whether the author declares it, not a default of AttentionBackend.
        asks: whether a layer of such a row does ask for it.
        is_listed: whether the author names this value, not a range that has it.
        problem: why the kit cannot try it at all.
        shapes: the shapes of its batches.
    """

    name: str
    rows: Sequence[Fixed] = ()
    is_own: bool = True
    is_listed: bool = True
    asks: Callable[[LayerSpec], bool] = lambda spec: True
    problem: str | None = None
    shapes: tuple[str, ...] = ("mixed", "decode")

    @property
    def words(self) -> str:
        """The name in sentences: "kv_cache_dtype fp8_e5m2"."""
        return " ".join(self.name.split("-", 1))


def claims_of(target: Target) -> Iterator[DeclaredValue]:
    """Every declared value that changes which layers are served, always in the same order."""
    backend = target.backend
    served = {str(phase) for phase in backend.supported_phases}
    yield from (
        DeclaredValue(f"phase-{phase}", [{"shape": str(phase)}]) for phase in Phase if phase in served
    )
    yield from _features(target)
    yield from _attn_types(target)
    yield from _impl_flags(target)
    for dtype in target.dtypes:
        yield DeclaredValue(f"dtype-{dtype}", [{"dtype": dtype}], overrides(backend, "supported_dtypes"))
    for name in _storage_types(target):
        yield _storage(name)
    sizes, blocks = head_sizes(target), block_sizes(target)
    yield from (_head_size(target, size) for size in sizes)
    own_blocks = overrides(backend, "get_supported_kernel_block_sizes")
    for size in blocks:
        is_listed = size in backend.get_supported_kernel_block_sizes()
        rows = [{"block_size": size}]
        yield DeclaredValue(f"block_size-{size}", rows, own_blocks, is_listed, shapes=_SHAPES_OF_SIZES)
    own_layouts = overrides(backend, "supported_kv_cache_layouts")
    for layout in backend.supported_kv_cache_layouts():
        yield DeclaredValue(f"layout-{layout}", [{"layout": layout}], own_layouts)


def head_sizes(target: Target) -> list[int]:
    """The head sizes to try: all that the backend lists, up to a limit of the level, and samples of multiples."""
    return _sizes(target, target.head_sizes, "head_size")


def block_sizes(target: Target) -> list[int]:
    """The block sizes to try, as `head_sizes`."""
    return _sizes(target, target.block_sizes, "block_size")


def _sizes(target: Target, sizes: list[int], field: str) -> list[int]:
    plain = _SMALL.replace(head_size=64, block_size=16)
    keys = {compile_key(target.backend, plain.replace(**{field: size})) for size in sizes[:8]}
    # Each of these sizes would compile kernels of its own.
    most = _MOST_COMPILED if len(keys) > 1 else _MOST_SIZES
    return spread(sizes, most[target.level])


def _kinds(target: Target, has: Callable[[LayerSpec], bool]) -> list[Fixed]:
    layers = {kind: _SMALL.replace(**fields) for kind, fields in KINDS.items()}
    return [
        {"kind": kind}
        for kind, spec in layers.items()
        if has(spec) and not (spec.is_encoder and target.phase is Phase.DECODE)
    ]


def _features(target: Target) -> Iterator[DeclaredValue]:
    for flag in target.backend.features & COMPUTED:
        if flag is Feature.SPARSE:
            yield from _sparse(target)
        # No step of a backend that only decodes has an encoder.
        elif rows := _rows_of(target, flag):
            yield DeclaredValue(f"feature-{flag.names()[0]}", rows, asks=functools.partial(_asks, flag))


def _asks(flag: Feature, spec: LayerSpec) -> bool:
    return flag in spec.required_features()


def _rows_of(target: Target, flag: Feature) -> list[Fixed]:
    if flag is Feature.HEAD_SIZE_V:
        sides = ("smaller", "larger")
        sized = [{"head_size": size, "values": side} for size in target.head_sizes for side in sides]
        return [*({"values": side} for side in sides), *sized]
    by_kind = _kinds(target, functools.partial(_asks, flag))
    return (
        by_kind
        if by_kind or flag is Feature.ENCODER
        else [{flag.ask.field: value} for value in samples_of(target, flag)]
    )


def _sparse(target: Target) -> Iterator[DeclaredValue]:
    backend, flag = target.backend, Feature.SPARSE
    for kind in map(str, backend.supported_sparse_kinds):
        rows = [{flag.ask.field: value} for value in flag.ask.values if value.kind == kind]
        problem = (
            None if kind in SPARSE_KINDS else f"no SparseSpec has it; there are {', '.join(SPARSE_KINDS)}"
        )
        yield DeclaredValue(f"supported_sparse_kinds-{kind}", rows, problem=problem)
    if backend.serves_dense:
        yield DeclaredValue("serves_dense", [{flag.ask.field: None}])


def _attn_types(target: Target) -> Iterator[DeclaredValue]:
    backend = target.backend
    # By default the features say which types are served, so that a class need not refuse the others.
    is_own = overrides(backend, "supports_attn_type")
    for kind in AttentionType:
        rows = _kinds(target, lambda spec, kind=kind: spec.attn_type == kind)  # type: ignore[misc]
        if rows and backend.supports_attn_type(kind):
            yield DeclaredValue(f"attn_type-{kind}", rows, is_own)


def _impl_flags(target: Target) -> Iterator[DeclaredValue]:
    impl, _ = guarded_call(target.backend.get_impl_cls)
    for name in ("supports_pcp", "supports_quant_query_input"):
        if getattr(impl, name, False):
            yield DeclaredValue(name, problem=_NO_CASE)
    # An impl may be of several backends, and no layer can ask one for an LSE that does not declare it.
    has_lse = Feature.LSE in target.backend.features and getattr(impl, "can_return_lse_for_decode", False)
    if has_lse and target.phase is not Phase.PREFILL:
        yield DeclaredValue("can_return_lse_for_decode", [{"needs_lse": True, "shape": "decode"}])


def _storage_types(target: Target) -> list[str]:
    listed, backend = target.kv_cache_dtypes, target.backend
    if not overrides(backend, "supports_kv_cache_dtype"):
        return listed
    names = ["auto", *(name for row in kv_formats() if row.dtype for name in row.names)]
    return list(dict.fromkeys([*listed, *(name for name in names if backend.supports_kv_cache_dtype(name))]))


def _storage(name: str) -> DeclaredValue:
    is_known = name == "auto" or kv_format(name).has_numbers
    problem = None if is_known else _NO_CASE
    return DeclaredValue(f"kv_cache_dtype-{name}", [{"kv_cache_dtype": name}], problem=problem)


def _head_size(target: Target, size: int) -> DeclaredValue:
    rows: list[Fixed] = [target.sized(size)]
    if Feature.HEAD_SIZE_V in target.backend.features:
        # Some sizes are only those of values.
        others = [each for each in target.head_sizes if each != size][:8]
        rows += [{"head_size": each, "values": "larger" if size > each else "smaller"} for each in others]
    is_own = overrides(target.backend, "get_supported_head_sizes")
    is_listed = size in target.backend.get_supported_head_sizes()

    def asks(spec: LayerSpec) -> bool:
        return size in (spec.head_size, spec.head_size_v)

    return DeclaredValue(f"head_size-{size}", rows, is_own, is_listed, asks, shapes=_SHAPES_OF_SIZES)
