"""The proofs of a KV format pass for the codecs that attnplug ships, and name what is wrong with others."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device
from attnplug.core.kv_format import KVFormat, kv_format, kv_formats
from attnplug.ops.kv_codecs import Int8TokenHeadCodec, NVFP4Codec, Rotated4Codec
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError
from attnplug.testing.conformance.numbers import kv_formats as proofs
from attnplug.testing.conformance.target import Target
from attnplug.testing.pages import encoding_fault

Planes = tuple[torch.Tensor, ...]


def failures(row: KVFormat) -> dict[str, str]:
    """The proofs that a format fails, with their words."""
    found = {}
    for name, (prove, _) in proofs._PROOFS.items():
        try:
            proofs._run(prove, row)
        except CheckSkipped:
            continue
        except ConformanceError as problem:
            found[name] = str(problem)
    return found


@pytest.mark.parametrize("name", [row.name for row in kv_formats() if row.codec])
def test_a_shipped_format_passes_all_its_proofs(name: str) -> None:
    assert failures(kv_format(name)) == {}


def test_the_kit_lists_the_proofs_of_each_format_that_a_backend_reads() -> None:
    ids = [check.id for check in proofs.checks(Target(TorchBackend, Device("cpu")))]
    assert ids[:2] == ["format/nvfp4-planes", "format/nvfp4-errors"]
    assert len(ids) == len(proofs._PROOFS) * sum(row.codec is not None for row in kv_formats())


class SwappedNibbles(NVFP4Codec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        return super().decode((planes[0] >> 4 | planes[0] << 4, planes[1]), scale)


class NoSign(NVFP4Codec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        return super().decode((planes[0] & 0x77, planes[1]), scale)


class LateScales(NVFP4Codec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        return super().decode(
            (planes[0], planes[1].view(torch.uint8).roll(1, -1).view(planes[1].dtype)), scale
        )


class NoLayerScale(NVFP4Codec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        return super().decode(planes, 1.0)


class TiesUp(NVFP4Codec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        return super().encode(rows * 1.2, scale)


class ScaleOfAll(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        own = (rows.abs().amax() / 127).clamp_min(2.0**-120).expand(*rows.shape[:-1], 1)
        return (rows / own).round().clamp(-127, 127).to(torch.int8), own.contiguous()


class ToZero(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        own = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-120)
        return (rows / own).trunc().clamp(-127, 127).to(torch.int8), own


class Unsigned(Int8TokenHeadCodec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        return super().decode((planes[0].view(torch.uint8), planes[1]), scale)


class NoSaturation(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        own = rows.abs().amax(-1, keepdim=True) / 127
        return (rows / own).round().to(torch.int8), own


class KeepsScale(Int8TokenHeadCodec):
    last: torch.Tensor | None = None

    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        data, own = super().encode(rows, scale)
        kept, self.last = self.last, own[:1].clone() if own.dim() == 2 else None
        return data, own if kept is None else torch.maximum(own, kept.expand_as(own))


class ChangesRows(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        return super().encode(rows.mul_(1.5).div_(1.5), scale)


class UsesLayerScale(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        return super().encode(rows / scale, scale)


class LeastSquares(Rotated4Codec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        data, own = super().encode(rows, scale)
        return data, (own.float() * 0.988).half()


class NotTurnedBack(Rotated4Codec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        return self.decode_rotated(planes)


class NoSigns(Rotated4Codec):
    def rotate(self, rows: torch.Tensor, back: bool = False) -> torch.Tensor:
        return self._transformed(rows) if back else super().rotate(rows)


class WideSteps(Rotated4Codec):
    _STEP = 0.46


class BytesLate(Rotated4Codec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        return super().decode((planes[0].roll(1, -1), planes[1]), scale)


class Doubled(Rotated4Codec):
    def rotate(self, rows: torch.Tensor, back: bool = False) -> torch.Tensor:
        return super().rotate(rows, back) * (0.5 if back else 2.0)


class DrawsByDefault(Rotated4Codec):
    def __init__(self, head_size: int) -> None:
        super().__init__(head_size)
        drawn = torch.rand(head_size, generator=torch.Generator().manual_seed(head_size))
        self.signs = torch.where(drawn < 0.5, 1.0, -1.0)


class DecodesEarlierTokens(Int8TokenHeadCodec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        found = super().decode(planes, scale)
        return found if found.dim() < 3 or len(found) < 24 else torch.cat([found[:20], found[:-20]])


class CountsIn16Bits(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        data, own = super().encode(rows, scale)
        data.view(-1, data.shape[-1])[2**15 :] = 0
        return data, own


class NeedsRows(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        return super().encode(rows.reshape(*rows.shape[:-1], -1, 4).flatten(-2), scale)


class LosesOddTails(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        data, own = super().encode(rows, scale)
        data[..., rows.shape[-1] // 16 * 16 :] = 0
        return data, own


class OnePlane(Int8TokenHeadCodec):
    kept: dict[torch.Size, torch.Tensor]

    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        data, own = super().encode(rows, scale)
        self.__dict__.setdefault("kept", {})
        return self.kept.setdefault(data.shape, data).copy_(data), own


class DensePlanes(Int8TokenHeadCodec):
    def decode(self, planes: Planes, scale: float) -> torch.Tensor:
        data = planes[0]
        return super().decode(
            (data.as_strided(data.shape, torch.empty(data.shape).stride()), planes[1]), scale
        )


class Draws(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        torch.manual_seed(0)
        return super().encode(rows, scale)


class LongPrompts(Int8TokenHeadCodec):
    def encode(self, rows: torch.Tensor, scale: float) -> Planes:
        data, own = super().encode(rows, scale)
        return data, own * 1.01 if rows.dim() == 3 and len(rows) >= 1024 else own


@pytest.mark.parametrize(
    ("codec", "proof", "words"),
    [
        (SwappedNibbles, "errors", "Gaussian rows have an error of 1.[0-9]+, more than the declared 0.1"),
        (NoSign, "errors", "more than the declared"),
        (LateScales, "errors", "more than the declared"),
        (NoLayerScale, "errors", "more than the declared"),
        (TiesUp, "errors", "more than the declared"),
        (
            ScaleOfAll,
            "rows",
            "alone, rows have other bytes in the plane data: the bytes of a row depend on other",
        ),
        (ToZero, "errors", "more than the declared"),
        (Unsigned, "errors", "more than the declared"),
        (NoSaturation, "edges", "NaN or infinite|a row of zeros gives back other numbers"),
        (KeepsScale, "rows", "rows have other bytes in the plane scale"),
        (DecodesEarlierTokens, "decoded", "as tokens and heads, rows give back other numbers than alone"),
        (CountsIn16Bits, "decoded", "among 67,200, rows give back other numbers than alone"),
        (LongPrompts, "decoded", "among 67,200, rows give back other numbers than alone"),
        (LosesOddTails, "errors", "with head_size=72: Gaussian rows have an error"),
        (OnePlane, "planes", "encode changes the planes that it gave before"),
        (DensePlanes, "decoded", "in views with strides, rows give back other numbers than alone"),
        (Draws, "planes", "changes torch's random numbers"),
        (ChangesRows, "planes", "encode changes the rows that it is given"),
        (
            DrawsByDefault,
            "defaults",
            "the plane data has other bytes while torch's default dtype is torch.float64",
        ),
        (NeedsRows, "planes", "without a row: raised RuntimeError"),
        (UsesLayerScale, "scales", "the layer's scale changes the bytes"),
        (LeastSquares, "errors", "products with the rows themselves are .*% smaller"),
        (NotTurnedBack, "errors", "more than the declared"),
        (NoSigns, "rotation", "rotate with back=True does not undo rotate"),
        (WideSteps, "errors", "more than the declared"),
        (BytesLate, "errors", "more than the declared"),
        (Doubled, "rotation", "rotate changes the norm of rows"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_codec_fails_the_proof_that_names_its_mistake(codec: Any, proof: str, words: str) -> None:
    shipped = next(row for row in kv_formats() if row.codec and row.codec.endswith(codec.__base__.__name__))
    found = failures(dataclasses.replace(shipped, codec=f"{__name__}:{codec.__name__}"))
    assert proof in found, found
    assert re.search(words, found[proof]), found[proof]


def test_bounds_that_are_far_too_wide_are_told() -> None:
    found = failures(dataclasses.replace(kv_format("nvfp4"), rms_error=0.5))
    assert "less than half of the declared 0.5" in found["errors"]


def test_a_writer_may_round_otherwise_but_not_worse() -> None:
    rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    codec = Int8TokenHeadCodec(64)
    data, own = codec.encode(rows, 1.0)
    wanted = codec.decode((data, own), 1.0).double()
    assert encoding_fault(wanted, wanted, rows) is None
    halves_up = (rows * (1 / own) + 0.5).floor().clamp(-127, 127).to(torch.int8)
    assert encoding_fault(codec.decode((halves_up, own), 1.0).double(), wanted, rows) is None
    coarse = own.bfloat16().float()
    assert "times that of the codec" in str(
        encoding_fault(codec.decode((data, coarse), 1.0).double(), wanted, rows)
    )
    wanted[0, 0] = torch.nan
    assert "NaN" in str(encoding_fault(wanted, codec.decode((data, own), 1.0).double(), rows))
