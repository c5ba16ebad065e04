"""Stand-ins for the kernel libraries where there is no GPU: they take what the real ones take, and do nothing."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["FlashInfer", "Wrapper", "stand_ins"]


class Wrapper:
    """FlashInfer's wrappers: plans nothing, attends nothing."""

    def __init__(self, *given: Any, **fixed: Any) -> None:
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.empty(8, dtype=torch.uint8)
        self._paged_kv_last_page_len_buf = torch.zeros(1, dtype=torch.int32)

    def plan(self, *arrays: Any, **fixed: Any) -> None:
        self._paged_kv_indices_buf = next(each for each in arrays if isinstance(each, torch.Tensor))

    def run(self, query: torch.Tensor, *given: Any, out: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return out


class FlashInfer:
    """FlashInfer, as `attnplug.backends.flashinfer.library` gives it."""

    version = "none"

    def is_built(self, name: str) -> bool:
        return True

    def module_name(self, built: object) -> str:
        return str(built)

    def decode_wrapper(self, *given: Any) -> Wrapper:
        return Wrapper()

    prefill_wrapper = sink_wrapper = decode_wrapper


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, FlashAttention 2 and 4 and FlashInfer are these; keys are written as on a GPU, by Triton's launch."""
    import attnplug.backends.flashinfer.builder as flashinfer_builder
    import attnplug.backends.flashinfer.impl as flashinfer_impl
    import attnplug.backends.flashinfer.library as flashinfer_library
    from attnplug.backends.flash_attn import fa2, fa4
    from attnplug.backends.impl import BuiltinImpl
    from attnplug.ops.triton.kv_write import write_kv_cache

    fa2_kernels, fa4_kernels = fa2.FlashAttn2Kernels(_varlen_fwd), fa4.FlashAttn4Kernels(_forward)
    modules = {
        "flash_attn": {"flash_attn_varlen_func": _varlen_func},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"flash_attn_varlen_func": _varlen_func},
        "flashinfer": dict.fromkeys(
            ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"), Wrapper
        ),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {k: _module(k, v) for k, v in modules.items()}))
        for owner, name, value in (
            (fa2, "_kernels", lambda: fa2_kernels),
            (fa4, "_kernels", lambda: fa4_kernels),
            (flashinfer_builder, "library", FlashInfer),
            (flashinfer_library, "library", FlashInfer),
            (flashinfer_impl, "write_kv_cache", write_kv_cache),
            (BuiltinImpl, "_write", staticmethod(write_kv_cache)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _varlen_fwd(query: torch.Tensor, k: object, v: object, out: object, *given: object) -> list[torch.Tensor]:
    return [query, query]


def _forward(**given: object) -> None:
    pass


def _varlen_func(query: torch.Tensor, *given: object, **keywords: object) -> torch.Tensor:
    return query


def _module(name: str, members: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module
