"""Layers that ask for one thing, or two, beyond the plainest: what a backend is asked about, not run with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

from attnplug.core.device import Device
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.kv_format import kv_cache_dtypes
from attnplug.core.mla.dims import MLADims
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.testing.conformance.check import CheckSkipped, Level
from attnplug.testing.conformance.target import Target

PHASES: tuple[Phase | None, ...] = (None, Phase.DECODE, Phase.PREFILL)

_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"direct_kv": True},
    {"attn_type": "encoder_only", "direct_kv": True},
    {"attn_type": "encoder_decoder"},
    {"causal": False},
    {"causal": False, "direct_kv": True},
)
_OTHERS: tuple[dict[str, Any], ...] = (
    *({"head_size": size} for size in (1, 16, 80, 96, 128, 256, 576)),
    *({"dtype": name} for name in ("float16", "bfloat16", "float32")),
    *({"block_size": size} for size in (1, 16, 24, 128, 1000)),
    *({"attn_type": kind} for kind in AttentionType),
    *({"num_heads": heads, "num_kv_heads": kv} for heads, kv in ((1, 1), (5, 1), (6, 2), (64, 8), (256, 1))),
    {"window": (-1, 7), "causal": False},
    {"kv_cache_dtype": "unheard_of_3bit"},
)


def _others() -> list[dict[str, Any]]:
    return [*_OTHERS, *({"kv_cache_dtype": name} for name in kv_cache_dtypes())]


_LARGE: tuple[dict[str, Any], ...] = (
    {"num_heads": 512, "num_kv_heads": 8},
    {"num_heads": 96, "num_kv_heads": 96},
    {"head_size": 512},
    {"scale": 2.0},
)
# Values that a class might accept because they change little, or because few layers have them.
_EXTREMES: dict[Feature, tuple[Any, ...]] = {
    Feature.SLIDING_WINDOW: ((4095, 0), (131071, 0)),
    Feature.CHUNKED_LOCAL: (8192, 1 << 20),
    Feature.SOFT_CAP: (1e-3, 50.0, 1000.0),
    Feature.HEAD_SIZE_V: (8, 256, 512),
}


def plainest(target: Target) -> LayerSpec:
    """The plainest layer that the backend serves; where it serves none so plain, one that anybody might ask for."""
    for kind in _KINDS:
        with contextlib.suppress(CheckSkipped):
            return target.spec(**kind)
    plain = [name for name in target.dtypes if name in ("float32", "bfloat16", "float16")]
    dtype = plain[0] if plain else "bfloat16"
    return LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype)


def asking_for(target: Target, spec: LayerSpec, feature: Feature) -> LayerSpec:
    """`spec` with the arguments that ask for `feature`, if it is a stored type, by one that the backend declares."""
    return spec.replace(**target.storing(feature.fields(spec.head_size, spec.block_size)))


def grid(target: Target, *, pairs: bool = True) -> dict[str, LayerSpec]:
    """The plainest layer with one thing asked for, and with each two that go together, by what they ask for.

    The pairs are of features, at level full of everything.
    """
    base = plainest(target)
    features = [flag.fields(base.head_size, base.block_size) for flag in Feature]
    others = _others()
    wanted = [{}, *features, *others]
    if pairs:
        paired = features if target.level is Level.SMOKE else [*features, *others]
        wanted += [
            {**one, **two} for one, two in itertools.combinations(paired, 2) if not one.keys() & two.keys()
        ]
    found: dict[str, LayerSpec] = {}
    for fields in wanted:
        try:
            spec = base.replace(**fields)
        except SpecError:
            continue
        found[_words(fields)] = spec
    return found


def one_change_each(spec: LayerSpec) -> dict[str, dict[str, Any]]:
    """The fields of one thing more to ask of `spec`, by what it is: each feature, and each of other sizes and types."""
    features = [flag.fields(spec.head_size, spec.block_size) for flag in Feature]
    return {_words(fields): fields for fields in ({}, *features, *_others(), *_LARGE)}


def askings(spec: LayerSpec, feature: Feature) -> dict[str, LayerSpec]:
    """Layers that ask for `feature`: with usual and extreme values, and beside one thing more; by what they ask for."""
    plain = feature.fields(spec.head_size, spec.block_size)
    values = (*feature.ask.values, *_EXTREMES.get(feature, ()))
    wanted = [{**plain, feature.ask.field: each} for each in values]
    wanted += [{**fields, **plain} for fields in one_change_each(spec).values()]
    found: dict[str, LayerSpec] = {}
    for fields in wanted:
        with contextlib.suppress(SpecError):
            asking = spec.replace(**fields)
            if feature in asking.required_features():
                found[_words(fields)] = asking
    return found


def devices(target: Target) -> list[Device]:
    """The target's device, and such as need not be here."""
    named = ("cpu", "cuda", "sm75", "sm80", "sm90", "sm120", "rocm:9.4", "rocm", "xpu", "mps", "tpu")
    return list(dict.fromkeys([target.device, *map(Device.parse, named), Device("abacus")]))


def _words(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in fields.items()) or "nothing more"


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return "MLADims(...)" if isinstance(value, MLADims) else text
