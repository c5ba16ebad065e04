"""Checks of FLEX alone: masks made from bounds, pieces, shared plans, options, and refusals while running."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.errors import BatchError, LayoutError, PolicyError
from attnplug.testing import Batch, assert_close, assert_lse_close, direct_batch, paged_batch, run_batch
from torch.nn.attention.flex_attention import create_block_mask

from attnplug_flex import FlexBackend, FlexOptions, kernel, plan

LAYER: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
LENGTHS = [5, 1, 0, 40, 3], [5, 70, 9, 300, 2]
"""Prefill, decode, nothing new, extend, and a padding request that is shorter than its queries."""
DIRECT = [5, 1, 0, 40], [5, 70, 9, 300]


def assert_right(batch: Batch) -> None:
    output, lse = run_batch(FlexBackend, batch)
    tokens = batch.common.num_actual_tokens
    assert_close(output[:tokens], batch.oracle().output, 1e-5)
    if lse is not None:
        assert_lse_close(lse[:tokens], batch.oracle().lse, 1e-4)


def prepared(batch: Batch, **options: Any) -> tuple[Any, Any, list[Any]]:
    """The builder, the impl, and the arguments of its `forward` up to the metadata."""
    builder = FlexBackend.get_builder_cls()(None, ["layer"], BuilderConfig(), batch.query.device)  # type: ignore[arg-type]
    impl = FlexBackend.get_impl_cls().from_spec(
        batch.spec,
        backend=FlexBackend,
        layer_name="layer",
        tensors=batch.tensors,
        options=FlexOptions(**options),
    )
    return builder, impl, [None, batch.query, batch.key, batch.value, batch.kv_cache]


def run(batch: Batch, **arguments: Any) -> torch.Tensor:
    builder, impl, positional = prepared(batch)
    given = arguments.pop("replaced", {})
    positional = [given.get(index, each) for index, each in enumerate(positional)]
    output = batch.query.new_empty(batch.query.shape[0], batch.spec.num_heads, batch.spec.head_size_v)
    return impl.forward(*positional, builder.build(0, batch.common), output, **arguments)


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(([0] * 300, list(range(1, 301))), id="causal"),
        pytest.param(([max(p - 9, 0) for p in range(300)], list(range(1, 301))), id="window"),
        pytest.param(([0] * 5, [700] * 5), id="decodes"),
        pytest.param(([0, 0, 40, 40, 513], [0, 40, 40, 513, 514]), id="requests, two of which see nothing"),
    ],
)
def test_the_block_mask_of_bounds_is_the_one_torch_makes_of_their_mask(
    bounds: tuple[list[int], list[int]],
) -> None:
    low, high = (torch.tensor(each, dtype=torch.int32) for each in bounds)
    mask = plan._mask(low, high, int(high.max()))
    expected = create_block_mask(mask.mask_mod, None, None, low.numel(), int(high.max()), device="cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    seen = (torch.arange(int(high.max())) >= low[:, None]) & (torch.arange(int(high.max())) < high[:, None])
    for row, (count, blocks) in enumerate(
        zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)
    ):
        for block in blocks[:count].tolist():
            assert seen[128 * row : 128 * row + 128, 128 * block : 128 * block + 128].all()


@pytest.mark.parametrize("scores", [1, 2000])
@pytest.mark.parametrize(
    "reach", [{}, {"window": (7, 0)}, {"chunk_size": 16}, {"causal": False, "window": (3, 9)}]
)
def test_a_step_cut_into_many_pieces_gives_the_same(
    reach: dict[str, Any], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_SCORES", scores)
    assert_right(paged_batch(LayerSpec(**LAYER, **reach, needs_lse=True), *LENGTHS, padding=2))


def test_pieces_keep_to_the_scores_they_may_make() -> None:
    batch = paged_batch(LayerSpec(**LAYER), [900], [2000])
    builder, impl, arguments = prepared(batch)
    metadata = builder.build(0, batch.common)
    impl.forward(*arguments, metadata, torch.empty_like(batch.query))
    (made,) = metadata.plans.values()
    sizes = [(p.rows.stop - p.rows.start) * (p.keys.stop - p.keys.start) for p in made.pieces]
    assert len(sizes) > 1
    assert max(sizes) <= plan._SCORES


@pytest.mark.parametrize(
    "features", [{}, {"has_alibi": True, "logits_soft_cap": 3.0}, {"has_sinks": True, "needs_lse": True}]
)
@pytest.mark.parametrize("direct", [False, True])
def test_the_one_piece_of_a_compiled_step_gives_the_same(
    direct: bool, features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of a kernel of torch.compile; here it runs uncompiled, as there may be no GPU."""
    spec = LayerSpec(**LAYER, **features, direct_kv=direct, window=(30, 0))
    batch = direct_batch(spec, *DIRECT) if direct else paged_batch(spec, *LENGTHS)
    monkeypatch.setattr(kernel, "_compiled", kernel._uncompiled)
    builder, impl, arguments = prepared(batch, compile=True)
    monkeypatch.setattr(impl, "_check_device", lambda *_, **__: None)
    output = torch.empty_like(batch.query)
    impl.forward(*arguments, builder.build(0, batch.common), output)
    assert_close(output, batch.oracle().output, 1e-5)


