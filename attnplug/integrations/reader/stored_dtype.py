"""The storage of keys and values that a checkpoint names, in its configuration or in a file beside it. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from attnplug._system.text import shown
from attnplug.core.errors import ModelConfigError
from attnplug.core.kv_format import kv_cache_dtypes
from attnplug.integrations.reader.config_json import parse
from attnplug.integrations.reader.stored_names import (
    PROJECTION,
    REMEDY,
    Caches,
    about_attention,
    about_projections,
    check_modules,
    check_projections,
    fits,
)

_FORMATS: Final = {(8, "float"): "fp8_e4m3", (8, "int"): "int8"}
"""The dtype by bits and type of a scheme, which compressed-tensors and ModelOpt write."""
_WORDS: Final = {
    **{name: name for name in kv_cache_dtypes()},
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
"""Names of one scale for all keys, and one for all values: the only scales that the reader knows."""


def says_something(value: object) -> bool:
    """Whether a field has a value: None, False and empty values say nothing about the cache."""
    if isinstance(value, Mapping):
        # Observers of ModelOpt are switched off by a flag of their own.
        return bool(value) and value.get("enable") is not False
    return value is not None and value is not False and value not in ("", [], ())


def dtype_of(place: str, value: object) -> str:
    """The dtype that a word ("FP8"), a scheme of numbers, or a list of one of them names.

    ModelConfigError: any other value; it names `place`.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return dtype_of(place, value[0])
    if isinstance(value, str):
        text = value.strip().lower().replace("-", "_").removeprefix("torch.").replace("float8", "fp8")
        if text in _WORDS:
            return _WORDS[text]
        known = ", ".join(name for name in kv_cache_dtypes() if name != "auto")
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
            f"{place}={shown(scheme)}: has scales by {shown(scales)}, and the reader knows one scale for keys and "
            f"one for values; a LayerSpec with head_scales=True has them for each KV head; {REMEDY}"
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
    names = list(names) if isinstance(names, Mapping) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(f"{place}={shown(patterns)}: must be a list of names; {REMEDY}")
    check_projections(place, names, caches)
    found: dict[str, str] = {}
    for name, config in configs.items():
        if any(fits(name, pattern) for pattern in names):
            outputs = config.get("output_tensors") if isinstance(config, Mapping) else None
            said = dtype_of(f"{name}.output_tensors", outputs) if says_something(outputs) else ""
            found[said] = name
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


_SECTIONS: Final = ("quantization_config", "compression_config", "quantization")
"""Fields with all that a quantizer says, on the top level or in a configuration inside."""
_BESIDE: Final = (
    *("hf_quant_config.json", "quantization_config.json", "quantize_config.json", "quant_config.json"),
    *("quant_cfg.json", "kv_cache_scales.json"),
)
"""Files with the same as a section, by ModelOpt, AutoRound, AutoGPTQ, AutoAWQ, TensorRT-LLM, AutoFP8."""
_NAMED: Final = frozenset(
    {"kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method", "kv_cache_dtype"}
    | {"kv_cache_quant_dtype", "static_kv_dtype"}
)
"""Fields whose value is a word or a scheme. Outside of a section only these count."""
_ABOUT: Final = re.compile(r"(^|_)kv_?cache|(^|_)kv_(dtype|bits|quant|scheme)|\[?[kv]{1,2}\]?_bmm_quantizer")
"""The rule for fields in a section: such a field is read, or it is refused."""
# Fields of Quark, which say the storage together. `kv_cache_post_rope` is about the scales, not about the storage.
_READ_TOGETHER: Final = frozenset({"kv_cache_group", "kv_cache_quant_config", "kv_cache_post_rope"})


class Stored(NamedTuple):
    """A `kv_cache_dtype`, and the places that name it; "auto" and no place if the checkpoint names none."""

    dtype: str
    places: tuple[str, ...] = ()


def stored_kv_dtype(config: Any, folder: Path | None = None, caches: Caches | None = None) -> Stored:
    """The `kv_cache_dtype` that a checkpoint names.

    Args:
        config: the JSON object of a configuration, or a PreTrainedConfig.
        folder: of the checkpoint, whose other files are read too.
        caches: gives the attention modules with a cache, which a quantizer may name one by one; by default those
            of most decoders, `model.layers.0.self_attn` and so on.

    Raises:
        ModelConfigError: a storage that no `kv_cache_dtype` is; a field about the cache that the reader does not know;
            two places that name different storages; a file beside the configuration that is not JSON.
    """
    data = config if isinstance(config, Mapping) else config.to_dict()
    if caches is None:
        usual = [f"model.layers.{index}.self_attn" for index in range(_layers_of(data) or 1)]
        caches = lambda: usual  # noqa: E731
    found = dict(_said(data, caches))
    for name in _BESIDE if folder is not None else ():
        path = folder / name  # type: ignore[operator]
        if os.path.lexists(path):
            for place, dtype in _said(parse(path), caches, inside=True):
                found[f"{name}: {place}"] = dtype
    if len(set(found.values())) > 1:
        told = "; ".join(f"{place} names {dtype}" for place, dtype in found.items())
        raise ModelConfigError(f"the checkpoint contradicts itself: {told}; {REMEDY}")
    return Stored(next(iter(found.values())), tuple(found)) if found else Stored("auto")


