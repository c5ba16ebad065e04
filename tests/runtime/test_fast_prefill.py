"""Fast prefill: the last layers, which read the pages of others, compute only the tokens whose logits are wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_backends import backend, offered
from model_layers import layer
from served_model import Drawn, ServedModel

from attnplug.backends.flash_attn import FlashAttn4Backend
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.triton import TritonBackend
from attnplug.core import AttentionBackend, BuilderConfig, LayerSpec
from attnplug.core.batch import KVSharingFastPrefillMetadata, create_fast_prefill_custom_backend
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.interface.impl_and_builder import make_builder
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.runtime import GraphState, StepBatchBuilder

FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
SHARED = {"2": "0", "3": "1", "4": "0"}


class WantingModel(ServedModel):
    """A model of two layers with pages and three readers; each step gives the logits of `wanted`."""

    wanted: Any = None

    def __init__(self, specs: dict[str, LayerSpec] | None = None, **asked: Any) -> None:
        specs = specs or {"0": FULL, "1": SLIDING, "2": FULL, "3": SLIDING, "4": FULL}
        asked.setdefault("kv_sharing", SHARED)
        super().__init__(specs, memory=lambda plan: {"kv_sharing_fast_prefill": True}, **asked)
        step = self.batches.step
        self.batches.step = lambda scheduled: step(scheduled, self.wanted)  # type: ignore[method-assign]

    def begin(self, **scheduled: int) -> Any:
        self.batch = super().begin(**scheduled)
        return self.batch

    def check(self, layer: str, drawn: Drawn) -> None:
        if layer in self.runtime.fast_prefill_layers and self.wanted is not None:
            rows = self.batch.common.logits_indices_padded
            drawn = Drawn(drawn.query[rows], None, None, drawn.expected[rows.long()])
        super().check(layer, drawn)


def serve(model: WantingModel) -> list[list[int]]:
    """Chunked prompts beside decodes, verified drafts and steps without logits; gives the rows of each step."""
    rows = []

    def step(wanted: Any, **scheduled: int) -> None:
        model.wanted = wanted
        common = model.step(**scheduled).common
        rows.append([] if common.logits_indices_cpu is None else common.logits_indices_cpu.tolist())

    model.add("a")
    step({}, a=20)
    step({"a": 1}, a=11)
    model.add("b")
    step({"a": 1}, a=1, b=17)
    step({"a": 3, "b": 1}, a=3, b=9)
    step(1, a=1, b=1)
    step({"b": 1}, a=1, b=1)
    step(None, a=1, b=4)
    return rows


EXPECTED = [[], [10], [0], [0, 1, 2, 11], [0, 1], [1], []]


def test_readers_compute_the_wanted_rows_and_give_the_plain_numbers() -> None:
    model = WantingModel()
    assert model.runtime.fast_prefill_layers == ("2", "3", "4")
    assert serve(model) == EXPECTED


@pytest.mark.parametrize("asked", [{"logits_soft_cap": 3.0}, {"chunk_size": 16}])
def test_what_readers_ask_for_is_computed_for_the_wanted_rows(asked: dict[str, Any]) -> None:
    spec = layer(dtype="float32", **asked)
    model = WantingModel({"0": FULL, "1": spec, "2": spec}, kv_sharing={"2": "1"})
    assert serve(model) == EXPECTED


def test_a_composite_serves_wanted_rows() -> None:
    class Ordered(TorchMetadataBuilder):
        reorder_batch_threshold = 1

    built = {"get_builder_cls": lambda: Ordered}
    with offered(
        backend("DECODER", supported_phases=("decode",), **built),
        backend("PREFILLER", supported_phases=("prefill",)),
    ):
        model = WantingModel(per_phase=True)
        assert model.plan.backends == ("PREFILLER+DECODER",)
        serve(model)


def test_only_the_last_readers_are_fast() -> None:
    specs = {"0": FULL, "1": FULL, "2": FULL, "3": FULL}
    model = WantingModel(specs, kv_sharing={"1": "0", "3": "2"})
    assert model.runtime.fast_prefill_layers == ("3",)
    assert [group.layer_names for group in model.runtime.attention_groups if group.fast_prefill] == [("3",)]
    serve(model)


def test_metadata_says_which_rows_it_is_about() -> None:
    model = WantingModel()
    model.wanted = {"a": 1}
    model.add("a")
    batch = model.begin(a=9)
    fast, plain = (model.runtime._active.layers[name][0] for name in ("4", "0"))
    assert isinstance(fast, KVSharingFastPrefillMetadata)
    assert not isinstance(plain, KVSharingFastPrefillMetadata)
    assert fast.logits_indices_padded is batch.common.logits_indices_padded
    assert fast.num_logits_indices == 1


@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend, FlashAttn4Backend])
def test_a_copy_for_another_group_says_it_too(backend: type[AttentionBackend]) -> None:
    model = WantingModel()
    model.wanted = {"a": 1}
    model.add("a")
    common = model.begin(a=9).common
    fast = create_fast_prefill_custom_backend("FastPrefill", backend)
    cache: Any = kv_cache_spec_for(FULL, 4)
    builder = make_builder(fast, cache, ["4"], BuilderConfig(), torch.device("cpu"))
    table, slots = torch.full_like(common.block_table_tensor, 3), torch.full_like(common.slot_mapping, -1)
    copied = builder.update_block_table(builder.build(0, common), table, slots)
    assert isinstance(copied, KVSharingFastPrefillMetadata)
    assert copied.logits_indices_padded is common.logits_indices_padded
    assert copied.num_logits_indices == 1


def test_a_reader_needs_a_query_for_each_wanted_row() -> None:
    model = WantingModel()
    model.wanted = {"a": 2}
    model.add("a")
    model.begin(a=9)
    for name in "01":
        model.check(name, model.draw(name, {"a": 9}))
    with pytest.raises(BatchError, match=r"query=\(1, 4, 8\) of layer 2 must have the shape \(at least 2"):
        model.runtime.forward("2", torch.zeros(1, 4, 8))
    assert model.runtime.forward("2", torch.zeros(2, 4, 8)).shape == (2, 4, 8)


def test_a_shared_prefix_is_asked_about_with_the_wanted_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def ask(self: Any, **question: Any) -> bool:
        asked.append(question["query_lens"].tolist())
        return True

    monkeypatch.setattr(TorchMetadataBuilder, "use_cascade_attention", ask)
    model = WantingModel({"0": FULL, "1": FULL}, kv_sharing={"1": "0"})
    model.wanted = {}
    model.add("a")
    model.step(a=41)
    model.add("b", prefix=("a", 32))
    model.wanted = {"a": 1, "b": 2}
    model.step(a=1, b=6)
    assert asked == [[1, 6], [1, 2]]


def test_graphs_and_draft_steps_run_all_tokens() -> None:
    config = BuilderConfig(max_num_seqs=4, cudagraph_batch_sizes=(4,), num_speculative_tokens=2)
    model = WantingModel(config=config)
    model.wanted = {"a": 1}
    model.add("a")
    model.step(a=9)
    model.wanted = {}
    batch = model.batches.step({"a": 1})
    graphs = GraphState(model.runtime, max_model_len=64, max_query_len=1)
    graphs.prepare_graph_input_buffers(graphs.get_graph_input_buffers(4), batch)
    assert model.runtime._active.layers["4"][1] == 4
    model.runtime.begin_step(batch, draft_index=0)
    assert model.runtime._active.layers["4"][1] == 1


def test_a_plan_that_ends_with_pages_of_its_own_is_refused() -> None:
    with pytest.raises(
        LayoutError, match="kv_sharing_fast_prefill='2' needs last layers that read the pages"
    ):
        WantingModel({"0": FULL, "1": FULL, "2": FULL}, kv_sharing={"1": "0"})


# Rows of the step


def batches() -> StepBatchBuilder:
    made = StepBatchBuilder(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_sizes=[16])
    made.add_request("a", [[1, 2]])
    made.add_request("b", [[3, 4]])
    return made


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [(1, [8, 13]), ([3, 0], [6, 7, 8]), ({"b": 2}, [12, 13]), (0, []), ({}, []), ([9, 5], list(range(14)))],
    ids=["one", "sequence", "mapping", "none", "empty", "all"],
)
def test_wanted_rows_are_the_last_of_each_request(wanted: Any, rows: list[int]) -> None:
    common = batches().step([9, 5], wanted).common
    assert common.num_logits_indices == len(rows)
    for indices in (common.logits_indices_padded, common.logits_indices_cpu):
        assert indices is not None
        assert indices.tolist() == rows
        assert indices.dtype == torch.int32


def test_wanted_rows_follow_the_order_of_the_step() -> None:
    made = StepBatchBuilder(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_sizes=[16],
        reorder_batch_thresholds=[1],
    )
    made.add_request("long", [[1, 2]])
    made.add_request("short", [[3, 4]], 5)
    batch = made.step([9, 1], [2, 0])
    assert batch.req_ids == ("short", "long")
    assert batch.common.logits_indices_cpu is not None
    assert batch.common.logits_indices_cpu.tolist() == [8, 9]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"a": 10}, "num_logits=10 of request a must be in 0 .. 9, its scheduled tokens"),
        ([1, -1], "num_logits=-1 of request b must be in 0 .. 5"),
        ({"c": 1}, "num_logits="),
        ([1], "num_logits="),
    ],
)
def test_wanted_logits_that_no_token_has_are_refused(wanted: Any, problem: str) -> None:
    made = batches()
    with pytest.raises(BatchError, match=problem):
        made.step([9, 5], wanted)
    assert made.step([9, 5]).common.num_logits_indices is None
