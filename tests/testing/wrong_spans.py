"""Backends that read multimodal spans wrongly: variants of TORCH, each with one mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from plain_attention import PlainImpl
from torch import Tensor
from wrong_builders import Altered

from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import CommonAttentionMetadata

__all__ = ["CutsSpansByWindows", "FillsSpansIn", "KeepsSpans", "MergesSpans", "SeesSpansBackwards"]


class SeesSpansBackwards(PlainImpl):
    """A span lifts the window, but not the causal mask."""

    def together(self, spans: Tensor, at: Tensor, held: Tensor) -> Tensor:
        return super().together(spans, at, held) & (held <= at)


class CutsSpansByWindows(PlainImpl):
    """A span lifts the causal mask, but not the window."""

    def together(self, spans: Tensor, at: Tensor, held: Tensor) -> Tensor:
        return super().together(spans, at, held) & self.seen(at, held, causal=False)


class MergesSpans(Altered):
    """Takes spans side by side as one, as a mask of image tokens does."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if made.spans is None:
            return made
        spans = made.spans.copy()
        for start, stop in zip(made.query_starts[:-1], made.query_starts[1:], strict=True):
            own = spans[start:stop]
            for row in range(1, len(own)):
                before = own[row - 1]
                if own[row, 1] and before[1] == own[row, 0]:
                    own[(own == before).all(1), 1] = own[row, 1]
                    own[(own == own[row]).all(1), 0] = before[0]
        return dataclasses.replace(made, spans=spans)


class FillsSpansIn(Altered):
    """Takes a step without spans as text."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if made.spans is not None:
            return made
        return dataclasses.replace(made, spans=np.zeros((made.num_actual_tokens, 2), dtype=np.int64))


class KeepsSpans(Altered):
    """Keeps the spans of the first step with as many tokens."""

    kept: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if self.kept is None or made.spans is None or self.kept.shape != made.spans.shape:
            self.kept = made.spans
        return dataclasses.replace(made, spans=self.kept)
