"""Sparse layers of latent attention as vLLM makes and calls them: its MLAAttention, its selector and its metadata.

Run in a source tree as vllm_harness says; pytest collects it when it is named alone. An indexer of the tests fills the
buffers, because vLLM's runs on GPUs only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import vllm_harness
from latent_cases_for_vllm import CHOSEN, NoPrefill, one_rank
from tests.v1.attention.utils import create_vllm_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata, SparseMLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend

from attnplug.core.errors import AttnplugError, BatchError, SpecError
from attnplug.integrations.vllm import builder as builder_module
from attnplug.integrations.vllm import impl as impl_module
from attnplug.integrations.vllm import sparse as sparse_module
from attnplug.integrations.vllm.latent import LatentLayer
from attnplug.ops import selection as selection_ops

__all__ = ["one_rank"]

HEADS, RANK, ROPE, NOPE, VALUE = 4, 32, 16, 24, 40
TOPK, BLOCK, PAGES, TABLE = 8, 16, 64, 6
SCALE = 0.2
RIGHT, WRONG = 2e-5, 0.05
CPU = torch.device("cpu")


def configuration(name: Any, **parallel: int) -> VllmConfig:
    """vLLM's configuration of a small model of DeepSeek V3.2's kind, with `--attention-backend name`."""
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    config = create_vllm_config(
        vllm_harness.folder("deepseek-ai/DeepSeek-R1"),
        dtype=torch.float32,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        hf_config_override={**sizes, "num_attention_heads": HEADS, "index_topk": TOPK},
    )
    config.attention_config.backend = name
    # Small, so that requests have several; nobody asks for this size, because vLLM's indexer reads 64.
    config.cache_config.user_specified_block_size = False
    for field, value in parallel.items():
        setattr(config.parallel_config, field, value)
    return config


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's choice of a backend by name as on NVIDIA's GPUs, where the class itself is asked."""

    def chosen(cls: Any, backend: Any, attn_selector_config: Any, **rest: Any) -> str:
        reasons = backend.get_class().validate_configuration(
            **attn_selector_config._asdict(), device_capability=None
        )
        if reasons:
            raise ValueError(f"Selected backend {backend} is not valid. Reason: {reasons}")
        return str(backend.get_path())

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(chosen))
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: NoPrefill)
    _cached_get_attn_backend.cache_clear()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        yield
        torch.set_default_dtype(before)


def make_layer(
    config: VllmConfig, prefix: str, buffer: torch.Tensor | None, *, has_indexer: bool = True, **more: Any
) -> Any:
    """vLLM's layer, with weights, and pages that no request has written."""
    with set_current_vllm_config(config):
        projection = ColumnParallelLinear(RANK, HEADS * (NOPE + VALUE), bias=False)
        projection.weight.data.normal_(std=0.3)
        indexer = types.SimpleNamespace(topk_indices_buffer=buffer) if has_indexer else None
        layer = mla_attention.MLAAttention(
            *(HEADS, SCALE, NOPE, ROPE, VALUE, None, RANK, projection),
            cache_config=config.cache_config,
            prefix=prefix,
            **{"use_sparse": True, "indexer": indexer, "topk_indices_buffer": buffer, **more},
        )
        layer.process_weights_after_loading(torch.float32)
    layer.kv_cache = torch.full((PAGES, BLOCK, RANK + ROPE), torch.nan)
    return layer


