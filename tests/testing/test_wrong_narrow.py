"""Backends that serve no plain layer are checked with a layer that they serve, and mistakes in them are found."""

from __future__ import annotations

import mutants.narrow  # noqa: F401 - lists its mutants
import pytest
from mutants.running import named_checks, problem_of
from mutants.table import Mutant, mutants_of
from right_narrow import NARROWS

from attnplug.core import Device
from attnplug.testing.conformance.check import CheckSkipped
from attnplug.testing.conformance.target import Target


@pytest.mark.parametrize("mutant", mutants_of("narrow"), ids=lambda mutant: mutant.name)
def test_a_mistake_that_needs_no_plain_layer_is_caught(mutant: Mutant) -> None:
    problems = [problem_of(check) or "" for check in named_checks(mutant, f"{mutant.check}*")]
    assert any(mutant.says in problem for problem in problems), problems


def target(name: str) -> Target:
    return Target(NARROWS[name], Device("cpu"))


def test_the_plainest_layer_of_a_narrow_backend_asks_for_what_it_serves_and_no_more() -> None:
    assert not target("PLAIN").spec().required_features()
    assert target("WINDOWS_ONLY").spec().window == (6, 0)
    assert target("SINKS_ONLY").spec(needs_lse=False).has_sinks
    both = target("WINDOWS_WITH_SINKS_ONLY").spec()
    assert (both.is_windowed, both.has_sinks, both.logits_soft_cap) == (True, True, None)
    three = target("FP8_WINDOWS_WITH_CAPS_ONLY").spec()
    assert (three.has_quantized_kv_cache, three.is_windowed, three.has_sinks) == (True, True, False)
    assert three.logits_soft_cap is not None


def test_what_a_check_asks_for_comes_before_what_the_backend_serves_alone() -> None:
    assert target("WINDOWS_ONLY").spec(window=(40, 0)).window == (40, 0)
    with pytest.raises(CheckSkipped, match="windows only"):
        target("WINDOWS_ONLY").spec(window=(-1, -1))


def test_pages_are_checked_with_a_layer_that_has_pages() -> None:
    assert target("DIRECT_OR_CROSS").spec(direct_kv=True).attn_type == "decoder"
    assert target("DIRECT_OR_CROSS").paged_spec().attn_type == "encoder_decoder"
    with pytest.raises(CheckSkipped, match="only direct K and V"):
        target("DIRECT_ONLY").paged_spec()
