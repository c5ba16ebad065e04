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
from attnplug.integrations.model_spec import NOT_READ, OWN_SPECS, Client, ModelSpec, make_spec
from attnplug.integrations.reader.architecture import build_model, model_class
from attnplug.integrations.reader.config_file import quiet_transformers
from attnplug.integrations.reader.config_json import one_line
from attnplug.integrations.reader.layer_specs import SpecMaker, index_key_size, is_another_sequence
from attnplug.integrations.reader.mixers import (
    UnreachedError,
    attention_inside,
    find_other_layers,
    looks_like_attention,
    own_attention_refused,
    works_on_single_tokens,
)
from attnplug.integrations.reader.model_inputs import LONG, Sizes, encoder_tokens, input_attempts, read_sizes
from attnplug.integrations.reader.state_specs import state_specs, states_of_transformers
from attnplug.integrations.reader.trace import (
    PROBE,
    AttentionCall,
    RunFailedError,
    Trace,
    probe_registered,
    record_run,
)
from attnplug.integrations.reader.unread_fields import notes_on_slopes, notes_on_unread, with_kinds

# Runs of modules, over all attempts for one model. A model that fails late would take minutes otherwise.
_BUDGET = 12_000
_OWN_ATTENTION = {
    # Bloom adds slope * key_pos, which differs from -slope * (query_pos - key_pos) by a constant per row.
    "BloomAttention": ("bloom", "num_heads", "num_heads", "inv_norm_factor"),
    # Falcon's new architecture caches copies of each KV head; num_kv_heads counts each head once.
    "FalconAttention": ("falcon", "num_heads", "num_kv_heads", "inv_norm_factor"),
    "MptAttention": ("mpt", "n_heads", "n_heads", "softmax_scale"),
}
"""Classes without transformers' attention interface: family, attributes with heads, KV heads and scale."""


def read_model(
    config: PreTrainedConfig,
    ranks: int,
    kv_cache_dtype: str,
    client: Client,
    dtype: str | None = None,
    notes: tuple[str, ...] = (),
) -> ModelSpec:
    """The layers of the model of `config`, of `dtype` if it is given, and `notes` with those of this reading.

    ModelConfigError: a layer cannot be read.
    """
    if dtype is not None:
        config = _with_dtype(config, dtype)
    config, translated = with_kinds(config)
    position = getattr(config.get_text_config(), "position_embedding_type", None)
    if isinstance(position, str) and position.startswith("relative"):
        raise ModelConfigError(
            f"position_embedding_type={position!r}: a relative position term in the logits, "
            f"which a LayerSpec cannot describe; {OWN_SPECS}"
        )
    with quiet_transformers(), probe_registered():
        model = _probed_model(config)
        notes = (*notes, *translated, *filter(None, model_class(config)[1:]))
        try:
            found = _read_whole(model, ranks, kv_cache_dtype, client)
        except ModelConfigError as error:
            if error.argument is not None:
                raise
            raise ModelConfigError(f"{error}; {OWN_SPECS}") from error
        if not found.layers and not found.other_layers:
            raise ModelConfigError(f"{found.name} has no attention layer, nor a layer of another known kind")
        notes = (
            *notes,
            *found.notes,
            *notes_on_slopes(model, found.layers),
            *notes_on_unread(model, found.layers),
        )
        if client is Client.TRANSFORMERS and (sentence := states_of_transformers(model)):
            notes = (*notes, f"{sentence}.")
    return dataclasses.replace(found, notes=notes)


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
    with contextlib.suppress(KeyError):
        return build_model(config, PROBE)
    try:
        model = build_model(config, {"": PROBE, **parts})
    except KeyError:
        model = build_model(config, "eager")
    # Modules that ask for a function or a mask while they run still get the probe's.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation_internal = PROBE
    return model


def _runs(model: PreTrainedModel, part: PreTrainedModel, sizes: Sizes) -> Iterator[Trace]:
    """Runs of `part` that succeed, with inputs of `sizes`, more informative ones first.

    Without one, ModelConfigError with the cause.
    """
    config: Any = part.config
    possible = {sizes.tokens, encoder_tokens(sizes.tokens), getattr(config, "max_source_positions", None)}
    lengths = frozenset(length for length in possible if isinstance(length, int))
    failures: list[RunFailedError] = []
    if type(part).forward is torch.nn.Module.forward:
        raise ModelConfigError(
            f"{type(part).__name__} has no forward to run; read the configurations inside it one by one"
        )
    succeeded = False
    spent = 0
    for inputs in input_attempts(part, part is model, sizes):
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
        raise _failure(part, failures, sizes)


def _failure(part: PreTrainedModel, failures: list[RunFailedError], sizes: Sizes) -> ModelConfigError:
    """The attention that a LayerSpec cannot describe, if the model reached it; else the model's own error."""
    # The run that came farthest says most about the model.
    farthest = max(failures, key=lambda failure: len(failure.trace.executed))
    cause = farthest.__cause__ or farthest
    try:
        _layers(farthest.trace, part, sizes, 1, "auto", Client.ENGINE)
    except ModelConfigError as error:
        return error
    for frame, _ in reversed(list(traceback.walk_tb(cause.__traceback__))):
        module = frame.f_locals.get("self")
        if not isinstance(module, torch.nn.Module) or not looks_like_attention(module):
            continue
        if any(call.module is module for call in farthest.trace.calls):
            continue
        path = farthest.trace.first_path(module)
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
            return own_attention_refused(path, module)
        return ModelConfigError(
            f"{path}: {type(module).__name__} fails before it attends, so its attention cannot be checked: "
            f"{one_line(cause)}"
        )
    return ModelConfigError(
        f"{type(part).__name__} cannot be run without data, so its attention cannot be checked: {one_line(cause)}"
    )


