"""A runtime over the engine's memory computes what it computes over its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from engine_pools import (
    POOLS,
    Pool,
    float8_as_bytes,
    interleaved,
    poisoned,
    raw_bytes,
    separate,
    shared,
    whole,
)
from model_layers import layer
from served_model import Drawn, ServedModel

from attnplug import plan
from attnplug.core import BuilderConfig
from attnplug.runtime import AttentionRuntime, set_kv_cache_layout

FULL = layer(dtype="float32")
WINDOW = layer(dtype="float32", sliding_window=20)
FP8 = layer(dtype="bfloat16", kv_cache_dtype="fp8")
MODELS: dict[str, dict[str, Any]] = {
    "full": {"specs": {"0": FULL, "1": FULL}},
    "window and full": {"specs": {"0": WINDOW, "1": FULL, "2": WINDOW, "3": FULL}},
    "shared": {"specs": {"0": FULL, "1": WINDOW, "2": FULL}, "kv_sharing": {"2": "0"}},
    "fp8": {"specs": {"0": FP8, "1": FP8}, "scales": (0.5, 0.25)},
    "values": {"specs": {"0": layer(dtype="float32", head_size_v=4)}},
    "one head": {
        "specs": {"0": layer(dtype="float16", num_kv_heads=1), "1": layer(dtype="float16", num_kv_heads=1)}
    },
    "chunks": {"specs": {"0": layer(dtype="float32", chunk_size=8), "1": FULL}},
}


@pytest.fixture(autouse=True)
def no_layout():
    yield
    set_kv_cache_layout(None)


class Recorded(ServedModel):
    """Keeps each output."""

    outputs: list[torch.Tensor]

    def run(self, layer: str, drawn: Drawn) -> torch.Tensor:
        self.__dict__.setdefault("outputs", []).append(super().run(layer, drawn))
        return self.outputs[-1]


def outputs(model: dict[str, Any], memory: Pool | None, **asked: Any) -> list[torch.Tensor]:
    """Those of requests that come, grow past a window, share a prefix and go; the oracle has checked them."""
    more = {} if memory is None else {"memory": memory}
    served = Recorded(**model, **more, **asked)
    served.add("a")
    served.step(a=21)
    served.add("b", prefix=("a", 16))
    served.step(a=1, b=5)
    served.step(a=19, b=1)
    served.remove("a")
    served.add("c")
    served.step(b=1, c=33)
    served.step(c=1)
    served.runtime.close()
    return served.outputs


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@functools.cache
def of_an_own_allocation(model: str, layout: Any) -> list[torch.Tensor]:
    set_kv_cache_layout(layout)
    return outputs(MODELS[model], None)


@pytest.mark.parametrize(
    ("pool", "layout"), [*((pool, "NHD") for pool in POOLS), ("interleaved", "HND"), ("raw_bytes", "HND")]
)
@pytest.mark.parametrize("model", MODELS)
def test_the_engines_memory_gives_the_numbers_of_an_own_allocation(model, pool, layout):
    expected = of_an_own_allocation(model, layout)
    set_kv_cache_layout(layout)
    same(outputs(MODELS[model], POOLS[pool]), expected)


def test_float8_caches_may_be_bytes():
    same(outputs(MODELS["fp8"], float8_as_bytes), outputs(MODELS["fp8"], None))


WIDE = {"num_heads": 2, "num_kv_heads": 1, "head_size": 16}
OF_TRITON: dict[str, dict[str, Any]] = {
    "window and full": {
        "specs": {
            "0": layer(dtype="float32", sliding_window=20, **WIDE),
            "1": layer(dtype="float32", **WIDE),
        }
    },
    "fp8": {"specs": {"0": layer(dtype="float16", kv_cache_dtype="fp8", **WIDE)}, "scales": (0.5, 0.25)},
}


@pytest.mark.parametrize(
    ("model", "pool", "layout"), [("window and full", interleaved, "HND"), ("fp8", raw_bytes, "NHD")]
)
def test_triton_reads_and_writes_the_engines_memory(model, pool, layout):
    set_kv_cache_layout(layout)
    asked: dict[str, Any] = {"backend": "TRITON", "num_blocks": 24}
    same(outputs(OF_TRITON[model], pool, **asked), outputs(OF_TRITON[model], None, **asked))


@pytest.mark.parametrize("pool", [raw_bytes, interleaved])
def test_cross_attention_in_the_engines_memory(pool):
    cross = layer(dtype="float32", attn_type="encoder_decoder")
    served = ServedModel({"0": FULL, "cross": cross}, max_encoder_len=24, memory=pool)
    served.add("a", encoder_len=19)
    served.step(a=18)
    served.step(a=1)


# The engine's memory stays the engine's


@pytest.mark.parametrize("pool", [separate, shared, raw_bytes, interleaved])
def test_only_null_blocks_and_the_tokens_of_requests_are_written(pool):
    made = plan(MODELS["window and full"]["specs"], "cpu", num_blocks=8)
    memory = pool(made)
    with AttentionRuntime(made, config=BuilderConfig(max_model_len=64), **memory) as runtime:
        assert all(not cache[0].any() for cache in runtime.kv_caches.values())
        assert all(cache[1:].isnan().all() for cache in runtime.kv_caches.values())
        runtime.warm_up()
        requests = runtime.step_batch_builder()
        requests.add_request("a", [[3], [5]])
        runtime.begin_step(requests.step(7))
        runtime.forward("1", torch.ones(7, 4, 8), torch.ones(7, 2, 8), torch.ones(7, 2, 8))
        kept = dict(runtime.kv_caches)
    for name, cache in kept.items():
        given = memory["kv_caches"][name]
        assert cache.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    (written,) = (g for g, each in enumerate(made.kv_cache_config.kv_cache_groups) if "1" in each.layer_names)
    block = (3, 5)[written]
    assert (kept["1"][block, :, :7] == 1).all()
    assert kept["1"][block, :, 7:].isnan().all()
    untouched = [each for each in range(1, 8) if each != block]
    assert kept["1"][untouched].isnan().all()


def test_bytes_between_the_blocks_stay_the_engines():
    made = plan(MODELS["full"]["specs"], "cpu", num_blocks=4)
    memory = interleaved(made)
    pool = whole(memory["kv_caches"]["0"]).view(4, -1)
    with AttentionRuntime(made, config=BuilderConfig(max_model_len=48), **memory) as runtime:
        requests = runtime.step_batch_builder()
        requests.add_request("a", [[3, 2, 1]])
        runtime.begin_step(requests.step(48))
        for name in made.specs:
            runtime.forward(name, torch.ones(48, 4, 8), torch.ones(48, 2, 8), torch.ones(48, 2, 8))
    assert (pool[:, :32] == 255).all()
    assert not (pool[:, 32:] == 255).any()


def test_two_runtimes_share_one_pool():
    made = plan({"0": FULL}, "cpu", num_blocks=4)
    memory, limits = separate(made), BuilderConfig(max_model_len=32)
    first = AttentionRuntime(made, config=limits, **memory)
    requests = first.step_batch_builder()
    requests.add_request("a", [[2]])
    first.begin_step(requests.step(5))
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    expected = first.forward("0", query, key, value)[-1:]
    first.close()
    second = AttentionRuntime(made, config=limits, **memory)
    requests = second.step_batch_builder()
    requests.add_request("a", [[2]], num_computed_tokens=4)
    second.begin_step(requests.step(1))
    torch.testing.assert_close(second.forward("0", query[-1:], key[-1:], value[-1:]), expected)


def test_the_allocator_is_called_once_for_each_tensor_of_the_plan():
    made, asked = plan(MODELS["window and full"]["specs"], "cpu", num_blocks=8), []

    def allocator(size: int, device: torch.device) -> torch.Tensor:
        asked.append((size, device))
        return poisoned(size, torch.int8)

    AttentionRuntime(made, allocator=allocator)
    tensors = made.kv_cache_config.kv_cache_tensors
    assert asked == [(tensor.size, torch.device("cpu")) for tensor in tensors]


def test_memory_made_in_inference_mode_is_used_there():
    made = plan({"0": FULL}, "cpu", num_blocks=4)
    with torch.inference_mode():
        runtime = AttentionRuntime(made, config=BuilderConfig(max_model_len=16), **separate(made))
        requests = runtime.step_batch_builder()
        requests.add_request("a", [[2]])
        runtime.begin_step(requests.step(1))
        value = torch.ones(1, 2, 8)
        assert (runtime.forward("0", torch.ones(1, 4, 8), value, value) == 1).all()


def test_a_model_without_pages_needs_no_memory():
    made = plan({"0": layer(dtype="float32", direct_kv=True)}, "cpu")
    assert AttentionRuntime(made, kv_caches={}).kv_caches == {}


def test_a_parameter_that_needs_no_gradient_is_memory_too():
    made = plan({"0": FULL}, "cpu", num_blocks=4)
    cache = separate(made)["kv_caches"]["0"]
    given = torch.nn.Parameter(cache, requires_grad=False)
    runtime = AttentionRuntime(made, kv_caches={"0": given})
    assert runtime.kv_caches["0"].data_ptr() == cache.data_ptr()
    assert type(runtime.kv_caches["0"]) is torch.Tensor
