"""FLASH_ATTN_3: calls the operator `flash_attn_3::fwd`, as the library's public functions do, but with our output.

It follows `hopper/flash_attn_interface.py` and `hopper/flash_api.cpp`. No release can be installed. On a GPU it ran
with the operators that vLLM 0.25.1 ships.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from attnplug.backends.flash_attn.impl import FlashAttnImpl
from attnplug.backends.flash_attn.metadata import Call, Kernels, Requests
from attnplug.backends.library_imports import import_library
from attnplug.core.errors import BackendUnavailableError

FWD = (
    *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
    *("page_table", "softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap"),
    *("scheduler_metadata", "num_splits"),
)
"""The arguments of `fwd` that are given, by name."""

SCHEDULE = (
    *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v"),
    *("qkv_dtype", "seqused_k", "cu_seqlens_q", "page_size", "is_causal", "window_size_left"),
    *("window_size_right", "has_softcap", "num_splits"),
)
"""The arguments of `get_scheduler_metadata` that are given, by name."""

NEEDED = ("PAGEDKV", "VARLEN", "LOCAL", "SOFTCAP", "SPLIT", "PACKGQA", "FP16")
"""Features that the backend declares, and a build can leave out (`FLASHATTENTION_DISABLE_...`)."""


class FlashAttn3Kernels:
    """Calls `fwd` with a schedule that `get_scheduler_metadata` makes once per step.

    Args:
        fwd: the operator.
        schedule: the operator `get_scheduler_metadata`.
    """

    # Its scheduler splits the keys of each request by its length.
    separate_decodes: ClassVar[bool] = False

    def __init__(self, fwd: Callable[..., Any], schedule: Callable[..., Any]) -> None:
        self._fwd = fwd
        self._schedule = schedule

    def __call__(self, call: Call) -> torch.Tensor | None:
        """As `Kernels`."""
        if not call.paged and call.requests.seq_lens.shape[0] > 1:
            call = _in_pages_of_one(call)
        requests, spec = call.requests, call.spec
        left, right = call.window
        if call.paged:
            where: dict[str, Any] = {
                "seqused_k": requests.seq_lens,
                "page_table": requests.block_table,
                "scheduler_metadata": self._planned(call),
            }
        else:
            where = {"cu_seqlens_k": requests.key_start_loc, "max_seqlen_k": max(requests.max_seq_len, 1)}
        _, lse, *_ = self._fwd(
            q=call.query,
            k=call.key,
            v=call.value,
            out=call.output,
            cu_seqlens_q=requests.query_start_loc,
            max_seqlen_q=requests.max_query_len,
            softmax_scale=spec.scale,
            is_causal=call.causal,
            window_size_left=left,
            window_size_right=-1 if call.causal else right,
            softcap=spec.logits_soft_cap or 0.0,
            num_splits=0,
            **where,
        )
        return cast(torch.Tensor, lse) if call.wants_lse else None

    def _planned(self, call: Call) -> torch.Tensor | None:
        """The step's schedule for layers like this one; None in a graph, where `fwd` makes it."""
        requests, spec = call.requests, call.spec
        # Replays have other lengths than the capture, so no schedule of its lengths may be part of the graph.
        if requests.captured:
            return None
        left, right = call.window
        plan = {
            "batch_size": requests.seq_lens.shape[0],
            "max_seqlen_q": requests.max_query_len,
            "max_seqlen_k": call.table_keys,
            "num_heads": spec.num_heads,
            "num_heads_k": spec.num_kv_heads,
            "headdim": spec.head_size,
            "headdim_v": spec.head_size_v,
            "qkv_dtype": call.query.dtype,
            "page_size": call.key.shape[1],
            "is_causal": call.causal,
            "window_size_left": left,
            "window_size_right": -1 if call.causal else right,
            "has_softcap": spec.logits_soft_cap is not None,
            "num_splits": 0,
        }
        key = tuple(plan.values())
        if key not in requests.schedules:
            starts, lens = requests.query_start_loc, requests.seq_lens
            requests.schedules[key] = self._schedule(seqused_k=lens, cu_seqlens_q=starts, **plan)
        return requests.schedules[key]


def _in_pages_of_one(call: Call) -> Call:
    """The call with its packed keys as pages of one token.

    Packed values are loaded in whole tiles, beyond the end of a request. A weight of 0 does not undo NaN, so
    one request could spoil the one before it. Tokens that a table names are loaded up to the end alone.
    """
    requests = call.requests
    if "pages of one" not in requests.kept:
        starts = requests.key_start_loc
        columns = torch.arange(max(requests.max_seq_len, 1), dtype=torch.int32, device=starts.device)
        # A table is read past a request's end, too: each entry names a token that exists.
        table = (starts[:-1, None] + columns).clamp_(max=max(call.key.shape[0] - 1, 0))
        requests.kept["pages of one"] = dataclasses.replace(
            requests, block_table=table, seq_lens=starts.diff(), schedules={}
        )
    paged = cast(Requests, requests.kept["pages of one"])
    key, value = call.key.unsqueeze(1), call.value.unsqueeze(1)
    return dataclasses.replace(call, requests=paged, key=key, value=value, paged=True)


class FlashAttn3Impl(FlashAttnImpl):
    """Attention in FlashAttention 3."""

    @classmethod
    def import_kernels(cls) -> Kernels:
        """FlashAttn3Kernels."""
        import_library("FLASH_ATTN_3")
        _check_build()
        operators = []
        for name, given in (("fwd", FWD), ("get_scheduler_metadata", SCHEDULE)):
            try:
                operator = getattr(torch.ops.flash_attn_3, name).default
            except AttributeError:
                raise BackendUnavailableError(
                    f"flash_attn_3._C registers no operator {name}; {_REMEDY}"
                ) from None
            known = {argument.name for argument in operator._schema.arguments}
            missing = ", ".join(sorted(set(given) - known))
            if missing:
                raise BackendUnavailableError(f"flash_attn_3::{name} does not take {missing}; {_REMEDY}")
            operators.append(operator)
        return FlashAttn3Kernels(*operators)


def _check_build() -> None:
    """BackendUnavailableError if the library was built without a declared feature."""
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return  # earlier builds have no such record
    sizes = [f"HDIM{size}" for size in (64, 96, 128, 192, 256)]
    lacking = [name for name in (*NEEDED, *sizes) if flags.get(f"FLASHATTENTION_DISABLE_{name}")]
    if lacking:
        switches = ", ".join(f"FLASHATTENTION_DISABLE_{name}" for name in lacking)
        raise BackendUnavailableError(f"flash-attn-3 was built with {switches}; build it without")


_REMEDY = "build flash-attn-3 from a current checkout of flash-attention/hopper"
