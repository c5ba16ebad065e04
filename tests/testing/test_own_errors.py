"""The kit never reports an error of its own making as the backend's, and runs a backend with its layers and orders alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from catching import variant
from right_latent import LATENTS
from right_narrow import NARROWS

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device, Feature, LayerSpec
from attnplug.core.errors import SpecError
from attnplug.testing.conformance.builders import kv_group_builds
from attnplug.testing.conformance.cases.steps import step_factory
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.declared import declared_values, refusals
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.numbers import (
    cache_layouts,
    cache_reads,
    cache_writes,
    merging,
    sparse_selections,
)
from attnplug.testing.conformance.process import process_state
from attnplug.testing.conformance.serving import context_parallel, runtimes
from attnplug.testing.conformance.target import Target

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")
NO_LAYER = functools.partial(SPEC.replace, window=(6, 0), chunk_size=24)


def of(name: str) -> Target:
    return Target((NARROWS | LATENTS)[name], Device("cpu"))


def test_a_layer_that_cannot_be_is_no_fault_of_the_backend() -> None:
    with pytest.raises(
        CheckSkipped, match="can make no such layer or step: chunk_size=24 cannot be given with"
    ):
        Check("a/check", NO_LAYER, "asks for no layer")()


def raises_spec_error() -> None:
    """As a backend that makes a layer of its own."""
    NO_LAYER()


def test_an_error_that_a_backend_raises_is_its_own() -> None:
    with pytest.raises(SpecError, match="cannot be given with"):
        Check("a/check", raises_spec_error, "asks a backend")()


def test_no_layer_runs_that_the_backend_refuses() -> None:
    target = Target(
        variant("NO_WINDOWS", features=TorchBackend.features & ~Feature.SLIDING_WINDOW), Device("cpu")
    )
    assert target.changed(SPEC, scale=0.3).scale == 0.3
    for fields, why in (({"window": (6, 0)}, "not supported"), ({"num_kv_heads": 3}, "num_kv_heads=3")):
        with pytest.raises(CheckSkipped, match=why):
            target.changed(SPEC, **fields)
    windowed = Target(TorchBackend, Device("cpu")).batch(SPEC.replace(window=(6, 0)), [1], [9])
    with pytest.raises(CheckSkipped, match="NO_WINDOWS serves no sliding, 4 heads"):
        Harness.of(target, windowed)


def test_decodes_come_first_for_a_builder_that_wants_them_there() -> None:
    target, lengths = of("DECODES_FIRST"), ([5, 1, 9, 0, 2], [5, 30, 29, 3, 2])
    batch = target.batch(SPEC, *lengths)
    assert batch.common.query_start_loc_cpu.diff().tolist() == [1, 0, 5, 9, 2]
    assert batch.seq_lens == [30, 3, 5, 29, 2]
    with pytest.raises(CheckSkipped, match="reorder_batch_threshold=1 puts shorter queries first than in"):
        target.batch(SPEC, *lengths, exact=True)
    assert Target(TorchBackend, Device("cpu")).batch(SPEC, *lengths).seq_lens == lengths[1]


def test_a_builder_that_refuses_an_order_is_asked_for_its_own() -> None:
    target = of("DECODES_FIRST")
    disordered = Target(TorchBackend, Device("cpu")).batch(SPEC, [5, 1], [5, 30])
    with pytest.raises(ConformanceError, match="has decodes behind longer queries"):
        Harness.of(target, disordered).forward(disordered)
    ordered = step_factory(target, SPEC, ([5, 1], [5, 30]))()
    Harness.of(target, ordered).forward(ordered)


@pytest.mark.parametrize(
    ("name", "group", "ids"),
    [
        ("ALWAYS_SLIDING_WINDOW", cache_writes.checks, ("cache/sharing-writes-none",)),
        ("ALWAYS_SLIDING_WINDOW", merging.checks, ("merge/context-and-new",)),
        ("ALWAYS_SLIDING_WINDOW", context_parallel.checks, ("context_parallel/decode-2-ranks-runs-of-1",)),
        pytest.param("SPARSE_ONLY", kv_group_builds.checks, ("builder/build_key",), marks=pytest.mark.slow),
        pytest.param("ALWAYS_SPARSE", kv_group_builds.checks, ("builder/build_key",), marks=pytest.mark.slow),
        ("LATENT_ALIAS", declared_values.checks, ("declared/feature-fp8_kv",)),
        ("DECODES_FIRST", declared_values.checks, ("declared/phase-prefill", "declared/any-layer")),
        ("BLOCKS_OF_1", cache_reads.checks, ("cache/null-block-decode", "cache/null-block-mixed")),
        pytest.param("BLOCKS_OF_1", runtimes.checks, ("runtime/drafts",), marks=pytest.mark.slow),
        pytest.param("FP8_E5M2", refusals.checks, ("refused/withdrawn-fp8_kv",), marks=pytest.mark.slow),
        ("SINGLE_OVER_BFLOAT", cache_layouts.checks, ("cache/layout-NHD-decode",)),
        ("ALWAYS_CROSS", sparse_selections.checks, ("selection/all-token_topk", "selection/all-block")),
        ("ALWAYS_MM_PREFIX", sparse_selections.checks, ("selection/all-token_topk",)),
        ("LATENT_SPARSE", cache_writes.checks, ("cache/sharing-writes-none",)),
        ("LATENT_SPARSE", process_state.kept_checks, ("state/settings-kept-decode",)),
    ],
)  # fmt: skip
def test_a_right_narrow_backend_passes_and_is_tried(name: str, group: Any, ids: tuple[str, ...]) -> None:
    found = {check.id: check for check in group(of(name))}
    # A skipped check raises too.
    for each in ids:
        found[each]()
