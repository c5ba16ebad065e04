"""Values of wrong types, given to each argument of the runtime: a documented error names it, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug.core import BuilderConfig
from attnplug.core.errors import AttnplugError, BatchError, LayoutError, SpecError
from attnplug.runtime import AttentionRuntime, BlockPool, GraphState, StepBatchBuilder

pytestmark = pytest.mark.attack("numbers")


class Hostile:
    """Its conversions and its repr raise."""

    def __index__(self) -> int:
        raise RuntimeError("no index")

    __len__ = __iter__ = __array__ = __float__ = __repr__ = __index__  # type: ignore[assignment]


# None of them is an integer, a sequence, a mapping by request, a name or a tensor that fits.
WRONG: list[Any] = [
    1.5,
    float("nan"),
    True,
    np.True_,
    np.float32(2),
    2**70,
    -(2**70),
    -1,
    np.uint64(2**64 - 1),
    b"1",
    [1, "a", None],
    [None],
    [[1, [2]]],
    [[2**70], [2**70]],
    [True, 1],
    [np.True_, 1],
    (1, 2.5),
    {"nobody": 1},
    {"a": None},
    {"a": 2**70},
    {1: 1},
    {1.5},
    object(),
    Hostile(),
    lambda *_: 1,
    int,
    torch.empty(3, device="meta"),
    torch.zeros(2, dtype=torch.float64),
    torch.tensor(True),
    torch.zeros(2, 4, 8).to_sparse(),
    torch.nested.nested_tensor([torch.zeros(1, 4, 8), torch.zeros(2, 4, 8)], layout=torch.jagged),
    np.array([1.0]),
    np.array(["a"]),
]
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "block_sizes": [16, 16]}


def pool() -> BlockPool:
    made = BlockPool(8)
    made.allocate(3)
    return made


def builder() -> StepBatchBuilder:
    made = StepBatchBuilder(**SIZES)  # type: ignore[arg-type]
    made.add_request("a", [[1, 2], [3, 4]])
    made.add_request("b", [[5], [6]])
    return made


def stepped() -> StepBatchBuilder:
    made = builder()
    made.step(3)
    return made


def finished() -> StepBatchBuilder:
    made = stepped()
    made.finish_step()
    return made


def by_size(name: str) -> Callable[[Any, Any], object]:
    return lambda _, wrong: StepBatchBuilder(**{**SIZES, name: wrong})


CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], object]]] = {
    "BlockPool": (pool, lambda _, wrong: BlockPool(wrong)),
    "allocate": (pool, lambda made, wrong: made.allocate(wrong)),
    "share": (pool, lambda made, wrong: made.share(wrong)),
    "free": (pool, lambda made, wrong: made.free(wrong)),
    "free, after good ones": (pool, lambda made, wrong: made.free([1, 2, wrong])),
    "users": (pool, lambda made, wrong: made.users(wrong)),
    **{
        f"StepBatchBuilder({name})": (builder, by_size(name))
        for name in (
            *SIZES,
            "device",
            "cross_groups",
            "max_encoder_len",
            "reorder_batch_thresholds",
            "mm_prefix_modalities",
            "sparse_topk",
            "num_blocks",
            "kv_cache_specs",
            "cascade_groups",
        )
    },
    "add_request(req_id)": (builder, lambda made, wrong: made.add_request(wrong)),
    "add_request(block_ids)": (builder, lambda made, wrong: made.add_request("c", wrong)),
    "add_request(block_ids[1])": (builder, lambda made, wrong: made.add_request("c", [[1], wrong])),
    "add_request(computed)": (builder, lambda made, wrong: made.add_request("c", (), wrong)),
    "add_request(encoder_len)": (builder, lambda made, wrong: made.add_request("c", (), 0, wrong)),
    "add_request(placeholders)": (builder, lambda made, wrong: made.add_request("c", (), 0, 0, wrong)),
    "placeholders['x']": (builder, lambda made, wrong: made.add_request("c", (), 0, 0, {"x": wrong})),
    "placeholders['x'][0]": (builder, lambda made, wrong: made.add_request("c", (), 0, 0, {"x": [wrong]})),
    "offset": (builder, lambda made, wrong: made.add_request("c", (), 0, 0, {"x": [(wrong, 1)]})),
    "length": (builder, lambda made, wrong: made.add_request("c", (), 0, 0, {"x": [(1, wrong)]})),
    "append_blocks(req_id)": (builder, lambda made, wrong: made.append_blocks(wrong, [[1], [2]])),
    "append_blocks(block_ids)": (builder, lambda made, wrong: made.append_blocks("a", wrong)),
    "append_blocks(block_ids[0])": (builder, lambda made, wrong: made.append_blocks("a", [wrong, [2]])),
    "free_blocks(req_id)": (builder, lambda made, wrong: made.free_blocks(wrong, 0, 0)),
    "free_blocks(group)": (builder, lambda made, wrong: made.free_blocks("a", wrong, 0)),
    "free_blocks(num_blocks)": (builder, lambda made, wrong: made.free_blocks("a", 0, wrong)),
    "remove_request": (builder, lambda made, wrong: made.remove_request(wrong)),
    "swap_states(i)": (builder, lambda made, wrong: made.swap_states(wrong, 0)),
    "swap_states(j)": (builder, lambda made, wrong: made.swap_states(0, wrong)),
    "step": (builder, lambda made, wrong: made.step(wrong)),
    "step by request": (builder, lambda made, wrong: made.step({"a": wrong})),
    "step in order": (builder, lambda made, wrong: made.step([1, wrong])),
    "num_logits": (builder, lambda made, wrong: made.step(3, wrong)),
    "num_logits by request": (builder, lambda made, wrong: made.step(3, {"a": wrong})),
    "finish_step": (stepped, lambda made, wrong: made.finish_step(wrong)),
    "finish_step by request": (stepped, lambda made, wrong: made.finish_step({"a": wrong, "b": 1})),
    "rollback": (finished, lambda made, wrong: made.rollback(wrong)),
    "rollback by request": (finished, lambda made, wrong: made.rollback({"a": wrong, "b": 1})),
    "profile_step(num_reqs)": (
        lambda: StepBatchBuilder(**SIZES),
        lambda made, wrong: made.profile_step(wrong, 8),
    ),  # type: ignore[arg-type]
    "profile_step(num_tokens)": (
        lambda: StepBatchBuilder(**SIZES),
        lambda made, wrong: made.profile_step(2, wrong),
    ),  # type: ignore[arg-type]
}


def state(made: Any) -> dict[str, Any]:
    """All numbers and names of a pool or a builder."""
    made = getattr(made, "_requests", made)
    # A call leaves its writes to the next one.
    made._settle()
    kinds = (int, tuple, list, dict, np.ndarray)
    return {name: copy.deepcopy(value) for name, value in vars(made).items() if isinstance(value, kinds)}


@pytest.mark.parametrize("call", CALLS)
def test_pools_and_builders_refuse_values_of_wrong_types_and_stay_as_they_were(call):
    make, attack = CALLS[call]
    for wrong in WRONG:
        made = make()
        before = state(made)
        with pytest.raises(AttnplugError) as error:
            attack(made, wrong)
        assert isinstance(error.value, (BatchError, SpecError, LayoutError))
        np.testing.assert_equal(state(made), before)


LAYERS = {"full": layer(dtype="float32"), "window": layer(dtype="float32", sliding_window=20)}
CONFIG = BuilderConfig(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, cudagraph_batch_sizes=(2, 4)
)


@pytest.fixture
def model() -> Iterator[ServedModel]:
    made = ServedModel(LAYERS, num_blocks=12, config=CONFIG)
    made.add("a")
    made.step(a=5)
    yield made
    # The next correct step has correct numbers, whatever was refused before.
    made.step(a=2)


def test_a_runtime_refuses_arguments_of_wrong_types(model):
    for name in (
        "plan",
        "layer_tensors",
        "config",
        "device",
        "kv_sharing_fast_prefill",
        "debug",
        "kv_caches",
    ):
        for wrong in (wrong for wrong in WRONG if name != "debug" or wrong is not True):
            if name == "kv_sharing_fast_prefill" and wrong is True:
                continue
            with pytest.raises(AttnplugError):
                AttentionRuntime(**{"plan": model.plan, name: wrong})
    for wrong in WRONG:
        for given in (
            {"layer_tensors": {"full": wrong}},
            {"kv_caches": {"full": wrong, "window": wrong}},
            {"allocator": lambda size, device, wrong=wrong: wrong},
        ):
            with pytest.raises(AttnplugError):
                AttentionRuntime(model.plan, **given)


def test_steps_refuse_arguments_of_wrong_types(model):
    runtime = model.runtime
    for wrong in WRONG:
        batch = model.batches.step({"a": 2})
        attacks: list[Callable[[], object]] = [
            lambda wrong=wrong: runtime.begin_step(wrong),
            lambda wrong=wrong, batch=batch: runtime.begin_step(batch, wrong),
            lambda wrong=wrong, batch=batch: runtime.begin_step(batch, metadata=wrong),
            lambda wrong=wrong, batch=batch: runtime.begin_step(
                batch, metadata={"full": wrong, "window": wrong}
            ),
            lambda wrong=wrong, batch=batch: runtime.begin_step(batch, draft_index=wrong),
            lambda wrong=wrong: runtime.step_batch_builder(wrong),
            lambda wrong=wrong: runtime.step_batch_builder(max_encoder_len=wrong),
            lambda wrong=wrong: runtime.step_batch_builder(mm_prefix_modalities=wrong),
        ]
        for attack in attacks:
            with pytest.raises(BatchError):
                attack()
        with pytest.raises(BatchError, match="has no step"):
            runtime.forward("full", torch.zeros(2, 4, 8))
        model.batches.finish_step({"a": 0})


def test_metadata_without_a_layer_is_refused_because_its_output_would_stay_unwritten(model):
    batch = model.batches.step({"a": 2})
    for given in ({}, {"full": None}):
        with pytest.raises(BatchError, match=r"metadata\['(full|window)'\]=None must be the metadata"):
            model.runtime.begin_step(batch, metadata=given)
    model.batches.finish_step({"a": 0})


def test_calls_refuse_arguments_of_wrong_types(model):
    runtime, generator = model.runtime, torch.Generator().manual_seed(0)
    spec = LAYERS["full"]
    query = torch.randn(2, spec.num_heads, spec.head_size, generator=generator)
    key = torch.randn(2, spec.num_kv_heads, spec.head_size, generator=generator)
    good = {"layer_name": "full", "query": query, "key": key, "value": key.clone()}
    tensors = [query[None], query.to("meta"), query.double(), query[:1], query.tolist(), query.numpy()]
    runtime.begin_step(model.batches.step({"a": 2}))
    expected = runtime.forward(**good)
    names = (*good, "output", "output_lse", "output_scale", "output_block_scale")
    for name in names:
        for wrong in (*WRONG, *tensors):
            with pytest.raises(BatchError, match="layer"):
                runtime.forward(**{**good, name: wrong})
    leaf = query.clone().requires_grad_()
    with torch.inference_mode():
        inference = query.clone()
    for wrong in (leaf, inference, query, query.view(-1).view(2, 4, 8)):
        with pytest.raises(BatchError, match="output"):
            runtime.forward(**good, output=wrong)
    torch.testing.assert_close(runtime.forward(**good), expected, rtol=0, atol=0)
    model.batches.finish_step({"a": 0})


def test_graphs_refuse_arguments_of_wrong_types(model):
    runtime = AttentionRuntime(model.plan, config=CONFIG, debug=False)
    graphs = GraphState(runtime)
    buffers, batch = graphs.get_graph_input_buffers(2), model.batches.step({"a": 1})
    for wrong in WRONG:
        attacks: list[Callable[[], object]] = [
            lambda wrong=wrong: GraphState(wrong),
            lambda wrong=wrong: GraphState(runtime, wrong),
            lambda wrong=wrong: GraphState(runtime, max_query_len=wrong),
            lambda wrong=wrong: GraphState(runtime, max_encoder_len=wrong),
            lambda wrong=wrong: graphs.metadata_for_capture(wrong),
            lambda wrong=wrong: graphs.metadata_for_capture(2, wrong),
            lambda wrong=wrong: graphs.get_graph_input_buffers(wrong),
            lambda wrong=wrong: graphs.get_graph_input_buffers(2, wrong),
            lambda wrong=wrong: graphs.prepare_graph_input_buffers(wrong, batch),
            lambda wrong=wrong: graphs.prepare_graph_input_buffers(buffers, wrong),
            lambda wrong=wrong: graphs.prepare_graph_input_buffers(buffers, batch, draft_index=wrong),
        ]
        if not isinstance(wrong, (int, np.integer)) or wrong < 0 or wrong is True:
            attacks.append(lambda wrong=wrong: graphs.batch_size_for(wrong))
        for attack in attacks:
            with pytest.raises(BatchError):
                attack()
    model.batches.finish_step({"a": 0})
