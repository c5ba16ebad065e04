"""Registering attnplug with transformers, setting it on a model, and reading its decisions.

The two functions that transformers calls: one makes the mask of a step, the other computes attention.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnplug.core.errors import AttnplugError, ModelConfigError
from attnplug.core.invariance import check_invariance
from attnplug.core.precision import without_autocast
from attnplug.core.spec import AttentionType
from attnplug.integrations.attention.calls import AttentionCall, read_keywords
from attnplug.integrations.attention.class_code import Kind, class_table
from attnplug.integrations.attention.mask_functions import read_mask_function
from attnplug.integrations.attention.model_hooks import (
    NAME,
    LayerState,
    attention_modules,
    forward_pass,
    layer_state,
    name_in_model,
    set_state,
    uses_attnplug,
    watch,
    watch_running_model,
)
from attnplug.integrations.attention.paged import attend_paged, serve_continuous_batching, take_paged
from attnplug.integrations.attention.step_mask import PatternMask, StepMask
from attnplug.integrations.ordering import run_in_order
from attnplug.integrations.reader.mask_pattern import UnknownMaskError
from attnplug.registry.selection.decision import Decision


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> PatternMask:
    """The mask function of transformers' AttentionMaskInterface: returns a pattern, never a matrix.

    Positions of queries begin at `q_offset`, those of keys at `kv_offset`. `mask_function` tells whether a query
    position sees a key position. `attention_mask` is bool `[B, L]`, False for padding; None without padding.
    """
    where = torch.device(device)
    shape = (batch_size, 1, q_length, kv_length)
    start = int(q_offset)
    queries, keys = range(start, start + q_length), range(kv_offset, kv_offset + kv_length)
    try:
        read = read_mask_function(mask_function, batch_size, queries, keys, where)
    except UnknownMaskError as error:
        # Models also make masks that no layer uses, so the refusal waits for a layer that gets this one.
        return PatternMask.of(str(error), shape, where)
    step = StepMask(
        pattern=read.pattern,
        batch=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=start,
        kv_offset=kv_offset,
        padding=attention_mask,
        left_padding=read.left_padding,
        segments=read.segments,
        spans=read.spans,
    )
    return PatternMask.of(step, shape, where)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' AttentionInterface, served by the backend attnplug chooses.

    Args:
        module: the attention module; its state is kept on it.
        query: `[B, H, Lq, D]`.
        key: `[B, Hkv, Lk, D]`.
        value: `[B, Hkv, Lk, Dv]`.
        attention_mask: the result of `attention_mask` for this step, or None.
        dropout: must be 0 in training.
        scaling: softmax scale; None means `D ** -0.5`.
        **keywords: `is_causal`, `sliding_window`, `softcap`, `s_aux`, those of continuous batching, and keywords
            without an effect.

    Returns:
        `[B, Lq, H, Dv]`, contiguous, with zeros for padding; and None for the weights.

    Raises:
        BatchError: a keyword, mask or tensor that is not served.
        SpecError: an impossible layer, such as one with a scale below 0.
        NoBackendError: no backend serves the layer.
    """
    forward_pass.calls += 1
    layer = layer_state(module) or set_state(module, LayerState())
    if not layer.name:
        model = forward_pass.root or watch_running_model(sys._getframe(1))
        layer.name = name_in_model(module, model)
    where = f"{layer.name} ({type(module).__name__})"
    if getattr(getattr(module, "config", None), "output_attentions", False):
        keywords["output_attentions"] = True
    paged = take_paged(keywords, where)
    call = AttentionCall(
        module=module,
        layer=where,
        query=query,
        key=key,
        value=value,
        keywords=read_keywords(keywords, where),
        one_sequence=layer.one_sequence,
    )
    call.check(dropout, scaling)
    if paged is not None:
        return attend_paged(call, paged, attention_mask, scaling, layer), None
    step = call.mask(attention_mask)
    spec = call.spec(step, scaling)
    binding = layer.binding(spec, query.device, call.keywords.sinks, step.q_length)
    packing = step.packing(query.device, is_cross=spec.attn_type is AttentionType.ENCODER_DECODER)
    positions = keywords.get("position_ids")
    call.check_positions(step, forward_pass.position_ids if positions is None else positions)
    tokens = packing.common.num_actual_tokens
    output = query.new_empty(tokens, spec.num_heads, spec.head_size_v)
    # A batch of padding alone has no tokens; `unpack` then gives zeros.
    if tokens:
        metadata = binding.metadata(step, packing, is_shared=attention_mask is not None)
        packed = (packing.queries.pack(query), packing.keys.pack(key), packing.keys.pack(value))
        with without_autocast(query.device):
            run_in_order(binding.impl.forward, binding.layer, *packed, None, metadata, output)
    return packing.queries.unpack(output, query.shape[0]), None


_ORIGINAL = "_attnplug_original"


