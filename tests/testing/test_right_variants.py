"""Correct backends that are unusual pass the kit: in how they compute, and in the little that they declare."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from catching import variant
from right_attention import RIGHT_IMPLS, RightImpl

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, Device, Feature
from attnplug.core.blocks import MultipleOf
from attnplug.core.spec import Phase
from attnplug.testing.conformance.cases import Case, designed_cases
from attnplug.testing.conformance.check import CheckSkipped
from attnplug.testing.conformance.correctness import check_case
from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.target import Target

_NEEDED = {
    Feature.CROSS: Feature.NON_CAUSAL,
    Feature.ENCODER: Feature.NON_CAUSAL | Feature.DIRECT_KV,
}
"""Features without which no layer could ask for another."""
_OF_ONE_SIZE = TorchBackend.features & ~Feature.HEAD_SIZE_V


def alone(feature: Feature) -> type[AttentionBackend]:
    stored = ("auto", "fp8_e4m3") if feature is Feature.FP8_KV else ("auto",)
    return variant(
        f"ONLY_{feature.name}",
        features=feature | _NEEDED.get(feature, Feature(0)),
        supported_kv_cache_dtypes=stored,
    )


NARROW: dict[str, dict[str, Any]] = {
    "PLAIN": {"features": Feature(0), "supported_kv_cache_dtypes": ("auto",)},
    "HALF": {"supported_dtypes": ("float16",)},
    "BFLOAT": {"supported_dtypes": ("bfloat16",)},
    "STORED_AS_NAMED": {"supported_kv_cache_dtypes": ("bfloat16",), "features": Feature.SLIDING_WINDOW},
    "ONE_HEAD_SIZE": {"get_supported_head_sizes": lambda cls: (80,), "features": _OF_ONE_SIZE},
    "ODD_HEAD_SIZE": {"get_supported_head_sizes": lambda cls: (20,), "features": _OF_ONE_SIZE},
    "ONE_BLOCK_SIZE": {"get_supported_kernel_block_sizes": lambda cls, spec=None, device=None: (24,)},
    "BLOCKS_OF_32": {
        "get_supported_kernel_block_sizes": lambda cls, spec=None, device=None: (MultipleOf(32),)
    },
    "HND": {"supported_kv_cache_layouts": lambda cls: ("HND",)},
    "PREFILL": {"supported_phases": (Phase.PREFILL,)},
    "DECODE": {"supported_phases": (Phase.DECODE,)},
}
NARROWS = {name: variant(name, **declared) for name, declared in NARROW.items()}
NARROWS |= {f"ONLY_{each.name}": alone(each) for each in TorchBackend.features}
WIDE = {impl.__name__.upper(): variant(impl.__name__.upper(), impl=impl) for impl in RIGHT_IMPLS}


@functools.cache
def torch_cases() -> list[Case]:
    """The numeric cases of TORCH, whose declarations the variants in `WIDE` share."""
    return designed_cases(Target(TorchBackend, Device("cpu")))


def failures(backend: type[AttentionBackend]) -> dict[str, str]:
    """What each failing check of the whole kit says, by check id."""
    found = {}
    for check in conformance_checks(backend, device="cpu"):
        if check.id.startswith("declaration/light"):
            continue  # a class of a test module cannot be imported by a child process
        try:
            check()
        except CheckSkipped:
            continue
        except Exception as problem:
            found[check.id] = str(problem)
    return found


@pytest.mark.parametrize("impl", RIGHT_IMPLS, ids=lambda impl: impl.__name__)
def test_an_unusual_computation_is_right(impl: type[RightImpl]) -> None:
    target = Target(WIDE[impl.__name__.upper()], Device("cpu"))
    # Each implementation is tried with other cases, so that all cases are run here.
    for case in torch_cases()[RIGHT_IMPLS.index(impl) :: len(RIGHT_IMPLS)]:
        check_case(target, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WIDE, *NARROWS])
def test_the_whole_kit_passes(name: str) -> None:
    assert failures((WIDE | NARROWS)[name]) == {}
