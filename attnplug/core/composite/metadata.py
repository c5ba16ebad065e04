"""One step's metadata for two backends."""

from __future__ import annotations

import dataclasses

import torch

from attnplug.core.metadata import AttentionMetadata


@dataclasses.dataclass(eq=False)
class CompositeMetadata(AttentionMetadata):
    """One step for two backends: `num_decodes` requests in front, then the others.

    Args:
        slot_mapping: int64, where the new K and V of the whole step go.
        num_reqs: requests of the step.
        num_actual_tokens: query rows of the step.
        num_decodes: requests of the decoding part.
        num_decode_tokens: their query rows.
        decode: metadata of the decoding part; None if it is empty.
        prefill: metadata of the rest; None if it is empty.
    """

    slot_mapping: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: AttentionMetadata | None
    prefill: AttentionMetadata | None
