"""The oracle against numbers worked out by hand, and against itself where a field is changed."""

from __future__ import annotations

import math

import pytest
import torch

from attnplug.core import LayerSpec, LayerTensors
from attnplug.errors import BatchError, SpecError
from attnplug.testing import attention_oracle, request_oracle, stored_values, visible_keys

ONE = LayerSpec(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, dtype="float32")


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[:, None, None]


def test_two_keys_are_weighed_by_their_exponentials() -> None:
    found = request_oracle(ONE, column(1.0), column(math.log(3.0), 0.0), column(8.0, 4.0), 2)
    assert found.output.item() == pytest.approx((3 * 8 + 1 * 4) / 4)
    assert found.lse.item() == pytest.approx(math.log(4.0))
    assert found.output.dtype == found.lse.dtype == torch.float64


def test_the_scale_multiplies_the_logits() -> None:
    spec = ONE.replace(scale=2.0)
    found = request_oracle(spec, column(1.0), column(math.log(3.0), 0.0), column(8.0, 4.0), 2)
    assert found.output.item() == pytest.approx((9 * 8 + 1 * 4) / 10)


def test_the_soft_cap_comes_after_the_scale() -> None:
    spec = ONE.replace(scale=2.0, logits_soft_cap=0.5)
    found = request_oracle(spec, column(1.0), column(3.0), column(1.0), 1)
    assert found.lse.item() == pytest.approx(0.5 * math.tanh(6.0 / 0.5))


def test_alibi_comes_after_the_soft_cap() -> None:
    spec = ONE.replace(has_alibi=True, logits_soft_cap=1.0)
    tensors = LayerTensors(alibi_slopes=torch.tensor([0.25]))
    found = request_oracle(
        spec, column(0.0), column(0.0, 0.0, 0.0), column(1.0, 2.0, 4.0), 3, tensors=tensors
    )
    weights = [math.exp(-0.5), math.exp(-0.25), 1.0]
    assert found.output.item() == pytest.approx((weights[0] + 2 * weights[1] + 4) / sum(weights))


def test_alibi_falls_off_on_both_sides() -> None:
    spec = ONE.replace(has_alibi=True, causal=False)
    tensors = LayerTensors(alibi_slopes=torch.tensor([1.0]))
    query, key = column(0.0, 0.0, 0.0), column(0.0, 0.0, 0.0)
    found = request_oracle(spec, query, key, column(1.0, 0.0, 0.0), 3, tensors=tensors)
    assert found.output[1].item() == pytest.approx(math.exp(-1) / (1 + 2 * math.exp(-1)))
    assert found.output[2].item() == pytest.approx(math.exp(-2) / (1 + math.exp(-1) + math.exp(-2)))


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    spec = ONE.replace(has_sinks=True)
    tensors = LayerTensors(sinks=torch.tensor([math.log(3.0)]))
    found = request_oracle(spec, column(0.0), column(0.0), column(8.0), 1, tensors=tensors)
    assert found.output.item() == pytest.approx(2.0)
    assert found.lse.item() == pytest.approx(math.log(4.0))
    without = request_oracle(spec, column(0.0), column(0.0), column(8.0), 1, tensors=tensors, use_sinks=False)
    assert without.output.item() == pytest.approx(8.0)
    assert without.lse.item() == pytest.approx(0.0)


def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity_or_the_sink() -> None:
    nothing = torch.empty(0, 1, 1)
    found = request_oracle(ONE, column(5.0), nothing, nothing, 4)
    assert (found.output.item(), found.lse.item()) == (0.0, -math.inf)
    tensors = LayerTensors(sinks=torch.tensor([1.5]))
    found = request_oracle(ONE.replace(has_sinks=True), column(5.0), nothing, nothing, 4, tensors=tensors)
    assert (found.output.item(), found.lse.item()) == (0.0, 1.5)


