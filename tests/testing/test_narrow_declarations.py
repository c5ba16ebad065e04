"""A backend that serves few values of what it declares passes: each declaration is run with one of those."""

from __future__ import annotations

import pytest
from catching import variant

from attnplug.core import Device, Feature
from attnplug.core.blocks import MultipleOf
from attnplug.testing.conformance.builders import layer_state
from attnplug.testing.conformance.declared import declared_values
from attnplug.testing.conformance.target import Target


def refuses(cls, spec, device):
    """As FlashAttention: chunks of whole pages, and values of another size for one head size only."""
    if spec.chunk_size and spec.chunk_size % 256:
        return f"chunk_size={spec.chunk_size}"
    if spec.head_size_v not in (spec.head_size, 128 if spec.head_size == 192 else None):
        return f"head_size_v={spec.head_size_v}"
    return None


@pytest.mark.parametrize("feature", ["chunked_local", "head_size_v"])
def test_a_layer_is_found_for_chunks_of_large_pages_and_for_one_pair_of_head_sizes(feature):
    narrow = variant(
        "NARROW",
        supports_combination=refuses,
        get_supported_kernel_block_sizes=lambda cls, spec=None, device=None: (MultipleOf(256),),
        get_preferred_block_size=lambda cls, spec=None, device=None, default=16: 256,
    )
    found = {check.id: check for check in declared_values.checks(Target(narrow, Device("cpu")))}
    # A skipped check raises too, so the layer of the feature was run.
    found[f"declared/feature-{feature}"]()


def test_layers_over_fp8_alone_keep_the_scales_that_filled_their_caches():
    stored = Feature.FP8_KV | Feature.SINKS | Feature.ALIBI
    fp8 = variant("FP8_ALONE", features=stored, supported_kv_cache_dtypes=("fp8",))
    found = [
        check for check in layer_state.unlike_layer_checks(Target(fp8, Device("cpu"))) if "own-" in check.id
    ]
    assert len(found) == 2
    for check in found:
        check()
