"""The axes of the matrix: their values for each backend, the plainest first, and the values that go together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.core.dtypes import kv_cache_dtype_name
from attnplug.core.features import Feature
from attnplug.registry.plugin_calls import guarded_call
from attnplug.testing.design.sizes import BLOCK_SIZES, HEAD_SIZES, sizes_to_try

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

PLAIN = "plain"
"""The feature of a layer that asks for none."""
FEATURES: tuple[str, ...] = (PLAIN, *(~Feature(0)).names())
"""Values of the axis `feature`."""
LATENT = 576
"""Head size of latents, with which MLA and sparse attention are tried: DeepSeek's 512 elements and 64 for positions."""
ROPE = 64
"""Elements of a latent that hold positions."""

_UNPAGED = tuple(flag.names()[0] for flag in Feature if flag.ask.unpaged)
_LATENTS = ("mla", "sparse")


def axes_of(backend: type[AttentionBackend], most_own: int | None = None) -> dict[str, tuple[Any, ...]]:
    """The values of each axis to try with a backend, by the name of the field of Cell, the plainest first.

    They are those tried with every backend, then those that this one lists.

    Args:
        backend: the class. A declaration that raises, or is not a sequence, adds nothing.
        most_own: the number of values that the backend may add to an axis, the ends first; None for all.
    """
    heads = _declared(backend.get_supported_head_sizes)
    blocks = _declared(backend.get_supported_kernel_block_sizes)
    preferred = _declared(lambda: (backend.get_preferred_block_size(),))
    kv_dtypes = _declared(
        lambda: tuple(kv_cache_dtype_name(name, "kv") for name in backend.supported_kv_cache_dtypes)
    )
    layouts = _declared(backend.supported_kv_cache_layouts)

    def joined(common: Sequence[Any], own: Iterable[Any]) -> tuple[Any, ...]:
        more = list(dict.fromkeys(value for value in own if value not in common))
        return (*common, *(more if most_own is None else _spread(more, most_own)))

    return {
        "feature": FEATURES,
        # A mixed batch runs both phases, so the others follow.
        "phase": ("mixed", "prefill", "decode"),
        "head_size": joined((*HEAD_SIZES, LATENT), sizes_to_try(heads, HEAD_SIZES)),
        "dtype": ("bfloat16", "float16", "float32"),
        "kv_cache_dtype": joined(("auto", "fp8_e4m3", "fp8_e5m2"), kv_dtypes),
        "block_size": joined(BLOCK_SIZES, (*sizes_to_try(preferred, ()), *sizes_to_try(blocks, BLOCK_SIZES))),
        "layout": joined(("NHD", "HND"), (name for name in layouts if isinstance(name, str))),
    }


def own_latents(backend: type[AttentionBackend]) -> frozenset[int]:
    """The head sizes that a backend of MLA lists; empty for other backends."""
    is_mla, _ = guarded_call(backend.is_mla)
    return frozenset(sizes_to_try(_declared(backend.get_supported_head_sizes), ()) if is_mla else ())


def goes_with(feature: str, axis: str, value: Any, latents: Collection[int] = ()) -> bool:
    """Whether a layer with a feature can have a value of another axis.

    Args:
        feature: of FEATURES.
        axis: a field of Cell other than the feature.
        value: of that axis; None for the block size and layout of a layer without pages.
        latents: other head sizes than LATENT that go with MLA, from `own_latents`.
    """
    unpaged = feature in _UNPAGED
    if axis in ("block_size", "layout"):
        return (value is None) == unpaged
    if value is None:
        return False
    if axis == "kv_cache_dtype":
        if unpaged:
            return bool(value == "auto")  # K and V that are not stored have no storage dtype
        is_fp8 = value.startswith("fp8")  # which is a feature of its own, so a plain layer lacks it
        return is_fp8 if feature == "fp8_kv" else not is_fp8 if feature == PLAIN else True
    if axis == "head_size":
        if value == LATENT:
            return feature in _LATENTS
        return feature != "mla" or (value in latents and value > ROPE)
    return (
        axis != "phase" or feature != "encoder" or value == "prefill"
    )  # encoders compute all tokens at once


def _declared(declaration: Callable[[], Any]) -> tuple[Any, ...]:
    found, _ = guarded_call(lambda: tuple(declaration()))
    return found or ()


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values: the ends, and others in even steps between them."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[:most])
    step = (len(values) - 1) / (most - 1)
    return [values[round(place * step)] for place in range(most)]