def test_layers_of_one_reach_share_a_plan_and_groups_of_one_batch_do_too() -> None:
    batch = paged_batch(LayerSpec(**LAYER), *LENGTHS)
    builder, impl, arguments = prepared(batch)
    metadata = builder.build(0, batch.common)
    for _ in range(2):
        impl.forward(*arguments, metadata, torch.empty_like(batch.query))
    other = builder.update_block_table(metadata, metadata.block_table.clone(), metadata.slot_mapping)
    impl.forward(*arguments, other, torch.empty_like(batch.query))
    assert len(metadata.plans) == 1
    assert other.plans is metadata.plans


def test_a_step_without_tokens_writes_nothing() -> None:
    output, _ = run_batch(FlexBackend, paged_batch(LayerSpec(**LAYER), [0, 0], [3, 0], padding=2))
    assert output.isnan().all()


def test_rows_that_see_nothing_are_zero_and_their_lse_is_the_sink() -> None:
    batch = paged_batch(LayerSpec(**LAYER, has_sinks=True, needs_lse=True), [4], [1])
    output, lse = run_batch(FlexBackend, batch)
    assert lse is not None
    assert batch.tensors.sinks is not None
    assert (output[:3] == 0).all()
    assert torch.equal(lse[:3], batch.tensors.sinks.expand(3, -1))
    assert (run_batch(FlexBackend, batch, use_sinks=False)[1][:3] == -torch.inf).all()  # type: ignore[index]


def test_bytes_of_an_fp8_pool_are_read_as_its_type() -> None:
    batch = paged_batch(LayerSpec(**LAYER, kv_cache_dtype="fp8"), *LENGTHS, k_scale=0.5, v_scale=2.0)
    assert batch.kv_cache is not None
    batch.kv_cache = batch.kv_cache.view(torch.uint8)
    assert_right(batch)


def test_scales_of_the_engines_layer_go_before_those_of_the_impl() -> None:
    class Layer:
        _k_scale_float, _v_scale_float = 0.5, 2.0

    batch = paged_batch(LayerSpec(**LAYER, kv_cache_dtype="fp8"), *LENGTHS, k_scale=0.5, v_scale=2.0)
    batch.tensors = type(batch.tensors)(k_scale=3.0, v_scale=3.0)
    output, _ = run_batch(FlexBackend, batch, layer=Layer())
    assert_close(output, batch.oracle().output, 5e-2)


def test_lengths_that_the_host_does_not_know_are_copied() -> None:
    batch = paged_batch(LayerSpec(**LAYER), *LENGTHS)
    batch.common.seq_lens_host = None
    assert_right(batch)


