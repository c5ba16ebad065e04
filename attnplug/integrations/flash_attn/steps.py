"""Batches of calls: their lengths, and the metadata for packed queries over pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import unusual_form
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.integrations.binding import starts_of
from attnplug.integrations.flash_attn.pages import Pages, must_check
from attnplug.integrations.flash_attn.request import integer

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Tokens of each request: `tensor` int32 `[R]` on the device, `host` the same where it is known without waiting.

    `added` of them came with the call.
    """

    tensor: torch.Tensor
    host: Ints | None
    added: int = 0

    @classmethod
    def of(cls, host: Ints, device: torch.device) -> Lengths:
        """Lengths that the host knows."""
        return cls(torch.from_numpy(host.astype(np.int32)).to(device), host)

    def with_more_tokens(self, count: int) -> Lengths:
        """With `count` more tokens for each request."""
        if not count:
            return self
        return Lengths(self.tensor + count, None if self.host is None else self.host + count, count)

    def on_host(self) -> Ints:
        """The lengths on the host, copied if need be, which waits for the device."""
        return self.tensor.cpu().numpy().astype(np.int64) if self.host is None else self.host


def read_lengths(
    given: int | torch.Tensor | None, batch: int, capacity: int, added: int, device: torch.device
) -> Lengths:
    """The tokens that caches of `capacity` hold before a call that adds some; None is as many as there is room for.

    Raises:
        BatchError: no room for the new tokens, or other than an int or int32 `[batch]`. Numbers on a GPU are read in
            debug mode only.
    """
    if isinstance(given, torch.Tensor):
        if (form := unusual_form(given)) is not None:
            raise BatchError("cache_seqlens", form, "must be a strided tensor, or an int")
        if given.shape != (batch,) or (given.dtype, given.device) != (torch.int32, device):
            found = f"{given.dtype} {tuple(given.shape)} on {given.device}"
            raise BatchError("cache_seqlens", found, f"must be torch.int32 ({batch},) on {device}, or an int")
        host = given.numpy().astype(np.int64) if device.type == "cpu" else None
        lengths = Lengths(given, host)
    elif given is None and added:
        raise BatchError("cache_seqlens", None, "is required where k is given: it says where k is written")
    else:
        limit = _room(capacity, added, "must be an int or an int32 tensor, ")
        count = capacity if given is None else integer("cache_seqlens", given, limit, 0)
        if count + added > capacity:
            raise BatchError("cache_seqlens", given, _room(capacity, added, "must be "))
        return Lengths.of(np.full(batch, count, dtype=np.int64), device)
    host = lengths.host
    if host is None and must_check(device):
        host = lengths.on_host()
    if host is not None and host.size and (host.min() < 0 or host.max() + added > capacity):
        found = host.tolist() if host.size < 20 else f"{host.size} numbers from {host.min()} to {host.max()}"
        raise BatchError("cache_seqlens", found, _room(capacity, added, "must be "))
    return lengths


def _room(capacity: int, added: int, must: str) -> str:
    return f"{must}in 0 .. {capacity - added}, so that the cache of {capacity} holds {added} new tokens"


def lengths_of(name: str, starts: torch.Tensor, rows: int | None) -> Ints:
    """The lengths of requests that start at `starts`, int32 `[R + 1]`, in `rows` packed rows.

    A tensor on a device is copied, which waits for it.

    Raises:
        BatchError: another dtype or shape, or starts that decrease or end past the rows.
    """
    if (
        not isinstance(starts, torch.Tensor)
        or unusual_form(starts) is not None
        or starts.is_meta
        or starts.dtype != torch.int32
        or starts.ndim != 1
        or not len(starts)
    ):
        found: object = starts
        if isinstance(starts, torch.Tensor):
            form = unusual_form(starts)
            found = f"{starts.dtype} {tuple(starts.shape)} on {starts.device}" if form is None else form
        raise BatchError(name, found, "must be torch.int32 [batch + 1], with values to read")
    host = starts.cpu().numpy().astype(np.int64)
    lengths = np.diff(host)
    if host[0] != 0 or (lengths < 0).any() or (rows is not None and host[-1] > rows):
        within = "" if rows is None else f" and end within the {rows} packed rows"
        limit = f"must start at 0, never decrease{within}"
        raise BatchError(name, host.tolist() if host.size < 20 else f"{host.size} numbers", limit)
    return lengths


def paged_step(
    query_lens: Ints, lengths: Lengths, pages: Pages, causal: bool, needs: str
) -> CommonAttentionMetadata:
    """Requests whose keys are in pages, the new ones too: the step writes no slot.

    `needs` is what the builder needs of the lengths on the host: "none", "upper_bound" or "exact".
    """
    query_starts = starts_of(query_lens)
    tokens, device = int(query_starts[-1]), pages.table.device
    exact = lengths.host
    if exact is None and needs == "exact":
        exact = lengths.on_host()
    bound = np.full(query_lens.size, pages.capacity, dtype=np.int32) if needs == "upper_bound" else None
    return CommonAttentionMetadata(
        query_start_loc=query_starts.to(device),
        query_start_loc_cpu=query_starts,
        seq_lens=lengths.tensor,
        num_reqs=query_lens.size,
        num_actual_tokens=tokens,
        max_query_len=int(query_lens.max()),
        max_seq_len=pages.capacity if exact is None else int(exact.max()),
        block_table_tensor=pages.table,
        slot_mapping=torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device),
        causal=causal,
        seq_lens_host=bound if exact is None else exact.astype(np.int32),
        seq_lens_host_exact=exact is not None,
    )
