"""The concatenated page indices of a step's requests, gathered once per step and KV group."""

from __future__ import annotations

import torch

from attnplug.backends.flashinfer.step import StepPages
from attnplug.core.batch.host import to_device
from attnplug.core.errors import BatchError
from attnplug.ops.page_indices import gather_page_indices

__all__ = ["PageIndices"]


class PageIndices:
    """A buffer of page indices, int32, for one step at a time.

    Args:
        device: where the buffer is.
        page_size: tokens of a page.
        room: its size at first; it grows when needed, unless `fixed`.
        fixed: whether captured graphs read it, so that its address must stay.
    """

    def __init__(self, device: torch.device, page_size: int, room: int, fixed: bool = False) -> None:
        self._device = device
        self._page_size = page_size
        self._fixed = fixed
        self.buffer = self._made(max(room, 1))
        """int32 `[room]`."""
        self._held: StepPages | None = None

    def hold(self, pages: StepPages) -> torch.Tensor:
        """The buffer with the indices of `pages`; they are gathered unless they are there.

        Raises:
            BatchError: more pages than a fixed buffer has room for.
        """
        if self._held is not pages:
            self._gather(pages)
            self._held = pages
        return self.buffer

    def _gather(self, pages: StepPages) -> None:
        host = pages.host
        count = host.num_pages
        if count > self.buffer.shape[0]:
            if self._fixed:
                limit = f"are more than the {self.buffer.shape[0]} that graphs were captured for"
                raise BatchError("pages", count, limit, "capture with a longer max_model_len")
            # A power of two, so that growing contexts do not allocate in every step.
            room = 1 << (count - 1).bit_length()
            self.buffer = self._made(room)
        rows = None if host.rows is None else to_device(host.rows, self._device)
        gather_page_indices(pages.block_table, pages.seq_lens, self._page_size, rows, self.buffer, count)

    def _made(self, room: int) -> torch.Tensor:
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.zeros(room, dtype=torch.int32, device=self._device)
