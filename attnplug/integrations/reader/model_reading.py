"""The whole reading: build, run, and turn what was recorded into layers."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.core.errors import ModelConfigError
from attnplug.core.spec import LayerSpec
from attnplug.integrations.reader.architecture import build
from attnplug.integrations.reader.inputs import DECODER_LENGTH, key_lengths, variants
from attnplug.integrations.reader.layer_specs import SpecMaker, make_spec
from attnplug.integrations.reader.other_layers import find_other_layers
from attnplug.integrations.reader.own_attention import read_own_attention
from attnplug.integrations.reader.quiet import one_line, quiet_transformers
from attnplug.integrations.reader.substitution import substituted
from attnplug.integrations.reader.trace import PROBE, AttentionCall, Trace, probe_registered, run

__all__ = ["Reading", "read_model"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Layers, other layers and KV sharing of one model, and the class they were read from."""

    layers: dict[str, LayerSpec]
    other_layers: dict[str, str]
    kv_sharing: dict[str, str]
    class_name: str


def read_model(config: PreTrainedConfig, ranks: int, kv_cache_dtype: str) -> Reading:
    """Everything there is to say about the attention of `config`. ModelConfigError where that is too little."""
    position = getattr(config.get_text_config(), "position_embedding_type", None)
    if isinstance(position, str) and position.startswith("relative"):
        raise ModelConfigError(
            f"position_embedding_type={position!r}: a relative position term in the logits, "
            "which no LayerSpec can say"
        )
    with quiet_transformers(), probe_registered():
        model = _build(config)
        trace = _trace(model)
        return _read(trace, ranks, kv_cache_dtype)


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    # A class with a table of its own implementations takes no other name: in a tower that is nothing to
    # the text model, and elsewhere the attention will be seen to be the class's own.
    parts = {name: PROBE if name == "text_config" else "eager" for name in config.sub_configs}
    for attention in (PROBE, {"": PROBE, **parts}):
        with contextlib.suppress(KeyError):
            return build(config, attention)
    return build(config, "eager")


def _trace(model: PreTrainedModel) -> Trace:
    lengths = key_lengths(model)
    failures: list[Exception] = []
    for lenient in (False, True):
        for inputs in variants(model):
            try:
                with substituted(model, lenient):
                    return run(model, inputs, lengths)
            except Exception as error:  # noqa: BLE001 - a model's forward may raise anything
                failures.append(error)
    # What says more than that a value was asked for that is not there comes first.
    failure = min(failures, key=lambda error: "meta" in str(error))
    raise ModelConfigError(
        f"{type(model).__name__} cannot be run without data, so its attention cannot be checked: "
        f"{one_line(failure)}"
    ) from failure


def _read(trace: Trace, ranks: int, kv_cache_dtype: str) -> Reading:
    config: Any = trace.model.config
    maker = SpecMaker(
        is_encoder_decoder=bool(config.is_encoder_decoder),
        has_cross_attention=bool(config.is_encoder_decoder or getattr(config, "add_cross_attention", False)),
        query_length=DECODER_LENGTH,
        ranks=ranks,
        kv_cache_dtype=kv_cache_dtype,
    )
    layers: dict[str, LayerSpec] = {}
    sharing: dict[str, str] = {}
    owners: dict[int, str] = {}
    visits: set[tuple[str, int]] = set()
    for call in trace.calls:
        if (call.path, call.visit) in visits:
            raise ModelConfigError(
                f"{call.path}: {type(call.module).__name__} calls attention more than once for one output, "
                "which no LayerSpec can say"
            )
        visits.add((call.path, call.visit))
        spec = maker.spec(call)
        name = _name(call, layers)
        owner = owners.setdefault(call.key.untyped_storage()._cdata, name)
        if owner != name and not spec.direct_kv:
            sharing[name] = owner
        layers[name] = spec
    for path in trace.own_attention:
        found = read_own_attention(path, trace.model.get_submodule(path), config)
        fields = dataclasses.asdict(found)
        dtype = str(trace.model.dtype).removeprefix("torch.")
        layers[path] = make_spec(path, ranks=ranks, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **fields)
    paths = frozenset(call.path for call in trace.calls) | frozenset(trace.own_attention)
    others = find_other_layers(trace, paths)
    name = type(trace.model).__name__
    if not layers and not others:
        raise ModelConfigError(f"{name} has no layer that the reader knows, of attention or any other kind")
    return Reading(layers, others, sharing, name)


def _name(call: AttentionCall, taken: dict[str, LayerSpec]) -> str:
    name, run_number = call.path, 1
    while name in taken:
        run_number += 1
        name = f"{call.path}#{run_number}"
    return name
