"""Reads a model: builds it, runs it once without data, and turns the recorded calls into layers."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.core.errors import ModelConfigError
from attnplug.core.spec import LayerSpec
from attnplug.integrations.model_spec import ModelSpec
from attnplug.integrations.reader.architecture import build_model
from attnplug.integrations.reader.config_file import one_line, quiet_transformers
from attnplug.integrations.reader.layer_specs import SpecMaker, make_spec
from attnplug.integrations.reader.mixers import works_on_single_tokens
from attnplug.integrations.reader.other_layers import find_other_layers
from attnplug.integrations.reader.trace import PROBE, Trace, probe_registered, record_run

_DECODER_LENGTH = 61
"""Tokens of a decoder, or of a model without one. A prime is unlikely to equal another dimension."""
_ENCODER_LENGTH = 43
"""Tokens of an encoder whose output a decoder reads."""
_OWN_ATTENTION = {
    # Bloom adds slope * key_pos, which differs from -slope * (query_pos - key_pos) by a constant per row.
    "BloomAttention": ("bloom", "num_heads", "num_heads", "inv_norm_factor"),
    # Falcon's new architecture caches copies of each KV head; num_kv_heads counts each head once.
    "FalconAttention": ("falcon", "num_heads", "num_kv_heads", "inv_norm_factor"),
    "MptAttention": ("mpt", "n_heads", "n_heads", "softmax_scale"),
}
"""Classes without transformers' attention interface: family, attributes with heads, KV heads and scale."""


def read_model(config: PreTrainedConfig, ranks: int, kv_cache_dtype: str) -> ModelSpec:
    """The layers of the model of `config`. ModelConfigError if one cannot be read."""
    position = getattr(config.get_text_config(), "position_embedding_type", None)
    if isinstance(position, str) and position.startswith("relative"):
        raise ModelConfigError(
            f"position_embedding_type={position!r}: a relative position term in the logits, "
            "which a LayerSpec cannot describe"
        )
    with quiet_transformers(), probe_registered():
        return _read(_run_without_data(_probed_model(config)), ranks, kv_cache_dtype)


def _probed_model(config: PreTrainedConfig) -> PreTrainedModel:
    # Some classes have a table of their own and accept no other name. In a tower that does not affect the text
    # model; elsewhere the trace will show attention of the class's own.
    parts = {name: PROBE if name == "text_config" else "eager" for name in config.sub_configs}
    for attention in (PROBE, {"": PROBE, **parts}):
        with contextlib.suppress(KeyError):
            return build_model(config, attention)
    return build_model(config, "eager")


def _run_without_data(model: PreTrainedModel) -> Trace:
    config: Any = model.config
    possible = {_DECODER_LENGTH, _ENCODER_LENGTH, getattr(config, "max_source_positions", None)}
    lengths = frozenset(length for length in possible if isinstance(length, int))
    failures: list[Exception] = []
    # Strict first: parts are skipped only if the model does not run otherwise.
    for lenient in (False, True):
        for inputs in _input_variants(model):
            try:
                with _failing_parts_skipped(model, lenient):
                    return record_run(model, inputs, lengths)
            except Exception as error:  # noqa: BLE001 - a model's forward may raise anything
                failures.append(error)
    # An error about meta tensors says only that data is missing, so any other error is shown instead.
    failure = min(failures, key=lambda error: "meta" in str(error))
    raise ModelConfigError(
        f"{type(model).__name__} cannot be run without data, so its attention cannot be checked: "
        f"{one_line(failure)}"
    ) from failure


