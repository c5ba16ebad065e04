"""The keywords that models pass to attention: those that are understood, those that change nothing, the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from attnplug.core.errors import BatchError

__all__ = ["Keywords", "read_keywords"]

_INERT = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
"""What no attention function of a modelling file reads; positions and token types are in the mask."""

_UNSERVED = {
    "output_attentions": "attention weights are never computed as a whole",
    "head_mask": "scales the weights of whole heads, which no LayerSpec can say",
    "position_bias": "is added to the logits, which no LayerSpec can say",
    "indices": "picks single keys for each query: sparse attention is not served through transformers",
    "block_indices": "picks blocks of keys for each query, which no LayerSpec can say",
    "cache": "is a paged cache: continuous batching is not served through transformers",
    "cu_seq_lens_q": "says that sequences are packed in one row",
    "cu_seq_lens_k": "says that sequences are packed in one row",
    "max_length_q": "says that sequences are packed in one row",
    "max_length_k": "says that sequences are packed in one row",
    "seq_idx": "says that sequences are packed in one row",
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
    """What the keywords `given` by `layer` say.

    Raises:
        BatchError: one that asks for what is not served, or that is not known.
    """
    for name, value in given.items():
        if name in _KNOWN or name in _INERT or value is None or value is False:
            continue
        packed = name.startswith(("cu_seq_lens", "max_length")) or name == "seq_idx"
        why = _UNSERVED.get(name, "is not known to attnplug and may change the result")
        raise BatchError(name, _said(value), f"{why} (passed by {layer})", _SPREAD if packed else _EAGER)
    return Keywords(
        is_causal=_flag(given.get("is_causal")),
        sliding_window=_number("sliding_window", given.get("sliding_window"), layer, int),
        softcap=_number("softcap", given.get("softcap"), layer, float),
        sinks=given.get("s_aux"),
    )


_KNOWN = frozenset({"is_causal", "sliding_window", "softcap", "s_aux"})


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _number(name: str, value: Any, layer: str, kind: type[Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BatchError(name, _said(value), f"must be a number (passed by {layer})", _EAGER)
    return kind(value)


def _said(value: Any) -> object:
    """`value` as an error may show it: a tensor by its dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
