"""The arguments for kernels of decoder, encoder and cross layers, from one prefill-and-decode metadata."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from attnplug.core.arguments import flag
from attnplug.core.batch.host import check_count
from attnplug.core.errors import BatchError
from attnplug.core.spec import AttentionType


class PrefillDecodeMetadata(Protocol):
    """A step's metadata that tells prefills from decodes; encoder fields are None without an encoder."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_encoder_tokens: int | None
    seq_lens_tensor: torch.Tensor | None
    """int32 `[R]`."""
    max_prefill_seq_len: int
    max_decode_seq_len: int
    block_tables: torch.Tensor | None
    """int32 `[R, max_blocks]`."""
    encoder_seq_lens: list[int] | None
    encoder_seq_lens_tensor: torch.Tensor | None
    """int32 `[R]`."""
    max_encoder_seq_len: int | None
    cross_slot_mapping: torch.Tensor | None
    cross_block_tables: torch.Tensor | None
    """int32 `[R, max_blocks]`, pages of the encoder's tokens."""


def is_all_encoder_attn_metadata_set(attn_metadata: PrefillDecodeMetadata) -> bool:
    """Whether everything that encoder self-attention needs is there."""
    needed = (
        _field(attn_metadata, name)
        for name in ("encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len")
    )
    return all(value is not None for value in needed)


def is_all_cross_attn_metadata_set(attn_metadata: PrefillDecodeMetadata) -> bool:
    """Whether everything that cross-attention needs is there, the encoder's part included."""
    needed = (_field(attn_metadata, name) for name in ("cross_slot_mapping", "cross_block_tables"))
    return is_all_encoder_attn_metadata_set(attn_metadata) and all(value is not None for value in needed)


def get_num_prefill_decode_query_kv_tokens(
    attn_metadata: PrefillDecodeMetadata, attn_type: AttentionType | str
) -> tuple[int, int, int]:
    """The numbers of prefill queries, prefill keys and decode queries of a layer, in tokens.

    Raises:
        BatchError: no `num_encoder_tokens` where the layer attends an encoder, or an unknown type.
    """
    kind = _attn_type(attn_type)
    prefill, decode = (_count(attn_metadata, name) for name in ("num_prefill_tokens", "num_decode_tokens"))
    if kind in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        return prefill, prefill, decode
    if _field(attn_metadata, "num_encoder_tokens") is None:
        raise BatchError("num_encoder_tokens", None, f"is required for attn_type {kind}")
    encoder = _count(attn_metadata, "num_encoder_tokens")
    if kind is AttentionType.ENCODER:
        return encoder, encoder, 0  # encoders run in prefills only
    return prefill, encoder, decode


def get_seq_len_block_table_args(
    attn_metadata: PrefillDecodeMetadata, is_prompt: bool, attn_type: AttentionType | str
) -> tuple[torch.Tensor | None, int | None, torch.Tensor | None]:
    """The lengths `[R]` of a layer's keys, the longest, and the table of their pages, if any.

    Args:
        attn_metadata: the step.
        is_prompt: whether a decoder layer runs the prefills.
        attn_type: decoder, encoder or encoder_decoder.

    Raises:
        BatchError: another type, or an encoder's lengths missing where they are needed.
    """
    kind = _attn_type(attn_type)
    is_prompt = flag("is_prompt", is_prompt)
    if kind is AttentionType.DECODER:
        longest = _field(attn_metadata, "max_prefill_seq_len" if is_prompt else "max_decode_seq_len")
        return _field(attn_metadata, "seq_lens_tensor"), longest, _field(attn_metadata, "block_tables")
    if kind is AttentionType.ENCODER_ONLY:
        raise BatchError("attn_type", str(kind), "must be decoder, encoder or encoder_decoder")
    lengths = _field(attn_metadata, "encoder_seq_lens_tensor")
    longest_encoder = _field(attn_metadata, "max_encoder_seq_len")
    for field, value in (("encoder_seq_lens_tensor", lengths), ("max_encoder_seq_len", longest_encoder)):
        if value is None:
            raise BatchError(field, None, f"is required for attn_type {kind}")
    table = _field(attn_metadata, "cross_block_tables") if kind is AttentionType.ENCODER_DECODER else None
    return lengths, longest_encoder, table


def _field(attn_metadata: object, name: str) -> Any:
    try:
        return getattr(attn_metadata, name)
    except AttributeError:
        raise BatchError("attn_metadata", attn_metadata, f"has no {name}") from None


def _count(attn_metadata: object, name: str) -> int:
    value = _field(attn_metadata, name)
    check_count(name, value, 0)
    return int(value)


def _attn_type(attn_type: AttentionType | str) -> AttentionType:
    try:
        return AttentionType(attn_type)
    except Exception:  # noqa: BLE001  (a comparison is code of the caller)
        raise BatchError("attn_type", attn_type, f"must be one of {', '.join(AttentionType)}") from None
