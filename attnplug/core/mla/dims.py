"""The dimensions of multi-head latent attention, and how a model's configuration gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attnplug.core.checks import check_size
from attnplug.core.errors import ModelConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLADims:
    """Dimensions of multi-head latent attention, as model configurations name them.

    Args:
        q_lora_rank: rank of the queries' projection; None if queries are not compressed.
        kv_lora_rank: L, elements of a latent that K and V are expanded from.
        qk_nope_head_dim: P, elements of a query and key head without positions.
        qk_rope_head_dim: R, elements with positions, which all heads of a key share; 0 without.
        v_head_dim: V, elements of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "q_lora_rank" or value is not None:
                least = 0 if field.name == "qk_rope_head_dim" else 1
                object.__setattr__(self, field.name, check_size(f"mla.{field.name}", value, least))

    @property
    def latent_size(self) -> int:
        """Elements that the cache stores for a token: L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_size(self) -> int:
        """Elements of a query head before absorption, and of an expanded key head: P + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def get_mla_dims(hf_config: Any) -> MLADims:
    """The MLADims of a Hugging Face configuration, or of its text part.

    Args:
        hf_config: a configuration object, or the mapping of a config.json. `q_lora_rank` may be
            absent or None: queries are then not compressed.

    Raises:
        ModelConfigError: a dimension is missing.
        SpecError: a dimension that means nothing.
    """
    text = _get(hf_config, "text_config")
    config = hf_config if text is None else text
    dims = {field.name: _get(config, field.name) for field in dataclasses.fields(MLADims)}
    missing = [name for name, value in dims.items() if value is None and name != "q_lora_rank"]
    if missing:
        kind = _get(config, "model_type") or type(config).__name__
        raise ModelConfigError(
            f"hf_config of {kind!r} has no {', '.join(missing)}: no latent attention in it"
        )
    return MLADims(**dims)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
