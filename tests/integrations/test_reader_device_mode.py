"""A forward without weights still has the values of lengths, grids and positions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from attnplug.integrations.reader.device_mode import ValuesWithoutWeights  # noqa: E402

WEIGHT = torch.empty(5, 3, device="meta")


@pytest.fixture(autouse=True)
def _mode():
    with torch.device("meta"), ValuesWithoutWeights():
        yield


def test_small_tensors_have_values_on_any_device():
    assert torch.arange(3, device=WEIGHT.device).tolist() == [0, 1, 2]
    assert torch.ones(2).sum().item() == 2
    assert torch.tensor([4, 5]).to(WEIGHT.device).tolist() == [4, 5]


def test_large_tensors_take_no_memory():
    assert torch.zeros(1 << 40).is_meta
    column = torch.arange(1 << 16)
    assert (column[:, None] - column[None, :]).is_meta


def test_what_is_computed_from_weights_has_a_shape_only():
    product = WEIGHT * torch.arange(3)

    assert product.is_meta
    assert product.shape == (5, 3)


def test_truth_values_select_from_a_tensor_without_data():
    assert WEIGHT[torch.tensor([True, False, True, False, False])].shape == (2, 3)


def test_repeats_with_values_give_the_length_of_a_tensor_without_data():
    assert torch.repeat_interleave(WEIGHT, torch.tensor([1, 0, 2, 0, 4]), dim=0).shape == (7, 3)


def test_a_copy_to_a_device_leaves_data_where_it_is():
    assert WEIGHT.cpu().is_meta
    assert WEIGHT.to("cpu", torch.float16).dtype == torch.float16
    assert torch.arange(2).to(WEIGHT).dtype == WEIGHT.dtype
