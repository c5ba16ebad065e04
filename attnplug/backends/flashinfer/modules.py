"""The units that FlashInfer compiles.

The modules of layers with sinks, under names of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A unit that FlashInfer compiles, or loads if it is compiled.

    Args:
        template: "fa2", "fa3", or "cuda-cores" for decodes without tensor cores.
        q_dtype: of queries and outputs.
        kv_dtype: of the pages.
        head_size: of queries, keys and values.
        windowed: whether the layers have a window.
        capped: whether they have a soft cap.
        sinks: whether it is the kernel with sinks.
    """

    template: str
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int
    windowed: bool
    capped: bool
    sinks: bool

    def __str__(self) -> str:
        names = {"windowed": "window", "capped": "soft cap", "sinks": "sinks"}
        extras = [text for name, text in names.items() if getattr(self, name)]
        dtypes = " over ".join(str(each).removeprefix("torch.") for each in (self.q_dtype, self.kv_dtype))
        return ", ".join([f"{self.template} for head size {self.head_size}", dtypes, *extras])


@dataclasses.dataclass(frozen=True, slots=True)
class LatentModule:
    """A unit for latent attention that FlashInfer compiles, or loads if it is compiled.

    Args:
        template: "fa2" or "fa3".
        dtype: of queries, latents and outputs.
        sizes: elements of a latent, and of its rotated part.
    """

    template: str
    dtype: torch.dtype
    sizes: tuple[int, int]

    def __str__(self) -> str:
        rank, rope = self.sizes
        return f"{self.template} for latents of {rank}+{rope}, {str(self.dtype).removeprefix('torch.')}"


PREFILL, SINKS = "BatchPrefillWithPagedKVCacheWrapper", "BatchAttentionWithAttentionSinkWrapper"


def sink_keywords(built: Module) -> dict[str, Any]:
    """The arguments about its module, for the constructor of the sink wrapper."""
    return {
        "backend": built.template,
        "q_data_type": built.q_dtype,
        "kv_data_type": built.kv_dtype,
        "head_dim_qk": built.head_size,
        "head_dim_vo": built.head_size,
        "window_left": 0 if built.windowed else -1,  # only its presence is compiled in
    }


def sink_arguments(module: ModuleType, built: Module) -> tuple[list[Any], dict[str, Any]]:
    """The arguments from which the sink wrapper generates its module, under our name; nothing is compiled."""
    found: list[tuple[list[Any], dict[str, Any]]] = []

    def collect(*_: Any, jit_args: list[Any], jit_kwargs: dict[str, Any], **__: Any) -> None:
        found.append((jit_args, jit_kwargs))

    ask = _naming(module, collect)
    ask(float_workspace_buffer=torch.empty(0, dtype=torch.uint8, device="cpu"), **sink_keywords(built))
    return found[0]


def own_name(wrapper: str, kv_dtype: torch.dtype, qk: int, vo: int) -> str:
    """The name of a sink module, from the one that FlashInfer gives it."""
    kind = str(kv_dtype).removeprefix("torch.")
    return f"{wrapper}_kv_{kind}_d{qk}_{vo}"


@functools.cache
def named_sinks(module: ModuleType) -> Any:
    """The sink wrapper, with modules whose names have the KV dtype and the head sizes too."""
    # FlashInfer names them by query dtype, window and template alone. A second head size
    # would get the same name, and run the kernels of the first, which are already loaded.
    return _naming(module, getattr(module, PREFILL).__init__)


def _naming(module: ModuleType, init: Callable[..., None]) -> Any:
    """The sink wrapper, with `init` as the constructor that it passes `jit_args` to, under our name."""
    prefill: Any = getattr(module, PREFILL)
    sinks: Any = getattr(module, SINKS)

    class Named(prefill):  # type: ignore[misc]
        def __init__(self, *args: Any, jit_args: list[Any], **keywords: Any) -> None:
            uri, _, kv_dtype, _, _, qk, vo = jit_args[:7]
            init(self, *args, jit_args=[own_name(uri, kv_dtype, qk, vo), *jit_args[1:]], **keywords)

    class NamedSinks(sinks, Named):  # type: ignore[misc]
        pass

    return NamedSinks