class Served:
    """Layers of one model in vLLM, with requests that grow, and their latents in float64."""

    def __init__(self, config: VllmConfig, layers: dict[str, Any]) -> None:
        self.config, self.layers = config, layers
        first = next(iter(layers.values()))
        with set_current_vllm_config(config):
            spec = first.get_kv_cache_spec(config)
            self.builder = first.attn_backend.get_builder_cls()(spec, [*layers], config, CPU)
        # No page is behind that of the page before it.
        self.pages = (torch.randperm(PAGES - 1) + 1).tolist()
        self.tables: dict[int, list[int]] = {}
        self.latents: dict[tuple[str, int], torch.Tensor] = {}

    def step(
        self,
        new: Sequence[tuple[int, int]],
        pick: Callable[[int], list[int]],
        *,
        beyond: int = 0,
        padding: int = 0,
    ) -> list[float]:
        """Run a step of (request, new tokens), and give each layer's worst error from the oracle's output.

        The host's lengths are upper bounds by `beyond`, and `padding` rows follow that are no query.
        """
        counts = [count for _, count in new]
        tokens, starts = sum(counts), torch.tensor([0, *counts]).cumsum(0).int()
        name = next(iter(self.layers))
        before = [self._length(name, request) for request, _ in new]
        lens = torch.tensor([b + c for b, c in zip(before, counts, strict=True)]).int()
        positions = [b + j for b, count in zip(before, counts, strict=True) for j in range(count)]
        table = torch.zeros(len(new), TABLE).int()
        for row, ((request, _), length) in enumerate(zip(new, lens.tolist(), strict=True)):
            own = self.tables.setdefault(request, [])
            own += [self.pages.pop() for _ in range(-(-length // BLOCK) - len(own))]
            table[row, : len(own)] = torch.tensor(own).int()
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        places = zip(rows, positions, strict=True)
        written = [int(table[row, at // BLOCK]) * BLOCK + at % BLOCK for row, at in places]
        slots = torch.tensor(written + [-1] * padding)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=len(new),
            num_actual_tokens=tokens + padding,
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            seq_lens_cpu_upper_bound=lens + beyond,
            causal=True,
        )
        metadata = self.builder.build(0, common)
        given = {"attn_metadata": dict.fromkeys(self.layers, metadata), "vllm_config": self.config}
        errors = []
        with set_forward_context(**given, slot_mapping=dict.fromkeys(self.layers, slots)):
            for name, layer in self.layers.items():
                self._pick(layer, positions, pick)
                q = torch.randn(tokens + padding, HEADS, NOPE + ROPE)
                latent = torch.randn(tokens + padding, RANK + ROPE)
                for row, (request, count) in enumerate(new):
                    own = latent[int(starts[row]) : int(starts[row]) + count].double()
                    seen = self.latents.get((name, request), own[:0])
                    self.latents[name, request] = torch.cat((seen, own))
                right = self._oracle(layer, name, q, [new[row][0] for row in rows], positions)
                shape = (tokens + padding, HEADS * VALUE)
                found = layer(q, latent[:, :RANK], latent[:, None, RANK:], output_shape=shape)
                errors.append(float((found[:tokens].double() - right).abs().max()))
                assert not found[tokens:].any()
        return errors

    def _length(self, name: str, request: int) -> int:
        return self.latents[name, request].shape[0] if (name, request) in self.latents else 0

    @staticmethod
    def _pick(layer: Any, positions: list[int], pick: Callable[[int], list[int]]) -> None:
        """What vLLM's indexer does: -1 everywhere, then positions in the request. A layer without one writes nothing."""
        if layer.indexer is None:
            return
        buffer = layer.indexer.topk_indices_buffer
        buffer[:] = -1
        for row, position in enumerate(positions):
            chosen = torch.tensor(pick(position)).int()
            buffer[row, : len(chosen)] = chosen

    def _oracle(
        self, layer: Any, name: str, q: torch.Tensor, requests: list[int], positions: list[int]
    ) -> torch.Tensor:
        """Each query over its keys, expanded for each head, in float64."""
        weights = layer.kv_b_proj.weight.double().view(HEADS, NOPE + VALUE, RANK)
        buffer = layer.impl.picked
        rows = []
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            keys = sorted({key for key in buffer[row].tolist() if 0 <= key <= position})
            latent = self.latents[name, request][keys]
            heads = torch.einsum("hnl,sl->hsn", weights, latent[:, :RANK])
            key = torch.cat((heads[..., :NOPE], latent[None, :, RANK:].expand(HEADS, -1, -1)), dim=-1)
            scores = torch.einsum("hn,hsn->hs", q[row].double(), key) * SCALE
            rows.append(torch.einsum("hs,hsv->hv", scores.softmax(-1), heads[..., NOPE:]).flatten())
        return torch.stack(rows)


def picks(position: int) -> list[int]:
    """Up to TOPK of the positions that a query sees, in any order."""
    return torch.randperm(position + 1)[:TOPK].tolist()


def picks_with_gaps(position: int) -> list[int]:
    """As `picks` of fewer, with -1 between them."""
    chosen = [-1] * TOPK
    places = torch.randperm(TOPK).tolist()
    for place, key in zip(places, picks(position)[:5], strict=False):
        chosen[place] = key
    return chosen


STEPS: list[list[tuple[int, int]]] = [
    [(0, 20)],  # a prompt, whose first queries see fewer keys than they may choose
    [(0, 1), (1, 3), (2, 41)],  # a decode and prompts
    [(1, 1), (0, 1), (2, 1)],  # decodes, in another order
    [(2, 1), (1, 17), (3, 1), (0, 4)],  # mixed: decodes, extends and a prompt of one token
    [(3, 2), (0, 2), (1, 2), (2, 2)],  # as with drafts
]


def buffer() -> torch.Tensor:
    return torch.full((64, TOPK), -1, dtype=torch.int32)


def served(name: Any, *, before: Callable[[Any], None] = lambda layer: None) -> Served:
    """Three layers: the second takes the keys that were picked for the first, and the third has others."""
    config, shared = configuration(name), buffer()
    layers = {
        "first": make_layer(config, "first", shared),
        "without": make_layer(config, "without", shared, has_indexer=False),
        "last": make_layer(config, "last", buffer()),
    }
    for layer in layers.values():
        before(layer)
    return Served(config, layers)


@pytest.mark.parametrize("name", CHOSEN, ids=lambda name: str(name.name))
@pytest.mark.parametrize("pick", [picks, picks_with_gaps])
def test_all_kinds_of_steps_over_the_keys_of_each_layers_own_buffer(name: Any, pick: Any) -> None:
    made = served(name)
    assert made.layers["first"].attn_backend.get_name() == name.name
    assert [max(made.step(new, pick)) < RIGHT for new in STEPS] == [True] * len(STEPS)


@pytest.mark.parametrize("name", CHOSEN, ids=lambda name: str(name.name))
def test_a_buffer_of_all_keys_is_dense_attention(name: Any) -> None:
    made = served(name)
    made.step([(0, TOPK)], lambda position: list(range(position + 1)))
    # The oracle of such a step is that of a dense layer, whatever was picked.
    for layer in made.layers.values():
        layer.impl.picked[:] = torch.arange(TOPK).int()
    assert max(made.step([(1, 3)], lambda position: list(range(position, -1, -1)))) < RIGHT


def test_keys_that_are_read_as_slots_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_slots(keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        return keys + BLOCK * 3

    made = served(CHOSEN[0], before=lambda layer: layer.kv_cache.normal_())
    monkeypatch.setattr(selection_ops, "slots_of_keys", as_slots)
    assert min(made.step(STEPS[0], picks)) > WRONG


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
    with pytest.raises(SpecError, match=r"token_topk 8.*is not served by TORCH in vLLM"):
        served(CHOSEN[0])


def test_weights_that_vllm_keeps_in_fewer_bits_are_refused() -> None:
    with pytest.raises(SpecError, match=r"stored in 4 or 8 bits.*VLLM_ROCM_USE_AITER_FP8BMM=0"):
        served(CHOSEN[0], before=lambda layer: delattr(layer, "W_UK_T"))


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
