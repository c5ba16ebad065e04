"""vLLM's backend classes: `ATTNPLUG` and `ATTNPLUG_NAME`, made when vLLM asks for them by their path."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from attnplug.core.backend import AttentionBackend as Theirs
from attnplug.core.blocks import MultipleOf as OurMultiple
from attnplug.core.errors import AttnplugError
from attnplug.core.features import Feature
from attnplug.core.kv_format import CODEC
from attnplug.core.spec import LayerSpec, Phase
from attnplug.integrations.vllm.builder import Builder
from attnplug.integrations.vllm.impl import HAS_CACHE_SHAPE, KINDS, Layer, pages_refusal
from attnplug.integrations.vllm.names import AUTOMATIC
from attnplug.integrations.vllm.ranks import gathered_spec, new_tokens_of, rank_refusal, ranks_size
from attnplug.integrations.vllm.steps import INVARIANT, has_scales
from attnplug.registry.default import explain, list_backends

UNSERVED = {
    "use_mla": "latent attention (MLA) is served by the names that end in _MLA, such as ATTNPLUG_MLA",
    "use_sparse": "sparse attention is served with latent attention alone, by the names that end in _MLA",
    "use_pcp": "prefill context parallelism is not served in vLLM",
    "use_adaptive_verification": "query lengths that the host does not know are not served",
    "use_rswa": "windows with a visible prefix are not served",
}
_READ = (
    *("head_size", "dtype", "kv_cache_dtype", "block_size", "has_sink", "has_sliding_window", "attn_type"),
    # attnplug's backends ask the device themselves, and a KV connector moves pages as they are.
    *("use_non_causal", "use_per_head_quant_scales", "device_capability", "use_kv_connector"),
    *("use_batch_invariant", "use_mm_prefix"),
    # The number of ranks is in the configuration.
    "use_dcp",
)
"""The arguments of vLLM's `validate_configuration` that are read."""
# Tokens; versions about 0.25 give layers with windows the smallest pages that a backend names.
_LEAST_PAGE = 16


class Backend(AttentionBackend):  # type: ignore[misc]
    """The common part of the classes; `theirs` are the backends of attnplug that a class can choose from."""

    name = AUTOMATIC
    backend: str | None = None
    theirs: tuple[type[Theirs], ...] = ()
    layer_class: Any = Layer
    builder_class: Any = Builder
    forward_includes_kv_cache_update = False

    @classmethod
    def get_name(cls) -> str:
        """The name that vLLM prints."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """The layer's class."""
        return _subclass(cls.layer_class, cls.backend)

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """The builder's class."""
        return _subclass(cls.builder_class, cls.backend)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any: `validate_configuration` asks each backend."""
        return []

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """The sizes of the one backend that are multiples of 16, and all such where several are chosen from."""
        if cls.backend is None:
            return [MultipleOf(_LEAST_PAGE)]
        sizes = cls.theirs[0].get_supported_kernel_block_sizes()
        return [
            MultipleOf(math.lcm(size.base, _LEAST_PAGE)) if isinstance(size, OurMultiple) else size
            for size in sizes
        ]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether a backend stores such values."""
        if kv_cache_dtype is None:
            return True
        served = any(theirs.supports_kv_cache_dtype(kv_cache_dtype) for theirs in cls.theirs)
        return served and pages_refusal(kv_cache_dtype) is None

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether a backend computes in it."""
        return any(str(dtype).removeprefix("torch.") in theirs.supported_dtypes for theirs in cls.theirs)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether the kind is one that attnplug knows."""
        return str(getattr(attn_type, "value", attn_type)) in KINDS

    @classmethod
    def _declares(cls, feature: Feature) -> bool:
        return any(feature in theirs.features for theirs in cls.theirs)

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether a backend declares sinks."""
        return cls._declares(Feature.SINKS)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether a backend declares windows."""
        return cls._declares(Feature.SLIDING_WINDOW)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether a backend declares it."""
        return cls._declares(Feature.NON_CAUSAL)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether a backend declares spans of multimodal tokens."""
        return cls._declares(Feature.MM_PREFIX)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether a backend declares scales for each KV head."""
        return cls._declares(Feature.HEAD_SCALES)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether a backend keeps bits in any batch, and however prompts are cut, which vLLM's scheduler decides."""
        return any(set(INVARIANT) <= set(theirs.supported_invariances) for theirs in cls.theirs)

    @classmethod
    def layouts(cls) -> list[str]:
        """The orders "NHD" and "HND" that all of its backends read, preferred first; NHD if they have none in common."""
        first, *others = (list(theirs.supported_kv_cache_layouts()) for theirs in cls.theirs)
        common = [layout for layout in first if all(layout in other for other in others)]
        return common or ["NHD"]

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """The reasons of attnplug against the layer, in sentences; its heads, cap and slopes come with the layer itself."""
        given = named(args, kwargs)
        reasons = unserved(given)
        stored = given.get("kv_cache_dtype") or "auto"
        if refusal := pages_refusal(stored):
            return [*reasons, f"kv_cache_dtype {stored} {refusal}"]
        kind = str(getattr(given["attn_type"], "value", given["attn_type"]))
        if kind not in KINDS:
            return [*reasons, f"attention type {kind} is not known to attnplug"]
        config = get_current_vllm_config_or_none()
        model = getattr(config, "model_config", None)
        heads = kv_heads = 1
        if model is not None:
            heads = model.get_num_attention_heads(config.parallel_config)
            kv_heads = model.get_num_kv_heads(config.parallel_config)
        causal = kind == "decoder" and not given.get("use_non_causal")
        fields: dict[str, Any] = {}
        if given.get("has_sliding_window"):
            fields["window"] = (1023, 0 if causal else 1023)
        direct = KINDS[kind]
        try:
            spec = LayerSpec(
                num_heads=heads,
                num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
                head_size=given["head_size"],
                dtype=given["dtype"],
                kv_cache_dtype="auto" if direct else stored,
                block_size=None if direct else given.get("block_size"),
                attn_type=kind,
                causal=causal,
                has_sinks=bool(given.get("has_sink")),
                direct_kv=direct,
                mm_prefix=kind == "decoder" and bool(given.get("use_mm_prefix")),
                head_scales=not direct
                and bool(given.get("use_per_head_quant_scales"))
                and has_scales(stored),
                invariance=INVARIANT if given.get("use_batch_invariant") else (),
                **fields,
            )
        except AttnplugError as error:
            return [*reasons, str(error)]
        size = 1 if direct else ranks_size(config)
        return reasons + reasons_against(spec, cls.backend, by_phase=cls.backend is None, ranks=size)


