"""FLASH_ATTN_4: calls `_flash_attn_fwd` of flash-attn-4, as its public functions do, but with our output."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from attnplug.backends.flash_attn.impl import FlashAttnImpl
from attnplug.backends.flash_attn.metadata import Call, Kernels, Requests
from attnplug.backends.library_imports import import_library
from attnplug.core.errors import BackendUnavailableError
from attnplug.ops.gather import keys_into
from attnplug.ops.triton.launch import on_device_of

FORWARD = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
    *("page_table", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right"),
    *("learnable_sink", "num_splits", "out", "lse"),
)
"""The arguments of `_flash_attn_fwd` that are given, by name."""

# Its kernels take 9 to 11 % less time over keys in a row than over pages of
# 16. On an H200 the copy takes as long as is spared where 8 requests of 2048
# tokens have groups of 4 heads. At twice as many rows it takes half of that.
_ROWS_PER_KEY = 16_384
"""Rows, queries times heads of a group, that attend a key on average where pages are copied before they are attended."""
# Most keys that are copied, for each new token: what a step allocates is bound by its own tokens.
_KEYS_PER_TOKEN = 2

# Taken by every call, because any call may compile, and CuTe DSL compiles for one thread at a time.
_ONE_AT_A_TIME = threading.Lock()


class FlashAttn4Kernels:
    """Calls `_flash_attn_fwd`.

    Args:
        forward: of `flash_attn.cute.interface`.
    """

    # Its kernels do not split the keys on Hopper, so a call for decodes alone gains nothing.
    separate_decodes: ClassVar[bool] = False

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, call: Call) -> torch.Tensor | None:
        """As `Kernels`."""
        if call.paged and _are_worth_copying(call):
            call = _in_rows(call)
        requests, spec = call.requests, call.spec
        left, right = call.window
        query, lse = call.query, None
        if call.wants_lse:
            lse = query.new_empty((spec.num_heads, query.shape[0]), dtype=torch.float32)
        if call.paged:
            # The table's bound, because some versions assert on Blackwell that the two agree.
            where: dict[str, Any] = {
                "seqused_k": requests.seq_lens,
                "page_table": requests.block_table,
                "max_seqlen_k": call.table_keys,
            }
        else:
            where = {"cu_seqlens_k": requests.key_start_loc, "max_seqlen_k": max(requests.max_seq_len, 1)}
        # Unlike the other generations it launches on the current device.
        with _ONE_AT_A_TIME, on_device_of(query):
            self._forward(
                q=query,
                k=call.key,
                v=call.value,
                cu_seqlens_q=requests.query_start_loc,
                max_seqlen_q=requests.max_query_len,
                softmax_scale=spec.scale,
                causal=call.causal,
                softcap=spec.logits_soft_cap,
                window_size_left=None if left < 0 else left,
                window_size_right=None if call.causal or right < 0 else right,
                learnable_sink=call.sinks,
                num_splits=1,
                out=call.output,
                lse=lse,
                **where,
            )
        return lse


def _are_worth_copying(call: Call) -> bool:
    """Whether the kernels spare more time over keys in a row than the copy takes."""
    requests, spec = call.requests, call.spec
    rows = requests.mean_queries * (spec.num_heads // spec.num_kv_heads)
    tokens = requests.end_token - requests.first_token
    return (
        _is_hopper(call.query.device)
        and rows >= _ROWS_PER_KEY
        and requests.num_keys <= _KEYS_PER_TOKEN * tokens
        # With a window most keys of a long request are attended by few queries.
        and call.window[0] < 0
        and not (requests.may_lack_keys or requests.queries_before_keys)
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the times above are of such a GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _in_rows(call: Call) -> Call:
    """The call with keys and values of all requests in a row; the layers of a step share where each request's begin."""
    requests = call.requests
    packed = requests.kept.get("packed")
    if not isinstance(packed, Requests):
        ends = requests.seq_lens.cumsum(0, dtype=torch.int32)
        packed = dataclasses.replace(requests, key_start_loc=torch.nn.functional.pad(ends, (1, 0)))
        requests.kept["packed"] = packed
    key = call.key.new_empty(requests.num_keys, *call.key.shape[2:])
    value = call.value.new_empty(requests.num_keys, *call.value.shape[2:])
    keys_into(call.key, call.value, requests.block_table, packed.key_start_loc, key, value)
    return dataclasses.replace(call, requests=packed, key=key, value=value, paged=False)


class FlashAttn4Impl(FlashAttnImpl):
    """Attention in FlashAttention 4."""

    @classmethod
    def import_kernels(cls) -> Kernels:
        """FlashAttn4Kernels."""
        forward = getattr(import_library("FLASH_ATTN_4"), "_flash_attn_fwd", None)
        if forward is None:
            raise BackendUnavailableError(f"flash_attn.cute.interface has no _flash_attn_fwd; {_REMEDY}")
        missing = ", ".join(sorted(set(FORWARD) - set(inspect.signature(forward).parameters)))
        if missing:
            raise BackendUnavailableError(f"_flash_attn_fwd does not take {missing}; {_REMEDY}")
        return FlashAttn4Kernels(forward)


_REMEDY = "pip install 'flash-attn-4==4.0.0b36'"
