"""Sparse layers of latent attention as vLLM makes and calls them: its MLAAttention, its selector and its metadata.

Run in a source tree as vllm_harness says; pytest collects it when it is named alone.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from latent_cases_for_vllm import CHOSEN, one_rank
from sparse_served import (
    BLOCK,
    DEVICE,
    HEADS,
    NOPE,
    ROPE,
    STEPS,
    TOPK,
    Served,
    as_on_a_gpu,
    buffer,
    configuration,
    make_layer,
    picks,
    picks_with_gaps,
    served,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import SparseMLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attnplug.core.errors import AttnplugError, BatchError, SpecError
from attnplug.integrations.vllm import builder as builder_module
from attnplug.integrations.vllm import impl as impl_module
from attnplug.integrations.vllm import sparse as sparse_module
from attnplug.integrations.vllm.latent import LatentLayer
from attnplug.mla import MLADecodeImpl
from attnplug.ops import selection as selection_ops

__all__ = ["as_on_a_gpu", "one_rank"]

# GPUs multiply float32 in fewer bits.
RIGHT, WRONG = 2e-3 if DEVICE.type == "cuda" else 2e-5, 0.05


@pytest.mark.parametrize("name", CHOSEN, ids=lambda name: str(name.name))
@pytest.mark.parametrize("pick", [picks, picks_with_gaps])
def test_all_kinds_of_steps_over_the_keys_of_each_layers_own_buffer(name: Any, pick: Any) -> None:
    made = served(name)
    assert made.layers["first"].attn_backend.get_name() == name.name
    assert [max(made.step(new, pick)) < RIGHT for new in STEPS] == [True] * len(STEPS)


@pytest.mark.parametrize("name", CHOSEN, ids=lambda name: str(name.name))
def test_sparse_and_dense_layers_have_one_builder(name: Any) -> None:
    config = configuration(name)
    sparse = make_layer(config, "sparse", buffer())
    dense = make_layer(config, "dense", None, use_sparse=False, has_indexer=False)
    dense.kv_b_proj.weight.data.copy_(sparse.kv_b_proj.weight)
    dense.process_weights_after_loading(torch.float32)
    made = Served(config, {"sparse": sparse, "dense": dense})
    for new in STEPS[:3]:
        assert max(made.step(new, picks)) < RIGHT


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's table is written by a kernel")
def test_keys_that_are_read_as_slots_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_slots(keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        return keys + BLOCK * 3

    made = served(CHOSEN[0], before=lambda layer: layer.kv_cache.normal_())
    monkeypatch.setattr(selection_ops, "slots_of_keys", as_slots)
    assert min(made.step(STEPS[0], picks)) > WRONG


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's table is written by a kernel")
def test_minus_one_that_is_attended_as_a_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = selection_ops.chosen_keys

    def attended(selection: Any, *rest: Any) -> Any:
        # Another key is attended in its place, as by a kernel that takes it for the last of the table.
        rows = torch.arange(selection.positions.shape[0])[:, None]
        taken = torch.where(selection.positions < 0, rows % 3, selection.positions).int()
        return right(type(selection)(taken, selection.counts), *rest)

    monkeypatch.setattr(selection_ops, "chosen_keys", attended)
    assert min(served(CHOSEN[0]).step([(0, 30)], picks_with_gaps)) > WRONG


@pytest.mark.parametrize("is_checked", [True, False])
def test_the_buffer_of_another_layer_is_noticed(is_checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = impl_module.Bound.__init__

    def of_one_kind(bound: Any, *given: Any) -> None:
        kind(bound, *given)
        bound.kind = bound.kind[:-1]

    monkeypatch.setattr(impl_module.Bound, "__init__", of_one_kind)
    made = served(CHOSEN[0])
    if is_checked:
        with pytest.raises(BatchError, match="is another tensor"):
            made.step(STEPS[0], picks)
        return
    monkeypatch.setattr(sparse_module.SparseLatentLayer, "_read", LatentLayer._read)
    errors = made.step(STEPS[0], picks)
    # The last layer of a kind gives the metadata of all.
    assert min(errors[:2]) > WRONG
    assert errors[2] < RIGHT


def test_an_impl_that_takes_no_absorbed_queries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_module, "MLADecodeImpl", type("Another", (), {}))
    with pytest.raises(SpecError, match=r"token_topk 8.*is not served by \w+ in vLLM"):
        served(CHOSEN[0])


def test_weights_that_vllm_keeps_in_fewer_bits_are_refused() -> None:
    with pytest.raises(SpecError, match=r"stored in 4 or 8 bits.*VLLM_ROCM_USE_AITER_FP8BMM=0"):
        served(CHOSEN[0], before=lambda layer: delattr(layer, "W_UK_T"))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="values are read on a CPU alone")
def test_a_key_twice_and_one_past_its_query_are_refused_on_a_cpu() -> None:
    with pytest.raises(BatchError, match="comes twice"):
        served(CHOSEN[0]).step([(0, 3)], lambda position: [0, 0])
    with pytest.raises(BatchError, match="past the last of the positions"):
        served(CHOSEN[0]).step([(0, 3)], lambda position: [position + 1])


def test_a_draft_models_indexer_may_get_the_buffer_of_its_target_before_the_first_step() -> None:
    made, target = served(CHOSEN[0]), buffer()
    indexer = made.layers["last"].indexer
    indexer.topk_indices_buffer = target
    # The builder has read the buffer that it had then.
    with pytest.raises(BatchError, match=r"topk_indices_buffer.*is another tensor"):
        made.step(STEPS[0], picks)

    def share(layer: Any) -> None:
        if layer.layer_name == "last":
            layer.indexer.topk_indices_buffer = target

    assert max(served(CHOSEN[0], before=share).step(STEPS[0], picks)) < RIGHT


def test_with_drafts_no_host_waits_for_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    made = served(CHOSEN[0])
    made.builder.exact = False
    monkeypatch.setattr(builder_module.Batch, "exact", property(lambda batch: pytest.fail("the host waits")))
    for new in STEPS:
        assert max(made.step(new, picks, beyond=2)) < RIGHT


def test_versions_that_call_forward_mha_of_sparse_layers_get_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mla_attention, "SparseMLAAttentionImpl", type("Unknown", (), {}))
    monkeypatch.delattr(sparse_module.SparseLatentLayer, "forward_mqa")
    made = served(CHOSEN[0])
    for new in STEPS:
        assert max(made.step(new, picks)) < RIGHT


def test_rows_of_a_graphs_padding_are_zeros() -> None:
    made = served(CHOSEN[0])
    made.step(STEPS[1], picks)
    errors = made.step([(0, 1), (1, 1)], picks, padding=3)
    assert max(errors) < RIGHT


def reasons(config: VllmConfig, **more: Any) -> str:
    with pytest.raises((ValueError, AttnplugError)) as refused:
        make_layer(config, "layer", buffer(), **more)
    return str(refused.value)


def test_pages_of_fp8_ds_mla_are_refused_with_what_to_do() -> None:
    config = configuration(CHOSEN[0])
    config.cache_config.cache_dtype = "fp8_ds_mla"
    found = reasons(config)
    assert "kv_cache_dtype fp8_ds_mla is not served in vLLM: its tokens have 656 bytes" in found
    assert "use --kv-cache-dtype fp8 or bfloat16" in found
    backend = CHOSEN[0].get_class()
    assert not backend.supports_kv_cache_dtype("fp8_ds_mla")
    assert "fp8_ds_mla" not in backend.supported_kv_cache_dtypes
    with pytest.raises(SpecError, match="656 bytes"):
        make_layer(config, "named", buffer(), attn_backend=backend)


def test_ranks_that_share_tokens_are_refused_because_a_selection_is_of_all_keys() -> None:
    found = reasons(configuration(CHOSEN[0], decode_context_parallel_size=2))
    assert "sparse attention not supported under context parallelism" in found


def test_a_model_that_does_not_say_how_many_keys_are_picked_is_refused() -> None:
    config = configuration(CHOSEN[0])
    del config.model_config.hf_config.index_topk
    assert "index_topk=None is not in the model's configuration" in reasons(config)


def test_backends_that_serve_no_sparse_layers_refuse_them() -> None:
    for name in ("ATTNPLUG_FLASHINFER_MLA", "ATTNPLUG"):
        found = reasons(configuration(AttentionBackendEnum[name]))
        assert "sparse" in found, found


@pytest.mark.parametrize("given", [None, torch.zeros(64, TOPK), torch.zeros(64).int()])
def test_a_layer_without_a_buffer_of_positions_is_refused(given: Any) -> None:
    indexer = types.SimpleNamespace(topk_indices_buffer=given)
    with pytest.raises(SpecError, match=r"topk_indices_buffer.*must be an int32 tensor \[tokens, topk\]"):
        make_layer(configuration(CHOSEN[0]), "layer", given, indexer=indexer)


def test_blocks_are_those_that_vllms_indexer_reads_too() -> None:
    config = configuration(CHOSEN[0])
    for name in ("ATTNPLUG_MLA", "ATTNPLUG_TRITON_MLA", "ATTNPLUG_FLASH_MLA_MLA"):
        with set_current_vllm_config(config):
            assert AttentionBackendEnum[name].get_class().get_preferred_block_size(16) == 64
    for size, refused in ((16, True), (64, False), (128, False)):
        sized = configuration(CHOSEN[0])
        sized.cache_config.block_size, sized.cache_config.user_specified_block_size = size, True
        if refused:
            limit = f"block_size {size} not supported: vLLM's indexer reads 64; use --block-size 64"
            assert limit in reasons(sized)
        else:
            make_layer(sized, "layer", buffer())
    del config.model_config.hf_config.index_topk
    with set_current_vllm_config(config):
        assert AttentionBackendEnum["ATTNPLUG_MLA"].get_class().get_preferred_block_size(16) == 16


def test_graphs_hold_decodes_where_the_backend_supports_them() -> None:
    for name, level in (("ATTNPLUG_TORCH_MLA", "NEVER"), ("ATTNPLUG_TRITON_MLA", "UNIFORM_BATCH")):
        config = configuration(AttentionBackendEnum[name])
        layer = make_layer(config, "layer", buffer())
        builder = layer.attn_backend.get_builder_cls()
        found = builder.get_cudagraph_support(config, layer.get_kv_cache_spec(config))
        assert found.name == level


@pytest.mark.parametrize("name", CHOSEN, ids=lambda name: str(name.name))
def test_later_steps_fill_what_a_graph_of_decodes_reads(name: Any) -> None:
    made = served(name)
    made.step(STEPS[1], picks)

    def read() -> list[int]:
        found = []
        for metadata in made.metadata.made.values():
            selected = metadata.selected
            tensors = (
                selected.page_table,
                selected.counts,
                selected.selection.positions,
                selected.selection.counts,
            )
            found += [tensor.data_ptr() for tensor in tensors]
        return found

    decodes = [(request, 1) for request in range(3)]
    made.step(decodes, picks, how="build_for_cudagraph_capture")
    captured = read()
    for _ in range(2):
        assert max(made.step(decodes, picks)) < RIGHT
        assert read() == captured


@pytest.mark.parametrize("is_sparse", [True, False])
def test_first_steps_run_once_for_each_kind_before_its_graphs_and_write_no_page(
    is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ran = AttentionBackendEnum.ATTNPLUG_TORCH_MLA, list[tuple[int, int]]()
    attend = MLADecodeImpl.attend

    def watched(
        impl: Any, layer: Any, query: torch.Tensor, key: Any, value: Any, pages: Any, *given: Any
    ) -> Any:
        ran.append((id(impl), query.shape[0]))
        assert query.shape[1:] == (HEADS, NOPE + ROPE)
        return attend(impl, layer, query, key, value, pages, *given)

    monkeypatch.setattr(MLADecodeImpl, "attend", watched)
    monkeypatch.setattr("attnplug.integrations.vllm.warm_up.compiles", lambda decision: True)
    if is_sparse:
        # No indexer has written them.
        made = served(name, before=lambda layer: layer.filled.fill_(1 << 30))
    else:
        config = configuration(name)
        given = {"use_sparse": False, "has_indexer": False}
        made = Served(config, {each: make_layer(config, each, None, **given) for each in ("a", "b")})
    warm_up, first = builder_module.warm_up, list[list[tuple[int, int]]]()

    def checked(builder: Any) -> None:
        pages = {each: layer.kv_cache.zero_().clone() for each, layer in made.layers.items()}
        warm_up(builder)
        first.append([*ran])
        assert all(torch.equal(layer.kv_cache, pages[each]) for each, layer in made.layers.items())

    monkeypatch.setattr(builder_module, "warm_up", checked)
    made.step(STEPS[0], picks)
    ran.clear()
    for _ in range(2):
        decodes = [(request, 1) for request in range(1, 4)]
        assert max(made.step(decodes, picks, how="build_for_cudagraph_capture")) < RIGHT
    [steps] = first
    # Layers that read one buffer are one kind.
    assert len({impl for impl, _ in steps}) == (2 if is_sparse else 1)
    assert {1, 2, 8, 64} <= {rows for _, rows in steps}


def test_dense_layers_of_the_same_class_stay_dense() -> None:
    config = configuration(CHOSEN[0])
    dense = make_layer(config, "dense", None, use_sparse=False, has_indexer=False)
    sparse = make_layer(config, "sparse", buffer())
    assert dense.impl.spec.sparse is None
    assert str(sparse.impl.spec.sparse) == f"token_topk {TOPK}"
    assert [isinstance(each.impl, SparseMLAAttentionImpl) for each in (dense, sparse)] == [False, True]
    again = make_layer(config, "again", buffer())
    assert type(again.impl) is type(sparse.impl)
    assert issubclass(type(sparse.impl), sparse.attn_backend.get_impl_cls())
