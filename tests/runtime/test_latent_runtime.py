"""Latent attention beside full and sliding layers on the runtime: steps, drafts, graphs, warm-up and the workspace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_backends import offered
from graph_backends import graph_backend
from graph_latents import ForgetfulBuilder, LatentGraphBuilder, latent_backend
from graph_models import FULL, LONGEST, SLIDING, UNIFORM, config, state_of
from served_model import ServedModel

from attnplug import plan
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, LayerSpec, MLADims, SparseSpec
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from attnplug.core.spec import Phase
from attnplug.mla import MLADecodeImpl
from attnplug.runtime import AttentionRuntime
from attnplug.testing import assert_close, layer_tensors

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
LATENT = LayerSpec(num_heads=4, num_kv_heads=1, head_size=32, mla=DIMS, dtype="float32")
SPECS = {"0": LATENT, "1": FULL, "2": SLIDING, "3": LATENT}
ROWS = 32
"""Computed tokens that a prefill expands at once."""


def served(
    builder: type[LatentGraphBuilder] = LatentGraphBuilder, drafts: int = 0, **asked: Any
) -> ServedModel:
    """The model on backends that graphs can hold."""
    with offered(graph_backend(UNIFORM), latent_backend(builder)):
        made = config(num_speculative_tokens=drafts, context_chunk_rows=ROWS)
        return ServedModel(SPECS, config=made, max_model_len=LONGEST, debug=False, **asked)


def with_requests(model: ServedModel) -> ServedModel:
    for name, tokens in (("a", 30), ("b", 3), ("c", 17)):
        model.add(name)
        model.step(**{name: tokens})
    return model


# Steps


def test_each_kind_of_layer_has_a_group_and_all_have_pages_of_one_size():
    groups = served().groups
    kinds = {group.layer_names: type(group.kv_cache_spec) for group in groups}
    assert set(kinds.values()) == {MLAAttentionSpec, FullAttentionSpec, SlidingWindowSpec}
    assert all(kinds[names] is MLAAttentionSpec for names in kinds if set(names) & {"0", "3"})
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1


@pytest.mark.parametrize("backend", ["TORCH", "LATENT_GRAPHS"])
def test_prompts_decodes_drafts_and_shared_prefixes_are_right_in_every_layer(backend):
    model = served(backend="TORCH") if backend == "TORCH" else served()
    assert model.plan.decisions["0"].backend == backend
    model.add("a")
    model.step(a=17)
    model.add("b", prefix=("a", 16))
    model.step(a=23, b=20)
    model.add("c")
    model.step({"a": 2, "b": 1, "c": 9}, a=3, b=3, c=9)
    model.remove("a")
    model.step(b=1, c=33)
    model.step(b=1, c=4)
    model.remove("b")
    model.remove("c")
    assert model.runtime.block_pool.num_free == 127


def test_a_draft_step_decodes_on_latents():
    model = with_requests(served(drafts=2))
    for index in (0, 1):
        model.draft(index, a=1, b=1, c=1)
    model.rollback(a=2, b=2, c=2)
    model.step(a=3, b=3, c=3)


# Graphs


def replayed(builder: type[LatentGraphBuilder], queries: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a captured step gives on the values of later ones, layer by layer, and what is right.

    On a CPU, the metadata of the capture stand for the graph: a replay reads the tensors that they have.
    """
    model = with_requests(served(builder))
    state = state_of(model)
    with state.capture(4, queries) as captured:
        for name, spec in SPECS.items():
            rows = torch.zeros(4 * queries, spec.num_heads, spec.query_size)
            key = torch.zeros(4 * queries, spec.num_kv_heads, spec.head_size)
            model.runtime.forward(name, rows, key, None if spec.mla else key)
    buffers = state.get_graph_input_buffers(4, queries)
    for _ in range(2):
        scheduled = dict.fromkeys("abc", queries)
        padded = state.prepare_graph_input_buffers(buffers, model.begin(**scheduled))
        model.runtime.begin_step(padded, metadata=captured)
        for name in SPECS:
            drawn = model.draw(name, scheduled)
            query, key, value = (
                None if rows is None else torch.cat([rows, rows.new_full((queries, *rows.shape[1:]), 9.0)])
                for rows in (drawn.query, drawn.key, drawn.value)
            )
            yield model.runtime.forward(name, query, key, value)[: 3 * queries], drawn.expected
        model.finish(**scheduled)
    assert all(not cache[0].any() for cache in model.runtime.kv_caches.values())


