"""Small models of every family that attnplug must serve, with random weights that make attention matter."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from attnplug.integrations.transformers import register

WINDOW = 8
"""Window and chunk of the models that have one; prompts are longer."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family: its configuration class, what to change in it, and the auto class that builds it."""

    config: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"

    def make_config(self, **changes: Any) -> Any:
        cls = getattr(transformers, f"{self.config}Config")
        named = {cls.attribute_map.get(name, name): value for name, value in SIZES.items()}
        known = {name: value for name, value in named.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, **self.fields, **changes})

    def build(self, config: Any, attention: str) -> Any:
        register()
        auto = getattr(transformers, self.auto)
        return auto.from_config(copy.deepcopy(config), attn_implementation=attention).eval()

    def pair(self, **changes: Any) -> tuple[Any, Any]:
        """The same model twice: on attnplug and on the modelling file's own eager attention."""
        torch.manual_seed(0)
        config = self.make_config(**changes)
        ours, eager = self.build(config, "attnplug"), self.build(config, "eager")
        with torch.no_grad():
            for name, weight in ours.named_parameters():
                if weight.ndim >= 2:
                    weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
                elif "sinks" in name:
                    weight.normal_(std=2.0)
        eager.load_state_dict(ours.state_dict())
        return ours, eager


DECODERS = {
    "llama": Family("Llama"),
    "qwen3": Family("Qwen3"),
    "mistral": Family("Mistral", {"sliding_window": WINDOW}),
    "gemma2": Family(
        "Gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "tie_word_embeddings": False}
    ),
    "gemma3": Family(
        "Gemma3Text", {"sliding_window": WINDOW, "num_hidden_layers": 6, "tie_word_embeddings": False}
    ),
    "gpt_oss": Family("GptOss", {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": Family(
        "Llama4Text",
        {
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "floor_scale": 16,
        },
    ),
    "phi3": Family("Phi3", {"sliding_window": WINDOW + 3}),
}
"""Decoders, each with prompts longer than its window or chunk."""
ENCODERS = {
    "bert": Family("Bert", auto="AutoModelForMaskedLM"),
    "modernbert": Family(
        "ModernBert",
        {"local_attention": WINDOW, "cls_token_id": 1, "sep_token_id": 2},
        auto="AutoModelForMaskedLM",
    ),
}
WHISPER = Family(
    "Whisper",
    {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "max_source_positions": 30,
        "max_target_positions": 64,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    auto="AutoModelForSpeechSeq2Seq",
)


def prompts(rows: int = 3, length: int = 21, side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[rows, length]` and their padding mask: row 0 whole, the others shorter and shorter."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        padded = min(5 * row, length - 1)
        mask[row, slice(0, padded) if side == "left" else slice(length - padded, length)] = 0
    return ids.masked_fill(mask == 0, 0), mask


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Within 1e-4 relative to max(1, |logits|), where `mask [B, L]` says that there are tokens."""
    assert found.shape == expected.shape
    error = (found - expected).abs() / expected.abs().clamp(min=1)
    kept = error if mask is None else error[mask.bool()]
    assert not kept.isnan().any()
    assert kept.max() <= 1e-4
