"""Right calls of the public functions of core and the registry: by name, the function and arguments that it accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import attnplug
from attnplug import core
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import batch as batches
from attnplug.core.kv_cache_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from attnplug.registry import Registry

Call = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]


SPEC = core.LayerSpec(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32")

LATENT = core.MLADims(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)

PAGES = core.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")

CONFIG = KVCacheConfig(
    3, (KVCacheTensor(3 * PAGES.page_size_bytes, ("a",)),), (KVCacheGroupSpec(("a",), PAGES),)
)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def common(**changed: Any) -> core.CommonAttentionMetadata:
    """Two requests of 3 and 2 new tokens, and 5 and 2 tokens in all."""
    given: dict[str, Any] = {
        "query_start_loc": ints(0, 3, 5),
        "query_start_loc_cpu": ints(0, 3, 5),
        "seq_lens": ints(5, 2),
        "num_reqs": 2,
        "num_actual_tokens": 5,
        "max_query_len": 3,
        "max_seq_len": 5,
        "block_table_tensor": ints(1, 2, 3, 4).view(2, 2),
        "slot_mapping": ints(6, 7, 8, 12, 13, dtype=torch.int64),
        "logits_indices_padded": ints(2, 4),
        "num_logits_indices": 2,
    }
    return core.CommonAttentionMetadata(**given | changed)


class Group:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclasses.dataclass
class Step:
    """A step as `PrefillDecodeMetadata` describes it."""

    num_prefill_tokens: Any = 3
    num_decode_tokens: Any = 2
    num_encoder_tokens: Any = 4
    seq_lens_tensor: Any = None
    max_prefill_seq_len: Any = 3
    max_decode_seq_len: Any = 5
    block_tables: Any = None
    encoder_seq_lens: Any = None
    encoder_seq_lens_tensor: Any = dataclasses.field(default_factory=lambda: ints(4))
    max_encoder_seq_len: Any = 4
    cross_slot_mapping: Any = None
    cross_block_tables: Any = None


@dataclasses.dataclass
class Running:
    """An engine's batch."""

    req_ids: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])
    num_computed_tokens_cpu: Any = dataclasses.field(default_factory=lambda: np.array([0, 4]))

    def swap_states(self, one: int, other: int, /) -> None:
        self.req_ids[one], self.req_ids[other] = self.req_ids[other], self.req_ids[one]


@dataclasses.dataclass
class Scheduled:
    num_scheduled_tokens: Any = dataclasses.field(default_factory=lambda: {"a": 3, "b": 1})


def chosen() -> core.Selection:
    return core.Selection(ints(0, 1, -1, 2, 1, 0).view(2, 3), ints(2, 3))


SPARSE = core.SparseSpec("token_topk", topk=3)


def slots(kind: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        "block_table": kind(np.array([[1, 2], [3, 4]], np.int32)),
        "num_computed_tokens": kind(np.array([2, 0], np.int32)),
        "num_new_tokens": kind(np.array([3, 2], np.int32)),
        "block_size": 4,
        "start_idx": kind(np.array([0, 1], np.int32)),
        "num_tokens": 6,
        "out": kind(np.zeros(8, np.int64)),
        "context_parallel": core.ContextParallel(2, 1),
    }


