"""Mistakes that need no special layer, in backends that serve no plain one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from right_narrow import NARROW

from attnplug.backends.torch_native.impl import TorchImpl
from mutants.parts import Altered
from mutants.table import Table

__all__ = ["table"]

table = Table("narrow")


class KeepsLengths(Altered):
    """Keeps the lengths of the first step with as many requests."""

    lengths: Any = None

    def altered(self, made: Any, common: Any) -> Any:
        self.lengths = self.lengths or {}
        kept = self.lengths.setdefault(made.seq_lens.size, made.seq_lens.copy())
        return dataclasses.replace(made, seq_lens=kept)


class Clears(TorchImpl):
    """Leaves zeros in the last query row."""

    def attend(self, layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found = super().attend(layer, query, *rest, **options)
        query[-1:] = 0
        return found


class OwnBuffer(TorchImpl):
    """Gives its own buffer where it is given no output."""

    buffer = torch.empty(0)

    def forward(self, layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found = super().forward(layer, query, *rest, **options)
        if len(rest) > 4 and rest[4] is not None:
            return found
        if self.buffer.shape[1:] != found.shape[1:] or self.buffer.shape[0] < found.shape[0]:
            self.buffer = torch.empty_like(found)
        return self.buffer[: found.shape[0]].copy_(found)


class Astray(TorchImpl):
    """Writes the first token to the slot after the last one too."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        more = torch.cat([slot_mapping[-1:], slot_mapping])
        more[0] = slot_mapping.max() + 1
        key, value = (torch.cat([each[:1], each[: slot_mapping.numel()]]) for each in (key, value))
        super().update_kv_cache(layer, key, value, kv_cache, more)


class Draws(TorchImpl):
    """Draws a random number in each call."""

    def attend(self, *given: Any, **options: Any) -> torch.Tensor:
        torch.rand(1)
        return super().attend(*given, **options)


_DIRECT = ("DIRECT_ONLY", "DIRECT_NON_CAUSAL_ONLY", "ENCODER_ONLY", "HALF_OF_ENCODERS_ONLY")
_KINDS = (
    *("FP8_ONLY", "WINDOWS_ONLY", "SINKS_ONLY", "CAPS_ONLY", "CHUNKS_ONLY", "SLOPES_ONLY", "SPANS_ONLY"),
    *("LSE_ONLY", "CROSS_ONLY", "NON_CAUSAL_ONLY", "OTHER_VALUES_ONLY", "WINDOWS_WITH_SINKS_ONLY"),
    *("FP8_WINDOWS_WITH_CAPS_ONLY", *_DIRECT),
)
for kind in _KINDS:
    declared = NARROW[kind]
    table.add(
        f"{kind}-KEEPS_LENGTHS | builder/build-full | step 2 of one builder", builder=KeepsLengths, **declared
    )
    table.add(f"{kind}-CLEARS | tensors/inputs-kept | query", impl=Clears, **declared)
    table.add(
        f"{kind}-OWN_BUFFER | state/outputs-apart | changed when later steps ran", impl=OwnBuffer, **declared
    )
    table.add(f"{kind}-DRAWS | state/settings-kept | random", impl=Draws, **declared)
    if kind not in _DIRECT:
        table.add(f"{kind}-ASTRAY | cache/only-slots-written | no slot names it", impl=Astray, **declared)
