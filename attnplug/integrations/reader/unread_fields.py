"""Fields about attention that a configuration has and its model class does not read: named in a note, or refused."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel, modeling_rope_utils

from attnplug._system.text import shown
from attnplug.core.errors import ModelConfigError
from attnplug.core.spec import LayerSpec
from attnplug.integrations.reader.config_parts import parts_of

_CAUSALITY: Final = re.compile(r"^(is_|use_)?(causal|bidirectional)(_(attention|attn|mask|masking))?$")
_NORM: Final = re.compile(r"(^|_)(q|k|qk|query|key|query_key)_?(layer_?)?norm(alization)?$")
# Fields with a number, whose 0 or -1 switches the feature off.
_OFF_AT_ZERO: Final = re.compile(r"^(sliding_window(_size)?|(local_)?window_size|\w*soft_?cap(ping)?)$")
# Numbers by which something is multiplied, so that 1 changes nothing.
_FACTOR: Final = re.compile(r"^(rotary|rope)_\w*(factor|scale)$|^(query|key|value)_multiplier$")


def _layers_say(
    model: PreTrainedModel, layers: Mapping[str, LayerSpec], config: Any, name: str, value: Any
) -> bool | None:
    """True if the layers are as the field says, False if they are otherwise, None if they do not show it."""
    specs = list(layers.values())
    if _CAUSALITY.search(name):
        causal = value if "causal" in name else not value
        return causal in {spec.causal for spec in specs} if isinstance(value, bool) and specs else None
    if isinstance(value, bool):
        present = _present(model, specs, name)
        return None if present is None else present is value
    if isinstance(value, (int, float)) and value in (0, -1) and _OFF_AT_ZERO.search(name):
        return not _present(model, specs, name)
    if isinstance(value, (int, float)) and value == 1 and _FACTOR.search(name):
        return True
    if isinstance(value, str) and value.lower() == "mla":
        return _has_latents(model)
    if _GROUPS.search(name):
        return bool(value == getattr(config, "num_key_value_heads", None))
    if name.startswith("swa_"):
        return _as_with_a_window(model, layers, config, name.removeprefix("swa_"), value)
    if name == "hybrid_layer_pattern" and isinstance(value, (list, tuple)):
        windows = [_has_window(spec) for spec in specs]
        return [kind == 1 for kind in value] == windows and all(kind in (0, 1) for kind in value)
    if name in _KINDS and isinstance(value, (list, tuple)) and len(value) == len(specs):
        limited = [_LIMITED.get(kind) if isinstance(kind, str) else None for kind in value]
        if None not in limited:
            return limited == [_has_window(spec) for spec in specs]
    return None


def notes_on_slopes(model: PreTrainedModel, layers: Mapping[str, LayerSpec]) -> Iterator[str]:
    """A note for ALiBi slopes that the class makes otherwise than the configuration, or the layer, says."""
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


def _has_window(spec: LayerSpec) -> bool:
    return spec.window[0] >= 0 or spec.chunk_size is not None


_FEATURES: Final[tuple[tuple[re.Pattern[str], Callable[[LayerSpec], bool]], ...]] = (
    (re.compile(r"(^|_)alibi$"), lambda spec: spec.has_alibi),
    (re.compile(r"(^|_)sinks?(_|$)"), lambda spec: spec.has_sinks),
    (re.compile(r"soft_?cap"), lambda spec: spec.logits_soft_cap is not None),
    (re.compile(r"sliding|window|(^|_)swa(_|$)"), _has_window),
)
"""The features that fields of such names switch on and off."""


def _present(model: PreTrainedModel, specs: Sequence[LayerSpec], name: str) -> bool | None:
    """Whether the layers have the feature that a field of this name switches on and off; None if they do not show it."""
    if name == "scale_attn_weights":
        return bool(specs) and all(
            spec.scale is None or math.isclose(spec.scale, spec.head_size**-0.5, rel_tol=1e-3)
            for spec in specs
        )
    for pattern, has in _FEATURES:
        if pattern.search(name):
            return any(map(has, specs))
    if name == "use_mla":
        return _has_latents(model)
    if _NORM.search(name):
        return any(_NORM.search(path.rpartition(".")[2]) for path, _ in model.named_modules())
    # A class that always computes a feature often keeps its factor under the name of the field.
    kept = [vars(module)[name] for module in model.modules() if name in vars(module)]
    numbers = [each for each in kept if isinstance(each, (bool, int, float))]
    return any(numbers) if numbers else None


def _has_latents(model: PreTrainedModel) -> bool:
    return any(hasattr(module, "kv_lora_rank") for module in model.modules())


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


# Fields with the kind of each layer. Layers of another kind have no KV cache, so such a field is never left out.
_KINDS: Final = frozenset(
    {
        *(
            "attn_type_list",
            "attn_types",
            "attention_types",
            "attention_layers",
            "block_types",
            "layer_types",
        ),
        *("layers_block_type", "layer_type_list", "mixer_types"),
        *("hybrid_override_pattern", "hybrid_layer_pattern"),
    }
)
_LIMITED: Final = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}
"""The words for layers with and without a window or chunks."""
_NAMES: Final = _KINDS | {
    *("alibi_bias_max", "chunk_size", "clip_qkv", "index_topk", "key_multiplier", "kv_channels"),
    *("kv_lora_rank", "local_window_size", "max_window_layers", "multi_query", "no_rope_layer_interval"),
    *("no_rope_layers", "num_kv_shared_layers", "position_embedding_type", "qk_layernorm", "qk_norm"),
    *("softmax_scale", "use_qk_norm", "window_size"),
}
"""Names of fields about attention that the rule does not find."""
_RULE: Final = re.compile(
    r"attn|attention|sliding|alibi|soft_?cap|causal|bidirectional|(^|_)sinks?(_|$)|rotary|head_dim|kv_heads|key_value_heads|"
    r"(^|_)(cla|infllm|mla|moba|nsa|swa|yoco)(_|$)|(^|_)kv_(shar|reuse)|shared?_kv|prefix_lm|rel(ative)?_pos|^sparse_config$|"
    r"query_group|(meta|memory)_tokens|kv_n_heads|n_head_kv|n_kv_head|mamba|(^|_)(ssm|rwkv|kda|gdn)(_|$)"
)
"""The rule for names."""
_GROUPS: Final = re.compile(r"query_group|kv_n_heads|n_head_kv|n_kv_head")
"""Other names for the number of KV heads."""
_STATES: Final = re.compile(r"mamba|(^|_)(ssm|rwkv|kda|gdn)(?=_|$)")
"""The words for layers with a state, whose class has its own names for their sizes."""
_OTHERS: Final = re.compile(
    r"drop|bias|fp32|^offset_alibi$|implementation|flash|sdpa|xformers|output_|hidden_size|mask_|^_|init|norm_eps"
)
"""Names about training, weights or the choice of a kernel, which no layer shows."""
# Fields that transformers moves into `rope_parameters` before the class sees them.
_ROPE: Final = frozenset({"partial_rotary_factor", "rope_theta", "rope_scaling", "rope_parameters"})
_WINDOW: Final = re.compile(r"^(max_window_layers|sliding_window\w*|use_sliding_window)$")
_SOFTMAX: Final = re.compile(r"full|global|sliding|local|swa|window|chunk|attention$|attn$", re.IGNORECASE)
_LINEAR: Final = re.compile(r"linear|lightning|mamba|conv|recurrent|delta|rwkv|kda|gdn", re.IGNORECASE)
_MARKS: Final = {"attn_type_list": (1, "1"), "hybrid_override_pattern": ("*",)}
"""The numbers and letters for attention, in fields whose other numbers and letters are no softmax attention."""


def with_kinds(config: Any) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """`config`, or a copy with the `layer_types` that MiniMax-Text-01 has in `attn_type_list`, and a note about it.

    ModelConfigError: the list has another length, or contradicts the `layer_types` of the file.
    """
    given = getattr(config, "attn_type_list", None)
    if config.model_type != "minimax" or not isinstance(given, (list, tuple)):
        return config, ()
    kinds = ["full_attention" if kind else "linear_attention" for kind in given]
    count, stated = config.num_hidden_layers, config.layer_types
    if len(kinds) != count:
        raise ModelConfigError(f"attn_type_list has {len(kinds)} layers, and num_hidden_layers={count}")
    usual = type(config)(num_hidden_layers=count).layer_types
    if stated not in (kinds, usual):
        raise ModelConfigError(
            "attn_type_list and layer_types name other kinds of layers; remove one of them"
        )
    changed = copy.deepcopy(config)
    changed.layer_types = kinds
    del changed.attn_type_list
    return changed, (
        f"attn_type_list is read as layer_types: {sum(map(bool, given))} of {count} layers attend.",
    )


def notes_on_unread(model: PreTrainedModel, layers: Mapping[str, LayerSpec]) -> Iterator[str]:
    """A note with the fields about attention that no class of `model` reads, or that show in no layer.

    ModelConfigError if such a field says that some layers are no softmax attention.
    """
    unread = ", ".join(dict.fromkeys([*_unknown(model, layers), *_without_effect(model, layers)]))
    if unread:
        yield f"{type(model).__name__} does not read {unread}: the layers are those of the class without it."


def _unknown(model: PreTrainedModel, layers: Mapping[str, LayerSpec]) -> Iterator[str]:
    """Fields whose name neither the configuration class nor a class of the model has, and that the layers do not show."""
    text = _source(frozenset(type(module).__module__ for module in model.modules()))
    for before, config in parts_of(model.config):
        for name, value in vars(config).items():
            about = name in _NAMES or (_RULE.search(name) and not _OTHERS.search(name))
            if not about or _declares(config, name):
                continue
            if getattr(config, f"use_{name.partition('_')[0]}", True) is False:
                continue  # a size of a feature that is off
            if (word := _STATES.search(name)) and word[0].strip("_") in text.lower():
                continue
            shown_value = _layers_say(model, layers, config, name, value)
            # A class that has the name may ignore it: what the field switches off, the class may always have.
            off = shown_value is False and (value is False or _CAUSALITY.search(name))
            if not off and _has_name(config, name, text):
                continue
            if shown_value is None and not _says_something(name, value):
                continue
            if _WINDOW.search(name) and shown_value is not False and _needs_no_window(config, name, value):
                continue
            if name in _KINDS and shown_value is not True:
                _refuse_other_kinds(model, before, name, value)
            if shown_value is not True:
                yield _in_words(f"{before}{name}", value)


def _without_effect(model: PreTrainedModel, layers: Mapping[str, LayerSpec]) -> Iterator[str]:
    """Fields that the class knows, with values of their own, and that show in no layer."""
    config: Any = model.config.get_text_config()
    specs = list(layers.values())
    windows = {spec.window[0] + 1 for spec in specs} | {spec.window[0] for spec in specs}
    windows |= {spec.chunk_size for spec in specs if spec.chunk_size is not None}
    window = getattr(config, "sliding_window", None)
    shows = {
        "sliding_window": window in windows or getattr(config, "use_sliding_window", True) is False,
        "attn_logit_softcapping": any(spec.logits_soft_cap is not None for spec in specs),
        "alibi": any(spec.has_alibi for spec in specs),
        "use_alibi": any(spec.has_alibi for spec in specs),
    }
    before = next((place for place, part in parts_of(model.config) if part is config), "")
    for name, does in shows.items():
        value = getattr(config, name, None)
        default = getattr(type(config), name, None)
        if not does and _says_something(name, value) and value != default:
            yield _in_words(f"{before}{name}", value)


def _says_something(name: str, value: Any) -> bool:
    """Whether a value asks for something: None, False, 0 and empty values switch a feature off."""
    if name in _KINDS and isinstance(value, (list, tuple)):
        return any(not _is_full(name, kind) for kind in value)
    if name == "position_embedding_type":
        return value not in (None, "", "absolute", "rope", "rope_gptj")
    if name in ("rotary_pct", "partial_rotary_factor"):
        return value not in (None, 1)
    return not (value is None or value is False or value == 0 or value in ("", [], (), {}))


def _needs_no_window(config: Any, name: str, value: Any) -> bool:
    """Whether a field about windows asks for nothing, because there is no window, or repeats its size."""
    if getattr(config, "use_sliding_window", True) is False:
        return True
    window = getattr(config, "sliding_window", None)
    is_size = name in ("sliding_window", "sliding_window_size")
    return window is None if not is_size else name != "sliding_window" and window == value


def _declares(config: PreTrainedConfig, name: str) -> bool:
    """Whether the configuration class has the field."""
    cls: Any = type(config)
    fields = getattr(cls, "__dataclass_fields__", {})
    if name in fields or name in cls.attribute_map or name in cls.attribute_map.values():
        return True
    return isinstance(getattr(cls, name, None), property) or (name in _ROPE and "rope_parameters" in fields)


def _has_name(config: PreTrainedConfig, name: str, text: str) -> bool:
    """Whether a class reads the name, as older files have fields that the configuration class does not declare."""
    word = rf"\b{re.escape(name)}\b"
    rope = inspect.getsource(modeling_rope_utils) if "rotary" in name else ""
    of_config = f"{rope}\n{_source(frozenset({type(config).__module__}))}"
    # A module's own attribute of that name comes from elsewhere, unless the name is there without `self` too.
    return bool(re.search(word, of_config) or re.search(rf"(?<!self\.){word}", text))


@functools.lru_cache(maxsize=64)
def _source(modules: frozenset[str]) -> str:
    """The source of transformers' modules, which also names fields of older files."""
    names = sorted(name for name in modules if name.startswith("transformers.models."))
    return "\n".join(inspect.getsource(sys.modules[name]) for name in names)


def _is_full(name: str, kind: object) -> bool:
    if isinstance(kind, str) and len(kind) > 1:
        return kind.lower() in ("attention", "full_attention", "full")
    return kind in _MARKS.get(name, ())


def _refuse_other_kinds(model: PreTrainedModel, before: str, name: str, value: Any) -> None:
    def may_be_softmax(kind: object) -> bool:
        if isinstance(kind, str) and len(kind) > 1:
            return bool(_SOFTMAX.search(kind)) and not _LINEAR.search(kind)
        # Numbers and letters mean something else in each field: 1 is a window in hybrid_layer_pattern.
        return name not in _MARKS or _is_full(name, kind)

    kinds = list(value) if isinstance(value, (list, tuple, str)) else []
    others = [kind for kind in kinds if not may_be_softmax(kind)]
    if others:
        raise ModelConfigError(
            f"{before}{name}: {len(others)} of {len(kinds)} layers are no softmax attention ({shown(others[0], 40)}), and "
            f"{type(model).__name__} does not read the field; set model_type to a family that does, or remove it"
        )


def _in_words(name: str, value: object) -> str:
    return f"{name}={shown(value, 40)}" if isinstance(value, (bool, int, float, str)) else name
