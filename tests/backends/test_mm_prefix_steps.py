"""Multimodal spans in steps that no rule of the kit's batches makes: on TORCH, and on TRITON's kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, Device, LayerSpec
from attnplug.errors import BatchError
from attnplug.testing import Batch, assert_close, assert_lse_close, direct_batch, paged_batch, tolerance
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.target import Target

triton = pytest.importorskip("attnplug.backends.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", mm_prefix=True, needs_lse=True)

backends = pytest.mark.parametrize(
    "backend", [TorchBackend, triton.TritonBackend], ids=lambda b: b.get_name()
)
limits = pytest.mark.parametrize(
    "fields",
    [{}, {"window": (7, 0)}, {"chunk_size": 16}, {"window": (3, 2), "causal": False}],
    ids=["causal", "window", "chunk", "two-sided"],
)


def run(backend: type[AttentionBackend], batch: Batch, speculative: int = 0) -> Output:
    harness = Harness.of(
        Target(backend, Device.parse(DEVICE)), batch, num_speculative_tokens=speculative, max_num_seqs=8
    )
    return harness.forward(batch)


def check(backend: type[AttentionBackend], batch: Batch, speculative: int = 0) -> None:
    found, expected, bound = run(backend, batch, speculative), batch.oracle(), tolerance(batch.spec)
    tokens = batch.common.num_actual_tokens
    assert_close(found.output[:tokens], expected.output, bound.output)
    assert found.lse is not None
    assert_lse_close(found.lse[:tokens], expected.lse, bound.lse)


@backends
@limits
def test_short_queries_of_decodes_see_their_spans(backend, fields):
    # Spans of the step, one that began long before it, and one that goes on after it.
    spans = [[(60, 63)], [(2, 41)], [(70, 72), (72, 73)], [(0, 3)], []]
    new, tokens = [3, 2, 3, 3, 1], [63, 41, 73, 3, 50]
    batch = paged_batch(
        SPEC.replace(**fields),
        new,
        tokens,
        spans=spans,
        block_size=8,
        padding=2,
        drop_window=True,
        device=DEVICE,
    )
    check(backend, batch, speculative=2)


@backends
@limits
def test_long_spans_cross_tiles_pages_windows_and_chunks(backend, fields):
    spans = [[(1, 150), (150, 152)], [(20, 21), (33, 100)]]
    batch = paged_batch(
        SPEC.replace(**fields), [152, 70], [152, 101], spans=spans, block_size=16, padding=2, device=DEVICE
    )
    check(backend, batch)


@backends
@limits
def test_keys_of_the_call_have_spans_too(backend, fields):
    spec = SPEC.replace(direct_kv=True, **fields)
    spans = [[(0, 40)], [(31, 50)], [(3, 5)]]
    # The second request has the keys of its last tokens only, and the span begins before them.
    batch = direct_batch(
        spec, [40, 19, 5], [40, 50, 5], key_lens=[40, 17, 5], spans=spans, padding=2, device=DEVICE
    )
    check(backend, batch)


@backends
@pytest.mark.parametrize("new", [2, 40], ids=["decode", "prefill"])
def test_a_step_without_spans_is_refused(backend, new):
    batch = paged_batch(SPEC, [new], [50], block_size=8, device=DEVICE)
    nothing = dataclasses.replace(batch.common, mm_prefix_spans=None, mm_prefix_spans_cpu=None)
    with pytest.raises(
        Exception, match="mm_prefix_spans=None is required: the layer has mm_prefix"
    ) as failed:
        run(backend, dataclasses.replace(batch, common=nothing), speculative=1)
    assert isinstance(failed.value.__cause__, BatchError)


@backends
@pytest.mark.parametrize(
    "spans", [torch.zeros(39, 2).int(), torch.zeros(40, 2).long(), torch.zeros(40).int()], ids=str
)
def test_spans_of_another_form_are_refused(backend, spans):
    batch = paged_batch(SPEC, [40], [50], block_size=8, device=DEVICE)
    common = dataclasses.replace(batch.common, mm_prefix_spans=spans.to(DEVICE), mm_prefix_spans_cpu=None)
    with pytest.raises(Exception, match=r"must be torch.int32 of the shape \(at least 40, 2\)"):
        run(backend, dataclasses.replace(batch, common=common))
