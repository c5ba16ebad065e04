"""Small random decoders of the families that kernels must serve, with weights that make attention matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from attnplug.core import LayerSpec
from attnplug.integrations.transformers import read_config

__all__ = ["FAMILIES", "FEW", "MANY", "Family", "Sizes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large models and texts are.

    Args:
        window: keys that a windowed layer sees; shorter than most prompts.
        head_size: of most families; kernel libraries compile for each.
        hidden: width of the model and its MLPs.
        heads: query heads, of two KV heads.
        prompts: how many tokens of each text are its prompt.
        shared: tokens that the last text has in common with the first.
        decodes: tokens after each prompt, run one by one.
        piece: tokens of a first pass, where the longest prompt is run in two.
        step_tokens: most tokens in a step of the engine, less than the longest prompt.
    """

    window: int
    head_size: int
    hidden: int
    heads: int
    prompts: tuple[int, ...]
    shared: int
    decodes: int
    piece: int
    step_tokens: int

    def fields(self) -> dict[str, Any]:
        """What every configuration has."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 2,
            "head_dim": self.head_size,
            "vocab_size": 256,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        }


MANY = Sizes(
    window=100,  # no multiple of a kernel's tile, nor of a page
    head_size=128,
    hidden=256,
    heads=8,
    prompts=(700, 333, 48, 1, 330),
    shared=300,
    decodes=16,
    piece=400,
    step_tokens=256,
)
"""What kernels are tried on."""
FEW = Sizes(
    window=12,
    head_size=32,
    hidden=64,
    heads=4,
    prompts=(60, 25, 5, 1, 40),
    shared=33,
    decodes=4,
    piece=30,
    step_tokens=32,
)
"""The same for interpreted kernels, and for tests of the tests."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Args:
        config: its configuration class, without "Config".
        kinds: "full" or "sliding" for each layer, where the family has both.
        windowed: whether any layer has a window.
        head_divisor: its heads are that much smaller.
        changes: what else to change in its configuration.
    """

    config: str
    kinds: tuple[str, ...] = ()
    windowed: bool = False
    head_divisor: int = 1
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make_config(self, sizes: Sizes) -> Any:
        """The configuration in these sizes."""
        fields = {**sizes.fields(), "head_dim": sizes.head_size // self.head_divisor}
        if self.windowed:
            fields["sliding_window"] = sizes.window
        if self.kinds:
            fields["num_hidden_layers"] = len(self.kinds)
            fields["layer_types"] = [f"{kind}_attention" for kind in self.kinds]
        return getattr(transformers, f"{self.config}Config")(**{**fields, **self.changes})

    def specs(self, sizes: Sizes, **changes: Any) -> dict[str, LayerSpec]:
        """What each layer asks of a backend, in bfloat16 and with these changes."""
        read = read_config(self.make_config(sizes))
        return {name: spec.replace(dtype="bfloat16", **changes) for name, spec in read.layers.items()}

    def make_model(self, sizes: Sizes, dtype: torch.dtype, device: torch.device | str) -> Any:
        """The model; its weights are such as bfloat16 holds exactly, and the same for every dtype and device."""
        config = self.make_config(sizes)
        if hasattr(config, "num_local_experts"):
            # The faster implementations need more than every device and dtype offers.
            config._experts_implementation = "eager"
        # Not cast afterwards: rotary frequencies are float32 whatever the dtype.
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" not in name:
                    mean, deviation = _distribution(name, weight)
                    drawn = torch.randn(weight.shape, generator=generator) * deviation + mean
                    weight.copy_(drawn.bfloat16())
        return model.to(device)


def _distribution(name: str, weight: torch.Tensor) -> tuple[float, float]:
    """Mean and deviation of a weight."""
    if name.endswith("sinks"):
        return 5.0, 1.0  # about as much as the keys of a window together
    if name.endswith("bias"):
        return 0.0, 0.1
    inputs = weight.shape[1] if weight.ndim == 3 else weight.shape[-1]
    return 0.0, 1.5 * inputs**-0.5  # attention's weights are far from equal, and logits from flat


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", windowed=True),
    "gemma2": Family(
        "Gemma2",
        kinds=("sliding", "full"),
        windowed=True,
        # Logits are several times the cap.
        changes={"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    ),
    "gemma3": Family(
        "Gemma3Text",
        kinds=("sliding", "sliding", "sliding", "full"),
        windowed=True,
        # Queries and keys are normalised: the scale alone says how much some keys matter more.
        changes={"query_pre_attn_scalar": 32},
    ),
    "gpt_oss": Family(
        "GptOss",
        kinds=("sliding", "full"),
        windowed=True,
        head_divisor=2,
        # With every expert chosen, no rounding can choose others. The length is what its YaRN stands for.
        changes={"num_local_experts": 2, "num_experts_per_tok": 2, "max_position_embeddings": 131072},
    ),
}
