"""What a layer can ask for beyond sizes and dtypes."""

from __future__ import annotations

import enum

__all__ = ["Feature"]


class Feature(enum.Flag):
    """One flag per thing that changes the numbers or the way a backend is called.

    A backend is asked with `spec.required_features()` and refuses whatever it has not declared in
    `AttentionBackend.features`, so a flag added here in a later release is refused by every plugin
    that has never heard of it.
    """

    SLIDING_WINDOW = enum.auto()
    """Only keys within `window` of the query's position are seen."""
    CHUNKED_LOCAL = enum.auto()
    """Only keys of the query's own chunk are seen."""
    SOFT_CAP = enum.auto()
    """Logits become `c * tanh(logits / c)`."""
    SINKS = enum.auto()
    """One learned logit per head enters the softmax denominator."""
    ALIBI = enum.auto()
    """A per-head slope times the distance is subtracted from the logits."""
    MLA = enum.auto()
    """Multi-head latent attention: one latent vector per token is cached."""
    SPARSE = enum.auto()
    """Only keys picked by an indexer are seen."""
    MM_PREFIX = enum.auto()
    """Spans of multimodal tokens see each other in both directions."""
    LSE = enum.auto()
    """The log-sum-exp of each row is returned, so that partial results can be merged."""
    HEAD_SIZE_V = enum.auto()
    """Values have another head size than queries and keys."""
    NON_CAUSAL = enum.auto()
    """Queries see keys after their own position."""
    DIRECT_KV = enum.auto()
    """K and V come with the call instead of from pages."""
    FP8_KV = enum.auto()
    """The KV cache holds 8-bit floats with scales."""
    CROSS = enum.auto()
    """Queries of a decoder attend the keys of an encoder."""
    ENCODER = enum.auto()
    """Encoder layers, without a KV cache that grows."""

    def names(self) -> tuple[str, ...]:
        """The lower-case names of the flags set, in the order of this class."""
        return tuple(flag.name.lower() for flag in self if flag.name)
