"""Reads a model: builds it, runs it once without data, and turns the recorded calls into layers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.core.errors import ModelConfigError
from attnplug.core.spec import LayerSpec
from attnplug.integrations.model_spec import Client, ModelSpec
from attnplug.integrations.reader.architecture import build_model
from attnplug.integrations.reader.config_file import quiet_transformers
from attnplug.integrations.reader.config_json import one_line
from attnplug.integrations.reader.input_sizes import read_sizes
from attnplug.integrations.reader.layer_specs import SpecMaker, index_key_size, is_another_sequence
from attnplug.integrations.reader.mixers import (
    contains_attention,
    looks_like_attention,
    works_on_single_tokens,
)
from attnplug.integrations.reader.model_inputs import ENCODER_LENGTH, input_attempts
from attnplug.integrations.reader.other_layers import UnreachedError, find_other_layers, own_attention_refused
from attnplug.integrations.reader.rank_spec import make_spec
from attnplug.integrations.reader.trace import (
    PROBE,
    AttentionCall,
    RunFailedError,
    Trace,
    probe_registered,
    record_run,
)
from attnplug.integrations.reader.unread_fields import notes_on_unread, with_kinds

_BUDGET = 12_000
"""Runs of modules, over all attempts for one model. A model that fails late would take minutes otherwise."""
_OWN_ATTENTION = {
    # Bloom adds slope * key_pos, which differs from -slope * (query_pos - key_pos) by a constant per row.
    "BloomAttention": ("bloom", "num_heads", "num_heads", "inv_norm_factor"),
    # Falcon's new architecture caches copies of each KV head; num_kv_heads counts each head once.
    "FalconAttention": ("falcon", "num_heads", "num_kv_heads", "inv_norm_factor"),
    "MptAttention": ("mpt", "n_heads", "n_heads", "softmax_scale"),
}
"""Classes without transformers' attention interface: family, attributes with heads, KV heads and scale."""


def read_model(
    config: PreTrainedConfig, ranks: int, kv_cache_dtype: str, client: Client, dtype: str | None = None
) -> ModelSpec:
    """The layers of the model of `config`, of `dtype` if it is given. ModelConfigError if one cannot be read."""
    if dtype is not None:
        config = _with_dtype(config, dtype)
    config, notes = with_kinds(config)
    position = getattr(config.get_text_config(), "position_embedding_type", None)
    if isinstance(position, str) and position.startswith("relative"):
        raise ModelConfigError(
            f"position_embedding_type={position!r}: a relative position term in the logits, "
            "which a LayerSpec cannot describe"
        )
    with quiet_transformers(), probe_registered():
        model = _probed_model(config)
        read = _read_whole(model, ranks, kv_cache_dtype, client)
        return dataclasses.replace(read, notes=(*notes, *read.notes, *notes_on_unread(model, read.layers)))


def _with_dtype(config: PreTrainedConfig, dtype: str) -> PreTrainedConfig:
    """A copy of `config`, and of each configuration inside it, with that dtype."""
    config = copy.deepcopy(config)
    parts = [
        config,
        *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None),
    ]
    for part in parts:
        part.dtype = dtype
    return config


def _probed_model(config: PreTrainedConfig) -> PreTrainedModel:
    # Some classes have a table of their own and accept no other name. In a tower that does not affect the text
    # model; elsewhere the trace will show attention of the class's own.
    parts = {name: PROBE if name == "text_config" else "eager" for name in config.sub_configs}
    for attention in (PROBE, {"": PROBE, **parts}):
        with contextlib.suppress(KeyError):
            return build_model(config, attention)
    return build_model(config, "eager")


def _runs(model: PreTrainedModel, part: PreTrainedModel) -> Iterator[Trace]:
    """Runs of `part` that succeed, with more informative inputs first.

    Without one, ModelConfigError with the cause.
    """
    config: Any = part.config
    possible = {read_sizes(part).tokens, ENCODER_LENGTH, getattr(config, "max_source_positions", None)}
    lengths = frozenset(length for length in possible if isinstance(length, int))
    failures: list[RunFailedError] = []
    if type(part).forward is torch.nn.Module.forward:
        raise ModelConfigError(
            f"{type(part).__name__} has no forward to run; read the configurations inside it one by one"
        )
    succeeded = False
    spent = 0
    for inputs in input_attempts(part, part is model):
        try:
            with _failing_parts_skipped(part):
                trace = record_run(model, part, inputs, lengths)
        except RunFailedError as error:
            failures.append(error)
            spent += error.trace.visits
        else:
            succeeded = True
            spent += trace.visits
            yield trace
        if spent > _BUDGET:
            break
    if not succeeded:
        raise _failure(part, failures)


def _failure(part: PreTrainedModel, failures: list[RunFailedError]) -> ModelConfigError:
    """The attention that a LayerSpec cannot describe, if the model reached it; else the model's own error."""
    # The run that came farthest says most about the model.
    farthest = max(failures, key=lambda failure: len(failure.trace.executed))
    cause = farthest.__cause__ or farthest
    try:
        _layers(farthest.trace, part, 1, "auto", Client.ENGINE)
    except ModelConfigError as error:
        return error
    for frame, _ in reversed(list(traceback.walk_tb(cause.__traceback__))):
        module = frame.f_locals.get("self")
        if not isinstance(module, torch.nn.Module) or not looks_like_attention(module):
            continue
        if any(call.module is module for call in farthest.trace.calls):
            continue
        path = farthest.trace.first_path(module)
        if not _uses_interface(module):
            return own_attention_refused(path, module)
        return ModelConfigError(
            f"{path}: {type(module).__name__} fails before it attends, so its attention cannot be checked: "
            f"{one_line(cause)}"
        )
    return ModelConfigError(
        f"{type(part).__name__} cannot be run without data, so its attention cannot be checked: {one_line(cause)}"
    )


