"""Inputs on the meta device for one run of a model, with a distinct length for each sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

__all__ = ["DECODER_LENGTH", "ENCODER_LENGTH", "input_variants", "key_lengths"]

DECODER_LENGTH = 61
"""Tokens of a decoder, or of a model without one. A prime is unlikely to equal another dimension."""
ENCODER_LENGTH = 43
"""Tokens of an encoder whose output a decoder reads."""


def key_lengths(model: PreTrainedModel) -> frozenset[int]:
    """The possible numbers of keys in attention over these inputs."""
    config: Any = model.config
    lengths = {DECODER_LENGTH, ENCODER_LENGTH, getattr(config, "max_source_positions", None)}
    return frozenset(length for length in lengths if isinstance(length, int))


def input_variants(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try in turn until the model runs, the most informative first."""
    accepted = inspect.signature(model.forward).parameters
    plain = _tokens(model)
    if "use_cache" in accepted:
        plain["use_cache"] = True
    if getattr(model.config, "add_cross_attention", False) and "encoder_hidden_states" in accepted:
        shape = (1, ENCODER_LENGTH, model.config.hidden_size)
        plain.setdefault("encoder_hidden_states", torch.zeros(shape, dtype=model.dtype, device="meta"))
    # With token types, models show the spans of tokens that see each other in both directions.
    kinds = {
        name: _ids(DECODER_LENGTH) for name in ("token_type_ids", "mm_token_type_ids") if name in accepted
    }
    length = DECODER_LENGTH if "decoder_input_ids" not in plain else ENCODER_LENGTH
    whole = {"attention_mask": _ids(length)} if "input_ids" in plain and "attention_mask" in accepted else {}
    yield {**plain, **kinds}
    if whole:
        yield {**plain, **kinds, **whole}
    if kinds:
        yield plain
        yield {**plain, **whole}
    if "use_cache" in plain:
        yield {**plain, "use_cache": False}
        yield {**plain, **whole, "use_cache": False}


def _tokens(model: PreTrainedModel) -> dict[str, Any]:
    config: Any = model.config
    name = model.main_input_name
    if (
        name == "input_features"
        and hasattr(config, "num_mel_bins")
        and hasattr(config, "max_source_positions")
    ):
        frames = 2 * config.max_source_positions
        given = {name: torch.zeros(1, config.num_mel_bins, frames, dtype=model.dtype, device="meta")}
    elif config.is_encoder_decoder:
        given = {"input_ids": _ids(ENCODER_LENGTH)}
    else:
        return {"input_ids": _ids(DECODER_LENGTH)}
    return {**given, "decoder_input_ids": _ids(DECODER_LENGTH)}


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.int64, device="meta")
