"""TORCH with one feature declared and ignored: the kit catches it, whichever the feature is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from catching import variant
from wrong_numbers import misread

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device, Feature, LayerSpec
from attnplug.testing.conformance.cases import Case, designed_cases
from attnplug.testing.conformance.correctness import check_case
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import COMPUTED


@functools.cache
def torch_cases() -> list[Case]:
    return designed_cases(Target(TorchBackend, Device("cpu")))


def plain(field: str, spec: LayerSpec) -> Any:
    """The value of a field of a layer that asks for nothing."""
    if field == "head_size_v":
        return spec.head_size
    given = LayerSpec(num_heads=1, num_kv_heads=1, head_size=64)
    return "auto" if field == "kv_cache_dtype" else getattr(given, field)


@pytest.mark.parametrize("flag", COMPUTED, ids=lambda flag: flag.names()[0])
def test_a_feature_that_is_declared_and_ignored_is_caught(flag: Feature) -> None:
    field = flag.ask.field
    backend = variant("IGNORES", impl=misread(**{field: functools.partial(plain, field)}))
    target = Target(backend, Device("cpu"))
    asking = [case for case in torch_cases() if flag in case.spec.required_features()]
    caught = []
    for case in asking[:3]:
        try:
            check_case(target, case)
        except Exception as problem:  # an impl that expects other inputs may raise anything
            caught.append(problem)
    assert caught
