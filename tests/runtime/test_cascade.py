"""Cascade attention: what requests share, who is asked, and that the numbers stay the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from fake_backends import backend, offered
from model_layers import layer
from served_model import ServedModel

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native import builder as torch_builder
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.composite import composite_backend
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadataBuilder
from attnplug.runtime import GraphState, StepBatchBuilder
from attnplug.runtime.batch.cascade import may_cascade, shared_prefix_lens
from attnplug.testing import paged_batch

FULL = layer(dtype="float32")


class Asked:
    """The questions to builders of TORCH, which all get `answer`, and the prefix of each build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bool = True) -> None:
        self.questions: list[dict[str, Any]] = []
        self.built: list[int] = []
        build = TorchMetadataBuilder.build

        def ask(builder: Any, **question: Any) -> bool:
            self.questions.append(question)
            return answer

        def noted(builder: Any, common_prefix_len: int, *given: Any, **named: Any) -> Any:
            self.built.append(common_prefix_len)
            return build(builder, common_prefix_len, *given, **named)

        monkeypatch.setattr(TorchMetadataBuilder, "use_cascade_attention", ask)
        monkeypatch.setattr(TorchMetadataBuilder, "build", noted)


def serve(model: ServedModel, prefix: int = 32) -> None:
    """Three requests share a prefix: decodes, extends and long queries; then one without it comes."""
    model.add("a")
    model.step(a=prefix + 9)
    for name in "bc":
        model.add(name, prefix=("a", prefix))
    model.step(a=1, b=5, c=19)
    for _ in range(2):
        model.step(a=1, b=1, c=1)
    model.step(a=2, c=3)
    model.add("d")
    model.step(a=1, b=1, c=1, d=7)
    model.step(a=1, b=1, c=1, d=1)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        layer(dtype="float32", num_heads=6, num_kv_heads=2, head_size_v=4),
        layer(dtype="float32", logits_soft_cap=2.0),
        layer(dtype="float32", has_alibi=True),
        layer(dtype="float32", has_sinks=True),
        layer(dtype="float32", sliding_window=200),
        layer(dtype="float32", chunk_size=128),
        layer(dtype="bfloat16"),
    ],
    ids=["full", "groups", "cap", "alibi", "sinks", "window", "chunk", "bfloat16"],
)
def test_a_shared_prefix_changes_no_number(spec: LayerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    serve(ServedModel({"layers.0": spec}, max_model_len=96))
    assert asked.built == [0, 32, 32, 32, 32, 0, 0]


def test_fp8_pages_of_a_shared_prefix_have_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    serve(ServedModel({"0": layer(dtype="bfloat16", kv_cache_dtype="fp8")}, scales=(0.5, 0.25)))
    assert 32 in asked.built


def test_triton_attends_a_shared_prefix_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attnplug.backends.triton import builder as triton_builder
    from attnplug.backends.triton.impl import TritonImpl

    monkeypatch.setattr(triton_builder, "_SHARED_KEYS", 16)
    monkeypatch.setattr(triton_builder, "_SPARED_KEYS", 32)
    attended, attend = [], TritonImpl.attend

    def noted(impl: TritonImpl, *given: Any, **named: Any) -> torch.Tensor:
        attended.append(given[5].prefix_len)
        return attend(impl, *given, **named)

    monkeypatch.setattr(TritonImpl, "attend", noted)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = {"0": layer(dtype="float32", head_size=16)}
    serve(ServedModel(model, backend="TRITON", device=device))
    assert attended == [0, 32, 32, 32, 32, 0, 0]


def test_a_builder_that_says_no_gets_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, answer=False)
    serve(ServedModel({"layers.0": FULL}))
    assert len(asked.questions) == 4
    assert not any(asked.built)


def test_the_builder_is_told_the_step_and_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    serve(ServedModel({"layers.0": layer(dtype="float32", has_alibi=True, chunk_size=512)}))
    question = asked.questions[0]
    assert question.pop("query_lens").tolist() == [1, 5, 19]
    assert question == {
        "common_prefix_len": 32,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "use_alibi": True,
        "use_sliding_window": False,
        "use_local_attention": True,
        "num_sms": torch.get_num_threads(),
        "dcp_world_size": 1,
    }


