"""TORCH attends the keys of a selection, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device, LayerSpec, Selection, SparseSpec
from attnplug.core.config import BuilderConfig
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.errors import BatchError
from attnplug.ops import chosen_keys, slots_of_keys
from attnplug.testing.batches import Batch, direct_batch, paged_batch
from attnplug.testing.comparison import assert_close, assert_lse_close

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", needs_lse=True, block_size=8)
QUERIES, LENGTHS = [1, 5, 40, 1, 0, 2], [70, 33, 40, 1, 9, 50]


def run(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the batch's tokens on TORCH."""
    spec = batch.spec
    assert TorchBackend.validate_configuration(spec, Device("cpu")) == []
    impl = TorchBackend.get_impl_cls().from_spec(
        spec, backend=TorchBackend, layer_name="layer", tensors=batch.tensors
    )
    cache = kv_cache_spec_for(spec.replace(direct_kv=False), spec.block_size or 8)
    builder = TorchBackend.get_builder_cls()(cache, ["layer"], BuilderConfig(), torch.device("cpu"))
    output = torch.full((batch.query.shape[0], spec.num_heads, spec.head_size_v), torch.nan)
    lse = torch.full(output.shape[:2], torch.nan)
    given = batch.query, batch.key, batch.value, batch.kv_cache, builder.build(0, batch.common)
    impl.forward(None, *given, output, output_lse=lse if spec.needs_lse else None)
    tokens = batch.common.num_actual_tokens
    assert output[tokens:].isnan().all()
    return output[:tokens], lse[:tokens]


def expect_right(batch: Batch) -> None:
    truth, (output, lse) = batch.oracle(), run(batch)
    assert_close(output, truth.output, 1e-5)
    if batch.spec.needs_lse:
        assert_lse_close(lse, truth.lse, 1e-4)