def test_grouped_heads_share_consecutive_keys() -> None:
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=1, scale=1.0, dtype="float32")
    value = torch.tensor([[[10.0], [20.0]]])
    found = request_oracle(spec, torch.ones(1, 4, 1), torch.ones(1, 2, 1), value, 1)
    assert found.output.flatten().tolist() == [10, 10, 20, 20]


@pytest.mark.parametrize(
    ("fields", "position", "seen"),
    [
        ({}, 3, [0, 1, 2, 3]),
        ({"sliding_window": 1}, 3, [3]),
        ({"sliding_window": 3}, 3, [1, 2, 3]),
        ({"sliding_window": 3}, 0, [0]),
        ({"causal": False}, 3, [0, 1, 2, 3, 4, 5]),
        ({"causal": False, "window": (1, 2)}, 2, [1, 2, 3, 4]),
        ({"causal": False, "window": (-1, 0)}, 2, [0, 1, 2]),
        ({"causal": False, "window": (0, -1)}, 4, [4, 5]),
        ({"chunk_size": 4}, 3, [0, 1, 2, 3]),
        ({"chunk_size": 4}, 4, [4]),
        ({"chunk_size": 4}, 5, [4, 5]),
    ],
    ids=str,
)
def test_what_a_position_sees(fields: dict[str, object], position: int, seen: list[int]) -> None:
    mask = visible_keys(ONE.replace(**fields), torch.tensor([position]), torch.arange(6))
    assert mask[0].nonzero().flatten().tolist() == seen


def test_a_batch_can_narrow_a_layer_to_causal() -> None:
    spec = ONE.replace(causal=False, window=(1, 2))
    mask = visible_keys(spec, torch.tensor([2]), torch.arange(6), causal=True)
    assert mask[0].nonzero().flatten().tolist() == [1, 2]


def test_queries_and_keys_stand_at_the_end_of_the_request() -> None:
    found = request_oracle(ONE, column(0.0, 0.0), column(0.0, 0.0, 0.0), column(1.0, 2.0, 6.0), 10)
    assert found.output.flatten().tolist() == pytest.approx([1.5, 3.0])
    window = ONE.replace(sliding_window=2)
    found = request_oracle(window, column(0.0, 0.0), column(0.0, 0.0, 0.0), column(1.0, 2.0, 6.0), 10)
    assert found.output.flatten().tolist() == pytest.approx([1.5, 4.0])


def test_a_batch_is_its_requests_one_after_another() -> None:
    queries, keys = [column(1.0), column(), column(2.0, 3.0)], [column(1.0), column(1.0), column(4.0, 5.0)]
    found = attention_oracle(ONE, queries, keys, keys, [1, 1, 2])
    assert found.output.shape == (3, 1, 1)
    assert found.output[0].item() == pytest.approx(1.0)
    assert torch.equal(found.output[1:], request_oracle(ONE, queries[2], keys[2], keys[2], 2).output)
    assert attention_oracle(ONE, [], [], [], []).lse.shape == (0, 1)


def test_requests_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(BatchError, match="requests"):
        attention_oracle(ONE, [column(1.0)], [column(1.0)], [column(1.0)], [])


def test_tensors_that_the_spec_does_not_ask_for_are_refused() -> None:
    with pytest.raises(SpecError, match="sinks"):
        request_oracle(ONE, column(1.0), column(1.0), column(1.0), 1, tensors=LayerTensors(torch.ones(1)))


def test_stored_values_are_what_the_cache_gives_back() -> None:
    numbers = torch.tensor([1.0, 1.0 + 2**-10, 1e6])
    assert stored_values(numbers, ONE).tolist() == numbers.tolist()
    half = ONE.replace(kv_cache_dtype="bfloat16")
    assert stored_values(numbers[:2], half).tolist() == [1.0, 1.0]
    fp8 = ONE.replace(kv_cache_dtype="fp8")
    assert stored_values(numbers, fp8, scale=0.5).tolist() == [1.0, 1.0, 224.0]