def _uses_interface(module: torch.nn.Module) -> bool:
    """Whether the forward of `module` names transformers' table of attention functions."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@contextlib.contextmanager
def _failing_parts_skipped(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, an MLP or mixture of experts that fails returns its input.

    Routers of experts fail on meta tensors, because they choose by value. The reader records shapes only, so an
    input can replace an output of the same shape. With another shape, the part around it fails in turn.
    """
    parts = [module for module in model.modules() if works_on_single_tokens(module)]
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


def _read_whole(model: PreTrainedModel, ranks: int, kv_cache_dtype: str, client: Client) -> ModelSpec:
    unreached: list[UnreachedError] = []
    for trace in _runs(model, model):
        try:
            layers, sharing = _layers(trace, model, ranks, kv_cache_dtype, client)
        except ModelConfigError:
            if not unreached:
                raise
            continue  # these inputs only stand in for those that did not reach all attention
        unread: dict[str, str] = {}
        for path, tower in _unreached_towers(trace):
            try:
                tower_trace = next(_runs(model, tower))
                found, shared = _layers(tower_trace, tower, ranks, kv_cache_dtype, client)
                find_other_layers(tower_trace, frozenset(name.partition("#")[0] for name in found))
            except ModelConfigError as error:
                unread[path] = str(error)
            else:
                layers.update(found)
                sharing.update(shared)
                trace.executed |= tower_trace.executed
        name = type(model).__name__
        try:
            others = find_other_layers(trace, frozenset(path.partition("#")[0] for path in layers), unread)
        except UnreachedError as error:
            unreached.append(error)
            continue
        if not layers and not others:
            raise ModelConfigError(f"{name} has no attention layer, nor a layer of another known kind")
        return ModelSpec(
            layers=layers,
            other_layers=others,
            kv_sharing=sharing,
            model_type=str(model.config.model_type),
            name=name,
            index_keys={
                call.path: size
                for call in trace.calls
                if (size := index_key_size(call)) is not None and client is Client.ENGINE
            },
        )
    # `_runs` raises if no run succeeds, so each one that did left some attention unreached.
    raise unreached[0]


def _unreached_towers(trace: Trace) -> Iterator[tuple[str, PreTrainedModel]]:
    """Models inside the model that did not run, the outermost first; reads on after each has run."""
    for path, module in trace.model.named_modules():
        if path in trace.executed or not isinstance(module, PreTrainedModel):
            continue
        if contains_attention(module):
            yield path, module


def _layers(
    trace: Trace, part: PreTrainedModel, ranks: int, kv_cache_dtype: str, client: Client
) -> tuple[dict[str, LayerSpec], dict[str, str]]:
    """Layers of one run, and the layers whose keys and values some of them read."""
    config: Any = part.config
    maker = SpecMaker(
        is_encoder_decoder=bool(config.is_encoder_decoder),
        has_cross_attention=bool(config.is_encoder_decoder or getattr(config, "add_cross_attention", False)),
        generates="use_cache" in inspect.signature(part.forward).parameters,
        query_length=read_sizes(part).tokens,
        ranks=ranks,
        kv_cache_dtype=kv_cache_dtype,
        client=client,
    )
    layers: dict[str, LayerSpec] = {}
    sharing: dict[str, str] = {}
    owners: dict[int, str] = {}
    runs: Counter[str] = Counter()
    previous: dict[tuple[str, int], tuple[AttentionCall, str]] = {}
    for call in trace.calls:
        spec = maker.spec(call)
        visit = (call.path, call.visit)
        if visit in previous:
            earlier, name = previous[visit]
            if (
                spec == layers[name]
                and spec.direct_kv
                and not spec.causal
                and is_another_sequence(call, earlier)
            ):
                continue
            raise ModelConfigError(
                f"{call.path}: {type(call.module).__name__} calls attention more than once for one output, "
                "which a LayerSpec cannot describe"
            )
        runs[call.path] += 1
        name = call.path if runs[call.path] == 1 else f"{call.path}#{runs[call.path]}"
        previous[visit] = call, name
        # Storages on the meta device have no data pointer; `_cdata` identifies them.
        owner = owners.setdefault(call.key.untyped_storage()._cdata, name)
        if owner != name and not spec.direct_kv:
            sharing[name] = owner
        layers[name] = spec
    for path in trace.own_attention:
        if client is Client.TRANSFORMERS:
            name = type(trace.model.get_submodule(path)).__name__
            raise ModelConfigError(
                f"{path}: {name} computes attention of its own and would never call attnplug; leave the model's "
                "attn_implementation unchanged"
            )
        fields = _own_attention(path, trace.model.get_submodule(path), config)
        dtype = str(trace.model.dtype).removeprefix("torch.")
        layers[path] = make_spec(path, ranks=ranks, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **fields)
    return layers, sharing


def _own_attention(path: str, module: Any, config: Any) -> dict[str, Any]:
    """LayerSpec fields of causal self-attention whose calls cannot be recorded, with the heads of all ranks."""
    cls = type(module)
    family, *names = _OWN_ATTENTION.get(cls.__name__, ("",))
    # A class of the same name elsewhere may compute something else.
    if cls.__module__ != f"transformers.models.{family}.modeling_{family}":
        raise own_attention_refused(path, module)
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
