"""The chunks of computed tokens whose latents a prefill expands together: a pure function of lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attnplug.core.arguments import integers
from attnplug.core.batch.host import check_count
from attnplug.core.checks import MOST, check_size
from attnplug.core.config import CONTEXT_CHUNK_ROWS
from attnplug.core.dtypes import element_size
from attnplug.core.errors import BatchError, SpecError
from attnplug.core.spec import LayerSpec

FEW_CHUNKS = 8
"""Chunks of a prefill whose results are merged in the dtype of the layer; more are merged in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContextChunk:
    """The computed tokens of consecutive requests that are expanded together.

    Args:
        first: index of the first request.
        starts: the first position of each request.
        lengths: tokens of each request; 0 only between others.
    """

    first: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Tokens of the chunk."""
        return sum(self.lengths)

    @property
    def continues(self) -> bool:
        """Whether the first request has earlier tokens, which are in the chunk before."""
        return self.starts[0] > 0


def plan_context_chunks(context_lens: Sequence[int], rows: int, block_size: int) -> list[ContextChunk]:
    """The computed tokens of requests in chunks of at most `rows` tokens.

    Each token is in one chunk. A request is cut at multiples of `block_size` only, and only the first request of a
    chunk has tokens in an earlier one. Requests without computed tokens are in no chunk, or in one with length 0.

    Args:
        context_lens: computed tokens of each request, at least 0.
        rows: tokens of the workspace.
        block_size: tokens of a page.

    Raises:
        BatchError: a negative length, or fewer rows than a page has tokens.
    """
    context_lens = _checked(context_lens, rows, block_size)
    chunks: list[ContextChunk] = []
    first, starts, lengths, free = 0, [0] * 0, [0] * 0, rows

    def close() -> None:
        nonlocal starts, lengths, free
        # Requests at the end without tokens would only add work.
        while lengths and not lengths[-1]:
            starts.pop()
            lengths.pop()
        if lengths:
            chunks.append(ContextChunk(first, tuple(starts), tuple(lengths)))
        starts, lengths, free = [], [], rows

    for request, length in enumerate(context_lens):
        done = 0
        while done < length:
            left = length - done
            taken = left if left <= free else free // block_size * block_size
            if not taken:
                close()
                continue
            if not lengths:
                first = request
            starts.append(done)
            lengths.append(taken)
            free -= taken
            done += taken
            if done < length:
                close()
        # The queries of a chunk are one slice, so a request without computed tokens stays between its neighbours.
        if not length and lengths:
            starts.append(0)
            lengths.append(0)
    close()
    return chunks


def _checked(context_lens: Sequence[int], rows: int, block_size: int) -> list[int]:
    check_count("rows", rows, 1)
    check_count("block_size", block_size, 1)
    lengths = integers("context_lens", context_lens)
    # The start locations of a chunk are int32.
    if max(lengths, default=0) > MOST:
        raise BatchError("context_lens", max(lengths), f"must be at most {MOST}")
    if rows < block_size:
        raise BatchError("rows", rows, f"must be at least block_size={block_size}")
    if any(length < 0 for length in lengths):
        raise BatchError("context_lens", lengths, "must be at least 0")
    return lengths


def long_context(spec: LayerSpec, rows: int | None) -> int:
    """The fewest computed tokens that are more than FEW_CHUNKS; 0 for a layer that expands none.

    Args:
        spec: the layer.
        rows: tokens of the workspace, as `BuilderConfig.context_chunk_rows`.
    """
    if spec.mla is None or spec.sparse is not None:
        return 0
    return FEW_CHUNKS * max(rows or CONTEXT_CHUNK_ROWS, spec.block_size or 1) + 1


def prefill_workspace_bytes(spec: LayerSpec, rows: int) -> int:
    """Bytes of the workspace of an expanded prefill: `rows` latents, and their keys and values for each head.

    Raises:
        SpecError: the layer has no `mla`.
    """
    if not isinstance(spec, LayerSpec):
        raise SpecError("spec", spec, "must be a LayerSpec")
    rows = check_size("rows", rows, 0)
    if spec.mla is None:
        raise SpecError("mla", None, "is required: other layers expand nothing")
    expanded = spec.num_heads * (spec.mla.query_size + spec.mla.v_head_dim)
    return rows * (spec.mla.latent_size + expanded) * element_size(spec.dtype)
