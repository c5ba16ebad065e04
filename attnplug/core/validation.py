"""The checks behind AttentionBackend.validate_configuration, in a fixed order."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attnplug.core.blocks import MultipleOf
from attnplug.core.device import ComputeCapability
from attnplug.core.dtypes import DtypeName, bare_dtype_name, kv_cache_dtype_name
from attnplug.core.features import FEATURES, Feature
from attnplug.core.interface.answers import HookError, answer, declared
from attnplug.core.interface.signatures import overrides
from attnplug.core.kv_format import kv_format, with_codecs
from attnplug.core.reasons import Reason
from attnplug.core.spec import AttentionType

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec, Phase


def validate(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device, phase: Phase | None
) -> list[Reason]:
    """Every reason why `backend` does not serve `spec`; see `validate_configuration`."""
    return [
        *_sizes_and_dtypes(backend, spec, device),
        *_kinds(backend, spec, _WITH_CODE),
        *_spans(backend, spec),
        *_device(backend, device),
        *_type_and_phase(backend, spec, phase),
        *_combination_and_features(backend, spec, device),
    ]


def _outside(
    field: str,
    requested: object,
    supported: object,
    *,
    what: str | None = None,
    code: str | None = None,
    remedy: str | None = None,
) -> Reason:
    """The reason for a value outside the supported ones; `what` and `code` default to the field."""
    return Reason(
        f"{what or field} not supported",
        code=code or field,
        field=field,
        requested=requested,
        supported=supported,
        remedy=remedy,
    )


def _sizes_and_dtypes(backend: type[AttentionBackend], spec: LayerSpec, device: Device) -> Iterator[Reason]:
    # A backend without the feature refuses it once; its sizes would only repeat that.
    flag = Feature.HEAD_SIZE_V
    values_differ = flag in declared(backend, "features") and flag in spec.required_features()
    for field in ("head_size", "head_size_v") if values_differ else ("head_size",):
        size = getattr(spec, field)
        if not answer(backend, "supports_head_size", size):
            yield _outside(field, size, answer(backend, "get_supported_head_sizes"), code="head_size")
    if not _serves_dtype(backend, spec.dtype):
        names = declared(backend, "supported_dtypes")
        dtypes = [bare_dtype_name(dtype, "supported_dtypes") for dtype in names]
        yield _outside("dtype", spec.dtype, _limit(backend, "supports_dtype", dtypes))
    if not _stores(backend, spec):
        names = with_codecs(map(str, declared(backend, "supported_kv_cache_dtypes")))
        limit = _limit(backend, "supports_kv_cache_dtype", names)
        yield _outside("kv_cache_dtype", spec.kv_cache_dtype, limit)
    elif why := kv_format(spec.resolved_kv_cache_dtype).fault(spec):
        yield Reason(why, code="kv_format", field="kv_cache_dtype")
    # With direct K and V there are no pages, and so no block size to refuse.
    if spec.block_size is not None and not spec.direct_kv:
        yield from _block_size(backend, spec, spec.block_size, device)


def _serves_dtype(backend: type[AttentionBackend], dtype: str) -> bool:
    """Whether `supports_dtype` accepts a dtype, also where it looks in a set or dict of names or of torch dtypes."""
    name = DtypeName(dtype)
    found, error = _asked_of_dtype(backend, name)
    torch_dtype = getattr(sys.modules.get("torch"), dtype, None)
    # Without torch nothing has torch dtypes, and without a hash nothing was looked up.
    if name.was_hashed and torch_dtype is not None:
        other, failure = _asked_of_dtype(backend, DtypeName(dtype, hash(torch_dtype)))
        if error is not None and failure is None:
            return other
        if error is None and failure is None and other != found:
            # One of the two was found. A hash that nothing has tells which: its answer is the other one's.
            absent, _ = _asked_of_dtype(backend, DtypeName(dtype, hash((DtypeName, dtype))))
            return not absent
    if error is not None:
        raise error
    return found


def _asked_of_dtype(backend: type[AttentionBackend], dtype: DtypeName) -> tuple[bool, HookError | None]:
    try:
        return answer(backend, "supports_dtype", dtype), None
    except HookError as error:
        return False, error


def _block_size(
    backend: type[AttentionBackend], spec: LayerSpec, block_size: int, device: Device
) -> Iterator[Reason]:
    remedy = "leave block_size unset and the backend chooses"
    blocks = answer(backend, "get_supported_kernel_block_sizes", spec, device)
    if not MultipleOf.allows(blocks, block_size):
        yield _outside("block_size", block_size, blocks, remedy=remedy)
    elif not accepts_blocks(backend, block_size):
        limit = _limit(backend, "supports_block_size", blocks)
        yield _outside("block_size", block_size, limit, remedy=remedy)


def _limit(backend: type[AttentionBackend], method: str, declared: object) -> object:
    """The declared values, or the plugin's own method that decides in their place."""
    return f"accepted by {backend.__name__}.{method}" if overrides(backend, method) else declared


