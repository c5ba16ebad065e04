"""What a call must bring: refusals name the argument and the limit, and what fits is let through."""

from __future__ import annotations

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import LayerSpec
from attnplug.core.impl import LayerTensors
from attnplug.errors import BatchError, LayoutError
from attnplug.ops.checks import (
    check_cache_given,
    check_keys,
    check_queries,
    check_rows,
    kv_scales,
    pages_of,
)
from attnplug.ops.storage import in_words, storage_dtype, typed_view

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=8)


def test_rows_may_be_more_than_asked_and_not_fewer():
    check_rows("query", torch.empty(5, 4, 16), 5, (4, 16), torch.float32)
    check_rows("query", torch.empty(9, 4, 16), 5, (4, 16), torch.float32)
    with pytest.raises(BatchError, match=r"query=\(4, 4, 16\).*at least 5, 4, 16"):
        check_rows("query", torch.empty(4, 4, 16), 5, (4, 16), torch.float32)


@pytest.mark.parametrize("shape", [(), (5,), (5, 4), (5, 16, 4), (5, 4, 16, 1)])
def test_rows_of_any_other_shape_are_refused(shape):
    with pytest.raises(BatchError, match="must have the shape"):
        check_rows("query", torch.empty(shape), 5, (4, 16), torch.float32)


def test_an_lse_needs_a_layer_that_declares_it():
    query, lse = torch.empty(3, 4, 16), torch.empty(3, 4)
    with pytest.raises(BatchError, match="needs_lse=True"):
        check_queries(query, query, lse, 3, SPEC)
    check_queries(query, query, lse, 3, SPEC.replace(needs_lse=True))
    with pytest.raises(BatchError, match=r"output_lse.dtype"):
        check_queries(query, query, lse.half(), 3, SPEC.replace(needs_lse=True))


def test_output_scales_are_refused_by_name():
    query = torch.empty(3, 4, 16)
    with pytest.raises(BatchError, match="output_block_scale"):
        check_queries(query, query, None, 3, SPEC, output_scale=None, output_block_scale=torch.ones(2))


@pytest.mark.parametrize("missing", ["key", "value"])
def test_keys_and_values_come_together(missing):
    given = {"key": torch.empty(3, 2, 16), "value": torch.empty(3, 2, 16), missing: None}
    with pytest.raises(BatchError, match=f"{missing}=None"):
        check_keys(given["key"], given["value"], 3, SPEC)


def test_a_cache_is_given_where_the_layer_has_pages_and_only_there():
    check_cache_given(None, SPEC.replace(direct_kv=True))
    check_cache_given(None, LayerSpec(num_heads=4, num_kv_heads=4, head_size=16, attn_type="encoder_only"))
    with pytest.raises(LayoutError, match="is required"):
        check_cache_given(None, SPEC)
    with pytest.raises(LayoutError, match="must be None"):
        check_cache_given(torch.empty(3, 2, 8, 2, 16), SPEC.replace(direct_kv=True))


def test_bytes_of_an_fp8_cache_are_viewed_as_what_is_stored():
    spec = SPEC.replace(kv_cache_dtype="fp8_e5m2")
    keys, values = pages_of(TorchBackend, torch.zeros(3, 2, 8, 2, 16, dtype=torch.uint8), spec)
    assert keys.dtype == values.dtype == torch.float8_e5m2
    assert keys.shape == values.shape == (3, 8, 2, 16)
    with pytest.raises(LayoutError, match=r"or torch.uint8"):
        typed_view(torch.zeros(1), spec)


@pytest.mark.parametrize("shape", [(3, 2, 4, 2, 16), (3, 2, 8, 2), (2, 3, 8, 2, 16), (3, 2, 8, 4, 16)])
def test_a_cache_of_another_shape_is_refused(shape):
    with pytest.raises(LayoutError, match=r"num_blocks, 2, 8, 2, 16"):
        pages_of(TorchBackend, torch.zeros(shape), SPEC)


def test_storage_that_torch_has_no_float_for_is_refused():
    for stored in ("int8", "mxfp4"):
        with pytest.raises(LayoutError, match="kv_cache_dtype"):
            storage_dtype(SPEC.replace(kv_cache_dtype=stored))


def test_the_scales_of_the_engines_layer_come_before_those_of_the_tensors():
    class Layer:
        _k_scale_float, _v_scale_float = 2.0, 3.0

    tensors = LayerTensors(k_scale=torch.tensor(0.5), v_scale=0.25)
    assert kv_scales(Layer(), tensors) == (2.0, 3.0)
    assert kv_scales(None, tensors) == kv_scales(object(), tensors) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("size", "offset", "stride", "words"),
    [
        (64, 512, 576, torch.complex128),
        (16, 0, 24, torch.complex128),
        (12, 4, 20, torch.int64),
        (8, 2, 16, torch.bfloat16),
        (6, 0, 8, torch.bfloat16),
        (8, 0, 9, torch.bfloat16),
    ],
)
def test_words_are_the_same_memory(size: int, offset: int, stride: int, words: torch.dtype) -> None:
    memory = torch.arange(4 * stride + offset, dtype=torch.bfloat16)
    source = memory.as_strided((3, size), (stride, 1), offset)
    target = torch.zeros(3, 2, 2 * size, dtype=torch.bfloat16)[..., size:]
    into, given = in_words(target, source[:, None])
    assert given.dtype == into.dtype == words
    into.copy_(given)
    assert torch.equal(target, source[:, None].expand(3, 2, size))


def test_words_need_aligned_memory_and_rows_without_gaps() -> None:
    rows = torch.zeros(4, 16, dtype=torch.float16)
    assert in_words(rows.T)[0].dtype == torch.float16
    apart = torch.frombuffer(bytearray(66), dtype=torch.float16, offset=2)
    assert in_words(apart[:32].view(2, 16))[0].dtype == torch.float16
