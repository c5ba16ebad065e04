"""Partial results over disjoint keys, merged: the whole, whatever the keys were cut into."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import LayerSpec, LayerTensors
from attnplug.core.errors import BatchError
from attnplug.ops import merge, merge_attn_states
from attnplug.testing import OracleResult, assert_close, assert_lse_close, request_oracle

HEADS, HEAD_SIZE = 4, 8


def spec(**asked: object) -> LayerSpec:
    """Two KV heads for four heads, every key seen."""
    return LayerSpec(
        num_heads=HEADS, num_kv_heads=2, head_size=HEAD_SIZE, dtype="float32", causal=False, **asked
    )


def tokens(count: int, heads: int, seed: int, factor: float = 1.0) -> torch.Tensor:
    return factor * torch.randn(count, heads, HEAD_SIZE, generator=torch.Generator().manual_seed(seed))


def partial(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> OracleResult:
    asked = spec(has_sinks="tensors" in options)
    return request_oracle(asked, query, key, value, key.shape[0], **options)


def shard(rank_of: Sequence[int], rank: int) -> torch.Tensor:
    return torch.tensor([i for i, r in enumerate(rank_of) if r == rank], dtype=torch.int64)


@given(
    rank_of=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    queries=st.integers(0, 3),
    sharpness=st.sampled_from([0.1, 2.0, 40.0]),
    seed=st.integers(0, 99),
)
def test_any_sharding_of_the_keys_merges_to_the_whole(rank_of, queries, sharpness, seed):
    query = tokens(queries, HEADS, seed, sharpness)
    key, value = tokens(len(rank_of), 2, seed + 1), tokens(len(rank_of), 2, seed + 2)
    whole = partial(query, key, value)
    # Ranks without keys take part: they give output 0 and LSE -inf.
    parts = [partial(query, key[own], value[own]) for own in (shard(rank_of, rank) for rank in range(4))]
    found, lse = merge([part.output.float() for part in parts], [part.lse.float() for part in parts])
    assert_close(found, whole.output, 1e-5)
    assert_lse_close(lse, whole.lse, 1e-5)


@given(rank_of=st.lists(st.integers(0, 2), min_size=1, max_size=12), owner=st.integers(0, 2))
def test_a_sink_in_one_partial_is_counted_once(rank_of, owner):
    query, key, value = tokens(3, HEADS, 0), tokens(len(rank_of), 2, 1), tokens(len(rank_of), 2, 2)
    tensors = LayerTensors(sinks=torch.tensor([0.5, 2.0, -1.0, 3.0]))
    whole = partial(query, key, value, tensors=tensors)
    parts = []
    for rank in range(3):
        own = shard(rank_of, rank)
        parts.append(partial(query, key[own], value[own], tensors=tensors, use_sinks=rank == owner))
    found, lse = merge([part.output.float() for part in parts], [part.lse.float() for part in parts])
    assert_close(found, whole.output, 1e-5)
    assert_lse_close(lse, whole.lse, 1e-5)


def ones(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((1, 1, 2), value, dtype=dtype)


def one_lse(value: float) -> torch.Tensor:
    return torch.full((1, 1), value)


def test_equal_weights_give_the_mean_and_add_ln_2():
    found, lse = merge([ones(1.0), ones(3.0)], [one_lse(5.0), one_lse(5.0)])
    assert found.flatten().tolist() == [2.0, 2.0]
    assert lse.item() == pytest.approx(5.0 + math.log(2))


def test_one_partial_is_itself():
    found, lse = merge([ones(1.5)], [one_lse(-700.0)])
    assert torch.equal(found, ones(1.5))
    assert lse.item() == -700.0


def test_rows_that_no_partial_saw_are_zero_with_lse_minus_infinity():
    found, lse = merge([ones(7.0), ones(8.0)], [one_lse(-math.inf)] * 2)
    assert found.flatten().tolist() == [0.0, 0.0]
    assert lse.item() == -math.inf


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_stands_in_rows_a_partial_did_not_see_is_never_read(garbage):
    found, lse = merge([ones(garbage), ones(2.0)], [one_lse(-math.inf), one_lse(1.0)])
    assert found.flatten().tolist() == [2.0, 2.0]
    assert lse.item() == 1.0
    found, _ = merge([ones(garbage)], [one_lse(-math.inf)])
    assert found.flatten().tolist() == [0.0, 0.0]


def test_nan_in_a_row_that_was_seen_is_not_hidden():
    assert merge([ones(math.nan), ones(2.0)], [one_lse(1.0), one_lse(1.0)])[0].isnan().all()
    assert merge([ones(1.0), ones(2.0)], [one_lse(math.nan), one_lse(1.0)])[1].isnan().all()


@pytest.mark.parametrize("apart", [50.0, 500.0, 1e30])
@pytest.mark.parametrize("base", [-1e4, 0.0, 1e4])
def test_lses_far_apart_leave_the_larger_one(apart, base):
    found, lse = merge([ones(1.0), ones(2.0)], [one_lse(base - apart), one_lse(base)])
    assert found.flatten().tolist() == pytest.approx([2.0, 2.0])
    assert lse.item() == pytest.approx(base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_merged_in_float32_and_come_back_as_halves(dtype):
    generator = torch.Generator().manual_seed(3)
    outs = [torch.randn(5, 2, 8, generator=generator).to(dtype) for _ in range(3)]
    lses = [torch.randn(5, 2, generator=generator) for _ in range(3)]
    found, lse = merge(outs, lses)
    assert found.dtype == dtype
    assert lse.dtype == torch.float32
    weights = torch.softmax(torch.stack(lses).double(), 0)[..., None]
    expected = (torch.stack(outs).double() * weights).sum(0)
    assert_close(found, expected, torch.finfo(dtype).eps)


def test_inputs_are_not_modified():
    outs, lses = [ones(1.0), ones(2.0)], [one_lse(0.0), one_lse(-math.inf)]
    copies = [tensor.clone() for tensor in outs + lses]
    merge(outs, lses)
    merge_attn_states(outs, lses, torch.empty(1, 1, 2), torch.empty(1, 1))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(outs + lses, copies, strict=True))


def test_stacked_tensors_are_sequences_too():
    found, lse = merge(torch.stack([ones(1.0), ones(3.0)]), torch.zeros(2, 1, 1))
    assert found.flatten().tolist() == [2.0, 2.0]
    assert lse.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("which", [0, 1])
def test_the_result_can_be_written_over_one_of_the_partials(which):
    outs, lses = [ones(1.0), ones(3.0)], [one_lse(0.0), one_lse(math.log(3))]
    expected, expected_lse = merge(outs, lses)
    found, lse = merge_attn_states(outs, lses, outs[which], lses[which])
    assert found is outs[which]
    assert lse is lses[which]
    assert torch.equal(found, expected)
    assert torch.equal(lse, expected_lse)


def test_a_given_output_keeps_its_dtype_and_only_what_is_given_is_written():
    output = torch.empty(1, 1, 2, dtype=torch.bfloat16)
    found, lse = merge_attn_states([ones(1.0), ones(3.0)], [one_lse(0.0)] * 2, output)
    assert found is output
    assert output.flatten().tolist() == [2.0, 2.0]
    assert lse.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("outs", "lses", "said"),
    [
        ([], [], "outputs=0 must be as many as lses (0), at least one"),
        ([ones(1.0)], [], "outputs=1 must be as many as lses (0)"),
        ([ones(1.0), torch.zeros(2, 1, 2)], [one_lse(0.0)] * 2, "outputs[1], lses[1]=((2, 1, 2), (1, 1))"),
        ([ones(1.0)], [torch.zeros(1, 1, 1)], "must have the shapes (1, 1, 2) and (1, 1)"),
    ],
)
def test_partials_that_do_not_fit_each_other_are_refused(outs, lses, said):
    with pytest.raises(BatchError) as error:
        merge(outs, lses)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["output", "output_lse"])
def test_a_target_of_another_shape_is_refused_before_anything_is_written(name):
    targets = {"output": ones(9.0), "output_lse": one_lse(9.0)}
    targets[name] = torch.full((2, 2, 2), 9.0)
    with pytest.raises(BatchError, match=f"{name}=.* must have the shape"):
        merge_attn_states([ones(1.0)], [one_lse(0.0)], **targets)
    assert all((tensor == 9.0).all() for tensor in targets.values())


@pytest.mark.gpu
def test_merging_on_a_gpu_gives_the_same_and_never_waits(sync_errors):
    generator = torch.Generator().manual_seed(3)
    outs = [torch.randn(70, 8, 64, generator=generator) for _ in range(3)]
    lses = [10 * torch.randn(70, 8, generator=generator) for _ in range(3)]
    lses[1][::3] = -math.inf
    lses[0][::9] = lses[1][::9] = lses[2][::9] = -math.inf
    on_gpu = [[tensor.cuda() for tensor in part] for part in (outs, lses)]
    with sync_errors():
        found, lse = merge_attn_states(*on_gpu, torch.empty_like(on_gpu[0][0]))
    expected, expected_lse = merge(outs, lses)
    assert_close(found, expected, 1e-5)
    assert_lse_close(lse, expected_lse, 1e-5)
