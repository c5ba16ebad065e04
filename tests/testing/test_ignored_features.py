"""TORCH with one feature declared and ignored: the kit catches it, whichever the feature is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from catching import torch_cases, variant
from mutants.numbers import misread

from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.core import Device, Feature, LayerSpec
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import COMPUTED


def plain(field: str, spec: LayerSpec) -> Any:
    """The value of a field of a layer that asks for nothing."""
    if field == "head_size_v":
        return spec.head_size
    given = LayerSpec(num_heads=1, num_kv_heads=1, head_size=64)
    return "auto" if field == "kv_cache_dtype" else getattr(given, field)


# A layer that ignores `invariance` has right numbers, and `invariance/*` compares its bits.
@pytest.mark.parametrize(
    "flag", COMPUTED & ~(Feature.MLA | Feature.INVARIANCE), ids=lambda flag: flag.names()[0]
)
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


class PlainScale(TorchMLAImpl):
    """Scales the logits of latents as a plain layer of heads that long does."""

    def decode(self, *given: Any) -> None:
        self.softmax_scale = self.spec.replace(mla=None).scale
        super().decode(*given)


def test_latent_attention_that_is_declared_and_read_plainly_is_caught() -> None:
    parts = {
        "get_name": staticmethod(lambda: "IGNORES"),
        "get_impl_cls": classmethod(lambda cls: PlainScale),
    }
    target = Target(type("IGNORES", (TorchMLABackend,), parts), Device("cpu"))
    for case in designed_cases(target)[:3]:
        assert Feature.MLA in case.spec.required_features()
        with pytest.raises(ConformanceError, match="scale of the latent, not of the query"):
            check_case(target, case)
