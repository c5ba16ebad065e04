"""Backends with wrong numbers: they ignore a feature or compute it by another convention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from catching import Wrong, variant
from wrong_spans import CutsSpansByWindows, MergesSpans, SeesSpansBackwards
from wrong_steps import (
    AddsNoise,
    AlignsAtTheStart,
    BiasesByKeyPosition,
    CapsAfterAlibi,
    CapsAfterTheMask,
    DividesZeroByZero,
    ForgetsTheSinkInTheLse,
    GivesTheSinkAValue,
    IgnoresCausality,
    IgnoresStoredScales,
    InterleavesHeads,
    IsAlwaysCausal,
    MergesTwoSinks,
    MissesTheNewestToken,
    ScalesAfterTheCap,
    ScalesAlibi,
    SwapsStoredScales,
    TakesSinksInBaseTwo,
    WritesBaseTwo,
    WritesHeadsFirst,
    WritesPlusInfinity,
)

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import LayerSpec, LayerTensors

__all__ = ["WRONG_NUMBERS", "WrongNumbers"]


@dataclasses.dataclass(frozen=True)
class WrongNumbers(Wrong):
    """A wrong backend; `check` is the id of a check that fails, `asked` a pattern of all that can.

    `says` is the name of the known mistake, empty for unknown numbers.
    """

    asked: str


def misread(**changes: Callable[[LayerSpec], Any]) -> type[TorchImpl]:
    """TORCH's own kernels, for a layer with some fields changed."""

    class Misread(TorchImpl):
        def _bind(
            self,
            spec: LayerSpec,
            layer_name: str,
            tensors: LayerTensors,
            kv_sharing_target_layer_name: str | None = None,
            options: Any = None,
        ) -> None:
            taken = spec.replace(**{name: change(spec) for name, change in changes.items()})
            kept = dataclasses.replace(
                tensors,
                sinks=tensors.sinks if taken.has_sinks else None,
                alibi_slopes=tensors.alibi_slopes if taken.has_alibi else None,
            )
            super()._bind(taken, layer_name, kept, kv_sharing_target_layer_name, options)

    return Misread


def wider(before: int, after: int) -> Callable[[LayerSpec], tuple[int, int]]:
    """A window of so many keys more on each side that has a limit."""

    def window(spec: LayerSpec) -> tuple[int, int]:
        left, right = spec.window
        return (
            left + before if left >= 0 else -1,
            right + after if right >= 0 and not spec.causal else right,
        )

    return window


class ForgetsWindowsOfDecodes(TorchImpl):
    """One of two kernels is right: decodes of one token each see the whole request."""

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: TorchMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        def attended(out: torch.Tensor, lse: torch.Tensor | None) -> None:
            tensors = (layer, query, key, value, kv_cache, attn_metadata, out)
            super(ForgetsWindowsOfDecodes, self).attend(*tensors, output_lse=lse, **options)

        attended(output, output_lse)
        spec, self.spec = self.spec, self.spec.replace(window=(-1, -1))
        whole, whole_lse = output.clone(), None if output_lse is None else output_lse.clone()
        attended(whole, whole_lse)
        self.spec = spec
        rows = attn_metadata.query_starts[:-1][attn_metadata.query_lens == 1]
        output[rows] = whole[rows]
        if output_lse is not None and whole_lse is not None:
            output_lse[rows] = whole_lse[rows]
        return output


