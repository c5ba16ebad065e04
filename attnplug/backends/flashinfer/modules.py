"""The units that FlashInfer compiles."""

from __future__ import annotations

import dataclasses

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
