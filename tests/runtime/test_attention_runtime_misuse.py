"""Calls that cannot be honoured: each says so, and the runtime goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_backends import backend, offered
from model_layers import layer
from served_model import Drawn, ServedModel

from attnplug import plan
from attnplug.core import BuilderConfig, LayerTensors
from attnplug.core.errors import BatchError, LayoutError, PolicyError, SpecError
from attnplug.runtime import AttentionRuntime, StepBatchBuilder
from attnplug.testing import direct_batch

FULL = layer(dtype="float32")
CROSS = layer(dtype="float32", attn_type="encoder_decoder")
ENCODER = layer(dtype="float32", attn_type="encoder", direct_kv=True)
FP8 = layer(dtype="bfloat16", kv_cache_dtype="fp8")


def begun(specs: Any = None, **asked: Any) -> ServedModel:
    """A model with a step of 3 tokens begun."""
    model = ServedModel(specs or {"0": FULL, "1": FULL}, **asked)
    model.add("a", encoder_len=5 if asked.get("max_encoder_len") else 0)
    model.begin(a=3)
    return model


def runtime_of(spec: Any, tensors: LayerTensors | None = None, **asked: Any) -> AttentionRuntime:
    given = {} if tensors is None else {"0": tensors}
    return AttentionRuntime(plan({"0": spec}, "cpu", num_blocks=4), given, **asked)


def goes_on(model: ServedModel, layer: str = "0") -> None:
    """The step that was begun is served, and the next one."""
    model.check(layer, model.draw(layer, {"a": 3}))


# A call against the step


def test_forward_before_any_step():
    model = ServedModel({"0": FULL})
    rows = torch.zeros(1, 4, 8)
    with pytest.raises(BatchError, match="layer_name='0' has no step; call begin_step with a batch first"):
        model.runtime.forward("0", rows)
    model.add("a")
    model.step(a=3)


def test_forward_after_the_step_was_ended():
    model = begun()
    model.runtime.end_step()
    with pytest.raises(BatchError, match="has no step"):
        model.run("0", model.draw("0", {"a": 3}))


def test_a_direct_layer_in_a_step_of_pages_only():
    model = begun({"0": FULL, "e": ENCODER})
    with pytest.raises(BatchError, match=r"'e' has no step; call begin_step with direct=... first"):
        model.runtime.forward("e", torch.zeros(1, 4, 8))
    goes_on(model)


def test_a_layer_that_is_none():
    model = begun()
    with pytest.raises(BatchError, match="layer_name='nobody' is not one of the plan's 2 layers"):
        model.runtime.forward("nobody", torch.zeros(3, 4, 8))
    goes_on(model)


Change = Callable[[Drawn], dict[str, Any]]

WRONG: dict[str, tuple[Change, str]] = {
    "fewer queries": (lambda d: {"query": d.query[:2]}, r"query=\(2, 4, 8\) of layer 0 must have the shape \(at least 3, 4, 8\) in this step"),
    "queries of another head count": (lambda d: {"query": d.query[:, :2]}, r"query=\(3, 2, 8\) of layer 0 must have the shape \(at least 3, 4, 8\)"),
    "flat queries": (lambda d: {"query": d.query.flatten(1)}, r"query=\(3, 32\) of layer 0"),
    "queries of another dtype": (lambda d: {"query": d.query.half()}, r"query.dtype=torch.float16 of layer 0 must be torch.float32"),
    "fewer keys": (lambda d: {"key": d.key[:1]}, r"key=\(1, 2, 8\) of layer 0 must have the shape"),
    "keys of another dtype": (lambda d: {"key": d.key.double()}, "key.dtype=torch.float64 of layer 0"),
    "fewer values": (lambda d: {"value": d.value[:2]}, r"value=\(2, 2, 8\) of layer 0"),
    "no key": (lambda d: {"key": None}, "key=None of layer 0 is required: the step has 3 new keys"),
    "no value": (lambda d: {"value": None}, "value=None of layer 0 is required with a key"),
    "an output too small": (lambda d: {"output": torch.zeros(2, 4, 8)}, r"output=\(2, 4, 8\) of layer 0"),
    "an output of another dtype": (
        lambda d: {"output": torch.zeros(3, 4, 8, dtype=torch.float16)},
        "output.dtype=torch.float16 of layer 0 must be torch.float32",
    ),
    "an LSE that no spec asked for": (
        lambda d: {"output_lse": torch.zeros(3, 4)},
        r"output_lse=\(3, 4\) of layer 0 must be None; declare the layer with needs_lse=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_tensors_that_do_not_fit_the_step(wrong):
    change, message = WRONG[wrong]
    model = begun()
    drawn = model.draw("0", {"a": 3})
    called = {"query": drawn.query, "key": drawn.key, "value": drawn.value} | change(drawn)
    with pytest.raises(BatchError, match=message):
        model.runtime.forward("0", **called)
    model.check("0", drawn)


def test_an_lse_of_another_shape():
    model = begun({"0": layer(dtype="float32", needs_lse=True)})
    drawn = model.draw("0", {"a": 3})
    with pytest.raises(BatchError, match=r"output_lse=\(3, 2\) of layer 0 must have the shape"):
        model.runtime.forward("0", drawn.query, drawn.key, drawn.value, output_lse=torch.zeros(3, 2))
    model.check("0", drawn)


def test_keys_for_a_layer_that_reads_anothers_pages():
    model = begun(kv_sharing={"1": "0"})
    goes_on(model)
    drawn = model.draw("1", {"a": 3})
    for given in ({"key": torch.zeros(3, 2, 8)}, {"value": torch.zeros(3, 2, 8)}):
        with pytest.raises(
            BatchError, match="of layer 1 must be None, like value: it reads the pages of layer 0"
        ):
            model.runtime.forward("1", drawn.query, **given)
    model.check("1", drawn)


def test_cross_attention_without_the_encoders_tokens_in_their_first_step():
    model = begun({"0": FULL, "cross": CROSS}, max_encoder_len=8)
    drawn = model.draw("cross", {"a": 3})
    with pytest.raises(BatchError, match="key=None of layer cross is required: the step has 5 new keys"):
        model.runtime.forward("cross", drawn.query)
    model.check("cross", drawn)


def test_a_value_without_its_key_in_a_later_step_of_cross_attention():
    model = ServedModel({"0": FULL, "cross": CROSS}, max_encoder_len=8)
    model.add("a", encoder_len=5)
    model.step(a=1)
    model.begin(a=3)
    drawn = model.draw("cross", {"a": 3})
    with pytest.raises(BatchError, match="of layer cross must be None if key is None"):
        model.runtime.forward("cross", drawn.query, None, torch.zeros(5, 2, 8))
    model.check("cross", drawn)


def test_direct_layers_need_their_keys():
    runtime = runtime_of(ENCODER)
    batch = direct_batch(ENCODER, [4], [4])
    runtime.begin_step(direct=batch.common)
    with pytest.raises(BatchError, match="key=None of layer 0 is required: the step has 4 new keys"):
        runtime.forward("0", batch.query)
    runtime.forward("0", batch.query, batch.key, batch.value)


# A step against the plan


def test_a_step_of_nothing():
    model = begun()
    with pytest.raises(BatchError, match="batch=None is required: give batch, direct, or both"):
        model.runtime.begin_step()


def test_a_step_that_was_refused_leaves_none_begun():
    model = begun()
    with pytest.raises(BatchError, match="is required"):
        model.runtime.begin_step()
    with pytest.raises(BatchError, match="has no step"):
        model.run("0", model.draw("0", {"a": 3}))


def test_direct_metadata_for_a_plan_without_direct_layers():
    model = begun()
    direct = direct_batch(ENCODER, [4], [4]).common
    with pytest.raises(BatchError, match="direct=1 requests, and no layer of the plan has direct K and V"):
        model.runtime.begin_step(direct=direct)
    model.add("b")
    model.step(a=3, b=1)


def test_a_batch_of_another_number_of_kv_groups():
    model = begun()
    other = StepBatchBuilder(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8, block_sizes=[16, 16])
    other.add_request("x", [[1], [2]])
    with pytest.raises(BatchError, match=r"batch.block_tables=2 must be 1, one for each KV group"):
        model.runtime.begin_step(other.step(1))
    model.step(a=3)


def test_pages_past_the_pool():
    model = ServedModel({"0": FULL}, num_blocks=4)
    with pytest.raises(BatchError, match=r"block_ids\[0\]=4 must be in 0 .. 3, the 4 blocks of the pool"):
        model.batches.add_request("a", [[4]])
    model.add("a")
    with pytest.raises(BatchError, match=r"block_ids\[0\]=-1 must be in 0 .. 3, the 4 blocks of the pool"):
        model.batches.append_blocks("a", [[1, -1]])
    model.step(a=3)


def test_slots_past_the_pool_in_a_batch_of_another_builder():
    model = ServedModel({"0": FULL}, num_blocks=4)
    other = StepBatchBuilder(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8, block_sizes=[16])
    other.add_request("a", [[9]])
    with pytest.raises(BatchError, match="slot_mappings=144 of KV group 0 is past the 64 slots of 4 blocks"):
        model.runtime.begin_step(other.step(1))
    model.add("a")
    model.step(a=3)


def test_blocks_that_are_exhausted():
    model = ServedModel({"0": FULL}, num_blocks=3)
    model.add("a")
    model.step(a=20)
    model.add("b")
    with pytest.raises(BatchError, match=r"count=1 must be in 0 .. 0, the free blocks of 3; free blocks"):
        model.begin(b=1)
    model.remove("b")
    model.step(a=12)
    model.remove("a")
    model.add("b")
    model.step(b=32)


def test_a_request_without_pages_for_its_tokens():
    model = ServedModel({"0": FULL})
    model.batches.add_request("a", [[1]])
    with pytest.raises(BatchError, match="is past the 16 tokens of its pages in KV group 0"):
        model.batches.step(17)


# Use after close


def test_everything_but_close_raises_after_close():
    model = begun()
    batch = model.batches.step(3)
    with model.runtime as runtime:
        pass
    message = "runtime='closed' cannot be used any more; make another one"
    for call in (
        lambda: runtime.begin_step(batch),
        lambda: runtime.forward("0", torch.zeros(3, 4, 8)),
        lambda: runtime.step_batch_builder(8),
    ):
        with pytest.raises(BatchError, match=message):
            call()
    runtime.close()
    assert runtime.kv_caches == {}
    assert all(each.kv_cache is None for each in runtime.layers.values())


def test_a_runtime_closes_where_its_block_raised():
    runtime = runtime_of(FULL)
    with pytest.raises(RuntimeError, match="elsewhere"), runtime:
        raise RuntimeError("elsewhere")
    with pytest.raises(BatchError, match="cannot be used"):
        runtime.step_batch_builder(8)


# Making a runtime


def test_a_plan_without_a_number_of_blocks():
    with pytest.raises(
        LayoutError, match=r"plan.num_blocks=None is required; plan with num_blocks or memory"
    ):
        AttentionRuntime(plan({"0": FULL}, "cpu"))


def test_tensors_of_a_layer_that_is_none():
    with pytest.raises(LayoutError, match="layer_tensors='1' is not one of the plan's 1 layers"):
        AttentionRuntime(plan({"0": FULL}, "cpu", num_blocks=4), {"1": LayerTensors()})


@pytest.mark.parametrize(
    ("spec", "tensors", "message"),
    [
        (layer(has_sinks=True), None, "sinks of layer 0=None is required: the spec says has_sinks=True"),
        (FULL, LayerTensors(sinks=torch.zeros(4)), "sinks of layer 0=.* but the spec says has_sinks=False"),
        (layer(has_alibi=True), LayerTensors(alibi_slopes=torch.zeros(3)), "alibi_slopes of layer 0="),
        (FULL, LayerTensors(k_scale=0.5), "k_scale of layer 0=0.5 would be ignored"),
        (FULL, LayerTensors(v_scale=torch.tensor(0.5)), "v_scale of layer 0=0.5 would be ignored"),
        (FP8, LayerTensors(v_scale=torch.tensor(-1.0)), "v_scale of layer 0=-1.0 must be a finite number"),
    ],
)
def test_tensors_that_the_layer_does_not_ask_for_or_lacks(spec, tensors, message):
    with pytest.raises(SpecError, match=message):
        runtime_of(spec, tensors)


def test_scales_of_another_layers_pages():
    made = plan({"0": FP8, "1": FP8}, "cpu", num_blocks=4, kv_sharing={"1": "0"})
    tensors = {"0": LayerTensors(k_scale=0.5), "1": LayerTensors(k_scale=2.0)}
    with pytest.raises(
        LayoutError, match=r"k_scale=2.0 of layer 1 is not the 0.5 of 0, whose pages it reads"
    ):
        AttentionRuntime(made, tensors)
    tensors["1"] = LayerTensors(k_scale=0.5)
    assert AttentionRuntime(made, tensors).layers["1"]._k_scale_float == 0.5


def test_a_device_that_was_not_planned_for():
    with pytest.raises(LayoutError, match="device='meta' is not the device of the plan: cpu; plan for it"):
        runtime_of(FULL, device="meta")
    assert runtime_of(FULL, device="cpu").device == torch.device("cpu")


def test_context_parallelism():
    with pytest.raises(PolicyError, match=r"config.decode_context_parallel_size=2 must be 1"):
        runtime_of(FULL, config=BuilderConfig(decode_context_parallel_size=2))


def test_backends_that_see_shared_pages_differently():
    def values_first(kv_cache, spec):
        return kv_cache[:, 1], kv_cache[:, 0]

    with offered(backend("SWAPPED", split_kv=values_first)):
        made = plan({"0": FULL, "1": FULL}, "cpu", num_blocks=4, backend="TORCH,1=SWAPPED")
        assert AttentionRuntime(made).kv_caches.keys() == {"0", "1"}
        shared = dataclasses.replace(made, kv_sharing={"1": "0"})
        with pytest.raises(
            LayoutError, match="kv_sharing='1' on SWAPPED would read the pages of 0 differently"
        ):
            AttentionRuntime(shared)


# A builder of batches


def test_a_longest_sequence_is_needed_from_somewhere():
    with pytest.raises(BatchError, match="max_model_len=None is required"):
        runtime_of(FULL).step_batch_builder()
    limited = runtime_of(FULL, config=BuilderConfig(max_model_len=32))
    assert limited.step_batch_builder().max_model_len == 32
    assert limited.step_batch_builder(8).max_model_len == 8
    with pytest.raises(BatchError, match=r"max_model_len=33 must be at most config.max_model_len=32"):
        limited.step_batch_builder(33)


def test_a_plan_without_pages_has_no_batches():
    with pytest.raises(BatchError, match=r"plan=1 layers keep no pages; begin_step\(direct=...\)"):
        runtime_of(ENCODER).step_batch_builder(8)
