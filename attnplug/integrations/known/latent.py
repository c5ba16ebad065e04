"""The rules of DeepSeek's decoders, which cache a latent in place of keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from attnplug.core.mla import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.integrations.known.fields import (
    DECODER,
    EXPERTS,
    HEADS,
    SIZE,
    SMALL,
    TEXT,
    YES_OR_NO,
    Attention,
    Check,
    Family,
    Layers,
    number,
    one_of,
    optional,
    real,
    rope_of,
    whole,
)
from attnplug.integrations.model_spec import Client


def _read(values: Mapping[str, Any]) -> Layers | None:
    heads, nope, rope = (values[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    embedding = rope_of(values, rope, ("default", "yarn"), values.get("partial_rotary_factor"))
    # The configuration class sets both from the other sizes, and a file of another version may differ.
    given = (values.get("head_dim", rope), values.get("qk_head_dim", nope + rope))
    if embedding is None or given != (rope, nope + rope):
        return None
    if values["model_type"] == "deepseek_v2" and values["hidden_size"] % heads:
        return None  # the other configuration classes accept this
    if (values["num_key_value_heads"] or heads) != heads or values.get("index_head_dim", rope) < rope:
        return None
    topk = values.get("index_topk")
    dims = MLADims(
        q_lora_rank=values["q_lora_rank"],
        kv_lora_rank=values["kv_lora_rank"],
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=values["v_head_dim"],
    )
    attention = Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=nope + rope,
        head_size_v=dims.v_head_dim,
        scale=_scale(nope + rope, embedding),
        mla=dims,
        sparse=None if topk is None else SparseSpec("token_topk", topk),
    )
    return [(f"layers.{index}.self_attn", attention) for index in range(values["num_hidden_layers"])]


def _scale(size: int, rope: Mapping[str, Any]) -> float:
    """The softmax scale; YaRN raises it with the length that it adds (https://arxiv.org/abs/2309.00071)."""
    scale: float = size**-0.5
    share = rope.get("mscale_all_dim", 0)
    if rope["rope_type"] == "default" or not share or rope["factor"] <= 1:
        return scale
    raised: float = 0.1 * share * math.log(rope["factor"]) + 1.0
    return scale * raised * raised


_FIELDS: Final[dict[str, Check]] = {
    **DECODER,
    **EXPERTS,
    "aux_loss_alpha": number(0, 1e3),
    "ep_size": one_of(1),
    "first_k_dense_replace": SMALL,
    "head_dim": SIZE,
    "kv_lora_rank": SIZE,
    "moe_layer_freq": one_of(1),
    "n_group": optional(HEADS),
    "n_routed_experts": HEADS,
    "n_shared_experts": HEADS,
    "norm_topk_prob": YES_OR_NO,
    "num_key_value_heads": optional(HEADS),
    "num_nextn_predict_layers": SMALL,
    "pretraining_tp": one_of(1),
    "q_lora_rank": optional(SIZE),
    "qk_head_dim": SIZE,
    "qk_nope_head_dim": whole(2, 1 << 12),
    "qk_rope_head_dim": whole(2, 1 << 12),
    "routed_scaling_factor": real(0, 1e6),
    "scoring_func": TEXT,
    "seq_aux": YES_OR_NO,
    "topk_group": optional(HEADS),
    "topk_method": TEXT,
    "v_head_dim": whole(2, 1 << 12),
}
_SIZES: Final = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _family(
    name: str,
    kv_heads: int | None,
    defaults: Mapping[str, Any] = _SIZES,
    clients: tuple[Client, ...] = tuple(Client),
    **fields: Check,
) -> Family:
    return Family(
        classes={f"{name}ForCausalLM": "model.", f"{name}Model": ""},
        fields={**_FIELDS, **fields},
        defaults={**defaults, "num_key_value_heads": kv_heads},
        read=_read,
        clients=clients,
    )


LATENT: Final = {
    "deepseek_v2": _family("DeepseekV2", None, attention_dropout=real(0, 1), mlp_bias=YES_OR_NO),
    "deepseek_v3": _family("DeepseekV3", 128, rope_interleave=YES_OR_NO),
    "deepseek_v32": _family(
        "DeepseekV32",
        128,
        {**_SIZES, "index_head_dim": 128, "index_topk": 2048},
        # transformers attends the chosen keys itself, and the full reader says so.
        clients=(Client.ENGINE,),
        index_head_dim=whole(2, 1 << 12),
        index_n_heads=HEADS,
        index_topk=whole(1, 1 << 16),
        mlp_bias=YES_OR_NO,
        n_group=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=SIZE,
        topk_group=HEADS,
    ),
    "glm4_moe_lite": _family(
        "Glm4MoeLite",
        20,
        {**_SIZES, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
        n_group=HEADS,
        num_key_value_heads=HEADS,
        partial_rotary_factor=one_of(1.0),
        rope_interleave=YES_OR_NO,
        topk_group=HEADS,
    ),
}
"""Model types with latent attention, by name."""
