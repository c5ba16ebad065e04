"""Causality comes from each layer's spec, in every kind of step; a batch narrows it only where it says so."""

from __future__ import annotations

import dataclasses
import types
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from graph_models import served as graph_model
from graph_models import state_of
from model_layers import layer
from served_model import ServedModel

from attnplug import LayerSpec, plan
from attnplug.core import BuilderConfig
from attnplug.core.batch import UBatchSlice, split_attn_metadata
from attnplug.core.errors import BatchError
from attnplug.core.interface.impl_and_builder import make_builder, make_impl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.runtime import AttentionRuntime
from attnplug.testing import assert_close, attention_oracle, direct_batch, paged_batch, tolerance

FULL = layer(head_size=16, dtype="float32")
WIDE = layer(head_size=16, dtype="float32", causal=False)
NEAR = layer(head_size=16, dtype="float32", causal=False, window=(5, 3))
CROSS = layer(head_size=16, dtype="float32", attn_type="encoder_decoder")
ENCODER = layer(head_size=16, dtype="float32", attn_type="encoder_only", direct_kv=True)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
BACKENDS = ["TORCH", pytest.param("TRITON", marks=[needs_triton, pytest.mark.slow])]


def serve(model: ServedModel) -> None:
    """A prefill, a chunk of another beside a decode, extends, decodes, and drafts that are rejected."""
    model.add("a")
    model.step(a=20)
    model.add("b")
    model.step(a=1, b=17)
    model.step(a=4, b=9)
    model.step(a=1, b=1)
    model.step(a=3, b=3, accepted={"a": 1, "b": 2})
    model.step(b=2, a=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "specs",
    [
        {"0": WIDE},
        {"0": NEAR},
        {"causal": FULL, "wide": WIDE},
        {
            "wide": WIDE,
            "near": NEAR,
            "sliding": layer(head_size=16, dtype="float32", sliding_window=9),
            "causal": FULL,
        },
    ],
    ids=["wide", "near", "both", "four kinds"],
)
def test_layers_of_each_kind_are_right_in_the_same_steps(backend: str, specs: dict[str, LayerSpec]) -> None:
    serve(ServedModel(specs, backend=backend))


def test_the_first_row_of_a_layer_that_is_not_causal_sees_the_last() -> None:
    spec = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype="float32", causal=False)
    made = plan({"a": spec, "b": spec.replace(causal=True)}, "cpu", num_blocks=8)
    runtime = AttentionRuntime(made)
    batches = runtime.step_batch_builder(32)
    batches.add_request("r", [runtime.block_pool.allocate(1)])
    runtime.begin_step(batches.step(4))
    zeros, value = torch.zeros(4, 1, 16), torch.arange(4.0).view(4, 1, 1).expand(4, 1, 16).contiguous()
    assert runtime.forward("a", zeros, zeros, value)[:, 0, 0].tolist() == [1.5] * 4
    assert runtime.forward("b", zeros, zeros, value)[:, 0, 0].tolist() == [0, 0.5, 1, 1.5]


def test_a_composite_gives_both_members_the_layers_causality() -> None:
    asked = "prefill=TRITON,decode=TORCH" if find_spec("triton") else "TORCH"
    serve(ServedModel({"causal": FULL, "wide": WIDE}, backend=asked))


def test_cross_layers_beside_both_kinds() -> None:
    model = ServedModel({"causal": FULL, "wide": WIDE, "cross": CROSS}, max_encoder_len=24)
    model.add("a", encoder_len=19)
    model.step(a=7)
    model.add("b", encoder_len=5)
    model.step(a=1, b=9)
    model.step(a=1, b=1)


def test_a_bidirectional_draft_beside_a_causal_target() -> None:
    config = BuilderConfig(max_num_seqs=8, max_num_batched_tokens=256, num_speculative_tokens=3)
    model = ServedModel({"target": FULL, "draft": WIDE}, config=config)
    model.add("a")
    model.add("b")
    model.step(a=12, b=5)
    for index in range(3):
        model.draft(index, a=1, b=2)
    model.rollback(a=3, b=6)
    model.step(a=4, b=7)


