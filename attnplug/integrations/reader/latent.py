"""The dimensions of multi-head latent attention, read from the module that computes it."""

from __future__ import annotations

from attnplug.core.errors import ModelConfigError
from attnplug.core.spec import MLADims
from attnplug.integrations.reader.trace import AttentionCall

__all__ = ["latent_dims"]

_PARTS = frozenset(
    {"gate_proj", "indexer", "kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    | {"q_a_layernorm", "q_a_proj", "q_b_proj", "q_gate_proj", "q_proj", "rotary_emb"}
)
_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent_dims(call: AttentionCall) -> MLADims | None:
    """The MLADims of a module that caches a latent; None for other modules.

    A latent can replace keys and values only if they are linear in it. ModelConfigError refuses a module with
    a part that may break this.
    """
    module = call.module
    rank = getattr(module, "kv_lora_rank", None)
    if rank is None:
        return None
    name = f"{call.path}: {type(module).__name__}"
    parts = [part for part, _ in module.named_children() if part not in _PARTS]
    if parts:
        raise ModelConfigError(
            f"{name} has parts that a LayerSpec with latent attention cannot describe: {', '.join(parts)}"
        )
    missing = [dim for dim in _DIMS if not isinstance(getattr(module, dim, None), int)]
    if missing:
        raise ModelConfigError(f"{name} keeps a latent but lacks {', '.join(missing)}")
    nope, rope, size_v = (getattr(module, dim) for dim in _DIMS)
    if call.query.shape[3] != nope + rope or call.value.shape[3] != size_v:
        raise ModelConfigError(
            f"{name} has queries of {call.query.shape[3]} and values of {call.value.shape[3]} elements, "
            f"but latent dimensions of {nope} + {rope} and {size_v}"
        )
    return MLADims(
        q_lora_rank=getattr(module, "q_lora_rank", None),
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=size_v,
    )
