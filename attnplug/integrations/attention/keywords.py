"""The keywords that models pass to attention: applied, without effect, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from attnplug.core.errors import BatchError

_INERT = frozenset(
    {"cache_position", "deterministic", "layer_idx", "logits_to_keep", "mm_token_type_ids"}
    | {"num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values"}
    | {"position_ids", "return_dict", "token_type_ids", "use_cache"}
)
"""Keywords that attention functions of modelling files never read: the mask contains positions and token types."""
_KNOWN = frozenset({"is_causal", "sliding_window", "softcap", "s_aux"})
_PACKED = "says that sequences are packed in one row"
_UNSERVED = {
    "output_attentions": "attention weights are never computed as a whole",
    "head_mask": "scales the weights of whole heads, which a LayerSpec cannot describe",
    "position_bias": "is added to the logits, which a LayerSpec cannot describe",
    "indices": "picks single keys for each query: sparse attention is not served through transformers",
    "block_indices": "picks blocks of keys for each query, which a LayerSpec cannot describe",
    "cache": "is a paged cache: continuous batching is not served through transformers",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), _PACKED),
}
_EAGER = "use attn_implementation='eager'"
_SPREAD = "give each sequence a row of its own, padded"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Keywords:
    """The keywords of one call that change its result."""

    is_causal: bool | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def read_keywords(given: Mapping[str, Any], layer: str) -> Keywords:
    """The values of the keywords that `layer` passes.

    Raises:
        BatchError: a keyword that is unknown, or that asks for something not served.
    """
    for name, value in given.items():
        if name in _KNOWN or name in _INERT or value is None or value is False:
            continue
        why = _UNSERVED.get(name, "is not known to attnplug and may change the result")
        remedy = _SPREAD if why is _PACKED else _EAGER
        raise BatchError(name, _shown(value), f"{why} (passed by {layer})", remedy)
    causal = given.get("is_causal")
    return Keywords(
        is_causal=None if causal is None else bool(causal),
        sliding_window=_number("sliding_window", given.get("sliding_window"), layer, int),
        softcap=_number("softcap", given.get("softcap"), layer, float),
        sinks=given.get("s_aux"),
    )


def _number(name: str, value: Any, layer: str, kind: type[Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BatchError(name, _shown(value), f"must be a number (passed by {layer})", _EAGER)
    return kind(value)


def _shown(value: Any) -> object:
    """`value` for an error message; a tensor as its dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
