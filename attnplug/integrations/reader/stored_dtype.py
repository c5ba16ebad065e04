"""The storage of keys and values that a quantized checkpoint names in its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attnplug.core.errors import ModelConfigError
from attnplug.core.text import shown

_FIELDS: Final = ("quantization_config", "compression_config")
_SCHEMES: Final = {(8, "float"): "fp8_e4m3", (8, "int"): "int8"}
"""The dtype by bits and type of a `kv_cache_scheme`, which compressed-tensors and ModelOpt write."""
_ALGORITHMS: Final = {"FP8": "fp8_e4m3", "INT8": "int8", "NVFP4": "nvfp4"}
"""The dtype by `kv_cache_quant_algo`, which older versions of ModelOpt write."""
_REMEDY: Final = "give kv_cache_dtype (--kv-cache-dtype), such as bfloat16"


def stored_kv_dtype(config: Any) -> str:
    """The `kv_cache_dtype` that a model's configuration names: a JSON object or a PreTrainedConfig; "auto" for none.

    Raises:
        ModelConfigError: a storage that no `kv_cache_dtype` is.
    """
    for field in _FIELDS:
        found = config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)
        to_dict = getattr(found, "to_dict", None)
        found = found if to_dict is None else to_dict()
        if not isinstance(found, Mapping):
            continue
        inner = found.get("quantization")
        for part in (found, inner if isinstance(inner, Mapping) else {}):
            dtype = _of_scheme(field, part.get("kv_cache_scheme"))
            dtype = dtype or _of_algorithm(field, part.get("kv_cache_quant_algo"))
            if dtype is not None:
                return dtype
    return "auto"


def _of_scheme(field: str, scheme: object) -> str | None:
    if scheme is None:
        return None
    named = (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, Mapping) else (None, None)
    bits, kind = named
    dtype = _SCHEMES.get((bits, kind)) if type(bits) is int and isinstance(kind, str) else None
    if dtype is None:
        raise ModelConfigError(
            f"{field}.kv_cache_scheme={shown(scheme)}: must be 8 bits of type float or int; {_REMEDY}"
        )
    return dtype


def _of_algorithm(field: str, name: object) -> str | None:
    if name is None:
        return None
    dtype = _ALGORITHMS.get(name.upper()) if isinstance(name, str) else None
    if dtype is None:
        raise ModelConfigError(
            f"{field}.kv_cache_quant_algo={shown(name)}: must be one of {', '.join(_ALGORITHMS)}; {_REMEDY}"
        )
    return dtype
