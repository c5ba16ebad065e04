"""Backends that take another scale than that of the KV head are caught, and the message names the mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import failures, variant

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, LayerSpec
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.deviation import deviation_of
from attnplug.testing.conformance.mistakes.mistake_recognition import recognise
from attnplug.testing.conformance.numbers import cache_writes
from attnplug.testing.conformance.target import Target

SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", kv_cache_dtype="fp8", head_scales=True
)


def for_all(pick: Callable[[tuple[float, ...]], float], *, reads_only: bool = False) -> type[TorchImpl]:
    """TORCH with one scale for all heads."""

    class OneScale(TorchImpl):
        is_writing = False

        def update_kv_cache(self, *given: Any) -> None:
            self.is_writing = True
            super().update_kv_cache(*given)
            self.is_writing = False

        def _scales(self, layer: Any, stored: torch.dtype) -> tuple[Any, Any]:
            scales = super()._scales(layer, stored)
            if not isinstance(scales[0], tuple) or (reads_only and self.is_writing):
                return scales
            return tuple((pick(each),) * len(each) for each in scales)  # type: ignore[return-value]

    return OneScale


def first(scales: tuple[float, ...]) -> float:
    return scales[0]


@pytest.mark.parametrize(
    ("pick", "words"),
    [(first, "of the first KV head used for all"), (max, "largest scales of the KV heads used for all")],
)
def test_one_scale_for_all_heads_is_named_for_each_source(pick: Any, words: str) -> None:
    found = failures(variant("ONE_SCALE", impl=for_all(pick)), cache_writes.scale_checks)
    assert set(found) == {
        f"cache/scales-of-heads-{source}-{name}"
        for source in ("numbers", "tensors", "layer")
        for name in ("fp8", "fp8_e4m3", "fp8_e5m2")
    }
    assert all(words in str(problem) for problem in found.values()), found


def test_a_write_with_the_scale_of_the_first_head_is_named() -> None:
    def stored(target: Target) -> Any:
        return (each for each in cache_writes.checks(target) if each.id.startswith("cache/stored-"))

    found = failures(variant("FIRST_SCALE", impl=for_all(first)), stored)
    assert set(found) == {f"cache/stored-heads-{name}" for name in ("fp8", "fp8_e4m3", "fp8_e5m2")}
    assert all("scale of the first KV head used for all" in str(problem) for problem in found.values())


def test_numbers_of_a_step_show_the_scale_of_the_first_head() -> None:
    target = Target(variant("FIRST_SCALE", impl=for_all(first, reads_only=True)), Device("cpu"))
    batch = target.batch(SPEC, [1, 5, 40], [300, 29, 40], k_scale=0.37, v_scale=1.9)
    found = Harness.of(target, batch).forward(batch)
    wrong = deviation_of(batch, found.output, None, batch.oracle())
    assert recognise(wrong).name == "scale of the first KV head used for all where keys are read"


def test_the_scales_of_the_kit_differ_from_head_to_head() -> None:
    batch = Target(variant("RIGHT"), Device("cpu")).batch(SPEC, [1], [9], k_scale=0.37, v_scale=1.9)
    assert isinstance(batch.tensors.k_scale, torch.Tensor)
    assert batch.tensors.k_scale.unique().numel() == SPEC.num_kv_heads