def register() -> None:
    """Make `attn_implementation="attnplug"` known to transformers; may be called again.

    Models that dispatch through transformers' attention interface then use the backend that `attnplug.select`
    chooses for each layer, also in continuous batching (`generate_batch`). A forward in which another class (Bloom, CpmAnt, XLNet) computes self-attention of
    its own raises ModelConfigError with the name of the layer.
    """
    # A traced call would contain nothing of the step, so torch.compile runs both functions outside of its graphs.
    untraced: Any = torch.compiler.disable
    AttentionInterface.register(NAME, untraced(attention))
    AttentionMaskInterface.register(NAME, untraced(attention_mask))
    _watch_models()
    serve_continuous_batching()


def _watch_models() -> None:
    """Watch each model for which transformers accepts "attnplug" from now on."""
    # Each model calls this method when it is built, and when its implementation is set. transformers calls
    # nothing of an implementation that the model's layers ignore.
    original = PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        found = original(self, *args, **kwargs)
        if found == NAME:
            table = class_table(type(self), NAME)
            if table is not None:
                raise ModelConfigError(
                    f"{type(self).__name__} picks its attention classes from {table}, which has none for "
                    f"{NAME!r}; leave its attn_implementation unchanged"
                )
            watch(self)
        return found

    setattr(get_correct_attn_implementation, _ORIGINAL, original)
    models: Any = PreTrainedModel
    models.get_correct_attn_implementation = get_correct_attn_implementation


def set_attention(model: PreTrainedModel, invariance: Sequence[str] = ()) -> None:
    """Register attnplug and set it on every part of `model`, which may itself be a part of another model.

    To serve the text part of a multimodal model alone, pass that part: `set_attention(model.model.language_model)`.
    The other parts keep their implementations.

    All attention layers ask for the words of equal bits in `invariance`, also in continuous batching: "batch", "rows" and
    "heads". A layer for which no backend keeps them raises NoBackendError at its first call. The bits of matrix products
    and norms are transformers' own.

    Raises:
        SpecError: a word of `invariance` that is none.
        ModelConfigError: `model` is not a PreTrainedModel; a module computes attention itself and would ignore
            attnplug, or no module calls it; the configuration asks for attention weights; or transformers does
            not set it on a part. The model is then unchanged.
    """
    words = check_invariance(invariance)
    register()
    if not isinstance(model, PreTrainedModel):
        raise ModelConfigError(
            f"model={type(model).__name__}: must be a transformers.PreTrainedModel, or a part that is one"
        )
    _check_layers(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    # A refusal must leave the model unchanged, and transformers may have set other parts by then.
    before = {id(part.config): (part.config, part.config._attn_implementation) for part in parts}
    try:
        model.set_attn_implementation(NAME)
        for part in parts:
            if part.config._attn_implementation != NAME:
                found = part.config._attn_implementation
                raise ModelConfigError(
                    f"{type(part).__name__}: transformers keeps attn_implementation={found!r} here"
                )
            watch(part)
    except Exception as error:
        for config, implementation in before.values():
            # The public setter would also change the configurations inside this one.
            config._attn_implementation_internal = implementation
        if isinstance(error, AttnplugError):
            raise
        raise ModelConfigError(
            f"{type(model).__name__}: transformers does not set attn_implementation={NAME!r} ({error})"
        ) from error
    for module, _, _ in attention_modules(model):
        state = layer_state(module) or set_state(module, LayerState())
        state.invariance = words


def _check_layers(model: PreTrainedModel) -> None:
    found = {id(module): kind for module, _, kind in attention_modules(model)}
    for name, module in model.named_modules():
        # A private method, seen in transformers 5.17.
        unset = isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation()
        if unset or found.get(id(module)) is Kind.OWN:
            inside = f" ({name})" if name else ""
            raise ModelConfigError(
                f"{type(model).__name__}: its {type(module).__name__}{inside} computes attention of its own "
                "and would never call attnplug; leave its attn_implementation unchanged, or set a part of the "
                "model without it"
            )
    if not found:
        raise ModelConfigError(
            f"{type(model).__name__} has no layer that calls transformers' attention interface, so attnplug "
            "would serve nothing; leave its attn_implementation unchanged"
        )


def attention_decisions(model: torch.nn.Module) -> dict[str, Decision]:
    """The decision for each attention layer that has run, by the layer's name in `model`.

    Empty before the first forward pass, if no layer calls attnplug, and after another implementation is set.

    Raises:
        ModelConfigError: `model` is no torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelConfigError(
            f"model={type(model).__name__}: must be a torch.nn.Module, such as the model given to set_attention"
        )
    layers = {name: (module, layer_state(module)) for name, module in model.named_modules()}
    return {
        name: state.decision
        for name, (module, state) in layers.items()
        if state and state.decision and uses_attnplug(module, state.get_owner())
    }