@pytest.mark.parametrize("queries", [1, 3])
def test_a_replay_gives_what_the_step_gives(queries):
    for found, expected in replayed(LatentGraphBuilder, queries):
        assert_close(found, expected, 1e-5)


def test_lengths_that_a_build_copies_would_be_seen():
    pairs = list(replayed(ForgetfulBuilder, 1))
    wrong = [not torch.allclose(found, expected.float(), atol=1e-3) for found, expected in pairs]
    assert wrong == [spec.mla is not None for spec in SPECS.values()] * 2


def test_torch_s_latents_are_not_captured():
    model = ServedModel({"0": LATENT}, config=config(), max_model_len=LONGEST, debug=False, backend="TORCH")
    with pytest.raises(BatchError, match="declares NEVER"), state_of(model).capture(2):
        pytest.fail("the capture was begun")


# Warm-up


def test_the_warm_up_runs_decodes_and_prefills_with_context_and_writes_no_page(monkeypatch):
    seen: list[int] = []
    expand = MLADecodeImpl._expand

    def noted(self, kv_c, *rest):
        seen.append(kv_c.shape[0])
        expand(self, kv_c, *rest)

    monkeypatch.setattr(MLADecodeImpl, "_expand", noted)
    # TORCH compiles nothing; with a key its layers are warmed up.
    monkeypatch.setattr(TorchBackend, "compile_key", lambda spec: spec.head_size)
    monkeypatch.setattr(TorchBackend, "watch_compiling", lambda: contextlib.nullcontext([]))
    model = served()
    for cache in model.runtime.kv_caches.values():
        cache[1:].fill_(3.0)

    steps = [step for step in model.runtime.warm_up().steps if step.layer == "0"]

    assert {(step.phase, step.computed) for step in steps} == {
        (Phase.DECODE, True),
        (Phase.PREFILL, False),
        (Phase.PREFILL, True),
    }
    assert 64 in seen, "new tokens of the longest prompt"
    assert 1 in seen, "and the token computed before"
    assert seen.count(ROWS) >= 8, "and many chunks, which are merged in float32"
    assert all((cache[1:] == 3.0).all() for cache in model.runtime.kv_caches.values())


# The workspace


def test_all_layers_expand_their_context_in_one_workspace(monkeypatch):
    used: list[tuple[int, int]] = []
    parts_of = MLADecodeImpl._workspace

    def noted(self, buffer, rows, like):
        parts = parts_of(self, buffer, rows, like)
        if buffer is not None:
            end = parts[-1].data_ptr() + parts[-1].nbytes
            used.append((parts[0].data_ptr() - buffer.data_ptr(), end - buffer.data_ptr()))
        return parts

    monkeypatch.setattr(MLADecodeImpl, "_workspace", noted)
    specs = {"0": LATENT, "1": FULL, "2": LATENT.replace(num_heads=12)}
    made = plan(specs, "cpu", num_blocks=32, context_chunk_rows=ROWS)
    model = ServedModel(specs, planned=made, config=BuilderConfig(max_num_seqs=4))
    builders = [group.builder for group in model.runtime.attention_groups]
    buffers = [each.get_workspace_buffer() for each in builders if hasattr(each, "get_workspace_buffer")]
    assert len(buffers) == 2
    assert len({buffer.data_ptr() for buffer in buffers}) == 1
    # 32 rows of a latent of 32, and 12 heads of 20 + 10 elements, in float32.
    assert buffers[0].nbytes == made.prefill_workspace_bytes() == ROWS * (32 + 12 * 30) * 4

    model.add("a")
    model.step(a=40)
    model.step(a=24)

    # Of the 40 computed tokens each layer expands 32 and then 8.
    assert sorted(used) == sorted((0, rows * (32 + heads * 30) * 4) for rows in (32, 8) for heads in (4, 12))


def test_sparse_layers_of_latents_need_no_workspace():
    sparse = LATENT.replace(sparse=SparseSpec("token_topk", 8))
    made = plan({"0": sparse}, "cpu", num_blocks=8)
    assert made.prefill_workspace_bytes() == 0
    runtime = AttentionRuntime(made, {"0": layer_tensors(sparse)})
    assert runtime.attention_groups[0].builder.workspace_bytes == 0
    assert plan({"0": LATENT, "1": sparse}, "cpu", num_blocks=8).prefill_workspace_bytes() > 0
