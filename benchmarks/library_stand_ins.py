"""Replacements of the kernel libraries for machines without a GPU: they take what the real ones take, and do nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

from attnplug.backends.flashinfer.library import Library

__all__ = ["flashinfer", "stand_ins"]


class Wrapper:
    """FlashInfer's wrappers: plans nothing, attends nothing."""

    def __init__(self, workspace: torch.Tensor, *given: Any, **fixed: Any) -> None:
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.empty(8, dtype=torch.uint8)
        self._paged_kv_last_page_len_buf = self._paged_kv_indices_buf = torch.zeros(1, dtype=torch.int32)

    def plan(self, *arrays: Any, **fixed: Any) -> None:
        self._paged_kv_indices_buf = next(each for each in arrays if isinstance(each, torch.Tensor))

    def run(self, query: torch.Tensor, *given: Any, out: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return out


class FlashInfer(Library):
    """FlashInfer as the backend finds it, with all its kernels built."""

    def is_built(self, name: str) -> bool:
        return True

    is_prebuilt = is_built

    def module_name(self, built: object) -> str:
        return str(built)


def flashinfer() -> FlashInfer:
    """Stands for `attnplug.backends.flashinfer.library.library`."""
    return FlashInfer(_module("flashinfer", _FLASHINFER), Version("0.7.2"))


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, FlashAttention 2 and 4 and FlashInfer are these; keys are written as on a GPU, by Triton's launch."""
    import attnplug.backends.flashinfer.builder as flashinfer_builder
    import attnplug.backends.flashinfer.library as flashinfer_library
    from attnplug.backends.flash_attn import fa2, fa4
    from attnplug.backends.flash_attn.impl import FlashAttnImpl
    from attnplug.backends.impl import BuiltinImpl
    from attnplug.ops.triton.kv_write import BoundWrite

    # The arguments of FlashAttention 4 are checked.
    arguments = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fa4.FORWARD]
    forward: Any = functools.partial(_forward)
    forward.__signature__ = inspect.Signature(arguments)
    extension = types.SimpleNamespace(varlen_fwd=_extension_call, fwd_kvcache=_extension_call)
    interface = types.SimpleNamespace(_flash_attn_fwd=forward)
    modules = {
        "flash_attn": {"flash_attn_varlen_func": _varlen_func},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"flash_attn_varlen_func": _varlen_func},
        "flashinfer": _FLASHINFER,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {k: _module(k, v) for k, v in modules.items()}))
        for owner, name, value in (
            (fa2, "import_library", lambda backend: extension),
            (fa4, "import_library", lambda backend: interface),
            (flashinfer_builder, "library", flashinfer),
            (flashinfer_library, "library", flashinfer),
            (BuiltinImpl, "_bind_write", BoundWrite),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        FlashAttnImpl.kernels.cache_clear()
        stack.callback(FlashAttnImpl.kernels.cache_clear)
        yield


def _extension_call(query: torch.Tensor, *given: object) -> list[torch.Tensor]:
    """Its result is as large as its queries: output, LSE, and what else there is."""
    return [query, query]


def _forward(**given: object) -> None:
    pass


def _varlen_func(query: torch.Tensor, *given: object, **keywords: object) -> torch.Tensor:
    return query


_FLASHINFER: dict[str, Any] = dict.fromkeys(
    ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"), Wrapper
)


def _module(name: str, members: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module
