"""A small model of DeepSeek V3.2's kind: an indexer for vLLM that runs on a CPU, and the model without vLLM.

The indexer picks keys by numbers that depend on the layer and on both positions. vLLM's own runs on GPUs only; its weights
and its cache are made all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

TOPK = 16
CONFIG = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_topk": TOPK,
    "index_n_heads": 2,
    "index_head_dim": 128,
    # Layers 2 and 4 have no indexer, and take the keys of the layer before them.
    "index_topk_freq": 2,
    "first_k_dense_replace": 6,
    "rope_scaling": None,
}


def picked(layer: int, position: int) -> list[int]:
    """The keys of the query at `position`."""
    keys = torch.arange(position + 1, dtype=torch.int64)
    scores = ((keys + 1) * 2654435761 + (position + 1) * 40503 + (layer + 1) * 69069) % 65521
    return scores.argsort(descending=True)[:TOPK].tolist()


def stand_in_for_the_indexer() -> None:
    """Let vLLM's Indexer write what `picked` says; call it before the model is made."""
    from vllm.model_executor.models import deepseek_v2
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    class Indexer(deepseek_v2.Indexer):  # type: ignore[misc]
        """vLLM's, with its weights and its cache, and the picking of the tests."""

        def forward(self, hidden_states: torch.Tensor, qr: Any, positions: torch.Tensor, rotary: Any) -> None:
            layer = int(self.prefix.split(".layers.")[1].split(".")[0])
            self.topk_indices_buffer[: hidden_states.shape[0]] = -1
            for row, position in enumerate(positions.tolist()):
                chosen = torch.tensor(picked(layer, position), dtype=torch.int32)
                self.topk_indices_buffer[row, : len(chosen)] = chosen

    deepseek_v2.Indexer = Indexer
    DeepseekV32IndexerMetadataBuilder.build = lambda builder, *given, **named: None


class Sparse:
    """The model in float64."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], count: int) -> None:
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.config, self.count = config, count
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def draw(self, prompt: list[int]) -> list[int]:
        """The likeliest tokens after `prompt`."""
        ids = list(prompt)
        for _ in range(self.count):
            ids.append(int(self.logits(ids).argmax()))
        return ids[len(prompt) :]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of the token after `ids`."""
        weights, config = self.weights, self.config
        row = weights["model.embed_tokens.weight"][torch.tensor(ids)]
        for index in range(config["num_hidden_layers"]):
            own = f"model.layers.{index}."
            normed = self.norm(row, own + "input_layernorm.weight")
            row = row + self.attend(normed, own + "self_attn.", index)
            normed = self.norm(row, own + "post_attention_layernorm.weight")
            gate, up = (normed @ weights[own + "mlp.gate_up_proj.weight"].T).chunk(2, dim=-1)
            row = row + (torch.nn.functional.silu(gate) * up) @ weights[own + "mlp.down_proj.weight"].T
        return self.norm(row[-1], "model.norm.weight") @ weights["lm_head.weight"].T

    def attend(self, given: torch.Tensor, own: str, index: int) -> torch.Tensor:
        """The attention of a layer, with keys and values expanded for each head."""
        weights, config, place = self.weights, self.config, torch.arange(given.shape[0])
        rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        parts = (given @ weights[own + "fused_qkv_a_proj.weight"].T).split(
            [config["q_lora_rank"], rank, rope], -1
        )
        latent = self.norm(parts[1], own + "kv_a_layernorm.weight")
        query = self.norm(parts[0], own + "q_a_layernorm.weight") @ weights[own + "q_b_proj.weight"].T
        query = query.unflatten(-1, (-1, nope + rope))
        expanded = (latent @ weights[own + "kv_b_proj.weight"].T).unflatten(-1, (query.shape[1], -1))
        key, value = expanded[..., :nope], expanded[..., nope:]
        angle = place[:, None] * config["rope_theta"] ** (-torch.arange(0, rope, 2).double() / rope)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        query = torch.cat((query[..., :nope], self.rotate(query[..., nope:], turn)), dim=-1)
        turned = self.rotate(parts[2][:, None], turn).expand(-1, query.shape[1], -1)
        scores = torch.einsum("qhd,khd->hqk", query, torch.cat((key, turned), dim=-1)) * (nope + rope) ** -0.5
        seen = torch.zeros(given.shape[0], given.shape[0], dtype=torch.bool)
        for position in place.tolist():
            picking = index - 1 if index in (2, 4) else index
            seen[position, picked(picking, position)] = True
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -1e30).softmax(-1), value)
        return mixed.flatten(1) @ weights[own + "o_proj.weight"].T

    def norm(self, given: torch.Tensor, name: str) -> torch.Tensor:
        """The root mean square norm of that name."""
        scale = (given.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return given * scale * self.weights[name]

    @staticmethod
    def rotate(given: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Neighbours as complex numbers, turned."""
        return torch.view_as_real(
            torch.view_as_complex(given.unflatten(-1, (-1, 2)).contiguous()) * turn
        ).flatten(-2)