def _input_variants(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try in turn until the model runs, the most informative first."""
    accepted = inspect.signature(model.forward).parameters
    plain = _tokens(model)
    if "use_cache" in accepted:
        plain["use_cache"] = True
    if getattr(model.config, "add_cross_attention", False) and "encoder_hidden_states" in accepted:
        shape = (1, _ENCODER_LENGTH, model.config.hidden_size)
        plain.setdefault("encoder_hidden_states", torch.zeros(shape, dtype=model.dtype, device="meta"))
    # With token types, models show the spans of tokens that see each other in both directions.
    kinds = {
        name: _ids(_DECODER_LENGTH) for name in ("token_type_ids", "mm_token_type_ids") if name in accepted
    }
    length = _DECODER_LENGTH if "decoder_input_ids" not in plain else _ENCODER_LENGTH
    whole = {"attention_mask": _ids(length)} if "input_ids" in plain and "attention_mask" in accepted else {}
    yield {**plain, **kinds}
    if whole:
        yield {**plain, **kinds, **whole}
    if kinds:
        yield plain
        yield {**plain, **whole}
    if "use_cache" in plain:
        yield {**plain, "use_cache": False}
        yield {**plain, **whole, "use_cache": False}


def _tokens(model: PreTrainedModel) -> dict[str, Any]:
    config: Any = model.config
    name = model.main_input_name
    sizes = ("num_mel_bins", "max_source_positions")
    if name == "input_features" and all(hasattr(config, size) for size in sizes):
        frames = 2 * config.max_source_positions
        given = {name: torch.zeros(1, config.num_mel_bins, frames, dtype=model.dtype, device="meta")}
    elif config.is_encoder_decoder:
        given = {"input_ids": _ids(_ENCODER_LENGTH)}
    else:
        return {"input_ids": _ids(_DECODER_LENGTH)}
    return {**given, "decoder_input_ids": _ids(_DECODER_LENGTH)}


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.int64, device="meta")


@contextlib.contextmanager
def _failing_parts_skipped(model: PreTrainedModel, active: bool) -> Iterator[None]:
    """Inside the block, if `active`, an MLP or mixture of experts that fails returns its input.

    Routers of experts fail on meta tensors, because they choose by value. The reader records shapes only, so an
    input can replace an output of the same shape. With another shape, the part around it fails in turn.
    """
    parts = [module for module in model.modules() if works_on_single_tokens(module)] if active else []
    try:
        for part in parts:
            part.forward = _input_on_failure(part.forward)
        yield
    finally:
        for part in parts:
            # The replacement is an attribute of the instance, so removing it shows the class's method again.
            vars(part).pop("forward", None)


def _input_on_failure(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_or_input(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            for given in (*args, *kwargs.values()):
                if isinstance(given, torch.Tensor) and given.is_floating_point():
                    return given
            raise

    return forward_or_input


def _read(trace: Trace, ranks: int, kv_cache_dtype: str) -> ModelSpec:
    config: Any = trace.model.config
    maker = SpecMaker(
        is_encoder_decoder=bool(config.is_encoder_decoder),
        has_cross_attention=bool(config.is_encoder_decoder or getattr(config, "add_cross_attention", False)),
        query_length=_DECODER_LENGTH,
        ranks=ranks,
        kv_cache_dtype=kv_cache_dtype,
    )
    layers: dict[str, LayerSpec] = {}
    sharing: dict[str, str] = {}
    owners: dict[int, str] = {}
    runs: Counter[str] = Counter()
    visits: set[tuple[str, int]] = set()
    for call in trace.calls:
        if (call.path, call.visit) in visits:
            raise ModelConfigError(
                f"{call.path}: {type(call.module).__name__} calls attention more than once for one output, "
                "which a LayerSpec cannot describe"
            )
        visits.add((call.path, call.visit))
        spec = maker.spec(call)
        runs[call.path] += 1
        name = call.path if runs[call.path] == 1 else f"{call.path}#{runs[call.path]}"
        # Storages on the meta device have no data pointer; `_cdata` identifies them.
        owner = owners.setdefault(call.key.untyped_storage()._cdata, name)
        if owner != name and not spec.direct_kv:
            sharing[name] = owner
        layers[name] = spec
    for path in trace.own_attention:
        fields = _own_attention(path, trace.model.get_submodule(path), config)
        dtype = str(trace.model.dtype).removeprefix("torch.")
        layers[path] = make_spec(path, ranks=ranks, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **fields)
    others = find_other_layers(trace, frozenset({*(call.path for call in trace.calls), *trace.own_attention}))
    name = type(trace.model).__name__
    if not layers and not others:
        raise ModelConfigError(f"{name} has no attention layer, nor a layer of another known kind")
    return ModelSpec(
        layers=layers, other_layers=others, kv_sharing=sharing, model_type=str(config.model_type), name=name
    )


def _own_attention(path: str, module: Any, config: Any) -> dict[str, Any]:
    """LayerSpec fields of causal self-attention whose calls cannot be recorded, with the heads of all ranks."""
    cls = type(module)
    family, *names = _OWN_ATTENTION.get(cls.__name__, ("",))
    # A class of the same name elsewhere may compute something else.
    if cls.__module__ != f"transformers.models.{family}.modeling_{family}":
        raise ModelConfigError(
            f"{path}: {cls.__name__} computes attention of its own, which cannot be checked against a LayerSpec"
        )
    if family == "mpt":
        _check_mpt(config.attn_config)
    fields = dict(
        zip(("num_heads", "num_kv_heads", "scale"), (getattr(module, n) for n in names), strict=True)
    )
    return {**fields, "head_size": module.head_dim, "has_alibi": family != "falcon" or bool(config.alibi)}


def _check_mpt(attention: Any) -> None:
    ignored = {
        "attn_type": attention.attn_type != "multihead_attention",
        "prefix_lm": attention.prefix_lm,
        "qk_ln": attention.qk_ln,
        "attn_uses_sequence_id": attention.attn_uses_sequence_id,
        "alibi": not attention.alibi,
    }
    for name, asked in ignored.items():
        if asked:
            raise ModelConfigError(
                f"attn_config.{name}={getattr(attention, name)!r}: transformers' MPT ignores it, "
                "so the model's own attention cannot be read"
            )