BATCH: dict[str, Call] = {
    "get_dcp_local_seq_lens": (
        batches.get_dcp_local_seq_lens,
        lambda: {"seq_lens": ints(5, 2), "dcp_size": 2, "dcp_rank": 1, "cp_kv_cache_interleave_size": 1},
    ),
    "compute_causal_conv1d_metadata": (
        batches.compute_causal_conv1d_metadata,
        lambda: {"query_start_loc": ints(0, 3, 5), "device": torch.device("cpu")},
    ),
    "make_kv_sharing_fast_prefill_common_attn_metadata": (
        batches.make_kv_sharing_fast_prefill_common_attn_metadata,
        lambda: {"common_attn_metadata": common()},
    ),
    "subclass_attention_metadata": (
        batches.subclass_attention_metadata,
        lambda: {
            "name_prefix": "My",
            "metadata_cls": core.AttentionMetadata,
            "fields": [("rows", Any, None)],
        },
    ),
    "create_fast_prefill_custom_backend": (
        batches.create_fast_prefill_custom_backend,
        lambda: {"prefix": "My", "underlying_attn_backend": TorchBackend},
    ),
    "make_local_attention_virtual_batches": (
        batches.make_local_attention_virtual_batches,
        lambda: {"attn_chunk_size": 4, "common_attn_metadata": common(), "block_size": 4},
    ),
    "local_attention table": (
        lambda block_table: batches.make_local_attention_virtual_batches(4, common(), 4)[1](block_table),
        lambda: {"block_table": ints(1, 2, 3, 4).view(2, 2)},
    ),
    "is_all_encoder_attn_metadata_set": (
        batches.is_all_encoder_attn_metadata_set,
        lambda: {"attn_metadata": Step()},
    ),
    "is_all_cross_attn_metadata_set": (
        batches.is_all_cross_attn_metadata_set,
        lambda: {"attn_metadata": Step()},
    ),
    "get_num_prefill_decode_query_kv_tokens": (
        batches.get_num_prefill_decode_query_kv_tokens,
        lambda: {"attn_metadata": Step(), "attn_type": "decoder"},
    ),
    **{
        f"get_num_prefill_decode_query_kv_tokens({name})": (
            lambda name=name, **given: batches.get_num_prefill_decode_query_kv_tokens(
                Step(**given), "encoder_decoder"
            ),
            lambda name=name: {name: 3},
        )
        for name in ("num_prefill_tokens", "num_decode_tokens", "num_encoder_tokens")
    },
    "get_seq_len_block_table_args": (
        batches.get_seq_len_block_table_args,
        lambda: {"attn_metadata": Step(), "is_prompt": True, "attn_type": "decoder"},
    ),
    "reorder_batch_to_split_decodes_and_prefills": (
        batches.reorder_batch_to_split_decodes_and_prefills,
        lambda: {"input_batch": Running(), "scheduler_output": Scheduled(), "decode_threshold": 1},
    ),
    "reorder: req_ids": (
        lambda req_ids: batches.reorder_batch_to_split_decodes_and_prefills(Running(req_ids), Scheduled()),
        lambda: {"req_ids": ["a", "b"]},
    ),
    "reorder: num_computed_tokens_cpu": (
        lambda num_computed_tokens_cpu: batches.reorder_batch_to_split_decodes_and_prefills(
            Running(num_computed_tokens_cpu=num_computed_tokens_cpu), Scheduled()
        ),
        lambda: {"num_computed_tokens_cpu": np.array([0, 4])},
    ),
    "reorder: num_scheduled_tokens": (
        lambda num_scheduled_tokens: batches.reorder_batch_to_split_decodes_and_prefills(
            Running(), Scheduled(num_scheduled_tokens)
        ),
        lambda: {"num_scheduled_tokens": {"a": 3, "b": 1}},
    ),
    "reorder: num_scheduled_tokens['a']": (
        lambda num_scheduled_tokens: batches.reorder_batch_to_split_decodes_and_prefills(
            Running(), Scheduled({"a": num_scheduled_tokens, "b": 1})
        ),
        lambda: {"num_scheduled_tokens": 3},
    ),
    "compute_slot_mapping of arrays": (batches.compute_slot_mapping, lambda: slots(lambda array: array)),
    "compute_slot_mapping of tensors": (batches.compute_slot_mapping, lambda: slots(torch.from_numpy)),
    "compute_slot_mapping_start_idx": (
        batches.compute_slot_mapping_start_idx,
        lambda: {"is_prompt": True, "query_len": 5, "context_len": 0, "sliding_window": 3},
    ),
    "reshape_query_for_spec_decode": (
        batches.reshape_query_for_spec_decode,
        lambda: {"query": torch.randn(6, 2, 8), "batch_size": 3},
    ),
    "reshape_attn_output_for_spec_decode": (
        batches.reshape_attn_output_for_spec_decode,
        lambda: {"attn_output": torch.randn(3, 2, 2, 8)},
    ),
    "split_decodes_and_prefills": (
        batches.split_decodes_and_prefills,
        lambda: {"common_attn_metadata": common(), "decode_threshold": 1, "require_uniform": False},
    ),
    "split_decodes_prefills_and_extends": (
        batches.split_decodes_prefills_and_extends,
        lambda: {"common_attn_metadata": common(), "decode_threshold": 1},
    ),
    "split_prefill_chunks": (
        batches.split_prefill_chunks,
        lambda: {"seq_lens_cpu": ints(3, 4, 5), "workspace_size": 8, "request_offset": 0},
    ),
    "UBatchSlice": (
        lambda **given: batches.split_attn_metadata([batches.UBatchSlice(**given)], common()),
        lambda: {"request_slice": slice(0, 1), "token_slice": slice(0, 3)},
    ),
    "slice_query_start_locs": (
        batches.slice_query_start_locs,
        lambda: {"query_start_loc": ints(0, 3, 5), "request_slice": slice(0, 1)},
    ),
    "split_attn_metadata": (
        batches.split_attn_metadata,
        lambda: {
            "ubatch_slices": [batches.UBatchSlice(slice(0, 1), slice(0, 3))],
            "common_attn_metadata": common(),
        },
    ),
    # Every function that reads a batch, with each of its fields.
    **{
        f"{name} of common({field})": (
            lambda read=read, **given: read(common(**given)),
            lambda field=field: {field: getattr(common(), field)},
        )
        for name, read in {
            "split_decodes_and_prefills": batches.split_decodes_and_prefills,
            "split_decodes_prefills_and_extends": batches.split_decodes_prefills_and_extends,
            "make_local_attention_virtual_batches": (
                lambda each: batches.make_local_attention_virtual_batches(4, each, 4)
            ),
            "make_kv_sharing_fast_prefill_common_attn_metadata": (
                batches.make_kv_sharing_fast_prefill_common_attn_metadata
            ),
            "split_attn_metadata": lambda each: batches.split_attn_metadata(
                [
                    batches.UBatchSlice(slice(0, 1), slice(0, 2)),
                    batches.UBatchSlice(slice(0, 2), slice(2, 5)),
                ],
                each,
            ),
        }.items()
        for field in (
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "block_table_tensor",
        )
    },
}

