"""The steps that a warm-up runs: their requests, and metadata that writes no page and reads the null block alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.composite import CompositeBackend
from attnplug.core.config import BuilderConfig
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import LayerSpec, Phase

# Kernels differ by tile, and no tile has more rows.
_MOST_ROWS = 1024
_SHORT = 16
"""Queries of requests that backends may decode. Kernels that merge the parts of their keys differ by how many there are
for a request, by factors of 8."""
_LONGEST_PROMPT = 16_384
"""Queries of one long prompt. FLASH_ATTN_4 attends a copy of the keys where each has so many rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class DummyShape:
    """The requests of a dummy step.

    Args:
        requests: their number.
        query_len: queries of each.
        computed: tokens of each in the KV cache before the step.
        phase: decode or prefill.
    """

    requests: int
    query_len: int
    computed: int
    phase: Phase


def shapes_within(
    config: BuilderConfig, backend: type[AttentionBackend], *, is_paged: bool, context: int = 0
) -> Iterator[DummyShape]:
    """The dummy steps after which a layer compiles nothing more.

    Args:
        config: the most requests, tokens and tokens of speculation.
        backend: of the layer.
        is_paged: whether the layer has pages, and so decodes and tokens before a step.
        context: computed tokens of a step with which a layer runs further kernels; 0 without.
    """
    most, tokens = config.max_num_seqs, config.max_num_batched_tokens
    longest = min(tokens, config.max_model_len or tokens, _LONGEST_PROMPT)
    decodes = 0
    if is_paged:
        decodes = min(1 + config.num_speculative_tokens, longest)
        for query_len in range(1, decodes + 1):
            for requests in _counts(most, tokens, query_len):
                yield DummyShape(requests, query_len, 1, Phase.DECODE)
    powers = (1 << power for power in range(_MOST_ROWS.bit_length()))
    lengths = {decodes + 1, *powers, longest, *_limits(backend)}
    for query_len in sorted(length for length in lengths if decodes < length <= longest):
        yield DummyShape(1, query_len, 0, Phase.PREFILL)
        if is_paged:
            for requests in _counts(most, tokens, query_len):
                yield DummyShape(requests, query_len, 1, Phase.PREFILL)
    query_len = min(longest, 2 * _SHORT)
    each = (config.max_model_len or context + query_len) - query_len
    requests = -(-context // max(each, 1))
    if 0 < requests <= min(most, tokens // query_len):
        yield DummyShape(requests, query_len, -(-context // requests), Phase.PREFILL)


def _counts(most: int, tokens: int, query_len: int) -> list[int]:
    """The numbers of requests in steps of such queries: one, the most, and the powers of 8 between if they are short."""
    fitting = max(min(most, tokens // query_len), 1)
    powers = range(0, fitting.bit_length(), 3) if query_len <= _SHORT else ()
    return sorted({1, fitting, *(1 << power for power in powers)})


def _limits(backend: type[AttentionBackend]) -> set[int]:
    """The query lengths around the limits at which another member of a composite serves a step."""
    routes = backend.routes if issubclass(backend, CompositeBackend) else ()
    least = {steps.query[0] + beside for steps, _ in routes for beside in (-1, 0)}
    return least | {steps.query[1] + beside for steps, _ in routes if steps.query[1] for beside in (0, 1)}


def dummy_tensors(
    spec: LayerSpec, rows: int, device: torch.device, *, writes: bool = True
) -> dict[str, torch.Tensor]:
    """The query, key and value of a layer's call for so many tokens: zeros. A layer with `mla` has no value.

    Args:
        spec: the layer.
        rows: the tokens.
        device: of the tensors.
        writes: whether the layer has keys of its own.
    """
    sizes = {"query": (spec.num_heads, spec.query_size)}
    if writes:
        sizes["key"] = spec.num_kv_heads, spec.head_size
        if spec.mla is None:
            sizes["value"] = spec.num_kv_heads, spec.head_size_v
    dtype = getattr(torch, spec.dtype)
    return {name: torch.zeros(rows, *size, dtype=dtype, device=device) for name, size in sizes.items()}


def dummy_step(
    shape: DummyShape, block_table: torch.Tensor, slot_mapping: torch.Tensor, **inputs: Any
) -> CommonAttentionMetadata:
    """The metadata of such a step.

    Args:
        shape: its requests.
        block_table: int32 `[R, max_blocks]` with the null block.
        slot_mapping: int64 `[T]`, all -1.
        inputs: optional fields that layers need.
    """
    device, length = block_table.device, shape.computed + shape.query_len
    rows = shape.requests * shape.query_len
    starts = torch.arange(0, rows + 1, shape.query_len, dtype=torch.int32, device="cpu")
    lengths = np.full(shape.requests, length, dtype=np.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(lengths).to(device),
        num_reqs=shape.requests,
        num_actual_tokens=rows,
        max_query_len=shape.query_len,
        max_seq_len=length,
        block_table_tensor=block_table,
        slot_mapping=slot_mapping,
        seq_lens_host=lengths,
        **inputs,
    )
