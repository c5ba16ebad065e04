"""Registering attnplug with transformers, setting it on a model, and reading its decisions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnplug.core.errors import AttnplugError, ModelConfigError
from attnplug.integrations.attention.class_code import Kind, class_table
from attnplug.integrations.attention.continuous import serve_continuous_batching
from attnplug.integrations.attention.functions import attention, attention_mask
from attnplug.integrations.attention.layers import layer_state
from attnplug.integrations.attention.model_hooks import NAME, attention_modules, uses_attnplug, watch
from attnplug.registry.selection.decision import Decision

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


def set_attention(model: PreTrainedModel) -> None:
    """Register attnplug and set it on every part of `model`, which may itself be a part of another model.

    To serve the text part of a multimodal model alone, pass that part: `set_attention(model.model.language_model)`.
    The other parts keep their implementations.

    Raises:
        ModelConfigError: `model` is no PreTrainedModel; a module computes attention itself and would ignore
            attnplug, or no module calls it; the configuration asks for attention weights; or transformers does
            not set it on a part. The model is then unchanged.
    """
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
