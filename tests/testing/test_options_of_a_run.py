"""A run of the kit may make all layers with options: what is wrong only with them is found."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
from catching import variant
from fake_plugins import plugin

import attnplug
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Feature
from attnplug.core.errors import PolicyError, SpecError
from attnplug.registry.default import get_registry
from attnplug.testing import conformance_checks, parametrize_with_checks
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.suites import load_suite
from attnplug.testing.isolation.listing import Listing, SuiteRequest, option_words
from attnplug.testing.isolation.results import SavedResults


@dataclasses.dataclass(frozen=True)
class Options:
    """A kernel, of which one is wrong, and a limit on windows."""

    kernel: Literal["safe", "fast", "stale", "none"] = "safe"
    windows: bool = True


class Impl(TorchImpl):
    """The fast kernel is wrong, and the last one serves no layer."""

    @classmethod
    def from_spec(cls, spec: Any, *, options: Options, **rest: Any) -> Any:
        if options.kernel == "none" or (spec.is_windowed and not options.windows):
            raise SpecError("options", options, "serves no such layer", "take the defaults")
        return super().from_spec(spec, options=options, **rest)

    def attend(self, *given: Any, **named: Any) -> torch.Tensor:
        return super().attend(*given, **named).mul_(1.1 if self.options.kernel == "fast" else 1)


class Builder(TorchMetadataBuilder):
    """With the stale kernel it keeps the slots of its first step."""

    slots: torch.Tensor | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        impl = next(iter(self.config.layers.values())).impl
        if impl.options.kernel != "stale":
            return made
        self.slots = made.slot_mapping if self.slots is None else self.slots
        return dataclasses.replace(made, slot_mapping=self.slots[: len(made.slot_mapping)])


FEW: dict[str, Any] = {
    "features": Feature.SLIDING_WINDOW,
    "supported_dtypes": ("float32",),
    "supported_kv_cache_dtypes": ("auto",),
    "get_supported_head_sizes": lambda cls: (64,),
    "get_supported_kernel_block_sizes": lambda cls, spec=None, device=None: (16,),
}
ACME = variant("ACME", impl=Impl, builder=Builder, Options=Options, **FEW)


def check(check_id: str, **options: Any) -> Check:
    listed = conformance_checks(ACME, device="cpu", only=[check_id], options=options or None)
    return next(each for each in listed if each.id == check_id)


CASE = "correct/mixed-h4x2-d64-float32-b16-NHD"


@pytest.mark.parametrize("check_id", [CASE, "declared/any-layer", "batch/alone-mixed", "runtime/steps"])
def test_numbers_that_are_wrong_with_an_option_fail_with_it_alone(check_id: str) -> None:
    check(check_id)()
    check(check_id, windows=False)()
    with pytest.raises(ConformanceError):
        check(check_id, kernel="fast")()


def test_a_builder_that_is_wrong_with_an_option_fails_with_it_alone() -> None:
    check("builder/build-full")()
    with pytest.raises(ConformanceError, match="slot_mapping is not the step's own"):
        check("builder/build-full", kernel="stale")()


def test_a_layer_that_is_refused_with_the_options_is_skipped_and_named() -> None:
    with pytest.raises(CheckSkipped, match="windows=False") as found:
        check(f"{CASE}-window6.0", windows=False)()
    assert found.value.text.startswith("options refused: ")


def test_options_with_which_no_plain_layer_is_served_fail() -> None:
    with pytest.raises(ConformanceError, match="the plainest layer is refused"):
        check("declared/any-layer", kernel="none")()


def test_other_options_are_tried_beside_those_of_the_run() -> None:
    listed = conformance_checks(ACME, device="cpu", only=["options/*"], options={"kernel": "fast"})
    values = {each.id for each in listed if each.id.startswith("options/kernel=")}
    assert values == {"options/kernel=safe", "options/kernel=stale", "options/kernel=none"}
    with pytest.raises(ConformanceError):
        next(each for each in listed if each.id == "options/windows=False")()


def test_a_test_module_gives_options_too() -> None:
    with pytest.raises(PolicyError, match="ACME has no such option; there are: kernel"):
        parametrize_with_checks(ACME, device="cpu", options={"kernels": "fast"})


@pytest.fixture
def registered() -> Any:
    attnplug.register(plugin(ACME), "acme")
    yield
    get_registry().unregister("acme")


@pytest.mark.usefixtures("registered")
def test_texts_replace_the_options_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def options_of(*texts: str) -> Any:
        return load_suite("ACME", device="cpu", options=texts, only=["options/held"]).options

    assert options_of() is None
    assert options_of("kernel=fast", "ACME.windows=false") == Options("fast", False)
    monkeypatch.setenv("ATTNPLUG_OPTIONS", "ACME.kernel=fast,FLASHINFER.tensor_cores=false")
    assert options_of() == Options("fast")
    assert options_of("windows=false") == Options("safe", False)
    monkeypatch.setenv("ATTNPLUG_OPTIONS", "FLASHINFER.tensor_cores=false")
    assert options_of() is None


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kernel", "must be NAME.option=value, or option=value for the one backend"),
        ("kernel=slow", r"options\['kernel'\]='slow' must be Literal"),
        ("kernels=fast", "ACME has no such option; there are: kernel"),
        ("FLASHINFER.tensor_cores=false", "is for another backend, and ACME is checked"),
        ("NOBODY.kernel=fast", "has keys that are not backends; there are: ACME"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        load_suite("ACME", device="cpu", options=[text], only=["options/held"])


def test_results_with_other_options_are_no_results_of_a_run(tmp_path: Any) -> None:
    usual = Listing(SuiteRequest("ACME"), "ACME", None, "cpu", "cpu", None, (), {}, {}, "0123")
    other = dataclasses.replace(usual, options=option_words(Options("fast")))
    assert other.options == "kernel=fast"
    assert SavedResults(usual, folder=tmp_path).path != SavedResults(other, folder=tmp_path).path