def reads_blocks(
    backend: type[AttentionBackend], block_size: int, spec: LayerSpec | None, device: Device | None
) -> bool:
    """Whether a backend can read pages of `block_size` tokens of a layer."""
    sizes = answer(backend, "get_supported_kernel_block_sizes", spec, device)
    return MultipleOf.allows(sizes, block_size) and accepts_blocks(backend, block_size)


def accepts_blocks(backend: type[AttentionBackend], block_size: int) -> bool:
    """Whether the backend's own `supports_block_size` accepts a size; True if it has none."""
    # The method asks for no layer in particular, so only an override knows more than the sizes of a layer.
    if not overrides(backend, "supports_block_size"):
        return True
    accepted: bool = answer(backend, "supports_block_size", block_size)
    return accepted


def _stores(backend: type[AttentionBackend], spec: LayerSpec) -> bool:
    if overrides(backend, "supports_kv_cache_dtype"):
        accepted: bool = answer(backend, "supports_kv_cache_dtype", spec.kv_cache_dtype)
        return accepted
    stored = spec.resolved_kv_cache_dtype
    # A cache of the layer's own dtype is what "auto" means.
    names = {spec.kv_cache_dtype, stored, "auto" if stored == spec.dtype else stored}
    return not names.isdisjoint(stored_dtypes(backend))


def stored_dtypes(backend: type[AttentionBackend]) -> list[str]:
    """The names of the storage types that a backend declares; an alias means the name too, CODEC all with a codec."""
    field = "supported_kv_cache_dtypes"
    names = with_codecs(kv_cache_dtype_name(each, field) for each in declared(backend, field))
    return list(dict.fromkeys([*names, *(kv_format(name).name for name in names)]))


_HAVE_KINDS = [
    flag
    for flag in FEATURES
    if flag.ask.kinds is not None or flag.ask.declared_by not in (None, "supports_attn_type")
]
_WITH_CODE = [flag for flag in _HAVE_KINDS if flag.ask.code is not None]
# Their reasons stand with those of other features, whose code begins alike.
_WITHOUT_CODE = [flag for flag in _HAVE_KINDS if flag.ask.code is None]


def _kinds(backend: type[AttentionBackend], spec: LayerSpec, flags: Sequence[Feature]) -> Iterator[Reason]:
    """The reasons against those features that a method of the backend, or a list of kinds, declares."""
    for flag in flags:
        asked, method = flag.is_asked_by(spec), flag.ask.declared_by
        serves = flag in declared(backend, "features") if method is None else answer(backend, method)
        if asked:
            yield from _kind(backend, spec, flag, serves)
        elif flag.ask.only and serves and not (flag.ask.besides and declared(backend, flag.ask.besides)):
            yield Reason(flag.ask.only, code=flag.code, field=flag.ask.field)


def _spans(backend: type[AttentionBackend], spec: LayerSpec) -> Iterator[Reason]:
    if (
        spec.mm_prefix
        and spec.attn_type is AttentionType.ENCODER_DECODER
        and answer(backend, "supports_mm_prefix")
    ):
        fact = (
            f"{Feature.MM_PREFIX.refusal} in cross attention: its keys are the encoder's, and have no spans"
        )
        yield Reason(fact, code=Feature.MM_PREFIX.code, field="mm_prefix")


