"""The facts about an optional tensor of a step: its rows, its copy on the host, its padding, and who needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec


@dataclasses.dataclass(frozen=True, slots=True)
class StepInput:
    """An optional field of CommonAttentionMetadata with a tensor of int32, or with a Selection.

    Batches, micro-batches, staging, graph buffers, checks and the conformance kit walk over these.

    Args:
        name: the field.
        per: what has a row: each "request", "start" location (one more than requests), "token", or wanted "logit".
        host: the field with the same on the host, so that nothing waits for the device; None without.
        is_array: whether that is a numpy array.
        width: the sizes after the rows; None if they vary, and then a runtime does not check it.
        padding: the value in rows of requests and tokens that only a graph or a dummy step has.
        of_keys: whether it tells of the decoder's own keys, so that cross attention has none.
        needed_by: whether a layer needs it. Dummy steps and the buffers of graphs then have it.
        why: for the refusal of a step without it, what a layer that needs it is or has; empty if builders refuse it.
        remedy: for that refusal.
    """

    name: str
    per: Literal["request", "start", "token", "logit"]
    host: str | None = None
    is_array: bool = False
    width: tuple[int, ...] | None = ()
    padding: int = 0
    of_keys: bool = False
    needed_by: Callable[[LayerSpec], bool] = lambda _: False
    why: str = ""
    remedy: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """The field on the device, and the one on the host."""
        return (self.name,) if self.host is None else (self.name, self.host)

    def count(self, requests: int, tokens: int) -> int:
        """The rows of a step with so many requests and tokens; wanted logits are counted apart."""
        return {"request": requests, "start": requests + 1}.get(self.per, tokens)

    def padded(self, rows: int, device: torch.device | str) -> torch.Tensor:
        """A new tensor of rows of padding."""
        return torch.full((rows, *(self.width or ())), self.padding, dtype=torch.int32, device=device)

    def on_host(self, rows: torch.Tensor) -> Any:
        """Rows on a CPU in the form of the field on the host."""
        return rows.numpy() if self.is_array else rows
