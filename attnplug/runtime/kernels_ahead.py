"""The kernels of TRITON that a plan launches, found by its warm-up on a GPU that need not be here."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from attnplug.backends.triton.ahead.pretended import pretended
from attnplug.core.impl import LayerTensors
from attnplug.runtime.attention_runtime import AttentionRuntime

if TYPE_CHECKING:
    from attnplug.backends.triton.ahead.chips import Chip
    from attnplug.backends.triton.ahead.forms import Form
    from attnplug.core.config import BuilderConfig
    from attnplug.core.spec import LayerSpec
    from attnplug.runtime.plan.model_plan import ModelPlan


def launches_of(plan: ModelPlan, config: BuilderConfig, chip: Chip) -> dict[Form, None]:
    """The forms of all kernels that `AttentionRuntime.warm_up` launches: the one list of what a model will run.

    Args:
        plan: of layers that TRITON serves.
        config: the engine's limits.
        chip: the GPU.
    """
    with pretended(chip) as found:
        tensors = {name: zeros_for(decision.spec) for name, decision in plan.decisions.items()}
        AttentionRuntime(plan, tensors, config=config).warm_up()
    return found


@functools.lru_cache(maxsize=16)
def zeros_for(spec: LayerSpec) -> LayerTensors:
    """The learned tensors that a layer needs, of zeros."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    made: dict[str, torch.Tensor] = {}
    if spec.has_sinks:
        made["sinks"] = torch.zeros(spec.num_heads)
    if spec.has_alibi:
        made["alibi_slopes"] = torch.zeros(spec.num_heads)
    if spec.mla is not None:
        sizes = spec.mla
        made["w_uk"] = torch.zeros(spec.num_heads, sizes.qk_nope_head_dim, sizes.kv_lora_rank, dtype=dtype)
        made["w_uv"] = torch.zeros(spec.num_heads, sizes.kv_lora_rank, sizes.v_head_dim, dtype=dtype)
    if spec.state is not None and spec.state.width is not None:
        made["conv_weight"] = torch.zeros(spec.num_heads, spec.state.width, dtype=dtype)
        made["conv_bias"] = torch.zeros(spec.num_heads, dtype=dtype)
    return LayerTensors(**made)
