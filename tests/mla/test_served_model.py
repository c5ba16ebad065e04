"""A model with latent attention beside full and sliding layers, on the runtime; and gathered pages."""

from __future__ import annotations

import pytest
import torch

from attnplug import plan
from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.core import BuilderConfig, LayerSpec, LayerTensors, MLADims
from attnplug.core.errors import LayoutError, SpecError
from attnplug.core.kv_cache_spec import MLAAttentionSpec
from attnplug.core.mla.weights import DenseProjection
from attnplug.ops import gather_pages
from attnplug.registry import get_registry
from attnplug.runtime import AttentionRuntime
from attnplug.testing import assert_close
from attnplug.testing.drawn_values import layer_tensors
from attnplug.testing.oracle import attention_oracle

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
LATENT = LayerSpec(num_heads=4, num_kv_heads=1, head_size=32, mla=DIMS, dtype="float32")
FULL = LayerSpec(num_heads=4, num_kv_heads=1, head_size=16, dtype="float32")
SPECS = {"a": LATENT, "b": FULL, "c": FULL.replace(sliding_window=9), "d": LATENT}


@pytest.mark.parametrize(("head_size", "blocks"), [(16, (16, 16)), (20, (80, 64))], ids=str)
def test_latent_full_and_sliding_layers_of_one_model_are_right_over_several_steps(
    head_size: int, blocks: tuple[int, int]
) -> None:
    specs = {
        name: spec if spec.mla else spec.replace(head_size=head_size, head_size_v=head_size, scale=None)
        for name, spec in SPECS.items()
    }
    made = plan(specs, "cpu", num_blocks=64)
    # Pages of equal bytes, of tokens of 128 bytes and of 128 or 160.
    assert (made.decisions["a"].block_size, made.decisions["b"].block_size) == blocks
    assert made.decisions["a"].get_backend_cls() is TorchMLABackend
    kinds = {
        name: group.kv_cache_spec
        for group in made.kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    assert isinstance(kinds["a"], MLAAttentionSpec)
    # One latent of 32 float32 for each token, no keys and values.
    assert kinds["a"].page_size_bytes == kinds["a"].block_size * 32 * 4
    tensors = {name: layer_tensors(spec) for name, spec in specs.items() if spec.mla}
    runtime = AttentionRuntime(made, tensors)
    batches = runtime.step_batch_builder(100)
    groups = len(made.kv_cache_config.kv_cache_groups)
    sizes = [group.kv_cache_spec.block_size for group in made.kv_cache_config.kv_cache_groups]
    for name in ("x", "y"):
        batches.add_request(name, [runtime.block_pool.allocate(-(-100 // sizes[at])) for at in range(groups)])
    generator = torch.Generator().manual_seed(0)
    known: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for counts in ({"x": 30, "y": 5}, {"x": 1, "y": 1}, {"x": 1, "y": 40}, {"x": 2, "y": 1}):
        runtime.begin_step(batches.step(counts))
        order = list(batches.req_ids)
        for layer, spec in specs.items():
            queries, keys, values, news = [], [], [], []
            for name in order:
                query = torch.randn(counts[name], spec.num_heads, spec.query_size, generator=generator)
                key = torch.randn(counts[name], 1, spec.head_size, generator=generator)
                value = (
                    key[..., : spec.head_size_v] if spec.mla else torch.randn(key.shape, generator=generator)
                )
                past = known.setdefault((layer, name), [])
                past.append((key, value))
                queries.append(query)
                news.append((key, value))
                keys.append(torch.cat([each for each, _ in past]))
                values.append(torch.cat([each for _, each in past]))
            key, value = (torch.cat([pair[half] for pair in news]) for half in (0, 1))
            found = runtime.forward(layer, torch.cat(queries), key, None if spec.mla else value)
            given = tensors.get(layer, LayerTensors())
            lens = [each.shape[0] for each in keys]
            expected = attention_oracle(spec, queries, keys, values, lens, tensors=given).output
            assert_close(found, expected, 2e-5)
        batches.finish_step()


def test_a_plan_tells_the_prefill_workspace_and_finds_its_classes_again_when_it_is_read_back() -> None:
    made = plan(SPECS, "cpu", num_blocks=64)
    # 16,384 rows of a latent of 32 and 4 heads of 20 + 10 elements, in float32.
    assert made.prefill_workspace_bytes() == 16_384 * (32 + 4 * 30) * 4
    assert made.prefill_workspace_bytes(100) == 100 * (32 + 4 * 30) * 4
    assert "a prefill workspace of 9,961,472 bytes" in " ".join(str(made).split())
    assert plan({"b": FULL}, "cpu").prefill_workspace_bytes() == 0
    again = type(made).from_json(made.to_json(), get_registry())
    assert again.decisions["a"].get_backend_cls() is TorchMLABackend
    assert again.decisions["b"].get_backend_cls() is not TorchMLABackend


def test_memory_has_room_for_the_workspace_that_a_runtime_allocates_once() -> None:
    with_room = plan(SPECS, "cpu", memory="64MiB", context_chunk_rows=1000)
    workspace = 1000 * (32 + 4 * 30) * 4
    page = sum(each.size for each in with_room.kv_cache_config.kv_cache_tensors) // (
        with_room.num_blocks or 1
    )
    assert with_room.num_blocks == (64 * 2**20 - workspace) // page
    assert with_room.budget is not None
    assert (with_room.budget.memory, with_room.budget.prefill_workspace) == (64 * 2**20, workspace)
    runtime = AttentionRuntime(with_room, {name: layer_tensors(SPECS[name]) for name in "ad"})
    [group] = [each for each in runtime.attention_groups if "a" in each.layer_names]
    buffer = group.builder.get_workspace_buffer()
    assert buffer.numel() == -(-workspace // 256) * 256
    read = type(with_room).from_json(with_room.to_json(), get_registry())
    assert (read.num_blocks, read.prefill_workspace_bytes()) == (with_room.num_blocks, workspace)
    older = {name: value for name, value in with_room.to_dict().items() if name != "context_chunk_rows"}
    assert type(with_room).from_dict(older).context_chunk_rows == 16_384
    for wrong in (0, "1000", 1.5, None):
        with pytest.raises(SpecError, match="context_chunk_rows"):
            type(with_room).from_dict(older | {"context_chunk_rows": wrong})


def test_rows_that_the_memory_of_a_plan_does_not_count_are_refused() -> None:
    made = plan({"a": LATENT}, "cpu", memory="64MiB", context_chunk_rows=1000)
    tensors = {"a": layer_tensors(LATENT)}
    with pytest.raises(LayoutError, match="context_chunk_rows=1001 must be at most 1000"):
        AttentionRuntime(made, tensors, config=BuilderConfig(context_chunk_rows=1001))
    fewer = AttentionRuntime(made, tensors, config=BuilderConfig(context_chunk_rows=999))
    assert fewer.config.context_chunk_rows == 999
    with pytest.raises(LayoutError, match="and 9961472 bytes of prefill workspace"):
        plan({"a": LATENT}, "cpu", memory="9MiB")
    with pytest.raises(SpecError, match="context_chunk_rows=0"):
        plan({"a": LATENT}, "cpu", context_chunk_rows=0)


def test_a_layer_whose_weights_are_missing_is_refused() -> None:
    with pytest.raises(SpecError, match="kv_b_proj=None is required: the layer has mla"):
        AttentionRuntime(plan({"a": LATENT}, "cpu", num_blocks=4))


@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn])
def test_gathered_pages_are_the_tokens_of_each_request_from_its_start(stored: torch.dtype) -> None:
    cache = torch.arange(6 * 4 * 2).reshape(6, 4, 2).float().to(stored)
    table = torch.tensor([[5, 1, -9], [2, -9, -9], [3, 4, 1]], dtype=torch.int32)
    out = torch.full((8, 2), torch.nan)
    gather_pages(cache, table, torch.tensor([0, 3, 3, 8]), torch.tensor([4, 0, 2]), out, 0.5)
    scale = 0.5 if stored.itemsize == 1 else 1.0
    rows = [cache[1, :3], cache[3, 2:], cache[4, :3]]
    assert torch.equal(out, torch.cat([each.float() for each in rows]) * scale)


def test_the_dense_projection_of_one_weight_is_that_of_two() -> None:
    weight = torch.randn(3 * 22, 24, generator=torch.Generator().manual_seed(0))
    joint = DenseProjection.of(weight, 12, 10)
    apart = DenseProjection(joint.w_uk.clone(), joint.w_uv.clone())
    latent = torch.randn(5, 24)
    for one, other in zip(joint.expand(latent), apart.expand(latent), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert joint.w_uk.data_ptr() == weight.data_ptr()
    query = torch.randn(5, 3, 12)
    scores = torch.einsum("tnp,snp->tns", query, joint.expand(latent)[0])
    assert torch.allclose(scores, torch.einsum("tnl,sl->tns", joint.absorb(query), latent), atol=1e-5)
