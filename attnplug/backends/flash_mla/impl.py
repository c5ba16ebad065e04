"""The layers of FLASH_MLA: calls of FlashMLA's dense and sparse kernels."""

from __future__ import annotations

import torch

from attnplug.backends.flash_mla.builder import ChosenStep, in_tiles
from attnplug.backends.flash_mla.library import library
from attnplug.backends.flash_mla.schedules import DenseStep
from attnplug.core.errors import LayoutError
from attnplug.mla.impl import MLADecodeImpl, packed_query

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_ALIGNMENT = 16
"""Bytes that the kernels copy at once."""


class FlashMLAImpl(MLADecodeImpl):
    """Latent attention by FlashMLA's kernels, which allocate their outputs."""

    can_return_lse_for_decode = True

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: DenseStep | ChosenStep,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """As MLADecodeImpl.decode."""
        found, lse = self.decoded(q_nope, q_pe, kv_cache, metadata, output_lse is not None)
        output.copy_(found)
        if output_lse is not None and lse is not None:
            output_lse.copy_(lse)

    def decoded(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: DenseStep | ChosenStep,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As MLADecodeImpl.decoded: the tensors that FlashMLA allocates."""
        _check_alignment(kv_cache)
        query = packed_query(q_nope, q_pe)
        if isinstance(metadata, ChosenStep):
            return self._over_chosen(query, kv_cache, metadata, wants_lse)
        return self._over_all(query, kv_cache, metadata, wants_lse)

    def _over_all(
        self, query: torch.Tensor, kv_cache: torch.Tensor, step: DenseStep, wants_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (tokens, heads, size), schedules = query.shape, step.schedules
        schedule, descales = schedules.of(step, heads), None
        if schedules.is_8bit:
            query, descale = rounded(query)
            descales = descale, schedules.one
        found, lse = schedules.library.decode(
            query.view(-1, step.queries, heads, size),
            kv_cache,
            schedule.block_table,
            schedule.seq_lens,
            schedule.scheduled,
            self.softmax_scale,
            descales,
        )
        output, lse = found.reshape(tokens, heads, -1), lse.transpose(1, 2).reshape(tokens, heads)
        if schedule.blind is not None:
            blind = schedule.blind.view(tokens, 1)
            output.masked_fill_(blind[:, :, None], 0)
            return output, lse.masked_fill_(blind, -torch.inf) if wants_lse else None
        return output, _without_infinity(lse) if wants_lse else None

    def _over_chosen(
        self, query: torch.Tensor, tokens: torch.Tensor, step: ChosenStep, wants_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sparse = self.spec.sparse
        keys = step.table.shape[1] if sparse is None else sparse.topk * sparse.block
        table, places = step.table[:, :keys], step.places[: in_tiles(keys)]
        if places.shape[0] != keys:
            table = torch.nn.functional.pad(table, (0, places.shape[0] - keys))
        # Entries past a query's keys are tokens that may hold NaN, which the kernel would multiply by 0.
        indices = torch.where(places < step.counts[:, None], table, -1)
        # Without any tile of keys the kernel would write nothing.
        counts = step.counts.clamp(min=1)
        found, lse = library().attend_chosen(query, tokens, indices, counts, self.softmax_scale, wants_lse)
        return found, None if lse is None else _without_infinity(lse)


def rounded(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in e4m3, and float32 `[1]`: their scale, by which the largest finite one becomes 448."""
    # Rows of padding may hold anything, and must not take the precision of others.
    largest = torch.linalg.vector_norm(query, torch.inf, dim=-1).float()
    largest = torch.where(largest.isfinite(), largest, 0).amax()
    scale = (largest / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (query / scale).to(_E4M3), scale.view(1)


def _without_infinity(lse: torch.Tensor) -> torch.Tensor:
    # FlashMLA's LSE of a query that sees no key is +inf.
    return lse.masked_fill_(lse == torch.inf, -torch.inf)


def _check_alignment(kv_cache: torch.Tensor) -> None:
    block, token, element = kv_cache.stride()
    steps = (block if kv_cache.shape[0] > 1 else 0) | (token if kv_cache.shape[1] > 1 else 0)
    if element != 1 or (steps * kv_cache.itemsize | kv_cache.data_ptr()) % _ALIGNMENT:
        limit = (
            f"and the address must be multiples of {_ALIGNMENT} bytes, since FlashMLA copies as many at once"
        )
        raise LayoutError("kv_cache.stride()", kv_cache.stride(), limit, "pad the blocks")
