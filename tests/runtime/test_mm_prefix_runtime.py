"""Layers with mm_prefix in a runtime: spans reach them, and a step without spans is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.errors import BatchError
from attnplug.runtime import AttentionRuntime, GraphInputBuffers
from attnplug.testing import assert_close, attention_oracle, direct_batch

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
SPEC = LayerSpec(**SIZES, mm_prefix=True)


def runtime(*specs: LayerSpec) -> AttentionRuntime:
    layers = {f"layers.{index}": spec for index, spec in enumerate(specs)}
    config = BuilderConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    return AttentionRuntime(attnplug.plan(layers, "cpu", num_blocks=32), config=config)


def test_placeholders_of_requests_are_the_spans_of_all_layers_that_ask():
    specs = SPEC, SPEC.replace(sliding_window=4), SPEC.replace(mm_prefix=False)
    with runtime(*specs) as made:
        requests = made.step_batch_builder()
        blocks = [made.block_pool.allocate(4) for _ in made.kv_cache_config.kv_cache_groups]
        requests.add_request("a", blocks, placeholders={"image": [(2, 9), (11, 3)]})
        made.begin_step(requests.step(20))
        torch.manual_seed(0)
        query, key, value = torch.randn(20, 2, 8), torch.randn(20, 1, 8), torch.randn(20, 1, 8)
        outputs = []
        for index, spec in enumerate(specs):
            outputs.append(made.forward(f"layers.{index}", query, key, value))
            expected = attention_oracle(spec, [query], [key], [value], [20], spans=[[(2, 11), (11, 14)]])
            assert_close(outputs[-1], expected.output, 1e-5)
        assert not torch.allclose(outputs[0], outputs[2])


def test_a_step_without_spans_is_refused_before_any_layer_runs():
    with runtime(SPEC) as made:
        requests = made.step_batch_builder()
        requests.add_request("a", [made.block_pool.allocate(4)])
        step = requests.step(3)
        step.common.mm_prefix_spans = None
        with pytest.raises(
            BatchError, match=r"batch.common.mm_prefix_spans=None is required: layer layers.0"
        ):
            made.begin_step(step)
        with pytest.raises(BatchError, match="has no step"):
            made.forward("layers.0", *(torch.zeros(3, heads, 8) for heads in (2, 1, 1)))


def test_direct_layers_take_spans_from_their_own_batch():
    spec = SPEC.replace(direct_kv=True)
    batch = direct_batch(spec, [9, 4], [9, 4], spans=[[(1, 8)], []])
    with runtime(spec) as made:
        made.begin_step(direct=batch.common)
        assert_close(
            made.forward("layers.0", batch.query, batch.key, batch.value), batch.oracle().output, 1e-5
        )
        nothing = dataclasses.replace(batch.common, mm_prefix_spans=None)
        with pytest.raises(BatchError, match=r"direct.mm_prefix_spans=None is required"):
            made.begin_step(direct=nothing)


def test_plans_without_such_layers_have_no_spans_and_refuse_modalities():
    with runtime(SPEC.replace(mm_prefix=False)) as made:
        assert not made.has_mm_prefix
        requests = made.step_batch_builder()
        requests.add_request("a", [made.block_pool.allocate(4)], placeholders={"image": [(0, 4)]})
        assert requests.step(3).common.mm_prefix_spans is None
        with pytest.raises(BatchError, match="mm_prefix_modalities"):
            made.step_batch_builder(mm_prefix_modalities=["image"])


def test_a_graphs_buffer_has_the_spans_of_the_step_and_zeros_after_them():
    with runtime(SPEC) as made:
        requests = made.step_batch_builder()
        for name in "ab":
            requests.add_request(name, [made.block_pool.allocate(4)], placeholders={"image": [(0, 2)]})
        sizes = {"groups": 1, "max_blocks": 4, "device": torch.device("cpu")}
        buffers = GraphInputBuffers.allocate(4, 2, inputs=["mm_prefix_spans"], **sizes)
        assert buffers.mm_prefix_spans is not None
        buffers.mm_prefix_spans.fill_(7)
        part = buffers.first(3, 2)
        part.copy_from(requests.step(2))
        assert buffers.mm_prefix_spans.tolist() == [[0, 2]] * 4 + [[0, 0]] * 2 + [[7, 7]] * 2
        part.clear()
        assert not part.mm_prefix_spans.any()
        assert GraphInputBuffers.allocate(4, 2, **sizes).mm_prefix_spans is None
