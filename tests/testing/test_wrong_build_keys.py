"""A build that depends on more of a layer than `build_key` has is caught, also where only one field is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import pytest
from catching import failures, variant

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import AttentionBackend
from attnplug.core.errors import PolicyError
from attnplug.testing.conformance.builders import kv_group_builds

FIELDS = ("window", "chunk_size", "logits_soft_cap", "scale", "mm_prefix")


@dataclasses.dataclass(eq=False)
class Planned(TorchMetadata):
    """A step with the values of a layer that its build has read."""

    planned: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class PlanningImpl(TorchImpl):
    """Attends with the values that the build has read instead of its own."""

    def attend(self, *given: Any, **asked: Any) -> Any:
        own, self.spec = self.spec, self.spec.replace(**given[5].planned)
        try:
            return super().attend(*given, **asked)
        finally:
            self.spec = own


@dataclasses.dataclass(frozen=True)
class Options:
    factor: float = dataclasses.field(default=1.0, metadata={"conformance": (2.0,)})


class OptionImpl(PlanningImpl):
    """Takes apart of the scale what its option says, and gives it back, by the factor that the build has read."""

    def attend(self, *given: Any, **asked: Any) -> Any:
        own = self.spec
        factor = given[5].planned["factor"] / self.options.factor
        self.spec = own.replace(scale=own.scale * factor)
        try:
            return TorchImpl.attend(self, *given, **asked)
        finally:
            self.spec = own


class LateImpl(TorchImpl):
    """Refuses a value of its option when it is called, such as one that the device lacks."""

    def attend(self, *given: Any, **asked: Any) -> Any:
        if self.options.factor != 1.0:
            raise PolicyError("factor", self.options.factor, "needs another device")
        return super().attend(*given, **asked)


def planning(read: Any, key: Any) -> type[TorchMetadataBuilder]:
    """A builder that keeps what `read` gives of its layer's impl; `key` gives its build_key of that."""

    class Builder(TorchMetadataBuilder):
        @property
        def build_key(self) -> Hashable:
            return key(self._planned())

        def _planned(self) -> Mapping[str, Any]:
            return read(self.config.layers[self.layer_names[0]].impl)

        def build(self, *given: Any, **asked: Any) -> Planned:
            made = super().build(*given, **asked)
            return Planned(**vars(made), planned=self._planned())

    return Builder


def reading(*names: str) -> Any:
    return lambda impl: {name: getattr(impl.spec, name) for name in names}


def of(name: str, builder: type[TorchMetadataBuilder], impl: Any = PlanningImpl, **parts: Any) -> Any:
    return variant(name, impl=impl, builder=builder, **parts)


WRONG = {
    **{f"no_{name}": of(f"NO_{name.upper()}", planning(reading(name), lambda read: ())) for name in FIELDS},
    "is_windowed_only": of(
        "IS_WINDOWED_ONLY", planning(reading("window"), lambda read: read["window"] != (-1, -1))
    ),
    "one_of_two": of(
        "ONE_OF_TWO", planning(reading("window", "logits_soft_cap"), lambda read: read["window"])
    ),
    "no_option": of(
        "NO_OPTION",
        planning(lambda impl: {"factor": impl.options.factor}, lambda read: ()),
        OptionImpl,
        Options=Options,
    ),
}
RIGHT = {
    "refuses_late": variant("REFUSES_LATE", impl=LateImpl, Options=Options),
    "whole": of("WHOLE", planning(reading(*FIELDS), lambda read: tuple(read.values()))),
    "none": of("NONE", planning(reading(*FIELDS), lambda read: None)),
    "option": of(
        "OPTION",
        planning(lambda impl: {"factor": impl.options.factor}, lambda read: read["factor"]),
        OptionImpl,
        Options=Options,
    ),
}


@pytest.mark.parametrize("backend", WRONG.values(), ids=WRONG)
def test_a_key_without_what_the_build_reads_is_caught_and_named(backend: type[AttentionBackend]) -> None:
    found = failures(backend, kv_group_builds.checks)
    assert list(found) == ["builder/build_key"]
    (problem,) = found.values()
    assert "both builders have build_key=" in str(problem)
    assert "a known mistake: the build of another group" in str(problem)


@pytest.mark.parametrize("backend", RIGHT.values(), ids=RIGHT)
def test_a_key_with_all_that_the_build_reads_fails_none(backend: type[AttentionBackend]) -> None:
    assert failures(backend, kv_group_builds.checks) == {}


def test_a_key_that_no_mapping_takes_is_named() -> None:
    backend = of("UNHASHABLE", planning(reading("window"), dict))
    (problem,) = failures(backend, kv_group_builds.checks).values()
    assert "build_key" in str(problem)
    assert "must be hashable" in str(problem)
