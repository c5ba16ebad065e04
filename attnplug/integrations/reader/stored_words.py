"""Reads one value with which a quantizer names the storage of keys and values. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attnplug._system.text import shown
from attnplug.core.dtypes import KV_CACHE_DTYPES
from attnplug.core.errors import ModelConfigError
from attnplug.integrations.reader.stored_names import REMEDY, Caches, check_projections

_FORMATS: Final = {(8, "float"): "fp8_e4m3", (8, "int"): "int8"}
"""The dtype by bits and type of a scheme, which compressed-tensors and ModelOpt write."""
_WORDS: Final = {
    **{name: name for name in KV_CACHE_DTYPES},
    **dict.fromkeys(("fp8", "fp8_e4m3fn", "e4m3", "e4m3fn", "fp8_static", "static"), "fp8_e4m3"),
    "e5m2": "fp8_e5m2",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "none": "auto",
    "null": "auto",
    "no": "auto",
}
"""The dtype by the word for it; AutoFP8 and older Quark write "static" for an fp8 cache with calibrated scales."""
_WHOLE: Final = ("tensor", "per_tensor")
"""Names of one scale for all keys, and one for all values: the only scales that layers have."""


def says_something(value: object) -> bool:
    """Whether a field has a value: None, False and empty values say nothing about the cache."""
    if isinstance(value, Mapping):
        # Observers of ModelOpt are switched off by a flag of their own.
        return bool(value) and value.get("enable") is not False
    return value is not None and value is not False and value not in ("", [], ())


def dtype_of(place: str, value: object) -> str:
    """The dtype that a word ("FP8"), a scheme of numbers, or a list of one of them names.

    Raises:
        ModelConfigError: any other value; it names `place`.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return dtype_of(place, value[0])
    if isinstance(value, str):
        text = value.strip().lower().replace("-", "_").removeprefix("torch.").replace("float8", "fp8")
        if text in _WORDS:
            return _WORDS[text]
        known = ", ".join(name for name in KV_CACHE_DTYPES if name != "auto")
        raise ModelConfigError(f"{place}={shown(value)}: must be one of FP8, INT8, NVFP4, {known}; {REMEDY}")
    if isinstance(value, Mapping):
        return _of_scheme(place, value)
    raise ModelConfigError(f"{place}={shown(value)}: names no storage that the reader knows; {REMEDY}")


def _of_scheme(place: str, scheme: Mapping[str, Any]) -> str:
    bits, kind, word = (scheme.get(name) for name in ("num_bits", "type", "dtype"))
    scales = next(
        (scheme[name] for name in ("strategy", "qscheme") if scheme.get(name) is not None), "tensor"
    )
    if scales not in _WHOLE:
        raise ModelConfigError(
            f"{place}={shown(scheme)}: has scales by {shown(scales)}, and a layer has one scale for its keys "
            f"and one for its values; {REMEDY}"
        )
    dtype = _FORMATS.get((bits, kind)) if type(bits) is int and isinstance(kind, str) else None
    if dtype is None and isinstance(word, str):
        dtype = dtype_of(f"{place}.dtype", word)
    if dtype is None:
        raise ModelConfigError(f"{place}={shown(scheme)}: must be 8 bits of type float or int; {REMEDY}")
    if dtype == "int8" and (
        scheme.get("dynamic") is True or scheme.get("is_dynamic") is True or scheme.get("symmetric") is False
    ):
        raise ModelConfigError(
            f"{place}={shown(scheme)}: has zero points or scales of each step, and a layer has one scale that "
            f"is fixed at load; {REMEDY}"
        )
    return dtype


def dtype_of_outputs(place: str, patterns: object, configs: Mapping[str, Any], caches: Caches) -> str:
    """The dtype of the outputs of key and value projections, as Quark writes a cache.

    Args:
        place: the field with the patterns, for messages.
        patterns: the names of the projections, such as `["*k_proj", "*v_proj"]`.
        configs: the quantization of modules by name or pattern, each with its `output_tensors`.
        caches: gives the attention modules of the model that have a cache.

    Raises:
        ModelConfigError: the names cover keys alone, values alone or some layers; outputs of different storage, or
            none.
    """
    names = [patterns] if isinstance(patterns, str) else patterns
    if isinstance(names, Mapping):
        names = list(names)
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(f"{place}={shown(patterns)}: must be a list of names; {REMEDY}")
    check_projections(place, names, caches)
    found: dict[str, str] = {}
    for name, config in configs.items():
        if any(_matches(name, pattern) for pattern in names):
            outputs = config.get("output_tensors") if isinstance(config, Mapping) else None
            if says_something(outputs):
                found[dtype_of(f"{name}.output_tensors", outputs)] = name
            else:
                found[""] = name
    if not found or "" in found:
        lacking = found.get("", "any of them")
        raise ModelConfigError(
            f"{place}={shown(patterns)}: names a quantized cache, and output_tensors of {lacking} says no dtype; "
            f"{REMEDY}"
        )
    if len(found) > 1:
        raise ModelConfigError(
            f"{place}={shown(patterns)}: names a cache with several dtypes ({', '.join(found)}); {REMEDY}"
        )
    return next(iter(found))


def _matches(name: str, pattern: str) -> bool:
    # Not fnmatch: it normalizes case on some systems, and these names are not paths.
    text = "".join(".*" if letter == "*" else re.escape(letter) for letter in pattern)
    return name == pattern or re.fullmatch(text, name) is not None