class ReadsTheNextRow(TorchMetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return dataclasses.replace(metadata, block_table=metadata.block_table.roll(-1, 0))


_PLAIN = "mixed-h4x2-d64-float32-b16-NHD"


def _wrong(
    name: str,
    part: type[TorchImpl] | type[TorchMetadataBuilder],
    asked: str,
    alone: str,
    says: str | None,
    where: str = _PLAIN,
) -> WrongNumbers:
    """A backend that fails the case whose only feature is `alone`."""
    builder, impl = (part, None) if issubclass(part, TorchMetadataBuilder) else (None, part)
    return WrongNumbers(
        name,
        variant(name.upper(), builder=builder, impl=impl),
        f"correct/{where}{alone}",
        says or "",
        f"*{asked}",
    )


WRONG_NUMBERS = (
    _wrong(
        "ignores-windows",
        misread(window=lambda spec: (-1, -1)),
        "window*",
        "-window6.0",
        "sliding window ignored",
    ),
    _wrong(
        "ignores-windows-of-decodes",
        ForgetsWindowsOfDecodes,
        "window*",
        "-window6.0",
        "sliding window ignored",
    ),
    _wrong("ignores-chunks", misread(chunk_size=lambda spec: None), "chunk*", "-chunk24", "chunks ignored"),
    _wrong(
        "ignores-soft-caps", misread(logits_soft_cap=lambda spec: None), "cap3*", "-cap3", "soft cap ignored"
    ),
    _wrong("ignores-sinks", misread(has_sinks=lambda spec: False), "sinks*", "-sinks", "sinks ignored"),
    _wrong("ignores-alibi", misread(has_alibi=lambda spec: False), "alibi*", "-alibi", "ALiBi ignored"),
    _wrong(
        "ignores-causality", IgnoresCausality, "mixed-h4x2-d64-float32-b16-NHD*", "", "causal mask ignored"
    ),
    _wrong(
        "ignores-scales",
        misread(scale=lambda spec: None),
        "scale0.15*",
        "-scale0.15",
        "softmax scale ignored",
    ),
    _wrong(
        "ignores-fp8-scales",
        IgnoresStoredScales,
        "fp8*",
        "",
        "fp8 scales ignored",
        "mixed-h4x2-d64-float32-fp8-b16-NHD",
    ),
    _wrong(
        "swaps-fp8-scales",
        SwapsStoredScales,
        "fp8*",
        "",
        "k_scale and v_scale swapped",
        "mixed-h4x2-d64-float32-fp8-b16-NHD",
    ),
    _wrong("is-always-causal", IsAlwaysCausal, "non_causal*", "-non_causal", "non-causal taken as causal"),
    _wrong("aligns-at-the-start", AlignsAtTheStart, "h*x*float32-b16-NHD", "", "causal aligned at the start"),
    _wrong(
        "misses-the-newest-token",
        MissesTheNewestToken,
        "h*x*float32-b16-NHD",
        "",
        "queries one position early",
    ),
    _wrong(
        "counts-a-window-without-the-query",
        misread(window=wider(1, 0)),
        "window*",
        "-window6.0",
        "window off by one: a key too many before the query",
    ),
    _wrong(
        "counts-a-window-with-the-query",
        misread(window=wider(-1, 0)),
        "window*",
        "-window6.0",
        "window off by one: a key too few before the query",
    ),
    _wrong(
        "looks-ahead-too-far",
        misread(window=wider(0, 1)),
        "window40.40*",
        "-non_causal-window40.40",
        "window off by one: a key too many after the query",
    ),
    _wrong(
        "takes-chunks-as-windows",
        misread(chunk_size=lambda spec: None, window=lambda spec: ((spec.chunk_size or 0) - 1, 0)),
        "chunk*",
        "-chunk24",
        "chunk taken as window",
    ),
    _wrong("caps-after-the-mask", CapsAfterTheMask, "NHD-cap3*", "-cap3", "soft cap after the mask"),
    _wrong("caps-after-alibi", CapsAfterAlibi, "cap3*alibi*", "-cap3-alibi", "ALiBi before the cap"),
    _wrong("scales-after-the-cap", ScalesAfterTheCap, "cap3*", "-scale0.15-cap3", "scale after the cap"),
    _wrong("scales-alibi", ScalesAlibi, "alibi*", "-alibi", "ALiBi before the scale"),
    _wrong(
        "shifts-the-lse-by-alibi", BiasesByKeyPosition, "alibi-lse*", "-alibi-lse", "ALiBi of key positions"
    ),
    _wrong(
        "scales-twice",
        misread(scale=lambda spec: spec.scale**2),
        "h*x*float32-b16-NHD",
        "",
        "scale applied twice",
    ),
    _wrong("interleaves-heads", InterleavesHeads, "h4x2-d64-float32-b16*", "", "head groups interleaved"),
    _wrong(
        "gives-the-sink-a-value",
        GivesTheSinkAValue,
        "NHD-sinks*",
        "-sinks",
        "sink in the numerator, with the first key's value",
    ),
    _wrong("merges-two-sinks", MergesTwoSinks, "sinks*", "-sinks", "sink counted twice"),
    _wrong("takes-sinks-in-base-two", TakesSinksInBaseTwo, "sinks*", "-sinks", "sink in base 2"),
    _wrong(
        "forgets-the-sink-in-the-lse",
        ForgetsTheSinkInTheLse,
        "sinks*lse*",
        "-sinks-lse",
        "LSE without the sink",
    ),
    _wrong("writes-the-lse-in-base-two", WritesBaseTwo, "lse*", "-lse", "LSE in base 2"),
    _wrong("writes-the-lse-heads-first", WritesHeadsFirst, "lse*", "-lse", "LSE transposed"),
    _wrong(
        "writes-plus-infinity",
        WritesPlusInfinity,
        "lse*",
        "-lse",
        "LSE of +inf where nothing is seen",
        "idle-h4x2-d64-float32-b16-NHD",
    ),
    _wrong(
        "divides-zero-by-zero",
        DividesZeroByZero,
        "idle*",
        "-lse",
        "NaN where nothing is seen",
        "idle-h4x2-d64-float32-b16-NHD",
    ),
    _wrong(
        "reads-the-next-row",
        ReadsTheNextRow,
        "alike-*",
        "-lse",
        "pages of the next request",
        "alike-h4x2-d64-float32-b16-NHD",
    ),
    _wrong("ignores-spans", misread(mm_prefix=lambda spec: False), "spans*", "-spans", "spans ignored"),
    _wrong(
        "sees-spans-backwards",
        SeesSpansBackwards,
        "NHD-window6.0-spans",
        "-window6.0-spans",
        "spans seen by later tokens only",
    ),
    _wrong(
        "cuts-spans-by-windows",
        CutsSpansByWindows,
        "NHD-window6.0-spans",
        "-window6.0-spans",
        "window or chunk cuts spans",
    ),
    _wrong(
        "cuts-spans-by-chunks",
        CutsSpansByWindows,
        "NHD-chunk24-spans",
        "-chunk24-spans",
        "window or chunk cuts spans",
    ),
    _wrong("merges-spans", MergesSpans, "spans*", "-spans", "spans side by side merged"),
    _wrong("adds-noise", AddsNoise, "mixed-h4x2-d64-float32-b16-NHD*", "", None),
)
"""One for each feature that could be ignored and each convention that could differ."""
