"""The pages of states that captured graphs read: buffers of the largest size, and the steps in them."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.states.state_step import StateStep


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StateGraphBuffers(NotCopied):
    """The pages of one captured graph of B requests with q queries each. Padding is -1: it reads and writes no page.

    Args:
        pages: int32 `[B]`, the page that each request starts from.
        slots: int64 `[B * q]`, the page that gets the state after each token.
    """

    pages: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def allocate(cls, batch_size: int, tokens: int, device: torch.device) -> Self:
        """New buffers of padding."""
        pages = torch.full((batch_size,), PAD_SLOT_ID, dtype=torch.int32, device=device)
        return cls(pages, torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device))

    def first(self, batch_size: int, tokens: int) -> Self:
        """Views of the first rows."""
        return type(self)(self.pages[:batch_size], self.slots[:tokens])

    def clear(self) -> None:
        """Turn all requests into padding."""
        self.pages.fill_(PAD_SLOT_ID)
        self.slots.fill_(PAD_SLOT_ID)

    def copy_from(self, step: StateStep) -> None:
        """Copy the pages of a step, and padding after them, without waiting for the device."""
        self.clear()
        common = step.common
        for into, pages in ((self.pages, common.state_pages), (self.slots, common.slot_mapping)):
            if pages is not None:
                into[: pages.shape[0]].copy_(pages, non_blocking=True)

    def step(self, common: CommonAttentionMetadata, given: StateStep | None = None) -> StateStep:
        """The step over these buffers, which have the pages of `given`, or padding alone.

        Args:
            common: the padded batch.
            given: the step that was copied.
        """
        own = None if given is None else given.common
        padded = common.changed(
            causal=None,
            state_pages=self.pages,
            slot_mapping=self.slots,
            state_pages_cpu=_on_host(self.pages, None if own is None else own.state_pages_cpu),
            state_slots_cpu=_on_host(self.slots, None if own is None else own.state_slots_cpu),
        )
        if given is None:
            return StateStep(padded, overwrites=False)
        return StateStep(padded, given.overwrites, stamps=given.stamps, pool=given.pool)


def _on_host(buffer: torch.Tensor, pages: torch.Tensor | None) -> torch.Tensor:
    """The values of a buffer on the host: these pages, and padding."""
    host = torch.full(buffer.shape, PAD_SLOT_ID, dtype=buffer.dtype, device="cpu")
    if pages is not None:
        host[: pages.shape[0]] = pages
    return host
