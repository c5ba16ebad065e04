"""Whether the layers of a model already are as a field says that its class does not read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from attnplug._system.text import shown
from attnplug.core.spec import LayerSpec

CAUSALITY: Final = re.compile(r"^(is_|use_)?(causal|bidirectional)(_(attention|attn|mask|masking))?$")
_WINDOWS: Final = re.compile(r"sliding|window|(^|_)swa(_|$)")
_SOFT_CAP: Final = re.compile(r"soft_?cap")
_SINKS: Final = re.compile(r"(^|_)sinks?(_|$)")
_ALIBI: Final = re.compile(r"(^|_)alibi$")
_NORM: Final = re.compile(r"(^|_)(q|k|qk|query|key|query_key)_?(layer_?)?norm(alization)?$")
_OFF_AT_ZERO: Final = re.compile(r"^(sliding_window(_size)?|(local_)?window_size|\w*soft_?cap(ping)?)$")
"""Fields with a number, whose 0 switches the feature off."""
_FACTOR: Final = re.compile(r"^(rotary|rope)_\w*(factor|scale)$|^(query|key|value)_multiplier$")
"""Numbers by which something is multiplied, so that 1 changes nothing."""


def layers_say(
    model: PreTrainedModel, layers: Mapping[str, LayerSpec], config: Any, name: str, value: Any
) -> bool | None:
    """True if the layers are as the field says, False if they are otherwise, None if they do not show it."""
    specs = list(layers.values())
    if CAUSALITY.search(name):
        causal = value if "causal" in name else not value
        return causal in {spec.causal for spec in specs} if isinstance(value, bool) and specs else None
    if isinstance(value, bool):
        present = _present(model, specs, name)
        return None if present is None else present is value
    if isinstance(value, (int, float)) and value == 0 and _OFF_AT_ZERO.search(name):
        return not _present(model, specs, name)
    if isinstance(value, (int, float)) and value == 1 and _FACTOR.search(name):
        return True
    if isinstance(value, str) and value.lower() == "mla":
        return any(hasattr(module, "kv_lora_rank") for module in model.modules())
    if name.startswith("swa_"):
        return _as_with_a_window(model, layers, config, name.removeprefix("swa_"), value)
    if name == "hybrid_layer_pattern" and isinstance(value, (list, tuple)):
        windows = [_has_window(spec) for spec in specs]
        return [kind == 1 for kind in value] == windows and all(kind in (0, 1) for kind in value)
    return None


def notes_on_slopes(model: PreTrainedModel, layers: Mapping[str, LayerSpec]) -> Iterator[str]:
    """A note about ALiBi whose slopes the class makes otherwise than the configuration, or the layer, says."""
    attention = getattr(model.config, "attn_config", None)
    most = getattr(attention, "alibi_bias_max", 8)
    if model.config.model_type == "mpt" and most != 8:
        yield (
            f"{type(model).__name__} does not read attn_config.alibi_bias_max={shown(most, 40)}: transformers' MPT makes the slopes "
            "of 8."
        )
    scales = {
        spec.scale
        for path, spec in layers.items()
        if spec.has_alibi and type(model.get_submodule(path)).__name__ == "FalconAttention"
    }
    for scale in scales - {1.0}:
        yield (
            f"{type(model).__name__} multiplies ALiBi's slopes by the scale of its layers too: give attnplug the slopes of its "
            f"heads times {scale:.6g}."
        )


def _present(model: PreTrainedModel, specs: Sequence[LayerSpec], name: str) -> bool | None:
    """Whether the layers have the feature that a field of this name switches on and off; None if they do not show it."""
    if name == "scale_attn_weights":
        return bool(specs) and all(
            spec.scale is None or math.isclose(spec.scale, spec.head_size**-0.5, rel_tol=1e-3)
            for spec in specs
        )
    if _ALIBI.search(name):
        return any(spec.has_alibi for spec in specs)
    if _SINKS.search(name):
        return any(spec.has_sinks for spec in specs)
    if _SOFT_CAP.search(name):
        return any(spec.logits_soft_cap is not None for spec in specs)
    if _WINDOWS.search(name):
        return any(_has_window(spec) for spec in specs)
    if _NORM.search(name):
        return any(_NORM.search(path.rpartition(".")[2]) for path, _ in model.named_modules())
    # A class that always computes a feature often keeps its factor under the name of the field.
    kept = [vars(module)[name] for module in model.modules() if name in vars(module)]
    numbers = [each for each in kept if isinstance(each, (bool, int, float))]
    return any(numbers) if numbers else None


def _has_window(spec: LayerSpec) -> bool:
    return spec.window[0] >= 0 or spec.chunk_size is not None


def _as_with_a_window(
    model: PreTrainedModel, layers: Mapping[str, LayerSpec], config: Any, base: str, value: Any
) -> bool | None:
    """Whether all layers with a window have this value of a field that is `base` for the other layers."""
    if base == "rope_theta":
        rope = getattr(config, "rope_parameters", None)
        rope = rope.get("sliding_attention", rope) if isinstance(rope, Mapping) else None
        return isinstance(rope, Mapping) and rope.get("rope_theta") == value
    found = set()
    for path, spec in layers.items():
        if _has_window(spec):
            module = model.get_submodule(path.partition("#")[0])
            # The heads of a spec are those of a rank.
            heads = {
                field: weight.shape[0] // spec.head_size
                for field, name in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj"))
                if isinstance(weight := getattr(getattr(module, name, None), "weight", None), torch.Tensor)
            }
            sizes = {"head_dim": spec.head_size, "v_head_dim": spec.head_size_v or spec.head_size}
            found.add({**heads, **sizes}.get(base))
    return None if not found - {None} else all(each == value for each in found)
