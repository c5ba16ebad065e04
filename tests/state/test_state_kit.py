"""The kit catches planted mistakes of state layers, and passes right backends of other forms."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES
from plain_state import PlainStates
from state_mutants import LARGE, MUTANTS, RIGHT

from attnplug.backends.torch_native.backend import TorchStateBackend
from attnplug.backends.torch_native.state.builder import TorchStateBuilder
from attnplug.core import AttentionCGSupport, Device, LayerSpec, StateImpl
from attnplug.testing.conformance import Check, ConformanceError, conformance_checks
from attnplug.testing.conformance.states import state_checks
from attnplug.testing.conformance.target import Target

ROWS = [(family, name) for family, names in MUTANTS.items() for name in names]
NAMED = {
    "decay after the update": "the decay comes after the update",
    "output before the update": "the output comes before the update",
    "delta before the decay": "the delta is computed before the decay",
    "beta on the value only": "beta is applied to the value only",
    "beta twice": "beta is applied twice",
    "beta ignored": "beta is ignored",
    "delta ignored": "the delta rule is ignored",
    "value heads take key heads h % Hk": "value heads have the key heads h % Hk",
    "scale ignored": "the scale is ignored",
    "scale twice": "the scale is applied twice",
    "exp of exp": "the decay is taken as a factor, not as its logarithm",
    "log2": "the decay is taken as a logarithm to base 2",
    "row decay of the first row": "the decay of the first row for all rows",
    "the next head": "the decay of the next head",
    "ignored": "the decay is ignored",
    "zeros though given": "the step starts from zeros",
    "later chunks from zeros": "the step starts from zeros",
    "flipped taps": "the taps of a convolution are flipped",
    "bias dropped": "the bias of a convolution is ignored",
    "activation dropped": "the activation of a convolution is ignored",
}
"""The words of the failure for mistakes that one change of the rules explains."""


LAYERS = ("linear-head", "delta-row", "delta-head", "linear-row", "conv4", "conv3")
SLOW = {f"chunks of {size}" for size in (1, 16, 32, 128)} | {"computes in float64", "solves systems"}


def quick_checks(backend: type, layers: tuple[str, ...] = LAYERS) -> Iterator[Check]:
    """The checks of one layer of each kind, in float32, those of all kinds before the next schedule."""
    own = list(state_checks.checks(Target(backend, Device("cpu"))))
    for schedule in (
        "decodes",
        "dummies",
        "chunks",
        "mixed",
        "prompts",
        "strided",
        "strong",
        "resets",
        "drafts",
        "checkpoints",
        "repeats",
        "random",
    ):
        for layer in layers:
            found = [check for check in own if re.match(rf"states/{schedule}-{layer}-float32-h", check.id)]
            # The others have a scale of their own, and other sizes; the first has K = V.
            yield from found[:1] if "conv" in layer or schedule != "decodes" else found


def failures(
    backend: type, until: str | None = None, layers: tuple[str, ...] = LAYERS
) -> list[ConformanceError]:
    """The first failure, or all until one has this name."""
    found: list[ConformanceError] = []
    for check in quick_checks(backend, layers):
        try:
            check()
        except ConformanceError as problem:
            found.append(problem)
            if until is None or problem.named == until:
                break
    return found


@pytest.mark.parametrize(("family", "name"), ROWS)
def test_a_mistake_is_caught(family: str, name: str) -> None:
    assert failures(MUTANTS[family][name])


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_in_one_rule_is_named(name: str) -> None:
    family = next(family for family, names in MUTANTS.items() if name in names)
    # Layers of the other kind have no part with the mistake, and pass as those of the right one do.
    layers = tuple(each for each in LAYERS if ("conv" in each) is (family == "convolution"))
    assert failures(MUTANTS[family][name], NAMED[name], layers)[-1].named == NAMED[name]


class OwnOutput(StateImpl[Any]):
    """Writes nothing, and gives the tensor that it has."""

    made = torch.ones(3, 5)

    def advance(self, *arguments: Any, **gates: Any) -> torch.Tensor:
        return self.made


def test_a_tensor_of_the_kernels_own_is_copied_or_handed_on() -> None:
    impl = OwnOutput.__new__(OwnOutput)
    impl.spec, impl.layer_name = FAMILIES["conv"], "conv"
    call = None, torch.zeros(3, 5), None, None, torch.zeros(1), None
    assert impl.forward(*call) is impl.made
    given = torch.zeros(4, 5)
    assert impl.forward(*call, given) is given
    assert torch.equal(given, torch.tensor([[1.0], [1.0], [1.0], [0.0]]).expand(4, 5))
    assert torch.equal(impl.attend(*call, torch.zeros(3, 5)), impl.made)
    # Rows of padding, or another dtype, are no output of the caller's form.
    padded = impl.forward(None, torch.zeros(4, 5), *call[2:])
    assert torch.equal(padded[:3], impl.made)
    assert impl.forward(None, torch.zeros(3, 5, dtype=torch.float16), *call[2:]).dtype == torch.float16


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RIGHT]
)
def test_a_right_backend_of_another_form_passes(name: str) -> None:
    problems = failures(RIGHT[name])
    assert not problems, problems[0]


def test_torch_passes_within_a_minute() -> None:
    began = time.process_time()
    checks = conformance_checks(TorchStateBackend, device="cpu", only=["states/*"])
    assert {check.id.split("/")[0] for check in checks} >= {"declaration", "refused", "states"}
    for check in checks:
        if check.id.startswith("states/"):
            check()
    assert time.process_time() - began < 60


def test_torch_is_checked_for_states_under_its_own_name() -> None:
    from attnplug.backends.torch_native import TorchBackend

    ids = [check.id for check in conformance_checks(TorchBackend, device="cpu", only=["state/*"])]
    assert any(each.startswith("state/states/drafts-delta-head-float32") for each in ids)


def test_a_rule_that_nothing_serves_fails() -> None:
    class Boasts(TorchStateBackend):
        @classmethod
        def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
            return "it serves nothing"

    checks, texts = state_checks.checks(Target(Boasts, Device("cpu"))), []
    for check in checks:
        with pytest.raises(ConformanceError) as caught:
            check()
        texts.append(str(caught.value))
    assert texts == [
        f"supported_state_rules has {rule}, and the backend serves no layer of it"
        for rule in ("linear", "delta", "conv")
    ]


def test_a_builder_that_reads_pages_on_the_host_and_declares_graphs_fails() -> None:
    class Declares(TorchStateBuilder):
        cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    class Captured(TorchStateBackend):
        @classmethod
        def get_builder_cls(cls) -> type[TorchStateBuilder]:
            return Declares

    def found(backend: type) -> list[Check]:
        checks = state_checks.checks(Target(backend, Device("cpu")))
        return [check for check in checks if check.id.startswith("states/graphs-")]

    assert not found(TorchStateBackend)
    checks = found(Captured)
    assert len(checks) >= 7
    for check in checks[:2]:
        with pytest.raises(ConformanceError, match=r"output of request \w "):
            check()


class Wrapped(OwnOutput):
    """An impl whose `forward` allocates and whose `attend` counts, as both could before a kernel had tensors of its own."""

    calls = 0

    def attend(self, *arguments: Any, **given: Any) -> torch.Tensor:
        self.calls += 1
        return super().attend(*arguments, **given)


class Allocates(OwnOutput):
    def forward(self, layer: Any, query: Any, *arguments: Any, **given: Any) -> torch.Tensor:
        return self.attend(layer, query, *arguments[:4], torch.zeros_like(query), **given)


def test_impls_with_an_attend_or_a_forward_of_their_own_run() -> None:
    call = None, torch.zeros(3, 5), None, None, torch.zeros(1), None
    for kind in (Wrapped, Allocates):
        impl = kind.__new__(kind)
        impl.spec, impl.layer_name = FAMILIES["conv"], "conv"
        made = impl.forward(*call)
        assert torch.equal(made, impl.made)
        assert made is not impl.made
        assert getattr(impl, "calls", 1) == 1


def checks_of_large_keys(backend: type[PlainStates]) -> Iterator[Check]:
    large = type("Large", (backend,), {"get_supported_head_sizes": classmethod(lambda cls: (16, 256, 1))})
    return state_checks.checks(Target(large, Device("cpu")))


@pytest.mark.parametrize("name", LARGE)
def test_sizes_of_models_show_what_small_sizes_hide(name: str) -> None:
    start, backend = LARGE[name]
    check = next(each for each in checks_of_large_keys(backend) if each.id.startswith(f"states/{start}"))
    with pytest.raises(ConformanceError):
        check()
    next(each for each in checks_of_large_keys(PlainStates) if each.id == check.id)()
