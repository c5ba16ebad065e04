"""KV groups whose layers reach differently share one build of a step, and get what builds of their own would give."""

from __future__ import annotations

from collections.abc import Hashable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import own_build_key
from attnplug.ops.triton.launch import BoundKernel
from attnplug.runtime import AttentionRuntime, GraphState, StepBatchBuilder
from attnplug.runtime.steps import attention_groups

PAGE, LONGEST = 4, 48
BASE = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32", block_size=PAGE)
LAYERS = {
    "full": BASE,
    "window": BASE.replace(window=(6, 0)),
    "more": BASE.replace(window=(6, 0)),
    "chunk": BASE.replace(chunk_size=8),
}


def runtime_on(backend: str, **config: Any) -> AttentionRuntime:
    plan = attnplug.plan(LAYERS, device="cpu", backend=backend, num_blocks=400)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": LONGEST, **config}
    return AttentionRuntime(plan, config=BuilderConfig(**settings))


def requests_of(runtime: AttentionRuntime, lengths: list[tuple[int, int]]) -> StepBatchBuilder:
    builder, block = runtime.step_batch_builder(), 1
    for row, (computed, new) in enumerate(lengths):
        pages = -(-(computed + new) // PAGE)
        groups = []
        for _ in builder.block_sizes:
            groups.append(list(range(block, block + pages)))
            block += pages
        builder.add_request(str(row), groups, num_computed_tokens=computed)
    return builder


def outputs(runtime: AttentionRuntime, tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(tokens, 4, 16, generator=generator)
    return {name: runtime.forward(name, drawn[:, :2], drawn[:, 2:3], drawn[:, 3:]) for name in LAYERS}


def fill(runtime: AttentionRuntime) -> None:
    for name, cache in runtime.kv_caches.items():
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(len(name))))


def build_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_groups, "_twin", lambda group, batch: id(group))


step_lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=4)


@settings(max_examples=25)
@given(lengths=step_lengths)
def test_shared_builds_give_what_separate_ones_give(lengths: list[tuple[int, int]]) -> None:
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for is_apart in (False, True):
            if is_apart:
                build_apart(monkeypatch)
            runtime = runtime_on("TORCH")
            fill(runtime)
            batch = requests_of(runtime, lengths).step([new for _, new in lengths])
            runtime.begin_step(batch)
            found.append(outputs(runtime, batch.common.num_actual_tokens))
    for name in LAYERS:
        assert torch.equal(found[0][name], found[1][name])


def test_a_step_is_built_once_for_all_kinds_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = TorchMetadataBuilder.build

    def counted(self: Any, *given: Any) -> Any:
        built.append(self)
        return build(self, *given)

    monkeypatch.setattr(TorchMetadataBuilder, "build", counted)
    runtime = runtime_on("TORCH")
    batch = requests_of(runtime, [(9, 1), (20, 3)]).step([1, 3])
    runtime.begin_step(batch)
    assert len(built) == 1
    assert len(runtime.attention_groups) == 4
    build_apart(monkeypatch)
    runtime.begin_step(batch)
    assert len(built) == 5


def test_a_subclass_that_makes_its_metadata_shares_no_build_unless_it_declares_a_key() -> None:
    class Own(TorchMetadataBuilder):
        def build(self, *given: Any, **named: Any) -> Any:
            return super().build(*given, **named)

    class Keyed(Own):
        build_key = "mine"

    def key_of(builder: type[TorchMetadataBuilder]) -> Hashable:
        cache: Any = kv_cache_spec_for(BASE, PAGE)
        return own_build_key(builder(cache, ["full"], BuilderConfig(), torch.device("cpu")))

    assert key_of(TorchMetadataBuilder) == ()
    assert key_of(Own) is None
    assert key_of(Keyed) == "mine"


def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, as they are launched from now on."""
    names: list[str] = []
    call = BoundKernel.__call__

    def counted(self: Any, *given: Any) -> None:
        names.append(self._kernel.__name__)
        call(self, *given)

    monkeypatch.setattr(BoundKernel, "__call__", counted)
    return names


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_plans_a_step_once_for_each_reach_also_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    new = 2
    sizes = {"num_speculative_tokens": 1, "cudagraph_batch_sizes": (4,)}
    found = []
    names = launched(monkeypatch)
    for is_apart in (False, True):
        if is_apart:
            build_apart(monkeypatch)
        runtime = runtime_on("TRITON", **sizes)
        fill(runtime)
        graphs = GraphState(runtime)
        with graphs.capture(4, new):
            outputs(runtime, 4 * new)
        batch = requests_of(runtime, [(3, new), (30, new), (17, new)]).step(new)
        del names[:]
        # What a graph replays has no plans, so the step before the replay makes them all.
        padded = graphs.prepare_graph_input_buffers(graphs.get_graph_input_buffers(4, new), batch)
        plans = [name for name in names if name.startswith("plan_")]
        # Each builder of its own has the plans of its own layers.
        assert len(plans) == (4 if is_apart else 3)
        del names[:]
        tokens = batch.common.num_actual_tokens
        seen = outputs(runtime, padded.common.num_actual_tokens)
        assert not [name for name in names if name.startswith("plan_")]
        found.append({name: out[:tokens] for name, out in seen.items()})
        runtime.begin_step(batch)
        eager = outputs(runtime, tokens)
        for name in LAYERS:
            np.testing.assert_allclose(found[-1][name], eager[name], atol=1e-5)
    for name in LAYERS:
        assert torch.equal(found[0][name], found[1][name])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_order_of_a_batch_follows_the_queries_that_triton_takes_for_decodes() -> None:
    most = 16
    plan = attnplug.plan(LAYERS, device="cpu", backend="TRITON", num_blocks=400)
    runtime = AttentionRuntime(plan, config=BuilderConfig(max_num_seqs=4, max_model_len=LONGEST))
    new = [17, most, 20, 1]
    batch = requests_of(runtime, [(9, count) for count in new]).step(new)
    assert batch.req_ids == ("3", "1", "2", "0")
    runtime.begin_step(batch)
    made: Any = {runtime._active.layers[name].metadata for name in LAYERS}
    assert {each.num_decodes for each in made} == {2}
    assert {each.num_decode_tokens for each in made} == {1 + most}
    assert len({id(each.workspace) for each in made}) == 1
