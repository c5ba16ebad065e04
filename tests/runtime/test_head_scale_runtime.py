"""Scales for each KV head in the runtime: prompts, decodes, layers that read another layer's pages, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug import plan
from attnplug.core import LayerTensors
from attnplug.errors import LayoutError, SpecError
from attnplug.runtime import AttentionRuntime
from attnplug.runtime.plan.sharding import context_spec, new_tokens_spec
from attnplug.testing.drawn_values import layer_tensors

FP8 = layer(dtype="float32", kv_cache_dtype="fp8", head_scales=True)


@pytest.mark.parametrize(
    "own", [{}, {"sliding_window": 20, "has_sinks": True}, {"logits_soft_cap": 2.0}], ids=str
)
def test_steps_have_the_numbers_of_the_oracle(own: dict[str, Any]) -> None:
    model = ServedModel({"a": FP8.replace(**own), "b": layer(dtype="float32")}, scales=(0.37, 1.9))
    model.add("x")
    model.step(x=20)
    model.add("y")
    model.step(x=1, y=35)
    model.step(x=1, y=1)
    scales = model.runtime.layers["a"]._k_scale_float
    assert isinstance(scales, tuple)
    assert len(set(scales)) == FP8.num_kv_heads
    assert model.runtime.layers["a"]._k_scale.tolist() == pytest.approx(scales)


def test_a_layer_reads_the_pages_of_another_with_its_scales() -> None:
    made = plan({"0": FP8, "1": FP8}, "cpu", num_blocks=4, kv_sharing={"1": "0"})
    writer = LayerTensors(k_scale=torch.tensor([0.5, 2.0]))
    runtime = AttentionRuntime(made, {"0": writer})
    assert runtime.layers["1"]._k_scale_float == (0.5, 2.0)
    AttentionRuntime(made, {"0": writer, "1": LayerTensors(k_scale=(0.5, 2.0))})
    with pytest.raises(LayoutError, match=r"k_scale=.*0.5, 0.5.* is not the .*0.5, 2.0"):
        AttentionRuntime(made, {"0": writer, "1": LayerTensors(k_scale=0.5)})


def test_a_scale_that_is_not_positive_is_refused_with_the_head() -> None:
    made = plan({"0": FP8}, "cpu", num_blocks=4)
    with pytest.raises(SpecError, match=r"v_scale\[1\] of layer 0=-1.0 must be a finite number above 0"):
        AttentionRuntime(made, {"0": LayerTensors(v_scale=torch.tensor([1.0, -1.0]))})


def test_ranks_attend_stored_keys_with_the_scales_and_new_ones_without() -> None:
    assert context_spec(FP8).head_scales
    assert not new_tokens_spec(FP8).head_scales


def test_graphs_read_scales_in_memory_that_stays() -> None:
    made = plan({"0": FP8}, "cpu", num_blocks=4)
    runtime = AttentionRuntime(made, {"0": layer_tensors(FP8, k_scale=0.37, v_scale=1.9)})
    one = runtime.layers["0"]
    impl: Any = one.impl
    scales, device = impl._scales(one, torch.float8_e4m3fn), torch.device("cpu")
    first = impl._on_device(scales, device)
    other = impl._on_device(tuple(each[::-1] for each in scales), device)
    again = impl._on_device(impl._scales(one, torch.float8_e4m3fn), device)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert not any(a is b for a, b in zip(first, other, strict=True))


def test_a_reader_without_head_scales_of_pages_that_have_them_is_refused() -> None:
    made = plan({"0": FP8, "1": FP8.replace(head_scales=False)}, "cpu", num_blocks=4, kv_sharing={"1": "0"})
    for scale in (torch.tensor([0.5, 2.0]), (0.5, 2.0), 0.5):
        with pytest.raises(
            LayoutError, match=r"head_scales=False of layer 1 is not that of 0.* declare both"
        ):
            AttentionRuntime(made, {"0": LayerTensors(k_scale=scale)})
    made = plan({"0": FP8.replace(head_scales=False), "1": FP8}, "cpu", num_blocks=4, kv_sharing={"1": "0"})
    runtime = AttentionRuntime(made, {"0": LayerTensors(k_scale=0.5)})
    assert runtime.layers["1"]._k_scale_float == (0.5, 0.5)


def test_the_tensors_of_a_layer_are_float32_whatever_the_default_is() -> None:
    made = plan({"0": FP8}, "cpu", num_blocks=4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        runtime = AttentionRuntime(made, {"0": LayerTensors(k_scale=(0.3, 0.1))})
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(runtime.layers["0"]._k_scale, torch.tensor([0.3, 0.1]))


def test_scales_that_an_engine_wrote_anew_are_read_again() -> None:
    made = plan({"0": FP8}, "cpu", num_blocks=4)
    impl: Any = AttentionRuntime(made, {}).layers["0"].impl
    scale, mine = torch.tensor([0.5, 2.0]), torch.float8_e4m3fn
    engine: Any = SimpleNamespace(_k_scale=scale, _v_scale=scale, _k_scale_float=2.0, _v_scale_float=2.0)
    first = impl._scales(engine, mine)
    assert first == ((0.5, 2.0), (0.5, 2.0))
    assert impl._scales(engine, mine) is first
    scale.copy_(torch.tensor([4.0, 1.0]))
    assert impl._scales(engine, mine) == ((4.0, 1.0), (4.0, 1.0))
