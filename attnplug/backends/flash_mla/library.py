"""FlashMLA as `sgl-flash-mla` 1 installs it: the only module that knows its functions."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch

from attnplug.backends.library_imports import import_library
from attnplug.core.errors import BackendUnavailableError

_SIZE_V = 512
# The functions that are called, and the arguments that they get by name.
_ASKED: dict[str, set[str]] = {
    "flash_mla_with_kvcache": {
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "use_legacy",
        "descale_q",
        "descale_k",
    },
    "flash_mla_sparse_fwd": {"d_v", "topk_length", "use_legacy", "return_log2_lse"},
    "get_mla_decoding_metadata": {"is_fp8_kvcache", "use_legacy"},
    "get_mla_metadata": set(),
    "has_legacy": set(),
}


class Library:
    """The functions of FlashMLA's kernels for Hopper, which the wheel calls its legacy ones.

    Args:
        module: `flash_mla`.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def schedule(self, seq_lens: torch.Tensor, rows: int, is_8bit: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The division of requests over multiprocessors, and where the parts of each request start.

        Args:
            seq_lens: int32 `[R]`, contiguous; without 0 if `is_8bit`.
            rows: queries of a request times heads.
            is_8bit: for latents in e4m3, whose kernel has a division of its own.

        Returns:
            Two new int32 tensors, `[P, 8]` and `[R + 1]`.
        """
        given = {"is_fp8_kvcache": is_8bit, "use_legacy": True}
        tiles, splits = self._module.get_mla_decoding_metadata(seq_lens, rows, 1, **given)
        return tiles, splits

    def scheduled(self, tiles: torch.Tensor, splits: torch.Tensor) -> Any:
        """The object that calls take, over tensors of `schedule`."""
        made, _ = self._module.get_mla_metadata()
        made.tile_scheduler_metadata, made.num_splits = tiles, splits
        return made

    def decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scheduled: Any,
        scale: float,
        descales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend all latents of each request, causally.

        Args:
            query: `[R, q, H, L + R]`.
            kv_cache: `[num_blocks, 64, L + R]`.
            block_table: int32 `[R, max_blocks]`.
            seq_lens: int32 `[R]`, contiguous.
            scheduled: from `scheduled`.
            scale: the factor of logits.
            descales: float32 `[1]`, the scales of 8-bit queries and latents; None for 16 bits.

        Returns:
            The output `[R, q, H, L]`, and the LSE `[R, H, q]`: natural, and +inf for queries that see no key.
        """
        more: dict[str, Any] = {}
        if descales is not None:
            more = {"descale_q": descales[0], "descale_k": descales[1]}
        given = {"softmax_scale": scale, "causal": query.shape[1] > 1, "is_fp8_kvcache": descales is not None}
        pages = kv_cache[:, :, None]
        out, lse = self._module.flash_mla_with_kvcache(
            query, pages, block_table, seq_lens, _SIZE_V, scheduled, use_legacy=True, **given, **more
        )
        return out, lse

    def attend_chosen(
        self,
        query: torch.Tensor,
        tokens: torch.Tensor,
        indices: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend the chosen latents of each query.

        Args:
            query: `[T, H, L + R]` in bfloat16.
            tokens: `[n, 1, L + R]` in bfloat16.
            indices: int32 `[T, K]`, rows of `tokens`; -1 for none.
            counts: int32 `[T]`, at least 1: indices that are read, from the first.
            scale: the factor of logits.
            wants_lse: whether the LSE is computed.

        Returns:
            The output `[T, H, L]`, and the LSE `[T, H]`, as `decode`; None if it is not wanted.
        """
        found = self._module.flash_mla_sparse_fwd(
            query,
            tokens,
            indices[:, None],
            scale,
            d_v=_SIZE_V,
            topk_length=counts,
            use_legacy=True,
            # None gives a natural LSE, and False none.
            return_log2_lse=None if wants_lse else False,
        )
        return found[0], found[2]


@functools.cache
def library() -> Library:
    """The library, imported and checked.

    Raises:
        BackendUnavailableError: it is missing, its import raises, it was built without the kernels for Hopper, or it
            lacks a function or an argument that is used here. The text has the remedy.
    """
    module = import_library("FLASH_MLA")
    for name, asked in _ASKED.items():
        function = getattr(module, name, None)
        lacking = {name} if function is None else asked - set(inspect.signature(function).parameters)
        if lacking:
            remedy = "pip install --force-reinstall --no-deps 'sgl-flash-mla>=1,<2'"
            raise BackendUnavailableError(f"flash_mla has no {', '.join(sorted(lacking))}; {remedy}")
    if not module.has_legacy():
        remedy = "build it with FLASH_MLA_BUILD_LEGACY=1"
        raise BackendUnavailableError(f"flash_mla was built without its kernels for Hopper; {remedy}")
    return Library(module)
