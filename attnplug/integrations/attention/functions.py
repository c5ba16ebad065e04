"""The two functions that transformers calls: one makes the mask of a step, the other computes attention."""

from __future__ import annotations

import sys
from typing import Any

import torch

from attnplug.core.precision import without_autocast
from attnplug.core.spec import AttentionType
from attnplug.integrations.attention.calls import AttentionCall, read_keywords
from attnplug.integrations.attention.forward_pass import forward_pass
from attnplug.integrations.attention.layers import LayerState, layer_state, name_in_model, set_state
from attnplug.integrations.attention.mask_functions import read_mask_function
from attnplug.integrations.attention.model_hooks import watch_running_model
from attnplug.integrations.attention.paged import attend_paged, take_paged
from attnplug.integrations.attention.step_mask import PatternMask, StepMask
from attnplug.integrations.reader.mask_pattern import UnknownMaskError


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
    paged = take_paged(keywords)
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
            output = binding.impl.forward(binding.layer, *packed, None, metadata, output)
    return packing.queries.unpack(output, query.shape[0]), None