CORE: dict[str, Call] = {
    "ContextParallel": (core.ContextParallel, lambda: {"size": 2, "rank": 1, "interleave": 1}),
    "ContextParallel.of": (core.ContextParallel.of, lambda: {"group": Group(), "interleave": 1}),
    "ContextParallel.of(size)": (
        lambda size: core.ContextParallel.of(type("G", (), {"size": lambda _: size, "rank": lambda _: 0})()),
        lambda: {"size": 2},
    ),
    "ContextParallel.from_dict": (
        core.ContextParallel.from_dict,
        lambda: {"data": {"size": 2, "rank": 1, "interleave": 1}},
    ),
    "ContextParallel.owner": (
        lambda position: core.ContextParallel(2).owner(position),
        lambda: {"position": 3},
    ),
    "ContextParallel.local_position": (
        lambda position: core.ContextParallel(2).local_position(position),
        lambda: {"position": 3},
    ),
    "ContextParallel.local_length": (
        lambda **given: core.ContextParallel(2).local_length(**given),
        lambda: {"length": 3, "rank": 1},
    ),
    "ContextParallel.most_local": (
        lambda length: core.ContextParallel(2).most_local(length),
        lambda: {"length": 3},
    ),
    "BuilderConfig": (
        core.BuilderConfig,
        lambda: {
            "layers": {},
            "num_speculative_tokens": 1,
            "decode_context_parallel_size": 1,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 64,
            "context_chunk_rows": 64,
            "cudagraph_batch_sizes": (1, 2),
        },
    ),
    "FullAttentionSpec": (
        core.FullAttentionSpec,
        lambda: {
            "block_size": 4,
            "num_kv_heads": 1,
            "head_size": 8,
            "head_size_v": 8,
            "dtype": "float32",
            "padding": 0,
        },
    ),
    "SlidingWindowSpec": (
        lambda **given: core.SlidingWindowSpec(
            block_size=4, num_kv_heads=1, head_size=8, dtype="float32", **given
        ),
        lambda: {"sliding_window": 5},
    ),
    "ChunkedLocalAttentionSpec": (
        lambda **given: core.ChunkedLocalAttentionSpec(
            block_size=4, num_kv_heads=1, head_size=8, dtype="float32", **given
        ),
        lambda: {"chunk": 5},
    ),
    "KVCacheTensor": (KVCacheTensor, lambda: {"size": 64, "shared_by": ("a",)}),
    "KVCacheGroupSpec": (KVCacheGroupSpec, lambda: {"layer_names": ("a",), "kv_cache_spec": PAGES}),
    "KVCacheConfig": (
        KVCacheConfig,
        lambda: {
            "num_blocks": 3,
            "kv_cache_tensors": CONFIG.kv_cache_tensors,
            "kv_cache_groups": CONFIG.kv_cache_groups,
        },
    ),
    "unpadded": (
        lambda **given: common().unpadded(**given),
        lambda: {"num_actual_tokens": 3, "num_actual_reqs": 1},
    ),
    "MLADims": (
        core.MLADims,
        lambda: {
            "q_lora_rank": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "get_mla_dims": (core.get_mla_dims, lambda: {"hf_config": dataclasses.asdict(LATENT)}),
    "SparseSpec": (core.SparseSpec, lambda: {"kind": "block", "topk": 3, "block": 2}),
    "SparseSpec.from_dict": (
        core.SparseSpec.from_dict,
        lambda: {"data": {"kind": "block", "topk": 3, "block": 2}},
    ),
    "Selection": (core.Selection, lambda: {"positions": ints(0, 1).view(1, 2), "counts": ints(2)}),
    "Selection.allocate": (core.Selection.allocate, lambda: {"tokens": 3, "topk": 2, "device": "cpu"}),
    "Selection.clear": (lambda **given: chosen().clear(**given), lambda: {"count": 0}),
    "Selection.copy_from": (lambda **given: chosen().copy_from(**given), lambda: {"other": chosen()}),
    "Selection.check_size": (lambda **given: chosen().check_size(**given), lambda: {"tokens": 2}),
    "Selection.check_values": (
        lambda **given: core.Selection(ints(0, -1).view(1, 2), ints(1)).check_values(**given),
        lambda: {"sparse": SPARSE, "ends": ints(2, dtype=torch.int64)},
    ),
    "MultipleOf": (core.MultipleOf, lambda: {"base": 16, "but": (32,)}),
    "MultipleOf.from_on": (lambda **given: core.MultipleOf(16).from_on(**given), lambda: {"least": 17}),
    "MultipleOf.nearest": (core.MultipleOf.nearest, lambda: {"sizes": [16], "wanted": 17}),
    "MultipleOf.dividing": (core.MultipleOf.dividing, lambda: {"number": 32, "sizes": [16]}),
    "MultipleOf.common": (core.MultipleOf.common, lambda: {"one": [16], "other": [16]}),
    "MultipleOf.allows": (core.MultipleOf.allows, lambda: {"sizes": [16], "size": 16}),
    "is_quantized_kv_cache": (core.is_quantized_kv_cache, lambda: {"kv_cache_dtype": "fp8"}),
    "LayerTensors": (
        lambda **given: core.LayerTensors(**given).check(SPEC.replace(has_sinks=True, has_alibi=True)),
        lambda: {"sinks": torch.zeros(2), "alibi_slopes": torch.zeros(2), "k_scale": 1.0, "v_scale": 1.0},
    ),
    "LayerTensors.check": (core.LayerTensors().check, lambda: {"spec": SPEC}),
    "DenseProjection.of": (
        core.DenseProjection.of,
        lambda: {"kv_b_proj": torch.randn(2 * 16, 16), "nope": 8, "v_head_dim": 8},
    ),
    "composite_backend": (core.composite_backend, lambda: {"prefill": TorchBackend, "decode": TorchBackend}),
}


@dataclasses.dataclass
class Plugin:
    ATTNPLUG_API = 1


SELECTION: dict[str, Call] = {
    **{
        f"{function.__name__}": (
            function,
            lambda: {
                "spec": SPEC,
                "device": "cpu",
                "phase": "decode",
                "layer_name": "a",
                "backend": "TORCH",
                "options": {},
                "assume_installed": {"flash-attn": "2.8.0"},
                "allow_refuted": ("TORCH",),
                "tuned": False,
            },
        )
        for function in (attnplug.select, attnplug.explain)
    },
    "select_layers": (
        attnplug.select_layers,
        lambda: {
            "specs": {"a": SPEC},
            "device": "cpu",
            "phase": "decode",
            "backend": "TORCH",
            "options": {},
            "assume_installed": {"flash-attn": "2.8.0"},
            "allow_refuted": ("TORCH",),
            "tuned": False,
        },
    ),
    "use": (
        lambda **given: attnplug.use(**given).__enter__(),
        lambda: {"backend": "TORCH", "options": {"TORCH": {}}},
    ),
    "Registry": (Registry, lambda: {"plugins": {}}),
    "Registry.register": (
        lambda **given: Registry({}).register(**given),
        lambda: {"plugin": Plugin(), "name": "mine"},
    ),
    "Registry.unregister": (lambda **given: Registry({}).unregister(**given), lambda: {"name": "mine"}),
    "LayerSpec": (
        core.LayerSpec,
        lambda: {
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_size": 8,
            "head_size_v": 8,
            "dtype": "float32",
            "kv_cache_dtype": "auto",
            "block_size": 16,
            "scale": 0.5,
            "causal": True,
            "sliding_window": 4,
            "logits_soft_cap": 2.0,
            "attn_type": "decoder",
            "direct_kv": False,
            "needs_lse": True,
            "has_sinks": False,
            "mm_prefix": False,
        },
    ),
    "LayerSpec.from_dict": (core.LayerSpec.from_dict, lambda: {"data": SPEC.to_dict()}),
    "Device.parse": (core.Device.parse, lambda: {"text": "sm90"}),
    "Device": (core.Device, lambda: {"type": "cuda", "capability": (9, 0)}),
}

ALL = {"batch": BATCH, "core": CORE, "top": SELECTION}
