"""The places of decodes, extends and prefills in an ordered batch, and prefills cut to fit a workspace.

Tokens of a uniform decode batch with a dimension per request, and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnplug.core.arguments import Shape, integers
from attnplug.core.batch.host import (
    IntArray,
    check_count,
    exact_integers,
    exact_seq_lens,
    host_view,
    query_spans,
)
from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """The decodes at the front of a batch, and the prefills from the first longer request on.

    Args:
        common_attn_metadata: the batch, decodes first.
        decode_threshold: the longest query of a decode, in tokens.
        require_uniform: decodes must also have the first request's query length. In a batch of one
            length, rows of length 0 are padding and count as decodes, with all tokens.

    Returns:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens.

    Raises:
        BatchError: negative query lengths, or a batch of one length whose tokens are not its padded
            rows times that length.
    """
    common = common_attn_metadata
    check_count("decode_threshold", decode_threshold, 0)
    if type(require_uniform) is not bool:
        raise BatchError("require_uniform", require_uniform, "must be True or False")
    starts, lengths = query_spans(common)
    num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
    if num_reqs == 0:
        return 0, 0, 0, num_tokens
    first = int(lengths[0])
    if first > decode_threshold:
        return 0, num_reqs, 0, num_tokens
    if require_uniform:
        others = lengths != first
        if not (others & (lengths != 0)).any():
            _check_padded(first, num_reqs, num_tokens)
            return num_reqs, 0, num_tokens, 0
    else:
        others = lengths > decode_threshold
    num_decodes = int(others.argmax())
    if not others[num_decodes]:
        return num_reqs, 0, num_tokens, 0
    num_decode_tokens = int(starts[num_decodes])
    return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


def split_decodes_prefills_and_extends(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int, int, int]:
    """The decodes, extends and prefills of a batch that holds them in this order.

    An extend is longer than `decode_threshold` and has computed tokens; a prefill has none. Past
    the first longer request a short one counts as its neighbours do, because another threshold may have
    ordered the batch.

    Returns:
        num_decodes, num_extends, num_prefills, then the tokens of each.

    Raises:
        BatchError: lengths that are negative, ragged or not known to the host, or a batch out of order.
    """
    common = common_attn_metadata
    check_count("decode_threshold", decode_threshold, 0)
    starts, lengths = query_spans(common)
    num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
    context = exact_seq_lens(common, lengths) - lengths
    longer = lengths > decode_threshold
    num_decodes = int(longer.argmax()) if num_reqs else 0
    if not num_reqs or not longer[num_decodes]:
        return num_reqs, 0, 0, num_tokens, 0, 0
    prefill = longer & (context == 0)
    first_prefill = int(prefill.argmax())
    if not prefill[first_prefill]:
        first_prefill = num_reqs
    _check_order(lengths, context, num_decodes, first_prefill)
    decode_tokens = int(starts[num_decodes])
    prefill_tokens = num_tokens - int(starts[first_prefill]) if first_prefill < num_reqs else 0
    return (
        num_decodes,
        first_prefill - num_decodes,
        num_reqs - first_prefill,
        decode_tokens,
        num_tokens - decode_tokens - prefill_tokens,
        prefill_tokens,
    )


def split_prefill_chunks(
    seq_lens_cpu: torch.Tensor | IntArray | Sequence[int], workspace_size: int, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Consecutive requests packed greedily, so that each chunk's lengths fit a workspace together.

    Args:
        seq_lens_cpu: sequence lengths `[R]` on the host.
        workspace_size: how many tokens the workspace holds.
        request_offset: added to every bound.

    Returns:
        (first request, one past the last) of each chunk.

    Raises:
        BatchError: a negative length, or one that the workspace does not hold.
    """
    if isinstance(seq_lens_cpu, torch.Tensor):
        seq_lens_cpu = host_view("seq_lens_cpu", seq_lens_cpu)
    if not isinstance(seq_lens_cpu, np.ndarray):
        seq_lens_cpu = np.array(
            [_in_64_bits(each) for each in integers("seq_lens_cpu", seq_lens_cpu)], dtype=np.int64
        )
    lengths = seq_lens_cpu
    if lengths.dtype.kind not in "iu":
        raise BatchError("seq_lens_cpu", str(lengths.dtype), "must be of an integer type")
    lengths = exact_integers("seq_lens_cpu", lengths)
    check_count("workspace_size", workspace_size, 0)
    check_count("request_offset", request_offset, 0)
    if lengths.ndim != 1:
        raise BatchError("seq_lens_cpu", lengths.shape, "must have one dimension")
    if not lengths.size:
        return []
    for row in (int(lengths.argmin()), int(lengths.argmax())):
        if not 0 <= lengths[row] <= workspace_size:
            limit = f"of request {row + request_offset} must be in 0 .. workspace_size={workspace_size}"
            raise BatchError("seq_lens_cpu", int(lengths[row]), limit)
    ends = lengths.cumsum(dtype=np.int64)
    following = ends.searchsorted(ends - lengths + workspace_size, side="right").tolist()
    chunks, start = [], 0
    while start < len(following):
        end = following[start]
        chunks.append((start + request_offset, end + request_offset))
        start = end
    return chunks


