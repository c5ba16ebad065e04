"""FLASH_ATTN_2: `varlen_fwd` of flash-attn 2, which the library's own functions call, but with our output.

The public functions return a new output, to be copied. Positions follow
`_flash_attn_varlen_forward` in `flash_attn/flash_attn_interface.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from attnplug.backends.flash_attn.call import Call, Kernels
from attnplug.backends.flash_attn.generations import FlashAttn2Backend
from attnplug.backends.flash_attn.impl import FlashAttnImpl
from attnplug.backends.library_imports import import_library
from attnplug.core.errors import BackendUnavailableError

__all__ = ["VARLEN_FWD", "FlashAttn2Impl", "FlashAttn2Kernels"]

VARLEN_FWD = (
    *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"),
    *("alibi_slopes", "max_seqlen_q", "max_seqlen_k", "p_dropout", "softmax_scale", "zero_tensors"),
    *("is_causal", "window_size_left", "window_size_right", "softcap", "return_softmax", "gen"),
)
"""The arguments of `varlen_fwd`, which are positional."""


class FlashAttn2Kernels:
    """Calls `varlen_fwd`.

    Args:
        varlen_fwd: of the extension `flash_attn_2_cuda`.
    """

    decodes_apart: ClassVar[bool] = True
    """Only where all queries are single does it pack the heads of a KV head and split the keys."""

    def __init__(self, varlen_fwd: Callable[..., Any]) -> None:
        self._varlen_fwd = varlen_fwd

    def __call__(self, call: Call) -> torch.Tensor | None:
        """As `Kernels`."""
        requests, spec = call.requests, call.spec
        query, out, longest = call.query, call.output, requests.max_query_len
        keys = max(requests.max_seq_len, 1)
        causal, left, right = _window(call, keys)
        single = longest == 1 and requests.single
        if longest == 1 and not single:
            longest = 2  # with 1 it may take row i for request i, whatever the start locations say
        own = slice(requests.first_token, requests.end_token)
        if single:
            query, out = query[own], out[own]
        # Here it packs the query heads of a KV head and splits the keys, and returns another output.
        packs = single and spec.num_heads > spec.num_kv_heads and call.alibi_slopes is None
        packs = packs and left < 0 and (causal or right < 0)
        found, lse, *_ = self._varlen_fwd(
            query,
            call.key,
            call.value,
            None if packs else out,
            requests.query_start_loc,
            requests.query_start_loc if call.paged else requests.key_start_loc,
            requests.seq_lens if call.paged else None,
            None,
            requests.block_table if call.paged else None,
            call.alibi_slopes,
            longest,
            keys,
            0.0,
            spec.scale,
            False,
            causal,
            left,
            right,
            spec.logits_soft_cap or 0.0,
            False,
            None,
        )
        if packs:
            out.copy_(found)
        return cast(torch.Tensor, lse) if call.wants_lse else None


class FlashAttn2Impl(FlashAttnImpl):
    """Attention in FlashAttention 2."""

    _backend = FlashAttn2Backend

    @classmethod
    def kernels(cls) -> Kernels:
        """FlashAttn2Kernels."""
        return _kernels()


def _window(call: Call, keys: int) -> tuple[bool, int, int]:
    """Causal, left and right as `varlen_fwd` is told them; it makes right 0 of causal by itself."""
    left, right = call.window
    if call.alibi_slopes is None or right != 0:
        return call.causal, left, -1 if call.causal else right
    # Causal, it adds slope * key position to each logit, which shifts the LSE by slope * query position and
    # costs precision far out. With a window, if one as wide as all keys, it subtracts the distance.
    return False, min(left, keys - 1) if left >= 0 else keys - 1, 0


@functools.cache
def _kernels() -> FlashAttn2Kernels:
    found = getattr(import_library("FLASH_ATTN_2"), "varlen_fwd", None)
    if found is None:
        raise BackendUnavailableError(f"flash_attn_2_cuda has no varlen_fwd; {_REMEDY}")
    # pybind11 writes the arguments of a function into its documentation.
    numbers = re.findall(r"\barg(\d+):", found.__doc__ or "")
    if numbers and int(numbers[-1]) + 1 != len(VARLEN_FWD):
        what = f"takes {int(numbers[-1]) + 1} arguments, not {len(VARLEN_FWD)}"
        raise BackendUnavailableError(f"varlen_fwd of flash_attn_2_cuda {what}; {_REMEDY}")
    return FlashAttn2Kernels(found)


_REMEDY = "pip install 'flash-attn==2.8.3'"
