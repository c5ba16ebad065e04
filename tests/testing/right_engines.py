"""Correct backends with machinery: options of every type, caches, workspaces, threads, NumPy, messages."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import enum
import functools
import logging
import math
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from catching import variant
from right_attention import RightImpl

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.features import Feature
from attnplug.core.metadata import CommonAttentionMetadata

__all__ = ["ENGINES"]

_log = logging.getLogger("attnplug.tests.right_engines")


class InNumpy(RightImpl):
    """Logits and weights are NumPy arrays."""

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        stored = np.swapaxes(keys.float().numpy(), 1, 2) * np.float32(k_scale * self.spec.scale)
        return torch.from_numpy(query.float().numpy() @ stored)

    def weigh(self, logits, values, sinks, span):
        array, logs = logits.numpy(), sinks.numpy()[:, None]
        most = np.maximum(array.max(2, initial=-math.inf), logs)
        finite = np.where(np.isfinite(most), most, 0)
        weights = np.exp(array - finite[..., None])
        total = weights.sum(2) + np.exp(logs - finite)
        with np.errstate(divide="ignore"):
            lse = finite + np.log(total)
        shares = weights / np.maximum(total, np.finfo(np.float32).tiny)[..., None]
        return torch.from_numpy(shares @ values.numpy()), torch.from_numpy(lse.astype(np.float32))


class InThreads(RightImpl):
    """Heads are attended by a pool of threads that is made once, at the first call."""

    @staticmethod
    @functools.cache
    def pool() -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(2)

    def weigh(self, logits, values, sinks, span):
        half = max(logits.shape[0] // 2, 1)
        parts = [slice(0, half), slice(half, None)]
        weigh = super().weigh
        futures = [
            self.pool().submit(weigh, logits[part], values[part], sinks[part], span)
            for part in parts
            if logits[part].shape[0]
        ]
        outs, lses = zip(*(future.result() for future in futures), strict=True)
        return torch.cat(outs), torch.cat(lses)


class Compiled(RightImpl):
    """Kernels are made when a kind of layer is first run, and kept for the process; the first call warms up."""

    kernels: ClassVar[dict[Any, Callable[..., torch.Tensor]]] = {}

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        key = (self.spec.dtype, self.spec.head_size)
        if key not in self.kernels:
            _log.info("compiling for %s", key)
            self.kernels[key] = lambda query, keys: query.float() @ keys.float().mT
            self.kernels[key](torch.zeros_like(query), torch.zeros_like(keys))
        return self.kernels[key](query, keys) * (k_scale * self.spec.scale)


class Recent(RightImpl):
    """Masks of steps are kept in a bounded cache by lengths; nothing else is kept."""

    masks: ClassVar[collections.OrderedDict[tuple[int, int], torch.Tensor]] = collections.OrderedDict()

    def weigh(self, logits, values, sinks, span):
        key = (logits.shape[1], logits.shape[2])
        if key not in self.masks:
            self.masks[key] = torch.zeros(key, dtype=torch.float32, device="cpu")
        self.masks.move_to_end(key)
        while len(self.masks) > 8:
            self.masks.popitem(last=False)
        return super().weigh(logits + self.masks[key], values, sinks, span)


class Workspace(RightImpl):
    """One buffer for all layers of a thread, which grows to the largest step."""

    kept: ClassVar[threading.local] = threading.local()

    @property
    def buffers(self) -> list[torch.Tensor]:
        if not hasattr(self.kept, "buffers"):
            self.kept.buffers = [torch.empty(0)]
        return self.kept.buffers

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        shape = (*query.shape[:2], keys.shape[1])
        if self.buffers[0].numel() < math.prod(shape):
            # Made under inference_mode, a tensor could not be written outside it.
            with torch.inference_mode(False):
                self.buffers[0] = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
        found = self.buffers[0][: math.prod(shape)].view(shape)
        torch.matmul(query.float(), keys.float().mT, out=found)
        return found * (k_scale * self.spec.scale)


class Talkative(RightImpl):
    """Logs each call, and prints nothing."""

    def in_order(self, requests: list[int]) -> list[int]:
        _log.debug("attends %d requests", len(requests))
        return requests


class KeepsCommon(TorchMetadataBuilder):
    """Each step's metadata refers to what it was made of, as long as the step is alive."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.plans["common"] = common_attn_metadata
        return metadata


class Order(enum.Enum):
    """The order of requests."""

    FIRST = "first"
    LAST = "last"


@dataclasses.dataclass(frozen=True)
class ManyOptions:
    """One option of each type."""

    tile: int = dataclasses.field(default=16, metadata={"conformance": (1, 64)})
    shrink: float = dataclasses.field(default=1.0, metadata={"conformance": (0.5,)})
    label: str = "plain"
    inside: Literal["float32", "float64"] = "float32"
    order: Order = Order.FIRST
    most: int | None = None
    splits: tuple[int, ...] = dataclasses.field(default=(), metadata={"conformance": ((1, 3),)})
    exact: bool = True

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise ValueError("tile must be at least 1")


class WithOptions(RightImpl):
    """Every option changes how the same numbers are computed."""

    def in_order(self, requests: list[int]) -> list[int]:
        return requests if self.options.order is Order.FIRST else requests[::-1]

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        wide = getattr(torch, self.options.inside)
        scaled = query.to(wide) * (self.options.shrink * self.spec.scale)
        tiles = [scaled @ part.to(wide).mT for part in keys.split(self.options.tile, 1)]
        return (torch.cat(tiles, 2) * (k_scale / self.options.shrink)).float()


# What the machinery could break needs few kinds of layers.
_FEW: dict[str, Any] = {
    "features": Feature.LSE | Feature.SLIDING_WINDOW | Feature.DIRECT_KV,
    "supported_kv_cache_dtypes": ("auto",),
}
ENGINES = {
    **{each.__name__.upper(): variant(each.__name__.upper(), impl=each) for each in (InNumpy, InThreads)},
    **{
        each.__name__.upper(): variant(each.__name__.upper(), impl=each, **_FEW)
        for each in (Compiled, Recent, Workspace, Talkative)
    },
    "KEEPS_COMMON": variant("KEEPS_COMMON", impl=TorchImpl, builder=KeepsCommon, **_FEW),
    "WITH_OPTIONS": variant("WITH_OPTIONS", impl=WithOptions, Options=ManyOptions, **_FEW),
}