def made(spec: LayerSpec, **options: object) -> Batch:
    if spec.direct_kv:
        return direct_batch(spec, QUERIES, LENGTHS, key_lens=LENGTHS, padding=2, **options)
    return paged_batch(spec, QUERIES, LENGTHS, padding=2, **options)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window": (9, 0)},
        {"chunk_size": 16},
        {"logits_soft_cap": 3.0, "has_alibi": True},
        {"has_sinks": True},
        {"mm_prefix": True},
        {"causal": False, "window": (20, 5)},
        {"direct_kv": True},
        {"head_size_v": 48, "num_kv_heads": 1},
        {"attn_type": "encoder_decoder"},
        {"needs_lse": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "sparse",
    [SparseSpec("token_topk", 12), SparseSpec("token_topk", 100), SparseSpec("block", 3, 8)],
    ids=str,
)
def test_chosen_keys_are_attended_with_every_feature(sparse: SparseSpec, fields: dict[str, object]) -> None:
    expect_right(made(SPEC.replace(**fields, sparse=sparse)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_chosen_keys_of_an_fp8_cache_are_scaled(layout: str) -> None:
    spec = SPEC.replace(kv_cache_dtype="fp8", sparse=SparseSpec("token_topk", 12))
    batch = made(spec, k_scale=0.5, v_scale=2.0, layout=layout)
    output, lse = run(batch)
    truth = batch.oracle()
    assert_close(output, truth.output, 5e-2)
    assert_lse_close(lse, truth.lse, 1e-3)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_query_that_chooses_no_key_has_zeros_and_the_lse_of_its_sinks(has_sinks: bool) -> None:
    batch = made(SPEC.replace(has_sinks=has_sinks, sparse=SparseSpec("token_topk", 12)))
    assert batch.common.selection is not None
    batch.common.selection.clear(0)
    output, lse = run(batch)
    sinks = batch.tensors.sinks if has_sinks else torch.full((4,), -torch.inf)
    assert (output == 0).all()
    assert torch.equal(lse, sinks.expand_as(lse))


def everything(batch: Batch) -> Selection:
    """All keys of each query, in reverse."""
    chosen = Selection.allocate(batch.common.num_actual_tokens, max(LENGTHS), "cpu")
    row = 0
    for new, length in zip(QUERIES, LENGTHS, strict=True):
        for position in range(length - new, length):
            chosen.positions[row, : position + 1] = torch.arange(position + 1).flip(0).int()
            chosen.counts[row] = position + 1
            row += 1
    return chosen


def test_a_selection_of_all_keys_equals_a_dense_layer() -> None:
    dense = made(SPEC)
    chosen = everything(dense)
    sparse = dataclasses.replace(
        dense,
        spec=SPEC.replace(sparse=SparseSpec("token_topk", max(LENGTHS))),
        common=dataclasses.replace(dense.common, selection=chosen),
    )
    for found, expected in zip(run(sparse), run(dense), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_order_of_the_positions_changes_no_bit() -> None:
    batch = made(SPEC.replace(sparse=SparseSpec("token_topk", 12)))
    before = run(batch)
    chosen = batch.common.selection
    assert chosen is not None
    for row, count in enumerate(chosen.counts.tolist()):
        if count > 0:
            chosen.positions[row, :count] = chosen.positions[row, :count].roll(1)
    assert all(torch.equal(one, other) for one, other in zip(before, run(batch), strict=True))


def test_one_long_step_is_attended_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.backends.torch_native.selected._POSITIONS", 64)
    expect_right(made(SPEC.replace(sparse=SparseSpec("token_topk", 12))))


def test_only_the_needle_that_was_chosen_is_seen_far_beyond_topk() -> None:
    spec = SPEC.replace(num_heads=2, num_kv_heads=1, needs_lse=False, sparse=SparseSpec("token_topk", 4))
    batch = paged_batch(spec, [1], [2000])
    chosen = batch.common.selection
    assert chosen is not None
    chosen.clear(1)
    chosen.positions[0, 0] = 17
    output, _ = run(batch)
    torch.testing.assert_close(output[0], batch.values[0][17].float().expand(2, -1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.clear(), r"selection.counts\[0\]=-1 is not given"),
        (lambda s: s.positions[3, :1].fill_(69), "is past the last of the positions that the query can see"),
        (lambda s: s.positions[0, 1].copy_(s.positions[0, 0]), "comes twice"),
        (lambda s: s.counts.fill_(13), r"must be in 0 \.\. 12"),
    ],
)
def test_values_that_no_indexer_may_give_are_refused(change, message: str) -> None:
    batch = made(SPEC.replace(sparse=SparseSpec("token_topk", 12)))
    change(batch.common.selection)
    with pytest.raises(BatchError, match=message):
        run(batch)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (None, "selection=None is required: the layer is sparse token_topk 12; give CommonAttentionMetadata"),
        (Selection.allocate(3, 12, "cpu"), "selection=3 must have a row for each of the step's 49 tokens"),
    ],
)
def test_a_step_without_a_selection_is_refused(selection: Selection | None, message: str) -> None:
    batch = made(SPEC.replace(sparse=SparseSpec("token_topk", 12)))
    batch.common.selection = selection
    with pytest.raises(BatchError, match=message):
        run(batch)


def test_a_dense_kernel_over_pages_of_one_token_has_the_same_numbers() -> None:
    batch = paged_batch(SPEC.replace(sparse=SparseSpec("token_topk", 12)), [1, 1, 1], [70, 33, 12])
    output, _ = run(batch)
    chosen, common = batch.common.selection, batch.common
    assert chosen is not None
    assert batch.kv_cache is not None
    low, high = torch.zeros(3, dtype=torch.int64), common.seq_lens.long()
    keys, counts = chosen_keys(chosen, SparseSpec("token_topk", 12), low, high)
    slots = slots_of_keys(keys, torch.arange(3), common.block_table_tensor, 8)
    k, v = (pages.flatten(0, 1) for pages in TorchBackend.split_kv(batch.kv_cache, batch.spec))
    for row, count in enumerate(counts.tolist()):
        if not count:
            continue
        own = slots[row, :count]
        found = torch.nn.functional.scaled_dot_product_attention(
            batch.query[row, :, None].double(),
            k[own].repeat_interleave(2, 1).transpose(0, 1).double(),
            v[own].repeat_interleave(2, 1).transpose(0, 1).double(),
            scale=batch.spec.scale,
        )
        torch.testing.assert_close(output[row].double(), found[:, 0], rtol=1e-5, atol=1e-5)
