"""Builders per attention group, and each step's metadata for all layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from model_layers import BLOCK, caches, gemma_3, gpt_oss, layer, llama, model, whisper
from runtime_backends import CPU, HeadFirst, Plain, Swapping, Workspace, WorkspaceBuilder, decision

from attnplug.core import BuilderConfig, KVCacheConfig, KVCacheGroupSpec, LayerSpec
from attnplug.core.errors import BatchError, LayoutError, NoBackendError
from attnplug.core.spec import Phase
from attnplug.runtime import (
    AttentionGroup,
    StepBatch,
    StepBatchBuilder,
    WorkspaceUser,
    build_attn_metadata,
    cross_metadata,
    get_kv_cache_spec,
    group_kv_caches,
    init_attn_backend,
)


def groups_of(
    specs: dict[str, LayerSpec], backend: Any = Plain, **by_name: Any
) -> tuple[KVCacheConfig, list[AttentionGroup]]:
    """Attention groups of a model, one backend for all layers or another for some."""
    config = group_kv_caches(get_kv_cache_spec(specs, BLOCK))
    decisions = {name: decision(spec, by_name.get(name, backend)) for name, spec in specs.items()}
    return config, init_attn_backend(config.kv_cache_groups, decisions, BuilderConfig(), "cpu")


def batch_for(config: KVCacheConfig, cross: tuple[int, ...] = ()) -> StepBatch:
    """Two requests, whose pages in group g begin at 10 * g + 1 and 10 * g + 2."""
    groups = len(config.kv_cache_groups)
    made = StepBatchBuilder(
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=BLOCK,
        block_sizes=[BLOCK] * groups,
        cross_groups=cross,
        max_encoder_len=BLOCK if cross else 0,
    )
    for row, (computed, encoder) in enumerate(((5, 3), (0, 7))):
        pages = [[10 * group + row + 1] for group in range(groups)]
        made.add_request(str(row), pages, computed, encoder if cross else 0)
    return made.step([1, 4])


# Attention groups


def test_a_kv_group_of_like_layers_has_one_builder():
    config, found = groups_of(llama())
    assert len(found) == 1
    assert found[0].layer_names == tuple(llama())
    assert found[0].backend is Plain
    assert found[0].kv_cache_group_id == 0
    assert found[0].kv_cache_spec == config.kv_cache_groups[0].kv_cache_spec
    assert found[0].builder.layer_names == list(llama())
    assert found[0].builder.device == torch.device("cpu")
    assert found[0].specs == {layer()}


def test_each_kv_group_has_builders_of_its_own():
    config, found = groups_of(gemma_3())
    assert [group.kv_cache_group_id for group in found] == list(range(7))
    assert [group.layer_names for group in found] == [g.layer_names for g in config.kv_cache_groups]


def test_layers_of_a_kv_group_part_by_backend_and_by_heads():
    specs = model([{}, {}, {"num_heads": 8}, {"causal": False}, {}])
    _, found = groups_of(specs, **{"layers.1": Swapping})
    assert [(g.backend, g.layer_names) for g in found] == [
        (Plain, ("layers.0", "layers.4")),
        (Swapping, ("layers.1",)),
        (Plain, ("layers.2",)),
        (Plain, ("layers.3",)),
    ]


def test_layers_of_a_kv_group_part_by_phase():
    specs = model([{}, {}])
    config = group_kv_caches(get_kv_cache_spec(specs, BLOCK))
    decisions = {"layers.0": decision(layer(), phase=Phase.DECODE), "layers.1": decision(layer())}
    found = init_attn_backend(config.kv_cache_groups, decisions, BuilderConfig(), "cpu")
    assert [(g.phase, g.layer_names) for g in found] == [
        (Phase.DECODE, ("layers.0",)),
        (None, ("layers.1",)),
    ]


def test_builders_with_a_workspace_share_the_first_ones():
    WorkspaceBuilder.made = 0
    _, found = groups_of(gemma_3(), Workspace, **{"layers.0": Plain})
    buffers = {id(g.builder.get_workspace_buffer()) for g in found if g.backend is Workspace}
    assert len(buffers) == 1
    assert WorkspaceBuilder.made == 1
    assert isinstance(found[0].builder, WorkspaceUser) == (found[0].backend is Workspace)


def test_layers_with_direct_kv_get_no_builder():
    _, found = groups_of(whisper())
    names = {name for group in found for name in group.layer_names}
    assert names == {name for name in whisper() if "decoder." in name}


def test_a_layer_in_no_group_is_refused():
    config = group_kv_caches(caches(llama))
    decisions = {name: decision(spec) for name, spec in (llama() | {"extra": layer()}).items()}
    with pytest.raises(LayoutError, match=r"groups=\['extra'\] are in no KV group"):
        init_attn_backend(config.kv_cache_groups, decisions, BuilderConfig(), "cpu")


@pytest.mark.parametrize("names", [[("a",), ("a",)], [("a", "a")]])
def test_a_layer_named_twice_is_refused(names):
    spec = get_kv_cache_spec({"a": layer()}, BLOCK)["a"]
    groups = [KVCacheGroupSpec(part, spec) for part in names]
    with pytest.raises(LayoutError) as error:
        init_attn_backend(groups, {"a": decision(layer())}, BuilderConfig(), "cpu")
    assert f"groups='a' is in KV group 0 and again in {len(names) - 1}" in str(error.value)


def test_a_layer_without_a_decision_or_a_backend_is_refused():
    config = group_kv_caches(get_kv_cache_spec(model([{}]), BLOCK))
    with pytest.raises(LayoutError, match=r"decisions='layers\.0' has no decision"):
        init_attn_backend(config.kv_cache_groups, {}, BuilderConfig(), "cpu")
    undecided = {"layers.0": decision(layer(), None)}
    with pytest.raises(NoBackendError, match="no backend was chosen"):
        init_attn_backend(config.kv_cache_groups, undecided, BuilderConfig(), "cpu")


@pytest.mark.parametrize(("size", "readable"), [(16, True), (128, True), (32, False), (8, False)])
def test_pages_of_a_size_that_the_backend_cannot_read_are_refused(size, readable):
    config = group_kv_caches(get_kv_cache_spec(model([{}]), size))
    decisions = {"layers.0": decision(layer(), HeadFirst)}
    if readable:
        assert init_attn_backend(config.kv_cache_groups, decisions, BuilderConfig(), CPU.type)
        return
    with pytest.raises(LayoutError) as error:
        init_attn_backend(config.kv_cache_groups, decisions, BuilderConfig(), "cpu")
    said = (
        f"block_size={size} of layer layers.0 cannot be read by HEAD_FIRST, which reads 16, multiples of 64"
    )
    assert said in str(error.value)


# Metadata


def test_every_layer_gets_its_groups_table_and_slots():
    config, found = groups_of(gpt_oss())
    batch = batch_for(config)
    metadata = build_attn_metadata(found, batch, config)
    assert list(metadata) == [name for group in config.kv_cache_groups for name in group.layer_names]
    for at, group in enumerate(config.kv_cache_groups):
        first = 10 * at + 1
        for name in group.layer_names:
            common = metadata[name].common
            assert common.block_table_tensor[:, 0].tolist() == [first, first + 1]
            slots = [first * 16 + 5, *range((first + 1) * 16, (first + 1) * 16 + 4)]
            assert common.slot_mapping.tolist() == slots
            assert common.seq_lens is batch.common.seq_lens
            assert (common.max_query_len, common.causal) == (4, True)


def test_builders_that_cannot_swap_tables_build_once_for_each_group():
    config, found = groups_of(gemma_3())
    build_attn_metadata(found, batch_for(config), config)
    assert [group.builder.builds for group in found] == [1] * 7


def test_twins_are_built_once_and_get_the_others_tables():
    config, found = groups_of(gemma_3(), Swapping)
    batch = batch_for(config)
    metadata = build_attn_metadata(found, batch, config)
    # Six sliding groups are twins; the full one is alone.
    assert [group.builder.builds for group in found] == [1, 0, 0, 0, 0, 0, 1]
    for at, group in enumerate(found):
        made: Any = metadata[group.layer_names[0]]
        assert made.builder is found[0 if at < 6 else 6].builder
        assert made.updated_by is (group.builder if 0 < at < 6 else None)
        assert made.block_table[:, 0].tolist() == [10 * at + 1, 10 * at + 2]
        assert made.slot_mapping.tolist() == batch.of_group(at)[1].tolist()


@pytest.mark.parametrize("change", [{"num_heads": 8}, {"logits_soft_cap": 5.0}, {"scale": 0.5}])
def test_layers_that_ask_for_something_else_are_no_twins(change):
    # One kind of cache in three groups, whose second asks the backend for something else.
    specs = model([{}] * 3)
    specs["layers.1"] = dataclasses.replace(specs["layers.1"], **change)
    spec = get_kv_cache_spec(specs, BLOCK)["layers.0"]
    config = KVCacheConfig(1, (), tuple(KVCacheGroupSpec((name,), spec) for name in specs))
    decisions = {name: decision(asked, Swapping) for name, asked in specs.items()}
    found = init_attn_backend(config.kv_cache_groups, decisions, BuilderConfig(), "cpu")
    build_attn_metadata(found, batch_for(config), config)
    assert [group.builder.builds for group in found] == [1, 1, 0]


def test_two_builders_of_one_kv_group_see_one_batch():
    specs = model([{}, {"num_heads": 8}])
    config, found = groups_of(specs, Swapping)
    metadata: Any = build_attn_metadata(found, batch_for(config), config)
    assert [group.builder.builds for group in found] == [1, 1]
    assert metadata["layers.0"].common is metadata["layers.1"].common


def test_cross_layers_see_the_encoder():
    config, found = groups_of(whisper())
    batch = batch_for(config, cross=(1,))
    metadata: Any = build_attn_metadata(found, batch, config)
    own, cross = (metadata[f"decoder.layers.0.{kind}"].common for kind in ("self_attn", "encoder_attn"))
    assert batch.common.causal is None
    assert own.seq_lens is batch.common.seq_lens
    assert own.seq_lens.tolist() == [6, 4]
    assert own.causal is True
    assert cross.causal is False
    assert cross.seq_lens.tolist() == [3, 7]
    assert cross.seq_lens_host.tolist() == [3, 7]
    assert cross.seq_lens_host_exact
    assert cross.max_seq_len == 7
    assert not cross.causal
    assert cross.block_table_tensor[:, 0].tolist() == [11, 12]
    assert cross.slot_mapping.tolist() == [*range(176, 179), *range(192, 199)]
    assert cross.query_start_loc_cpu.tolist() == own.query_start_loc_cpu.tolist()
    assert cross.num_actual_tokens == 5
    assert own.block_table_tensor[:, 0].tolist() == [1, 2]  # the batch is as it was


def test_a_model_of_cross_attention_only_sees_the_encoder_too():
    specs = model([{"attn_type": "encoder_decoder"}])
    config, found = groups_of(specs)
    metadata: Any = build_attn_metadata(found, batch_for(config, cross=(0,)), config)
    assert metadata["layers.0"].common.seq_lens.tolist() == [3, 7]
    assert not metadata["layers.0"].common.causal


def test_a_batch_of_other_groups_is_refused():
    config, found = groups_of(gpt_oss())
    with pytest.raises(BatchError, match=r"batch\.block_tables=7 must be 2, one for each KV group"):
        build_attn_metadata(found, batch_for(group_kv_caches(caches(gemma_3))), config)


@pytest.mark.parametrize("cross", [(), (0,), (0, 1)])
def test_a_batch_that_takes_other_groups_for_cross_groups_is_refused(cross):
    config, found = groups_of(whisper())
    with pytest.raises(BatchError) as error:
        build_attn_metadata(found, batch_for(config, cross), config)
    said = f"batch.cross_groups={list(cross)} must be [1], the KV groups with a CrossAttentionSpec"
    assert said in str(error.value)


# Derived metadata


def test_cross_metadata_drops_what_is_said_of_the_decoders_keys():
    config = group_kv_caches(caches(whisper))
    common = dataclasses.replace(
        batch_for(config, cross=(1,)).common,
        key_start_loc=torch.tensor([0, 1, 2]),
        key_start_loc_cpu=torch.tensor([0, 1, 2]),
        dcp_local_seq_lens=torch.tensor([1, 2]),
        dcp_local_seq_lens_cpu=torch.tensor([1, 2]),
        _seq_lens_cpu=torch.tensor([6, 4]),
    )
    assert common.compute_num_computed_tokens().tolist() == [5, 0]
    table, slots = torch.tensor([[7], [8]]), torch.tensor([1])
    cross = cross_metadata(common, table, slots)
    assert cross.key_start_loc is cross.key_start_loc_cpu is None
    assert cross.dcp_local_seq_lens is cross.dcp_local_seq_lens_cpu is None
    assert cross._seq_lens_cpu is None
    assert cross.compute_num_computed_tokens().tolist() == [2, 3]
    assert cross.block_table_tensor is table
    assert cross.slot_mapping is slots
    assert common.key_start_loc is not None


@pytest.mark.parametrize("missing", ["encoder_seq_lens", "encoder_seq_lens_cpu"])
def test_cross_metadata_needs_the_encoders_lengths(missing):
    config = group_kv_caches(caches(whisper))
    common = dataclasses.replace(batch_for(config, cross=(1,)).common, **{missing: None})
    with pytest.raises(BatchError, match=f"{missing}=None is required for cross attention"):
        cross_metadata(common, torch.zeros(2, 1), torch.zeros(0))


def test_cross_metadata_of_a_batch_of_nobody_is_empty():
    config = group_kv_caches(caches(whisper))
    common = batch_for(config, cross=(1,)).common
    common.encoder_seq_lens_cpu = np.zeros(0, dtype=np.int32)
    assert cross_metadata(common, torch.zeros(0, 1), torch.zeros(0)).max_seq_len == 0
