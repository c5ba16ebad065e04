"""Correct backends that are unusual pass the kit: in how they compute, and in the little that they declare."""

from __future__ import annotations

import pytest
from catching import torch_cases, variant
from right_attention import RIGHT_IMPLS, RightImpl
from right_engines import ENGINES
from right_latent import LATENTS
from right_narrow import NARROWS
from right_unusual import UNUSUAL

from attnplug.core import AttentionBackend, Device, Feature, composite_backend
from attnplug.testing.conformance.builders import builders, kv_group_builds
from attnplug.testing.conformance.cases.spec_grid import plainest
from attnplug.testing.conformance.check import Check, CheckSkipped, CheckUntested
from attnplug.testing.conformance.declared import declared_values, options, pages, refusals
from attnplug.testing.conformance.declared import declared_values as untested
from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.numbers import merging
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.process import process_state
from attnplug.testing.conformance.target import Target

WIDE = {impl.__name__.upper(): variant(impl.__name__.upper(), impl=impl) for impl in RIGHT_IMPLS}
COMPOSITES = {"NUMPY_AND_THREADS": composite_backend(ENGINES["INNUMPY"], ENGINES["INTHREADS"])}
EVERY = WIDE | NARROWS | ENGINES | LATENTS | COMPOSITES | UNUSUAL
FEW = {
    "features": Feature(0),
    "supported_dtypes": ("float32",),
    "supported_kv_cache_dtypes": ("auto",),
    "get_supported_head_sizes": classmethod(lambda cls: (64,)),
    "get_supported_kernel_block_sizes": classmethod(lambda cls, spec=None, device=None: (16,)),
    "supported_kv_cache_layouts": classmethod(lambda cls: ("NHD",)),
}
"""Declarations that leave few layers."""
KINDS_ONLY = ("DIRECT_ONLY", "ENCODER_ONLY", "CROSS_ONLY", "ONE_KV_HEAD", "GROUPS_OF_8", "SPARSE_BLOCKS_ONLY")
"""Backends that refuse the plainest layers."""


def passes(check: Check) -> bool:
    """Whether a check passes; False if it is skipped."""
    try:
        check()
    except CheckSkipped:
        return False
    return True


def failures(backend: type[AttentionBackend]) -> dict[str, str]:
    """What each failing check of the whole kit says, by check id, and each that is skipped for want of plain layers."""
    found = {}
    for check in conformance_checks(backend, device="cpu"):
        if check.id.startswith("declaration/light"):
            continue  # a class of a test module cannot be imported by a child process
        try:
            check()
        except CheckSkipped as why:
            if "serves no layer with {}" in why.text:
                found[check.id] = why.text
        except Exception as problem:
            found[check.id] = str(problem)
    return found


@pytest.mark.parametrize("impl", RIGHT_IMPLS, ids=lambda impl: impl.__name__)
def test_an_unusual_computation_is_right(impl: type[RightImpl]) -> None:
    target = Target(WIDE[impl.__name__.upper()], Device("cpu"))
    # Each implementation is tried with other cases, so that all cases are run here.
    for case in torch_cases()[RIGHT_IMPLS.index(impl) :: len(RIGHT_IMPLS)]:
        check_case(target, case)


@pytest.mark.parametrize("name", KINDS_ONLY)
def test_a_backend_that_refuses_the_plainest_layers_is_no_wrong_one(name: str) -> None:
    target = Target(NARROWS[name], Device("cpu"))
    assert not target.reasons(plainest(target))
    for check in refusals.checks(target):
        passes(check)
    asked = [
        check for check in declared_values.checks(target) if "feature-" in check.id or "any-layer" in check.id
    ]
    assert asked
    skipped = [check.id for check in asked if not passes(check)]
    assert not skipped


def test_an_lse_that_no_layer_can_ask_for_is_reported() -> None:
    target = Target(NARROWS["PLAIN"], Device("cpu"))
    assert not any("lse" in check.id for check in declared_values.checks(target))
    (found,) = (check for check in untested.untested_checks(target) if "lse" in check.id)
    with pytest.raises(CheckUntested, match="can_return_lse_for_decode: features has no LSE"):
        found()


def test_options_of_every_type_are_tried() -> None:
    target = Target(type("FEW_OPTIONS", (ENGINES["WITH_OPTIONS"],), FEW), Device("cpu"))
    found = {check.id: check for check in options.checks(target)}
    passed = [name for name, check in found.items() if passes(check)]
    assert {name.partition("=")[0] for name in passed} == {
        f"options/{name}" for name in ("tile", "shrink", "inside", "order", "splits", "exact", "held")
    }
    assert found.keys() - set(passed) == {"options/label", "options/most"}


AROUND = (builders, refusals, merging, pages, refusals, kv_group_builds)
"""The checks around the computation."""


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_choice_around_the_computation_is_right(name: str) -> None:
    target = Target(UNUSUAL[name], Device("cpu"))
    checks = [check for module in AROUND for check in module.checks(target)]
    checks += [check for check in process_state.kept_checks(target) if "settings-kept-decode" in check.id]
    assert sum(passes(check) for check in checks) > len(checks) / 2


# All of them take hours: in CI the whole kit runs with TORCH, LATENT, and FLEX, which has options.
@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", EVERY)
def test_the_whole_kit_passes(name: str) -> None:
    assert failures(EVERY[name]) == {}