def _in_64_bits(length: int) -> int:
    check_count("seq_lens_cpu", length, 0)
    return length


def _check_padded(query_len: int, num_reqs: int, num_tokens: int) -> None:
    if query_len * num_reqs != num_tokens:
        limit = f"must be {query_len * num_reqs}: {num_reqs} padded requests of {query_len} tokens"
        raise BatchError("num_actual_tokens", num_tokens, limit)


def _check_order(lengths: IntArray, context: IntArray, first_extend: int, first_prefill: int) -> None:
    # A single token with context is a decode by any threshold, and no request with context comes after a prefill.
    late = (context > 0) & (lengths > 0)
    late[:first_prefill] &= lengths[:first_prefill] == 1
    late[:first_extend] = False
    if late.any():
        row = int(late.argmax())
        kind = "a decode" if lengths[row] == 1 else "an extend"
        found = f"request {row}, {kind} of {int(lengths[row])} tokens with {int(context[row])} computed"
        after = "a prefill" if row >= first_prefill else "an extend"
        remedy = "reorder the batch: decodes, extends, prefills"
        raise BatchError("common_attn_metadata", found, f"must not be after {after}", remedy)


_ROWS = Shape("*")


def reshape_query_for_spec_decode(query: torch.Tensor, batch_size: int) -> torch.Tensor:
    """`query [T, H, D]` as `[batch_size, T / batch_size, H, D]`, a view.

    Raises:
        BatchError: another number of dimensions, or tokens that do not divide among the requests.
    """
    _ROWS.check("query", query, {})
    if query.ndim != 3:
        raise BatchError("query", tuple(query.shape), "must be [tokens, heads, head_size]")
    check_count("batch_size", batch_size, 1)
    num_tokens, num_heads, head_size = query.shape
    if num_tokens % batch_size:
        raise BatchError(
            "batch_size", batch_size, f"must divide the {num_tokens} tokens: as many per request"
        )
    # No -1: its size cannot be told where there are no elements.
    return query.view(batch_size, num_tokens // batch_size, num_heads, head_size)


def reshape_attn_output_for_spec_decode(attn_output: torch.Tensor) -> torch.Tensor:
    """`[B, n, H, D]` as `[B * n, H, D]`; three dimensions pass through.

    Raises:
        BatchError: another number of dimensions.
    """
    _ROWS.check("attn_output", attn_output, {})
    if attn_output.ndim == 3:
        return attn_output
    if attn_output.ndim != 4:
        limit = "must be [requests, tokens, heads, head_size] or [tokens, heads, head_size]"
        raise BatchError("attn_output", tuple(attn_output.shape), limit)
    return attn_output.flatten(0, 1)
