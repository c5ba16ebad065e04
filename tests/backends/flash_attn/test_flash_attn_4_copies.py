"""FLASH_ATTN_4 copies pages into rows where its kernels spare more time than the copy takes, and nowhere else."""

from __future__ import annotations

import dataclasses

import flash_attn_cpu_impls
import flash_attn_fakes
import pytest
import torch
from flash_attn_cpu_impls import FlashAttn4Kernels
from flash_attn_on_cpu import FlashAttn4OnCpu

from attnplug.backends.flash_attn import fa4
from attnplug.backends.flash_attn.builder import FlashAttnMetadataBuilder
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.integrations.first_steps import run_first_steps
from attnplug.testing import assert_close, assert_lse_close, paged_batch, run_batch, tolerance

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float16"}
EXTENDS = [30, 40, 5], [50, 40, 20]
"""Queries and keys of each request: 75 and 110, in groups of two heads."""


@pytest.fixture
def calls(monkeypatch):
    """The arguments of the kernels' calls, which copy from 20 rows for each key on."""
    made = []
    forward = flash_attn_fakes._flash_attn_fwd

    def record(**given):
        made.append(given)
        return forward(**given)

    monkeypatch.setattr(
        flash_attn_cpu_impls.Impl4, "kernels", classmethod(lambda _: FlashAttn4Kernels(record))
    )
    monkeypatch.setattr(fa4, "_ROWS_PER_KEY", 20)
    monkeypatch.setattr(fa4, "_is_hopper", lambda device: True)
    return made


def check(spec: LayerSpec, lens: tuple[list[int], list[int]], **changes: object) -> None:
    batch = paged_batch(spec, *lens, block_size=16, backend=FlashAttn4OnCpu)
    batch = dataclasses.replace(batch, common=dataclasses.replace(batch.common, **changes))
    output, lse = run_batch(FlashAttn4OnCpu, batch)
    expected, bound, tokens = batch.oracle(), tolerance(spec), sum(lens[0])
    assert_close(output[:tokens], expected.output, bound.output)
    assert_lse_close(lse[:tokens], expected.lse, bound.lse)


@pytest.mark.parametrize(
    "fields",
    [{}, {"has_sinks": True}, {"head_size_v": 8}, {"logits_soft_cap": 5.0}, {"causal": False}],
    ids=["plain", "sinks", "values", "cap", "not causal"],
)
def test_many_rows_for_each_key_attend_a_copy(calls, fields):
    check(LayerSpec(**SIZES, needs_lse=True, **fields), EXTENDS)
    [call] = calls
    assert call["cu_seqlens_k"].tolist() == [0, 50, 90, 110]
    assert (call["k"].shape[0], call["max_seqlen_k"]) == (110, 50)
    assert "page_table" not in call


@pytest.mark.parametrize(
    ("lens", "fields", "changes"),
    [
        (([9, 9, 9], [15, 15, 15]), {}, {}),
        (([60, 60, 1], [60, 60, 130]), {}, {}),
        (EXTENDS, {"window": (40, 0)}, {}),
        (EXTENDS, {}, {"seq_lens_host": None}),
        (EXTENDS, {}, {"seq_lens_host_exact": False}),
        (([30, 40, 5], [50, 40, 0]), {"causal": False}, {}),
    ],
    ids=["few rows", "a long context", "window", "no lengths", "bounds", "no keys"],
)
def test_other_steps_attend_pages(calls, lens, fields, changes):
    check(LayerSpec(**SIZES, needs_lse=True, **fields), lens, **changes)
    assert [call["page_table"].shape[0] for call in calls] == [3]


def test_other_gpus_attend_pages(calls, monkeypatch):
    monkeypatch.setattr(fa4, "_is_hopper", lambda device: False)
    check(LayerSpec(**SIZES, needs_lse=True), EXTENDS)
    assert ["page_table" in call for call in calls] == [True]


def test_a_graph_attends_pages_and_layers_of_a_step_share_its_starts(calls):
    spec = LayerSpec(**SIZES)
    batch = paged_batch(spec, *EXTENDS, block_size=16, backend=FlashAttn4OnCpu)
    cache = kv_cache_spec_for(spec, 16)
    builder = FlashAttnMetadataBuilder(cache, ["layer"], BuilderConfig(), torch.device("cpu"))
    layers = [
        flash_attn_cpu_impls.Impl4.from_spec(
            spec, backend=FlashAttn4OnCpu, layer_name=name, tensors=batch.tensors
        )
        for name in ("one", "other")
    ]
    for metadata in (
        builder.build(0, batch.common),
        builder.build_for_cudagraph_capture(batch.common),
    ):
        for layer in layers:
            out = torch.empty_like(batch.query)
            layer.attend(None, batch.query, None, None, batch.kv_cache, metadata, out)
    one, other, *captured = calls
    assert one["cu_seqlens_k"] is other["cu_seqlens_k"]
    assert one["k"] is not other["k"]
    assert all("page_table" in call for call in captured)
    assert len(captured) == 2


def test_the_first_steps_of_an_engine_attend_a_copy_too(calls, monkeypatch):
    """Else the first long prompt would wait until the kernel over keys in a row is compiled."""
    monkeypatch.setattr(fa4, "_ROWS_PER_KEY", 2 * 1400)
    spec = LayerSpec(**SIZES, block_size=16)
    batch = paged_batch(spec, [1], [5], block_size=16, backend=FlashAttn4OnCpu)
    config = BuilderConfig(max_num_seqs=2, max_num_batched_tokens=1500)
    builder = FlashAttnMetadataBuilder(kv_cache_spec_for(spec, 16), ["layer"], config, torch.device("cpu"))
    impl = flash_attn_cpu_impls.Impl4.from_spec(
        spec, backend=FlashAttn4OnCpu, layer_name="layer", tensors=batch.tensors
    )
    run_first_steps(FlashAttn4OnCpu, impl, builder, spec, None, batch.kv_cache)
    # Keys are an odd number only where one was computed before: other prompts attend the keys of their call.
    copied = [keys for call in calls if "page_table" not in call and (keys := call["k"].shape[0]) % 2]
    assert copied == [1501]