def _kind(backend: type[AttentionBackend], spec: LayerSpec, flag: Feature, serves: bool) -> Iterator[Reason]:
    """The reason against a feature that is not declared, or not for the kind of the layer's value."""
    row = flag.ask
    if row.kinds is None:
        if not serves:
            yield Reason(flag.refusal, code=flag.code, field=row.field)
        return
    value, fact = getattr(spec, row.field), f"{flag.shown(spec)} not supported"
    asked = value if isinstance(value, tuple) else (value.kind,)
    kinds = declared(backend, row.kinds)
    missing = ", ".join(kind for kind in asked if kind not in kinds)
    if not serves:
        yield Reason(fact, code=flag.code, field=row.field)
    elif missing:
        yield Reason(fact, code=flag.code, field=row.field, requested=f"kind {missing}", supported=kinds)


def _device(backend: type[AttentionBackend], device: Device) -> Iterator[Reason]:
    types = declared(backend, "device_types")
    if device.type not in types:
        remedy = None
        if not overrides(backend, "device_types") and not backend.__module__.startswith("attnplug."):
            # Ported classes have no such attribute, and their authors wonder where the limit comes from.
            remedy = f"{backend.__name__} does not set device_types, whose default this is"
        what, code = "device type", "device_type"
        yield _outside("device.type", device.type, types, what=what, code=code, remedy=remedy)
    elif device.capability is not None:
        if not answer(backend, "supports_compute_capability", ComputeCapability(*device.capability)):
            found, what = "{}.{}".format(*device.capability), "compute capability"
            yield _outside("device.capability", found, None, what=what, code="compute_capability")
    elif device.type in ("cuda", "rocm") and depends_on_capability(backend):
        yield Reason(
            "compute capability not known",
            code="compute_capability",
            field="device.capability",
            remedy=f"name the device with one, such as {'sm90' if device.type == 'cuda' else 'rocm:9.4'}",
        )


def depends_on_capability(backend: type[AttentionBackend]) -> bool:
    """Whether a backend serves only some GPUs: it says so, or has its own method that knows which."""
    # The method may have been set after the class was made, so it is looked for at each question.
    return overrides(backend, "supports_compute_capability") or declared(backend, "depends_on_capability")


def _type_and_phase(
    backend: type[AttentionBackend], spec: LayerSpec, phase: Phase | None
) -> Iterator[Reason]:
    if not answer(backend, "supports_attn_type", spec.attn_type):
        supported = [kind for kind in AttentionType if answer(backend, "supports_attn_type", kind)]
        yield _outside("attn_type", str(spec.attn_type), supported, what="attention type")
    phases = list(declared(backend, "supported_phases"))
    asked = ("decode", "prefill") if phase is None else (str(phase),)
    missing = [each for each in asked if each not in phases]
    if missing:
        remedy = "select per phase" if phase is None and phases else None
        yield _outside("phase", missing, phases, remedy=remedy)


def _combination_and_features(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device
) -> Iterator[Reason]:
    """The combination, and the features that `features` alone declares; others have given their reason."""
    # A porter may mean False as a refusal or as none, so it is read as neither.
    why = answer(backend, "supports_combination", spec, device)
    if why is not None:
        yield Reason(f"combination not supported: {why}", code="combination")
    yield from _kinds(backend, spec, _WITHOUT_CODE)
    asked = spec.required_features()
    features = declared(backend, "features")
    if asked in features:
        return
    for flag in asked & ~features:
        refused_before = (
            flag.ask.declared_by is not None
            or flag.ask.kinds is not None
            or (flag is Feature.FP8_KV and not _stores(backend, spec))
            or (flag is Feature.NON_CAUSAL and not answer(backend, "supports_attn_type", spec.attn_type))
        )
        if not refused_before:
            yield Reason(flag.refusal, code=flag.code, field=flag.ask.field)