def test_importing_the_plugin_imports_no_torch_and_running_it_warns_of_nothing() -> None:
    code = """
import sys
import attnplug_flex
assert "torch" not in sys.modules
from attnplug.core import LayerSpec
from attnplug.testing import paged_batch, run_batch
run_batch(attnplug_flex.FlexBackend, paged_batch(LayerSpec(num_heads=2, num_kv_heads=1, head_size=16), [1], [5]))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_compiled_kernels_are_for_gpus_and_their_head_sizes() -> None:
    batch = paged_batch(LayerSpec(**LAYER), *LENGTHS)
    builder, impl, arguments = prepared(batch, compile=True)
    with pytest.raises(PolicyError, match="compile=True needs a CUDA device, not 'cpu'"):
        impl.forward(*arguments, builder.build(0, batch.common), torch.empty_like(batch.query))
    with pytest.raises(PolicyError, match="head sizes of at least 16, and this layer has 8"):
        prepared(paged_batch(LayerSpec(**{**LAYER, "head_size": 8}), [1], [1]), compile=True)


def test_kernels_are_made_for_sizes_and_modifications_not_for_numbers() -> None:
    spec = LayerSpec(**LAYER, logits_soft_cap=3.0)
    assert FlexBackend.compile_key(spec) == FlexBackend.compile_key(
        spec.replace(logits_soft_cap=5.0, window=(3, 0))
    )
    assert FlexBackend.compile_key(spec) != FlexBackend.compile_key(spec.replace(logits_soft_cap=None))


def test_what_a_layer_did_not_declare_is_refused_when_it_comes() -> None:
    paged, direct = (LayerSpec(**LAYER, direct_kv=each) for each in (False, True))
    batch = paged_batch(paged, *LENGTHS)
    with pytest.raises(BatchError, match="output_lse="):
        run(batch, output_lse=torch.empty(9, 4))
    with pytest.raises(BatchError, match="output_scale"):
        run(batch, output_scale=torch.ones(1))
    with pytest.raises(LayoutError, match="direct_kv=True to give K and V"):
        run(batch, replaced={4: None})
    with pytest.raises(LayoutError, match="kv_cache_dtype='auto'"):
        run(batch, replaced={4: batch.kv_cache.half()})  # type: ignore[union-attr]
    with pytest.raises(BatchError, match="cannot widen a causal layer"):
        run(paged_batch(paged, *LENGTHS, causal=False))
    with pytest.raises(LayoutError, match="must be None with direct_kv=True"):
        run(direct_batch(direct, *DIRECT), replaced={4: batch.kv_cache})
    with pytest.raises(BatchError, match="not in a KV cache"):
        run(direct_batch(direct, *DIRECT), replaced={2: None})
    with pytest.raises(BatchError, match="request 0 has more keys than its 3 tokens"):
        run(direct_batch(direct, [1], [3], key_lens=[4]))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("query_start_loc_cpu", [0, 2, 1], "must not decrease"),
        ("query_start_loc_cpu", [0, 2], "must have num_reqs"),
        ("query_start_loc_cpu", [0, 2, 9], "num_actual_tokens=3"),
        ("seq_lens_host", [-1, 2], "at least 0"),
    ],
)
def test_a_batch_that_means_nothing_is_refused(field: str, value: list[int], text: str) -> None:
    batch = paged_batch(LayerSpec(**LAYER), [2, 1], [2, 1])
    setattr(batch.common, field, torch.tensor(value, dtype=torch.int32))
    with pytest.raises(BatchError, match=text):
        run(batch)


def test_a_length_past_the_table_is_refused() -> None:
    batch = paged_batch(LayerSpec(**LAYER), [1], [100])
    batch.common.block_table_tensor = batch.common.block_table_tensor[:, :2]
    with pytest.raises(BatchError, match="seq_lens=100 is past the 32 tokens of 2 pages"):
        run(batch)
