"""Tensors that FlashInfer can take as they are, and all others, are answered alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flashinfer_builders import PAGE, builder_of, layer

from attnplug.testing import Batch, assert_close, paged_batch, tolerance

pytestmark = pytest.mark.usefixtures("fake_library")


def strided(query: torch.Tensor) -> torch.Tensor:
    """The queries in the middle of rows that hold keys too, as a projection gives them."""
    return torch.cat([query + 1, query, query - 1], dim=1)[:, query.shape[1] : 2 * query.shape[1]]


def transposed(query: torch.Tensor) -> torch.Tensor:
    return query.transpose(1, 2).contiguous().transpose(1, 2)


def recorded(query: torch.Tensor) -> torch.Tensor:
    return query.clone().requires_grad_()


def longer(query: torch.Tensor) -> torch.Tensor:
    return torch.cat([query, torch.full_like(query[:3], torch.nan)])


def attended(batch: Batch, query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    builder = builder_of({"0": batch.spec})
    metadata = builder.build(0, batch.common)
    impl = builder.config.layers["0"].impl
    impl.update_kv_cache(None, batch.key, batch.value, batch.kv_cache, batch.common.slot_mapping)
    impl.attend(None, query, None, None, batch.kv_cache, metadata, output)
    return output


@pytest.mark.parametrize(
    ("new", "tokens"),
    [([1, 1], [5, 9]), ([3, 4], [7, 4]), ([1, 3], [6, 9])],
    ids=["decode", "prefill", "both"],
)
@pytest.mark.parametrize("form", [torch.clone, strided, transposed, recorded, longer])
def test_queries_may_have_any_strides_more_rows_and_a_gradient(
    form: Callable[[torch.Tensor], torch.Tensor], new: list[int], tokens: list[int]
) -> None:
    batch = paged_batch(layer(), new, tokens, block_size=PAGE)
    rows = batch.common.num_actual_tokens
    output = torch.full((batch.query.shape[0], 4, 64), torch.nan, dtype=torch.float16)
    attended(batch, form(batch.query[:rows]), output)
    assert_close(output, batch.oracle().output, tolerance(batch.spec).output)
    assert not output.requires_grad


def test_outputs_that_are_not_dense_are_written_in_place() -> None:
    batch = paged_batch(layer(), [1, 1], [5, 9], block_size=PAGE)
    wide = torch.full((batch.query.shape[0], 12, 64), torch.nan, dtype=torch.float16)
    attended(batch, batch.query, wide[:, 4:8])
    assert_close(wide[:, 4:8], batch.oracle().output, tolerance(batch.spec).output)
    assert bool(wide[:, :4].isnan().all())