def test_layers_that_hide_the_prefix_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    specs = {
        "0": FULL,
        "1": layer(dtype="float32", sliding_window=40),
        "2": layer(dtype="float32", chunk_size=48),
    }
    serve(ServedModel(specs, max_model_len=96))
    # The first shared step is within the window of 40 for no request, and within no chunk of 48.
    assert [q["use_sliding_window"] or q["use_local_attention"] for q in asked.questions] == [False] * 4


def test_kv_groups_of_one_kind_each_get_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    model = ServedModel({"0": FULL, "1": layer(dtype="float32", sliding_window=90), "2": FULL, "3": FULL})
    serve(model)
    full = sum(1 for group in model.runtime.attention_groups if group.specs == {FULL})
    assert full > 1
    assert asked.built.count(32) == 4 * len(model.runtime.attention_groups)


def test_a_prefix_in_one_kv_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another group of the same layers, whose blocks differ, is built plainly and not copied from the first."""
    asked = Asked(monkeypatch)
    model = ServedModel({"0": FULL, "1": layer(dtype="float32", sliding_window=90), "2": FULL, "3": FULL})
    model.add("a")
    model.step(a=41)
    model.add("b", prefix=("a", 32))
    last = len(model.groups) - 1
    pool, held = model.runtime.block_pool, model.requests["b"].blocks[last]
    copies = pool.allocate(2)
    for name in model.groups[last].layer_names:
        cache = model.runtime.kv_caches[name]
        cache[copies] = cache[held]
    held[:] = copies
    model.batches.remove_request("b")
    model.batches.add_request("b", model.requests["b"].blocks, 32)
    del asked.built[:]
    batch = model.begin(a=1, b=1)
    assert batch.shared_prefix_lens == (*[32] * last, 0)
    assert sorted(asked.built) == [0, *[32] * last]
    for name in model.plan.specs:
        model.check(name, model.draw(name, {"a": 1, "b": 1}))


def test_members_of_a_composite_get_the_prefix_of_parts_with_several_requests() -> None:
    class Always(TorchMetadataBuilder):
        def use_cascade_attention(self, common_prefix_len: int, query_lens: Any, *_: Any, **__: Any) -> bool:
            self.asked = query_lens.tolist()
            return True

    composite = composite_backend(
        prefill=type("P", (TorchBackend,), {"get_builder_cls": classmethod(lambda cls: Always)}),
        decode=type("D", (TorchBackend,), {"get_builder_cls": classmethod(lambda cls: Always)}),
    )
    builder: Any = composite.get_builder_cls()(
        kv_cache_spec_for(FULL, 16), ["0"], BuilderConfig(), torch.device("cpu")
    )
    for lens, decoding, prefilling in (([1, 1, 9], 16, 0), ([1, 8, 9], 0, 16), ([1, 1], 16, None)):
        batch = paged_batch(FULL, lens, [count + 16 for count in lens])
        common = dataclasses.replace(batch.common)
        assert builder.use_cascade_attention(16, np.array(lens), 4, 2, False, False, False, 1, 1)
        made = builder.build(16, common)
        found = [part and part.common_prefix_len for part in (made.decode, made.prefill)]
        assert found == [decoding, prefilling]
    assert builder.decode.asked == [1, 1]
    assert not builder.use_cascade_attention(16, np.array([1, 9]), 4, 2, False, False, False, 1, 1)


class NeverAsked(TorchMetadataBuilder):
    use_cascade_attention = AttentionMetadataBuilder.use_cascade_attention


def test_tables_are_compared_only_for_builders_that_answer() -> None:
    made = backend("NEVER", get_builder_cls=lambda: NeverAsked)
    with offered(made):
        model = ServedModel({"0": FULL})
    model.add("a")
    model.step(a=41)
    model.add("b", prefix=("a", 32))
    assert model.step(a=1, b=1).shared_prefix_lens == (0,)
    builder: Any = composite_backend(made, TorchBackend).get_builder_cls()
    given: Any = kv_cache_spec_for(FULL, 16), ["0"], BuilderConfig(), torch.device("cpu")
    assert may_cascade(builder(*given))
    assert not may_cascade(NeverAsked(*given))


def test_steps_of_graphs_have_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ServedModel({"0": FULL}, config=BuilderConfig(max_num_seqs=4, cudagraph_batch_sizes=(4,)))
    model.add("a")
    model.step(a=41)
    model.add("b", prefix=("a", 32))
    model.step(a=1, b=3)
    asked = Asked(monkeypatch)
    graphs = GraphState(model.runtime, max_model_len=64)
    batch = model.batches.step(1)
    assert batch.shared_prefix_lens == (32,)
    graphs.prepare_graph_input_buffers(graphs.get_graph_input_buffers(4), batch)
    assert (asked.questions, asked.built) == ([], [0])


# The shared blocks of a step


def filled(rows: list[list[int]], computed: list[int]) -> StepBatchBuilder:
    batches = StepBatchBuilder(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_sizes=[4])
    for index, (row, count) in enumerate(zip(rows, computed, strict=True)):
        batches.add_request(str(index), [row], count)
    return batches


@pytest.mark.parametrize(
    ("rows", "computed", "shared"),
    [
        ([[1, 2, 3], [1, 2, 4]], [9, 9], 8),
        ([[1, 2, 3], [1, 2, 3]], [11, 8], 8),
        ([[1, 2, 3], [1, 2, 4]], [9, 7], 4),
        ([[1, 2, 3], [1, 2, 4], [1, 5]], [9, 9, 5], 4),
        ([[1, 2, 3], [5, 2, 3]], [9, 9], 0),
        ([[1, 2, 3], [1, 2, 4]], [9, 0], 0),
        ([[1, 2, 3], [1, 2, 4]], [9, 3], 0),
        ([[0, 2, 3], [0, 2, 4]], [9, 9], 0),
        ([[1, 0, 3], [1, 0, 4]], [9, 9], 4),
        ([[1, 2, 3]], [9], 0),
        ([], [], 0),
    ],
    ids=[
        "whole",
        "same",
        "computed",
        "three",
        "none",
        "new",
        "partial",
        "null",
        "null-later",
        "one",
        "empty",
    ],
)
def test_the_prefix_is_of_whole_blocks_that_all_requests_have_computed(
    rows: list[list[int]], computed: list[int], shared: int
) -> None:
    assert filled(rows, computed).step(1).shared_prefix_lens == (shared,)


def test_groups_of_other_block_sizes_and_of_encoders() -> None:
    tables = np.array(
        [[[1, 2, 3], [1, 2, 3]], [[4, 5, 0], [4, 6, 0]], [[7, 8, 9], [7, 8, 9]]], dtype=np.int32
    )
    assert shared_prefix_lens(tables, (4, 8, 4), np.array([12, 17]), [0, 1]) == (12, 8, 0)


# TORCH


def wants(prefix: int, lens: list[int], kv_heads: int = 8, ranks: int = 1) -> bool:
    builder = TorchMetadataBuilder(kv_cache_spec_for(FULL, 16), [], BuilderConfig(), torch.device("cpu"))
    return builder.use_cascade_attention(prefix, np.array(lens), 8, kv_heads, False, False, False, 1, ranks)


def test_torch_wants_a_long_prefix_of_many_short_queries() -> None:
    assert wants(4096, [1, 1])
    assert wants(256, [1] * 16)
    assert wants(1024, [4] * 8)
    assert not wants(128, [1] * 64)
    assert not wants(1024, [1, 1])
    assert not wants(4096, [1, 1, 64])
    assert not wants(4096, [1, 0, 0])
    assert not wants(4096, [1, 1], ranks=2)


def test_torch_refuses_a_prefix_that_is_not_computed() -> None:
    batch = paged_batch(FULL, [1, 9], [40, 25])
    builder = TorchMetadataBuilder(kv_cache_spec_for(FULL, 16), [], BuilderConfig(), torch.device("cpu"))
    with pytest.raises(BatchError, match=r"common_prefix_len=17 must be in 0 .. 16, the tokens that every"):
        builder.build(17, batch.common)
    assert builder.build(16, batch.common).common_prefix_len == 16


def test_torch_attends_a_worthwhile_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_builder, "_SPARED_KEYS", 128)
    monkeypatch.setattr(torch_builder, "_SHARED_KEYS", 32)
    calls: list[int] = []
    impl = TorchBackend.get_impl_cls()
    once = impl._attend_cascade

    def counted(self: Any, query: torch.Tensor, *given: Any) -> None:
        calls.append(query.shape[0])
        once(self, query, *given)

    monkeypatch.setattr(impl, "_attend_cascade", counted)
    serve(ServedModel({"0": FULL, "1": layer(dtype="float32", has_sinks=True)}))
    # Two steps of two layers: the first shared step has a long query, the last of a and c spares too little.
    assert calls == [3, 3, 3, 3]
