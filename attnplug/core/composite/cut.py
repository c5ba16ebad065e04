"""Cuts a step between two requests: the decodes in front, and the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.core.batch.splitting import split_decodes_and_prefills
from attnplug.core.metadata import LENGTHS_ON_HOST, OPTIONAL_ROWS, CommonAttentionMetadata


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The number of decodes and their tokens, and the step of each part; None for an empty part."""

    num_reqs: int
    num_tokens: int
    decode: CommonAttentionMetadata | None
    prefill: CommonAttentionMetadata | None


def cut_step(common: CommonAttentionMetadata, threshold: int, is_cross: bool) -> Cut:
    """Cut the step before its first query longer than `threshold`; nothing is read back.

    The parts are views of the step's tensors. Only the start locations of the rest are new, because they begin at 0:
    one subtraction on the device. The parts do not have the indices of wanted logits. `split_attn_metadata` takes four
    times the host's time, because it also cuts inside requests.

    Args:
        common: the step, decodes first, without direct K and V.
        threshold: the longest query of a decode.
        is_cross: whether slots are of encoder tokens, which no query owns; then each part has them all.

    Raises:
        BatchError: start locations that decrease or pass `num_actual_tokens`.
    """
    reqs, rest, tokens, _ = split_decodes_and_prefills(common, threshold)
    if not rest:
        return Cut(reqs, tokens, common, None)
    if not reqs:
        return Cut(0, 0, None, common)
    return cut_at(common, reqs, tokens, is_cross, longest=1 if threshold == 1 else None)


def cut_at(
    common: CommonAttentionMetadata,
    reqs: int,
    tokens: int,
    is_cross: bool = False,
    longest: int | None = None,
) -> Cut:
    """Cut the step after `reqs` requests, which have `tokens` queries; both parts have requests. See `cut_step`.

    `longest` is the longest query of the first part; None if it must be computed.
    """
    end = common.num_reqs
    rest, rest_tokens = end - reqs, common.num_actual_tokens - tokens
    start_locs, start_locs_cpu = common.query_start_loc, common.query_start_loc_cpu
    slots = (common.slot_mapping, common.slot_mapping)
    if not is_cross:
        slots = slots[0][:tokens], slots[0][tokens : tokens + rest_tokens]
    first, second = _optional(common, reqs, tokens)
    prefill = CommonAttentionMetadata(
        start_locs[reqs : end + 1] - tokens,
        torch.from_numpy(start_locs_cpu.numpy()[reqs:] - tokens),
        common.seq_lens[reqs:end],
        rest,
        rest_tokens,
        common.max_query_len,
        _longest(second, common),
        common.block_table_tensor[reqs:end],
        slots[1],
        common.causal,
        common.is_cut,
        seq_lens_host_exact=common.seq_lens_host_exact,
        **second,
    )
    if not tokens:  # no request of the first part has new tokens
        return Cut(reqs, 0, None, prefill)
    decode = CommonAttentionMetadata(
        start_locs[: reqs + 1],
        start_locs_cpu[: reqs + 1],
        common.seq_lens[:reqs],
        reqs,
        tokens,
        int(start_locs_cpu[: reqs + 1].diff().max()) if longest is None else longest,
        _longest(first, common),
        common.block_table_tensor[:reqs],
        slots[0],
        common.causal,
        common.is_cut,
        seq_lens_host_exact=common.seq_lens_host_exact,
        **first,
    )
    return Cut(reqs, tokens, decode, prefill)


_CUT = LENGTHS_ON_HOST | OPTIONAL_ROWS


def _optional(
    common: CommonAttentionMetadata, reqs: int, tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optional fields of the requests and tokens of the step, for each part."""
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    ends = {"request": (reqs, common.num_reqs), "token": (tokens, common.num_actual_tokens)}
    for name, per in _CUT.items():
        value = getattr(common, name)
        if value is not None:
            cut, end = ends[per]
            first[name], second[name] = value[:cut], value[cut:end]
    return first, second


def _longest(part: dict[str, Any], common: CommonAttentionMetadata) -> int:
    """The longest sequence of a part, or the step's bound if the host does not know it."""
    lengths = part.get("seq_lens_host")
    return common.max_seq_len if lengths is None else min(int(lengths.max()), common.max_seq_len)
