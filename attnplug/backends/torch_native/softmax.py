"""From float32 scores to weights, in the contract's order: scale, soft cap, ALiBi, mask, sinks."""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The scale, cap, slopes and sinks of one layer's softmax.

    Args:
        scale: softmax scale times the scale of stored keys.
        value_scale: scale of stored values.
        soft_cap: c of `c * tanh(logits / c)`.
        slopes: ALiBi, float32 `[Hkv, G]`.
        sinks: float32 `[Hkv, G]`; None if not used.
    """

    scale: float
    value_scale: float
    soft_cap: float | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether scaled_dot_product_attention can compute it: scale, mask and softmax only."""
        return self.soft_cap is None and self.slopes is None and self.sinks is None

    def shape(self, scores: torch.Tensor, distance: torch.Tensor | None, hidden: torch.Tensor | None) -> None:
        """Cap, bias and mask scaled scores in place.

        Args:
            scores: float32 `[B, Hkv, G, q, L]`.
            distance: `abs(key_pos - query_pos)` as float32 `[B, q, L]`; needed with slopes.
            hidden: bool `[B, q, L]`, True where a key is not seen; None hides nothing.
        """
        if self.soft_cap is not None:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.slopes is not None and distance is not None:
            scores.addcmul_(distance[:, None, None], self.slopes[:, :, None, None], value=-1)
        if hidden is not None:
            scores.masked_fill_(hidden[:, None, None], -math.inf)

    def normalise(
        self, scores: torch.Tensor, wants_lse: bool, may_be_empty: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights `[B, Hkv, G, q, L]`, and the log-sum-exp `[B, Hkv, G, q]` if wanted.

        Overwrites `scores`. A row that sees nothing has weights 0, and an LSE of -inf or its sink.
        """
        if self.sinks is None and not wants_lse and not may_be_empty:
            return scores.softmax(-1), None
        top = scores.amax(-1, keepdim=True)
        sinks = None if self.sinks is None else self.sinks[:, :, None, None]
        if sinks is not None:
            top = torch.maximum(top, sinks)
        top.masked_fill_(top == -math.inf, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += torch.exp(sinks - top)
        lse = (top + total.log()).squeeze(-1) if wants_lse else None
        return weights.div_(total.masked_fill(total == 0, 1.0)), lse

    def fill_empty(self, output: torch.Tensor, output_lse: torch.Tensor | None) -> None:
        """Write rows `[n, H, Dv]` and their LSE `[n, H]` that see no key at all."""
        output.zero_()
        if output_lse is not None:
            if self.sinks is None:
                output_lse.fill_(-math.inf)
            else:
                output_lse.copy_(self.sinks.reshape(1, -1).expand_as(output_lse))
