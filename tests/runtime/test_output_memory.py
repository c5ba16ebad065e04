"""Outputs in memory that a layer reads or writes meanwhile: refused by name, and right in memory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug.core import BuilderConfig
from attnplug.core.errors import BatchError

LAYERS = {"full": layer(dtype="float32", needs_lse=True), "window": layer(dtype="float32", sliding_window=20)}
TOKENS, HEADS, SIZE = 6, 4, 8


@pytest.fixture
def model() -> Iterator[ServedModel]:
    made = ServedModel(LAYERS, num_blocks=12, config=BuilderConfig(max_num_seqs=4, max_num_batched_tokens=32))
    made.add("a")
    made.runtime.begin_step(made.begin(a=TOKENS))
    yield made
    # The step is right whatever was refused before.
    for name in LAYERS:
        made.check(name, made.draw(name, {"a": TOKENS}))


def call(model: ServedModel, query: torch.Tensor | None = None, **given: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(TOKENS, heads, SIZE, generator=generator) for heads in (HEADS, 2, 2)]
    if query is not None:
        query.copy_(rows[0])
    return model.runtime.forward("full", *((query, *rows[1:]) if query is not None else rows), **given)


def refused(model: ServedModel, match: str, query: torch.Tensor | None = None, **given: Any) -> None:
    with pytest.raises(BatchError, match=match):
        call(model, query, **given)


def test_heads_of_one_row_are_apart_or_refused(model):
    packed = torch.zeros(TOKENS, 8, SIZE)
    expected = call(model)
    refused(model, "output=.* must not be in the memory of query", packed[:, :4], output=packed[:, 2:6])
    refused(model, "output=.* must not be in the memory of query", packed[:, :4], output=packed[:, :4])
    torch.testing.assert_close(call(model, packed[:, :4], output=packed[:, 4:]), expected)


def test_rows_of_a_query_are_not_an_output(model):
    memory = torch.zeros(TOKENS + 2, HEADS, SIZE)
    refused(model, "memory of query", memory[2:], output=memory[:-2])
    refused(model, "memory of query", memory[:-2], output=memory[2:])


@pytest.mark.parametrize(
    "strides", [(0, 8, 1), (32, 0, 1), (32, 8, 0), (16, 8, 1), (32, 4, 1), (31, 8, 1), (8, 48, 1)]
)
def test_an_output_that_overlaps_itself_is_refused(model, strides):
    output = torch.zeros(1000).as_strided((TOKENS, HEADS, SIZE), strides)
    if strides == (8, 48, 1):
        torch.testing.assert_close(call(model, output=output), call(model))
    else:
        refused(model, "output=.* must not overlap itself", output=output)


def test_an_lse_is_not_in_the_output_or_over_itself(model):
    output = torch.zeros(TOKENS, HEADS, SIZE)
    lse = output.view(-1)[40 : 40 + TOKENS * HEADS].view(TOKENS, HEADS)
    refused(model, "output=.* must not be in the memory of output_lse", output=output, output_lse=lse)
    refused(
        model, "output_lse=.* must not overlap itself", output_lse=torch.zeros(HEADS).expand(TOKENS, HEADS)
    )
    query = torch.zeros(TOKENS, HEADS, SIZE)
    refused(model, "output_lse=.* must not be in the memory of query", query, output_lse=query[..., 0])


@pytest.mark.parametrize("owner", LAYERS)
def test_an_output_is_in_no_cache_of_the_runtime(model, owner):
    cache = model.runtime.kv_caches[owner]
    memory = torch.empty(0).set_(cache.untyped_storage())
    count = TOKENS * HEADS * SIZE
    before = memory.clone()
    for start in (0, 64, memory.numel() - count):
        output = memory[start : start + count].view(TOKENS, HEADS, SIZE)
        refused(model, "output=.* must not be in the KV cache of layer (full|window)", output=output)
    refused(
        model,
        "output_lse=.* must not be in the KV cache",
        output_lse=memory[: TOKENS * HEADS].view(TOKENS, HEADS),
    )
    assert torch.equal(memory, before)


def test_closed_runtimes_forget_the_memory_of_their_caches(model):
    other = ServedModel(LAYERS, num_blocks=12)
    other.runtime.close()
    assert other.runtime.layers["full"].cache_memory.owner_of(torch.zeros(1), 0, 1 << 62) is None