def test_an_encoder_needs_no_word_of_the_batch_and_refuses_a_causal_one() -> None:
    runtime = AttentionRuntime(plan({"e": ENCODER, "d": FULL.replace(direct_kv=True)}, "cpu"))
    batch, causal = (
        direct_batch(ENCODER, [5, 30], [5, 30]),
        direct_batch(FULL.replace(direct_kv=True), [5, 30], [5, 30]),
    )
    runtime.begin_step(direct=dataclasses.replace(batch.common, causal=None))
    for name, each in (("e", batch), ("d", causal)):
        found = runtime.forward(name, each.query, each.key, each.value)
        assert_close(found, each.oracle().output, tolerance(each.spec).output)
    for flag, limit in ((True, "cannot narrow a layer of attn_type=encoder_only"), (False, "cannot widen")):
        with pytest.raises(BatchError, match=f"causal={flag} {limit}.*leave causal=None"):
            runtime.begin_step(direct=dataclasses.replace(batch.common, causal=flag))


def test_a_batch_that_says_causal_narrows_decoders_and_leaves_cross_attention() -> None:
    model = ServedModel({"wide": WIDE, "cross": CROSS}, max_encoder_len=24)
    model.add("a", encoder_len=9)
    batch = model.begin(a=6)
    batch.common.causal = True
    model.runtime.begin_step(batch)
    wide, cross = (model.draw(name, {"a": 6}) for name in ("wide", "cross"))
    expected = attention_oracle(FULL, [wide.query], [wide.key], [wide.value], [6]).output
    assert_close(model.run("wide", wide), expected, 1e-5)
    model.check("cross", cross)


def test_a_batch_that_says_not_causal_is_refused_where_a_layer_is() -> None:
    model = ServedModel({"causal": FULL, "wide": WIDE})
    model.add("a")
    batch = model.begin(a=6)
    batch.common.causal = False
    with pytest.raises(BatchError, match="causal=False cannot widen a causal layer; leave causal=None"):
        model.runtime.begin_step(batch)


@pytest.mark.parametrize("flag", ["yes", 1, 0])
def test_a_flag_that_is_no_bool(flag: object) -> None:
    with pytest.raises(BatchError, match=r"causal=.* must be a bool, or None"):
        FULL.causal_in(flag)  # type: ignore[arg-type]


def test_graphs_of_layers_of_both_kinds() -> None:
    model = graph_model({"causal": FULL, "wide": WIDE}, drafts=2)
    state = state_of(model)
    model.add("a")
    model.add("b")
    model.step(a=9, b=4)
    buffers = state.get_graph_input_buffers(2, 3)
    with state.capture(2, 3):
        pass
    drawn = model.begin(a=3, b=3)
    state.prepare_graph_input_buffers(buffers, drawn)
    for name in ("causal", "wide"):
        model.check(name, model.draw(name, {"a": 3, "b": 3}))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", [FULL, WIDE, NEAR], ids=["causal", "wide", "near"])
def test_a_builder_called_by_hand_reads_the_layers_where_the_batch_says_nothing(
    backend: str, spec: LayerSpec
) -> None:
    batch = paged_batch(spec, [5, 1, 20], [9, 30, 20])
    assert batch.common.causal is spec.causal
    common = dataclasses.replace(batch.common, causal=None)
    served = plan({"0": spec}, "cpu", num_blocks=8, backend=backend).decisions["0"].get_backend_cls()
    impl = make_impl(served, spec, layer_name="0", tensors=batch.tensors)
    config = BuilderConfig(layers={"0": types.SimpleNamespace(impl=impl)})
    cache: Any = kv_cache_spec_for(spec, 16)
    metadata = make_builder(served, cache, ["0"], config, torch.device("cpu")).build(0, common)
    given = batch.query, batch.key, batch.value, batch.kv_cache
    found = impl.forward(None, *given, metadata, torch.full_like(batch.query, torch.nan))
    assert_close(found, batch.oracle().output, tolerance(spec).output)


def test_micro_batches_of_a_request_are_for_causal_layers() -> None:
    runtime = AttentionRuntime(plan({"causal": FULL, "wide": WIDE}, "cpu", num_blocks=8))
    common = paged_batch(FULL, [8], [8], causal=None).common
    common.causal = None
    halves = [UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(0, 1), slice(4, 8))]
    parts = split_attn_metadata(halves, common)
    assert [part.is_cut for part in parts] == [True, True]
    (whole,) = split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 8))], common)
    assert not whole.is_cut
    for part in parts:
        assert part.causal_for(FULL)
        with pytest.raises(BatchError, match="is_cut=True has a part of a request"):
            part.for_layers([WIDE])
        builders = {group.layer_names: group.builder for group in runtime.attention_groups}
        with pytest.raises(BatchError, match="is_cut=True has a part of a request"):
            builders[("wide",)].build(0, part)
        builders[("causal",)].build(0, part)
    assert not whole.causal_for(WIDE)