if HAS_CACHE_SHAPE:

    def _get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def _get_kv_cache_stride_order(
        cls: type[Backend], include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        if include_num_layers_dimension or "NHD" in cls.layouts():
            raise NotImplementedError  # the order of the shape
        return (0, 1, 3, 2, 4)

    Backend.get_kv_cache_shape = staticmethod(_get_kv_cache_shape)
    Backend.get_kv_cache_stride_order = classmethod(_get_kv_cache_stride_order)
    # The class was abstract before it had this method.
    Backend.__abstractmethods__ = frozenset()
else:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def _supported_kv_cache_layouts(cls: type[Backend]) -> tuple[Any, ...] | None:
        names = cls.layouts()
        if len(names) > 1:
            return None  # any
        # vLLM's names have tokens (N) before heads (H) in the one order, and heads before tokens in the other.
        first, second = ("N", "H") if names == ["NHD"] else ("H", "N")
        return tuple(each for each in KVCacheLayout if each.name.index(first) < each.name.index(second))

    Backend.supported_kv_cache_layouts = classmethod(_supported_kv_cache_layouts)


def reasons_against(
    spec: LayerSpec, backend: str | None, *, by_phase: bool = False, ranks: int = 1
) -> list[str]:
    """Each backend's reasons; none if the layer is served, where `by_phase` by one backend for each phase that it has.

    With several `ranks` that share its tokens, both of its parts must be served.
    """
    if ranks > 1:
        if refusal := rank_refusal(spec):
            return [refusal]
        pages = reasons_against(gathered_spec(spec, ranks), backend, by_phase=by_phase)
        return pages or reasons_against(new_tokens_of(spec), backend)
    phases: Iterable[Phase | None] = (None,)
    if by_phase:
        phases = (Phase.PREFILL,) if spec.is_encoder else Phase
    for phase in phases:
        try:
            decision = explain(spec, None, phase, backend=backend)
        except AttnplugError as error:
            return [str(error)]
        if decision.backend is None:
            return [f"{each.name}: {reason}" for each in decision.refused for reason in each.reasons]
    return []


def unserved(given: Mapping[str, Any]) -> list[str]:
    """The reasons against what vLLM asks for and no backend serves, also against what later versions may ask for."""
    known = [why for name, why in UNSERVED.items() if given.get(name)]
    other = [name for name, value in given.items() if value and name not in UNSERVED and name not in _READ]
    return known + [f"{name} is not known to attnplug, and may change the result" for name in other]


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's `validate_configuration` by their names in this version."""
    return dict(inspect.signature(AttentionBackend.validate_configuration).bind(*args, **kwargs).arguments)


@functools.cache
def _subclass(base: type[Any], backend: str | None) -> type[Any]:
    """The class of a layer or builder for one backend, or for all."""
    return type(f"{base.__name__}_{backend or AUTOMATIC}", (base,), {"backend": backend})


def class_of(base: type[Backend], name: str, backend: str | None, **fields: Any) -> type[Backend]:
    """The subclass of `base` that vLLM calls `name`, for one backend, or for all.

    AttributeError: no backend has that name.
    """
    known = list_backends()
    if backend is not None and backend not in known:
        raise AttributeError(f"{name} is not a backend; loaded are {', '.join(sorted(known))}")
    theirs = tuple(known.values()) if backend is None else (known[backend],)
    stored = [
        dtype
        for each in theirs
        for dtype in each.supported_kv_cache_dtypes
        if dtype not in ("float32", CODEC) and not pages_refusal(dtype)
    ]
    fields |= {
        "name": name,
        "backend": backend,
        "theirs": theirs,
        "supported_kv_cache_dtypes": list(dict.fromkeys(stored)),
        "__module__": base.__module__,
        "__qualname__": name,
    }
    return type(name, (base,), fields)


@functools.cache
def backend_class(name: str) -> type[Backend]:
    """The class for ATTNPLUG or ATTNPLUG_NAME. AttributeError: no backend has that name."""
    prefix = f"{AUTOMATIC}_"
    # Without the prefix it is the name of no backend.
    backend = None if name == AUTOMATIC else name[len(prefix) :] if name.startswith(prefix) else ""
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    return class_of(Backend, name, backend, supported_dtypes=dtypes)


def __getattr__(name: str) -> type[Backend]:
    """The class by its name, as vLLM resolves paths."""
    if name.startswith(AUTOMATIC):
        return backend_class(name)
    raise AttributeError(name)