def folder_of(source: Any) -> Path | None:
    """The folder of a checkpoint: of a path, or from where a PreTrainedConfig was loaded; None if there is none."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            return path
        # Among files of many models, those beside config.json belong to that one.
        shared = path.name != "config.json" and os.path.lexists(path.parent / "config.json")
        return None if shared else path.parent
    loaded = getattr(source, "_name_or_path", None)
    return Path(loaded) if isinstance(loaded, str) and loaded and Path(loaded).is_dir() else None


def _layers_of(data: Mapping[str, Any]) -> int | None:
    for each in (data, *(value for value in data.values() if isinstance(value, Mapping))):
        layers = each.get("num_hidden_layers")
        if type(layers) is int:
            return layers
    return None


def _said(data: Mapping[str, Any], caches: Caches, inside: bool = False) -> Iterator[tuple[str, str]]:
    """Each place in an object that names a storage, and the dtype; `inside` for an object that is a section."""
    rest: list[tuple[str, Mapping[str, Any], bool]] = [("", data, inside)]
    if inside:
        yield from _of_quark("", data, caches)
    while rest:
        before, part, section = rest.pop()
        for name, value in part.items():
            place = f"{before}{name}"
            if not says_something(value) or name in _READ_TOGETHER:
                continue
            if name in _NAMED:
                yield place, dtype_of(place, value)
            elif section and name == "config_groups" and isinstance(value, Mapping):
                yield from _of_groups(place, value, caches, part.get("ignore"))
            elif section and name == "kv_cache" and isinstance(value, Mapping) and "dtype" in value:
                yield f"{place}.dtype", dtype_of(f"{place}.dtype", value["dtype"])
            elif section and _ABOUT.search(str(name)):
                raise ModelConfigError(
                    f"{place}={shown(value, 200)}: is about the cache, and the reader does not know it; {REMEDY}"
                )
            elif isinstance(value, Mapping) or hasattr(value, "to_dict"):
                # A PreTrainedConfig has objects inside, such as a CompressedTensorsConfig.
                inner = value if isinstance(value, Mapping) else value.to_dict()
                if name in _SECTIONS:
                    yield from _of_quark(f"{place}.", inner, caches)
                rest.append((f"{place}.", inner, section or name in _SECTIONS))


def _of_quark(before: str, section: Mapping[str, Any], caches: Caches) -> Iterator[tuple[str, str]]:
    """The cache of a section of Quark: outputs of projections that `kv_cache_group` names."""
    export = section.get("export")
    places = {f"{before}export.": export, before: section}
    parts = {place: part for place, part in places.items() if isinstance(part, Mapping)}
    own = section.get("kv_cache_quant_config")
    configs = {
        **(found if isinstance(found := section.get("layer_quant_config"), Mapping) else {}),
        **(own if isinstance(own, Mapping) else {}),
    }
    grouped = False
    for start, part in parts.items():
        if says_something(group := part.get("kv_cache_group")):
            grouped = True
            place = f"{start}kv_cache_group"
            yield place, dtype_of_outputs(place, group, configs, caches)
    place = f"{before}kv_cache_quant_config"
    if says_something(own):
        yield place, dtype_of_outputs(place, own, configs, caches)
    elif not grouped:
        outputs = [
            name
            for name, each in configs.items()
            if PROJECTION.search(name)
            and isinstance(each, Mapping)
            and says_something(each.get("output_tensors"))
        ]
        if outputs:
            raise ModelConfigError(
                f"{before}layer_quant_config: quantizes the outputs of {', '.join(outputs[:2])}, and no "
                f"kv_cache_group says whether these are the cache; {REMEDY}"
            )


def _of_groups(
    before: str, groups: Mapping[str, Any], caches: Caches, ignore: object
) -> Iterator[tuple[str, str]]:
    """Groups of compressed-tensors that quantize attention itself, or the outputs of its projections."""
    ignored = _words(ignore)
    for kind, about, check in (
        ("output_activations", about_projections, check_projections),
        ("input_activations", about_attention, check_modules),
    ):
        # Several groups of one dtype may cover the layers together.
        found: dict[str, tuple[str, list[str]]] = {}
        for name, group in groups.items():
            value = group.get(kind) if isinstance(group, Mapping) else None
            if not says_something(value):
                continue
            place = f"{before}.{name}.{kind}"
            if words := about(place, _words(group.get("targets")), caches):
                dtype = dtype_of(place, value)
                first, before_it = found.get(dtype, (place, []))
                found[dtype] = first, [*before_it, *words]
        for dtype, (place, words) in found.items():
            check(place, words, caches, ignored)
            yield place, dtype


def _words(targets: object) -> list[str]:
    if not isinstance(targets, Sequence) or isinstance(targets, str):
        return []
    return [target for target in targets if isinstance(target, str)]
