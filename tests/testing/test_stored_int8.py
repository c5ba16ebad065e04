"""A stored type is one row of the table and the function that rounds to it: int8 with the layer's scales, in TORCH."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from catching import variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import LayerSpec, kv_format
from attnplug.core.errors import LayoutError
from attnplug.core.kv_format import KVFormat, KVFormats
from attnplug.ops import write_kv_cache
from attnplug.testing.conformance import conformance_checks
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.oracle import stored_values

ROW = KVFormat(
    name="int8", family="int8", dtype="int8", size=1, layer_scales=True, rounding=f"{__name__}:round_to_int8"
)
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", kv_cache_dtype="int8")


def round_to_int8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest integers; values beyond the range become the largest ones."""
    return values.round_().clamp_(-127, 127).to(dtype)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_format, "TABLE", KVFormats((*kv_format.kv_formats(), ROW)))


@functools.cache
def checks(impl: type[TorchImpl] | None = None) -> dict[str, Check]:
    """The checks of int8 for TORCH with one type more, and perhaps an impl of its own."""
    stored = (*TorchBackend.supported_kv_cache_dtypes, "int8")
    backend = variant("TORCH_INT8", impl=impl, supported_kv_cache_dtypes=stored)
    found = conformance_checks(backend, device="cpu")
    return {each.id: each for each in found if "int8" in each.id and "int8_token_head" not in each.id}


def test_the_kit_tries_it_by_numbers_and_a_right_backend_passes_all_checks() -> None:
    found = checks()
    assert {
        "declared/kv_cache_dtype-int8",
        "cache/stored-int8",
        "cache/clamped-int8",
        "cache/sharing-int8",
        "cache/scales-of-numbers-int8",
        "cache/scales-of-tensors-int8",
        "cache/scales-of-layer-int8",
        "correct/mixed-h4x2-d64-float32-int8-b16-NHD",
        "correct/long-decode-h4x2-d64-float32-int8-b16-NHD",
    } <= set(found)
    for check in found.values():
        try:
            check()
        except CheckSkipped as skipped:
            pytest.fail(f"{check.id} was skipped: {skipped}")


class Rewrites(TorchImpl):
    """Writes other keys and values than those that it is given."""

    def change(self, stored: torch.Tensor) -> torch.Tensor:
        """The quotients to store, from the right ones."""
        raise NotImplementedError

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if self.spec.kv_cache_dtype == "int8":
            scales = self._scales(layer, torch.int8)
            key, value = (
                self.change(rows.float() / scale).mul_(scale).to(rows.dtype)
                for rows, scale in zip((key, value), scales, strict=True)
            )
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


class Truncates(Rewrites):
    def change(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.trunc()


class WrapsAround(Rewrites):
    def change(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored.round() + 128) % 256 - 128


class ForgetsScalesInWrites(TorchImpl):
    @staticmethod
    def _bind_write(key: Any, value: Any, k: Any, v: Any, slots: Any, scales: Any) -> Any:
        ones = (1.0, 1.0) if k.dtype == torch.int8 else scales
        return TorchImpl._bind_write(key, value, k, v, slots, ones)


class ForgetsScalesInReads(TorchImpl):
    def _scoring(self, layer: Any, device: Any, use_sinks: Any, stored: torch.dtype) -> Any:
        scoring = super()._scoring(layer, device, use_sinks, stored)
        return scoring if stored != torch.int8 else dataclasses.replace(scoring, value_scale=1.0)


@pytest.mark.parametrize(
    ("impl", "check", "says"),
    [
        (Truncates, "cache/stored-int8", "not rounded to the nearest value"),
        (Truncates, "declared/kv_cache_dtype-int8", "is wrong"),
        (WrapsAround, "cache/clamped-int8", "not as the largest finite value, 127"),
        (ForgetsScalesInWrites, "cache/stored-int8", "the scale left out"),
        (ForgetsScalesInWrites, "declared/kv_cache_dtype-int8", "is wrong"),
        (ForgetsScalesInReads, "declared/kv_cache_dtype-int8", "is wrong"),
        (ForgetsScalesInReads, "cache/scales-of-layer-int8", "scales of the engine's layer"),
    ],
)
def test_a_wrong_backend_is_caught(impl: type[TorchImpl], check: str, says: str) -> None:
    with pytest.raises(ConformanceError, match=says):
        checks(impl)[check]()


def test_the_oracle_and_the_pages_have_the_numbers_of_the_row() -> None:
    tokens = torch.tensor([0.5, -0.8, 1.24, 1e4]).expand(1, 2, 4)
    wanted = torch.tensor([1.0, -2.0, 2.0, 127.0]).expand(1, 2, 4)
    assert torch.equal(stored_values(tokens, SPEC, 0.5), wanted.double() * 0.5)
    pages = [torch.zeros(2, 16, 2, 4, dtype=torch.int8) for _ in "KV"]
    write_kv_cache(tokens, tokens, *pages, torch.tensor([17]), 0.5, 0.5)
    assert torch.equal(pages[0][1, 1].float(), wanted[0])


def test_without_the_rounding_no_numbers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kv_format, "TABLE", KVFormats((*kv_format.kv_formats(), dataclasses.replace(ROW, rounding=None)))
    )
    with pytest.raises(LayoutError, match=r"kv_cache_dtype='int8' must be one of float16, .*rotated4$"):
        stored_values(torch.zeros(1, 2, 64), SPEC)
    pages = [torch.zeros(2, 16, 2, 4, dtype=torch.int8) for _ in "KV"]
    with pytest.raises(LayoutError, match="must be a float type"):
        write_kv_cache(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), *pages, torch.tensor([17]))
