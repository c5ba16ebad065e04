"""Right calls of the public functions that run steps: by name, the function and arguments that it accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from core_calls import CONFIG, LATENT, PAGES, SPARSE, SPEC, Call, Group, chosen, common, ints

import attnplug
from attnplug import core, ops, runtime
from attnplug.mla import plan_context_chunks, prefill_workspace_bytes
from attnplug.ops import selection as selection_ops
from attnplug.ops.gather import gather_page_indices
from attnplug.registry import Registry


class Layer:
    kv_cache: Any = None


def pages(size: int = 8) -> torch.Tensor:
    return torch.randn(6, 4, 1, size)


def partials() -> dict[str, Any]:
    return {
        "outputs": [torch.randn(3, 2, 8), torch.randn(3, 2, 8)],
        "lses": [torch.randn(3, 2), torch.randn(3, 2)],
    }


PLAN = attnplug.plan({"a": SPEC}, "cpu", num_blocks=3)

BACKEND = PLAN.decisions["a"].get_backend_cls()

OPS: dict[str, Call] = {
    "combine": (ops.combine, lambda: {"outs": partials()["outputs"], "lses": partials()["lses"]}),
    "combine_partials": (
        ops.combine_partials,
        lambda: {
            "out": torch.randn(3, 2, 8),
            "lse": torch.randn(3, 2),
            "group": Group(),
            "scatter_heads": False,
            "backend": "a2a",
            "buffers": ops.ExchangeBuffers(),
            "output": torch.empty(3, 2, 8),
            "output_lse": torch.empty(3, 2),
        },
    ),
    "ExchangeBuffers": (ops.ExchangeBuffers, lambda: {"device": "cpu"}),
    "ExchangeBuffers.take": (
        lambda **given: ops.ExchangeBuffers().take(**given),
        lambda: {"name": "lses", "shape": (2, 3), "dtype": torch.float32},
    ),
    "ExchangeBuffers.partial": (
        lambda **given: ops.ExchangeBuffers().partial(**given),
        lambda: {"tokens": 3, "heads": 2, "head_size": 8, "dtype": torch.float32, "group": Group()},
    ),
    "ExchangeBuffers.partial_or_new": (
        lambda **given: ops.ExchangeBuffers().partial_or_new(**given),
        lambda: {"like": torch.randn(3, 2, 8), "group": Group()},
    ),
    "ExchangeBuffers.reserve": (
        lambda **given: ops.ExchangeBuffers().reserve(**given),
        lambda: {
            "tokens": 3,
            "heads": 2,
            "head_size": 8,
            "dtype": torch.float32,
            "group": Group(),
            "scatter_heads": True,
            "backend": "a2a",
        },
    ),
    "gather_keys": (
        ops.gather_keys,
        lambda: {
            "k_cache": pages(),
            "v_cache": pages(),
            "block_table": ints(1, 2, 3, 4).view(2, 2),
            "cu_lens": ints(0, 3, 8),
            "k_out": torch.empty(8, 1, 8),
            "v_out": torch.empty(8, 1, 8),
        },
    ),
    "gather_pages": (
        ops.gather_pages,
        lambda: {
            "kv_cache": torch.randn(6, 4, 8),
            "block_table": ints(1, 2, 3, 4).view(2, 2),
            "cu_lens": ints(0, 3, 6),
            "starts": ints(1, 2),
            "out": torch.empty(6, 8),
            "scale": 1.0,
        },
    ),
    "gather_slots": (
        ops.gather_slots,
        lambda: {
            "kv_cache": torch.randn(6, 4, 8),
            "slot_mapping": ints(3, -1, 7, dtype=torch.int64),
            "out": torch.empty(3, 8),
            "scale": 1.0,
        },
    ),
    "write_kv_cache": (
        ops.write_kv_cache,
        lambda: {
            "key": torch.randn(3, 1, 8),
            "value": torch.randn(3, 1, 8),
            "k_cache": pages().to(torch.float8_e4m3fn),
            "v_cache": pages().to(torch.float8_e4m3fn),
            "slot_mapping": ints(3, -1, 7, dtype=torch.int64),
            "k_scale": 2.0,
            "v_scale": 2.0,
        },
    ),
    "merge": (ops.merge, partials),
    "merge_attn_states": (
        ops.merge_attn_states,
        lambda: partials() | {"output": torch.empty(3, 2, 8), "output_lse": torch.empty(3, 2)},
    ),
    "Reach": (ops.Reach, lambda: {"left": 3, "right": 0, "chunk": 0, "spans": False}),
    "Reach.bounds": (
        lambda **given: ops.Reach(3, 0, 0, True).bounds(**given),
        lambda: {
            "positions": np.array([2, 3]),
            "first": np.array([0, 0]),
            "end": np.array([4, 4]),
            "spans": np.array([[0, 0], [2, 4]]),
        },
    ),
    "chosen_keys": (
        ops.chosen_keys,
        lambda: {
            "selection": chosen(),
            "sparse": SPARSE,
            "low": ints(0, 0, dtype=torch.int64),
            "high": ints(2, 3, dtype=torch.int64),
        },
    ),
    "slots_of_keys": (
        ops.slots_of_keys,
        lambda: {
            "keys": ints(0, 5, -1, 2).view(2, 2),
            "requests": ints(0, 1, dtype=torch.int64),
            "block_table": ints(1, 2, 3, 4).view(2, 2),
            "block_size": 4,
            "steps": (4, 1),
        },
    ),
    "table_of_tokens": (
        selection_ops.table_of_tokens,
        lambda: {
            "selection": chosen(),
            "sparse": SPARSE,
            "query_start_loc": ints(0, 1, 2),
            "seq_lens": ints(2, 3),
            "block_table": ints(1, 3).view(2, 1),
            "block_size": 4,
            "steps": (4, 1),
            "page_table": torch.zeros(2, 3, dtype=torch.int32),
            "counts": ints(0, 0),
            "ends": ints(0, 0),
        },
    ),
    "query_ends": (
        selection_ops.query_ends,
        lambda: {"query_start_loc": ints(0, 1, 2), "seq_lens": ints(2, 3), "ends": ints(0, 0)},
    ),
    "gather_page_indices": (
        gather_page_indices,
        lambda: {
            "block_table": ints(1, 2, 3, 4).view(2, 2),
            "seq_lens": ints(5, 3),
            "page_size": 4,
            "rows": ints(1, 0),
            "out": torch.zeros(4, dtype=torch.int32),
            "count": 3,
        },
    ),
}

LATENT_CALLS: dict[str, Call] = {
    "plan_context_chunks": (
        plan_context_chunks,
        lambda: {"context_lens": [5, 9], "rows": 8, "block_size": 4},
    ),
    "prefill_workspace_bytes": (
        prefill_workspace_bytes,
        lambda: {
            "spec": core.LayerSpec(
                num_heads=2, num_kv_heads=1, head_size=24, head_size_v=16, dtype="float32", mla=LATENT
            ),
            "rows": 8,
        },
    ),
}

RUNTIME: dict[str, Call] = {
    "allocate_kv_cache": (runtime.allocate_kv_cache, lambda: {"config": CONFIG, "device": "cpu"}),
    "bind_kv_cache": (
        runtime.bind_kv_cache,
        lambda: {"kv_caches": {"a": torch.zeros(4)}, "layers": {"a": Layer()}, "runner_kv_caches": []},
    ),
    "init_kv_cache": (
        runtime.init_kv_cache,
        lambda: {
            "config": CONFIG,
            "specs": {"a": SPEC},
            "backends": {"a": BACKEND},
            "device": "cpu",
            "layouts": {"a": "NHD"},
        },
    ),
    "reshape_kv_cache": (
        runtime.reshape_kv_cache,
        lambda: {
            "config": CONFIG,
            "raw": runtime.allocate_kv_cache(CONFIG, "cpu"),
            "specs": {"a": SPEC},
            "backends": {"a": BACKEND},
            "layouts": "NHD",
        },
    ),
    "view_kv_cache": (
        runtime.view_kv_cache,
        lambda: {
            "raw": torch.zeros(3 * PAGES.page_size_bytes, dtype=torch.uint8),
            "cache": PAGES,
            "spec": SPEC,
            "backend": BACKEND,
            "layout": "NHD",
            "num_layers": 1,
        },
    ),
    "cross_metadata": (
        runtime.cross_metadata,
        lambda: {
            "common": common(encoder_seq_lens=ints(3, 3), encoder_seq_lens_cpu=np.array([3, 3], np.int32)),
            "block_table": ints(1, 2, 3, 4).view(2, 2),
            "slot_mapping": ints(1, 2, 3, dtype=torch.int64),
        },
    ),
    "init_attn_backend": (
        runtime.init_attn_backend,
        lambda: {
            "groups": CONFIG.kv_cache_groups,
            "decisions": PLAN.decisions,
            "config": core.BuilderConfig(layers={"a": type("L", (), {"impl": object()})()}),
            "device": "cpu",
            "fast_prefill": (),
        },
    ),
    "blocks_needed": (
        runtime.blocks_needed,
        lambda: {
            "spec": PAGES,
            "num_tokens": 17,
            "new_tokens": 1,
            "context_parallel": core.ContextParallel(2),
        },
    ),
    "bytes_per_block": (runtime.bytes_per_block, lambda: {"config": CONFIG}),
    "fit_kv_cache": (
        runtime.fit_kv_cache,
        lambda: {
            "config": CONFIG,
            "memory": 1 << 20,
            "new_tokens": 1,
            "prefill_workspace": 16,
            "context_parallel": core.ContextParallel(2),
        },
    ),
    "parse_memory": (runtime.parse_memory, lambda: {"text": "80GiB"}),
    "get_kv_cache_spec": (runtime.get_kv_cache_spec, lambda: {"specs": {"a": SPEC}, "block_size": 4}),
    "group_kv_caches": (
        runtime.group_kv_caches,
        lambda: {"specs": {"a": PAGES, "b": PAGES}, "num_blocks": 3, "kv_sharing": {"b": "a"}},
    ),
    "num_padding_layers": (runtime.num_padding_layers, lambda: {"config": CONFIG}),
    "unify_page_sizes": (runtime.unify_page_sizes, lambda: {"specs": {"a": PAGES}}),
    "with_num_blocks": (runtime.with_num_blocks, lambda: {"config": CONFIG, "num_blocks": 5}),
    "get_kv_cache_layout": (runtime.get_kv_cache_layout, lambda: {"required": "HND"}),
    "context_parallel": (runtime.context_parallel, lambda: {"group": None, "interleave": 1}),
    "check_same_plan": (runtime.check_same_plan, lambda: {"plan": PLAN, "group": None}),
    "RankWatch": (runtime.RankWatch, lambda: {"group": None, "timeout": 1.0}),
    "SharingCost.of": (
        runtime.SharingCost.of,
        lambda: {"ranks": 2, "specs": [SPEC], "device": core.Device.parse("sm90")},
    ),
    "CpuGpuBuffer": (
        lambda size, **given: runtime.CpuGpuBuffer(size, **given),
        lambda: {"size": 3, "dtype": torch.int32, "device": "cpu", "fill": 0},
    ),
    "CpuGpuBuffer.copy_to_gpu": (
        lambda n: runtime.CpuGpuBuffer(3, dtype=torch.int32, device="cpu").copy_to_gpu(n),
        lambda: {"n": 2},
    ),
    "StagingRing": (runtime.StagingRing, lambda: {"slots": [1, 2], "device": "cpu"}),
}

TOP: dict[str, Call] = {
    "plan": (
        attnplug.plan,
        lambda: {
            "specs": {"a": SPEC, "b": SPEC},
            "device": "cpu",
            "per_phase": True,
            "uniform": False,
            "kv_sharing": {"b": "a"},
            "num_blocks": 5,
            "context_chunk_rows": 64,
            "context_parallel": core.ContextParallel(1),
            "registry": Registry(),
            "backend": "TORCH",
            "options": {},
            "assume_installed": {"flash-attn": "2.8.0"},
            "allow_refuted": ("TORCH",),
            "tuned": False,
        },
    ),
    "plan(memory)": (
        lambda memory: attnplug.plan({"a": SPEC}, "cpu", memory=memory),
        lambda: {"memory": "1MiB"},
    ),
}

ALL = {"ops": OPS, "mla": LATENT_CALLS, "runtime": RUNTIME, "top": TOP}