@contextlib.contextmanager
def _failing_parts_skipped(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, an MLP or mixture of experts that fails returns its input."""
    # Routers of experts fail on meta tensors, because they choose by value.
    # The reader records shapes only, so an input can replace an output of
    # the same shape. With another shape, the part around it fails in turn.
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
    sizes = read_sizes(model)
    for trace in _runs(model, model, sizes):
        try:
            layers, sharing = _checked_layers(trace, model, sizes, ranks, kv_cache_dtype, client)
        except ModelConfigError:
            if not unreached:
                raise
            continue  # these inputs only stand in for those that did not reach all attention
        unread: dict[str, str] = {}
        for path, tower in _unreached_towers(trace):
            try:
                inside = read_sizes(tower)
                tower_trace = next(_runs(model, tower, inside))
                found, shared = _checked_layers(tower_trace, tower, inside, ranks, kv_cache_dtype, client)
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
        reason = next((kind.partition(NOT_READ)[2] for kind in others.values() if NOT_READ in kind), None)
        if not layers and reason is not None:
            raise ModelConfigError(f"no attention of {name} was read: {reason}")
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
        if attention_inside(module) is not None:
            yield path, module


def _checked_layers(
    trace: Trace, part: PreTrainedModel, sizes: Sizes, ranks: int, kv_cache_dtype: str, client: Client
) -> tuple[dict[str, LayerSpec], dict[str, str]]:
    """The layers of a run; those that attend by code of their own must be the same in a longer text."""
    # Such code may attend to all of a short text, and to blocks of a long one.
    layers, sharing = _layers(trace, part, sizes, ranks, kv_cache_dtype, client)
    texts = {sizes.tokens, encoder_tokens(sizes.tokens)}
    own = [call for call in trace.calls if call.own is not None]
    if not any(tensor.shape[2] in texts for call in own for tensor in (call.query, call.key)):
        return layers, sharing
    longer = read_sizes(part, LONG)
    long_trace = next(_runs(trace.model, part, longer))
    found, _ = _layers(long_trace, part, longer, ranks, kv_cache_dtype, client)
    changed = next((path for path in {**layers, **found} if layers.get(path) != found.get(path)), None)
    if changed is not None:
        raise ModelConfigError(
            f"{changed}: {type(part).__name__} attends otherwise in a text of {longer.tokens} tokens than in one of "
            f"{sizes.tokens}, which a LayerSpec cannot describe"
        )
    return layers, sharing


def _layers(
    trace: Trace, part: PreTrainedModel, sizes: Sizes, ranks: int, kv_cache_dtype: str, client: Client
) -> tuple[dict[str, LayerSpec], dict[str, str]]:
    """Layers of one run, and the layers whose keys and values some of them read."""
    config: Any = part.config
    maker = SpecMaker(
        is_encoder_decoder=bool(config.is_encoder_decoder),
        has_cross_attention=bool(config.is_encoder_decoder or getattr(config, "add_cross_attention", False)),
        generates="use_cache" in inspect.signature(part.forward).parameters,
        query_length=sizes.tokens,
        ranks=ranks,
        kv_cache_dtype=kv_cache_dtype,
        client=client,
    )
    layers: dict[str, LayerSpec] = {}
    # transformers computes its states itself, so its client has attention layers alone.
    states = state_specs(trace.model, trace.states, ranks) if client is Client.ENGINE else []
    sharing: dict[str, str] = {}
    owners: dict[int, str] = {}
    runs: Counter[str] = Counter()
    previous: dict[tuple[str, int], tuple[AttentionCall, str]] = {}
    own = next(
        (call.path for call in trace.calls if call.own is not None), next(iter(trace.own_attention), None)
    )
    if client is Client.TRANSFORMERS and own is not None:
        raise ModelConfigError(
            f"{own}: {type(trace.model.get_submodule(own)).__name__} computes attention of its own and would never "
            "call attnplug; leave the model's attn_implementation unchanged"
        )
    for place, call in enumerate(trace.calls):
        layers |= {name: spec for after, name, spec in states if after == place}
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
    for path, why in trace.own_attention.items():
        fields = _own_attention(path, trace.model.get_submodule(path), config, why)
        dtype = str(trace.model.dtype).removeprefix("torch.")
        layers[path] = make_spec(path, ranks=ranks, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **fields)
    layers |= {name: spec for after, name, spec in states if after == len(trace.calls)}
    return layers, sharing


def _own_attention(path: str, module: Any, config: Any, why: str) -> dict[str, Any]:
    """LayerSpec fields of causal self-attention whose calls cannot be recorded, with the heads of all ranks.

    ModelConfigError with the reason `why` for other modules.
    """
    cls = type(module)
    family, *names = _OWN_ATTENTION.get(cls.__name__, ("",))
    # A class of the same name elsewhere may compute something else.
    if cls.__module__ != f"transformers.models.{family}.modeling_{family}":
        raise own_attention_refused(path, module, why)
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
