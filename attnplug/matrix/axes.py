"""The axes of the matrix: which values a backend is asked about, the plainest first, and which go together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.blocks import MultipleOf
from attnplug.core.dtypes import kv_cache_dtype_name
from attnplug.core.features import Feature
from attnplug.registry.plugin_calls import guarded_call

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

__all__ = [
    "BLOCK_SIZES",
    "DTYPES",
    "FEATURES",
    "HEAD_SIZES",
    "KV_CACHE_DTYPES",
    "LATENT",
    "LAYOUTS",
    "PHASES",
    "PLAIN",
    "ROPE",
    "Axes",
    "axes_of",
    "goes_with",
    "own_latents",
]

PLAIN = "plain"
"""The feature of a layer that asks for none."""
FEATURES: tuple[str, ...] = (PLAIN, *(str(flag.name).lower() for flag in Feature))
"""Values of the axis `feature`."""
PHASES: tuple[str, ...] = ("mixed", "prefill", "decode")
"""Mixed comes first: a layer is served in full where it is, and one batch then tries both kinds of work."""
HEAD_SIZES: tuple[int, ...] = (128, 64, 16, 32, 80, 96, 112, 192, 256)
"""What models have, and the ends of what kernels have; a backend's own come on top."""
LATENT = 576
"""Head size of multi-head latent attention: kv_lora_rank 512 and qk_rope_head_dim 64, as DeepSeek's.

It is asked with MLA, and with sparse attention, which models have over latents.
"""
ROPE = 64
"""Of a latent's elements those that hold positions; the rest is kv_lora_rank."""
DTYPES: tuple[str, ...] = ("bfloat16", "float16", "float32")
"""Values of the axis `dtype`: all that a layer can have."""
KV_CACHE_DTYPES: tuple[str, ...] = ("auto", "fp8_e4m3", "fp8_e5m2")
"""Storage types that every backend is asked for; a backend's own come on top."""
BLOCK_SIZES: tuple[int, ...] = (16, 32, 64, 128, 256, 8, 1)
"""Tokens per page that every backend is asked for; a backend's own come on top."""
LAYOUTS: tuple[str, ...] = ("NHD", "HND")
"""Values of the axis `layout`."""

_UNPAGED = tuple(flag.names()[0] for flag in Feature if flag.ask.unpaged)
_LATENTS = ("mla", "sparse")

Axes: TypeAlias = dict[str, tuple[Any, ...]]
"""The values of each axis, by the name of the field of Cell, the plainest first."""


def axes_of(backend: type[AttentionBackend], most_own: int | None = None) -> Axes:
    """The values of each axis that a backend is asked about.

    Those that every backend is asked about, and what it lists itself. Where it allows every multiple of
    something, the canonical values stand for them, or the least where none of them is one.

    Args:
        backend: the class. A declaration that raises, or is none, adds nothing.
        most_own: how many values of its own an axis may have, the ends first; None for all.
    """
    heads = _asked(backend.get_supported_head_sizes)
    blocks = _asked(backend.get_supported_kernel_block_sizes)
    preferred = _asked(lambda: (backend.get_preferred_block_size(),))
    kv_dtypes = _asked(
        lambda: tuple(kv_cache_dtype_name(name, "kv") for name in backend.supported_kv_cache_dtypes)
    )
    layouts = _asked(backend.supported_kv_cache_layouts)

    def joined(canonical: Sequence[Any], own: Iterable[Any]) -> tuple[Any, ...]:
        rest = list(dict.fromkeys(value for value in own if value not in canonical))
        return (*canonical, *(rest if most_own is None else _spread(rest, most_own)))

    return {
        "feature": FEATURES,
        "phase": PHASES,
        "head_size": joined((*HEAD_SIZES, LATENT), _sizes(heads, HEAD_SIZES)),
        "dtype": DTYPES,
        "kv_cache_dtype": joined(KV_CACHE_DTYPES, kv_dtypes),
        "block_size": joined(BLOCK_SIZES, (*_sizes(preferred, ()), *_sizes(blocks, BLOCK_SIZES))),
        "layout": joined(LAYOUTS, (name for name in layouts if isinstance(name, str))),
    }


def own_latents(backend: type[AttentionBackend]) -> frozenset[int]:
    """The head sizes that a backend of MLA lists beside LATENT; none of any other backend."""
    is_mla, _ = guarded_call(backend.is_mla)
    return frozenset(_sizes(_asked(backend.get_supported_head_sizes), ())) if is_mla else frozenset()


def goes_with(feature: str, axis: str, value: Any, latents: Collection[int] = ()) -> bool:
    """Whether a layer with a feature can be asked for a value of another axis, so that it means something.

    Args:
        feature: of FEATURES.
        axis: a field of Cell other than the feature.
        value: of that axis, or None for what only pages have.
        latents: head sizes beside LATENT that are asked with MLA; see `own_latents`.
    """
    is_direct = feature in _UNPAGED
    if axis in ("block_size", "layout"):
        return (value is None) == is_direct
    if value is None:
        return False
    if axis == "kv_cache_dtype":
        if is_direct:
            return bool(value == "auto")  # what is not stored has no storage type
        # 8-bit storage is a feature of its own, which a plain layer does not ask for.
        is_fp8 = value.startswith("fp8")
        return is_fp8 if feature == "fp8_kv" else not is_fp8 if feature == PLAIN else True
    if axis == "head_size":
        if value == LATENT:
            return feature in _LATENTS
        return feature != "mla" or (value in latents and value > ROPE)
    # An encoder's tokens are computed at once.
    return axis != "phase" or feature != "encoder" or value == "prefill"


def _asked(declared: Callable[[], Any]) -> tuple[Any, ...]:
    """What a plugin's declaration holds; nothing where it raises or is no sequence."""
    found, _ = guarded_call(lambda: tuple(declared()))
    return found or ()


def _sizes(allowed: Sequence[Any], samples: Sequence[int]) -> list[int]:
    """The sizes listed, and one for the multiples of which no sample is one."""
    listed = [size for size in allowed if type(size) is int and size > 0]
    multiples = (item for item in allowed if isinstance(item, MultipleOf))
    return [*listed, *(item.from_on(1) for item in multiples if not any(size in item for size in samples))]


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values: the ends, then those between in even steps."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[:most])
    step = (len(values) - 1) / (most - 1)
    return [values[round(place * step)] for place in range(most)]
