"""Cuts a step between two requests: the decodes in front, and the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.core.metadata import LENGTHS_ON_HOST, OPTIONAL_ROWS, CommonAttentionMetadata
from attnplug.core.spec import Phase


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepSplit:
    """The number of decodes and their tokens, and the step of each part; None for an empty part.

    A place names the member of a composite that serves the part.
    """

    num_reqs: int
    num_tokens: int
    decode: CommonAttentionMetadata | None
    prefill: CommonAttentionMetadata | None
    decode_place: str = Phase.DECODE
    prefill_place: str = Phase.PREFILL


def split_at(
    common: CommonAttentionMetadata,
    reqs: int,
    tokens: int,
    is_cross: bool = False,
    longest: int | None = None,
) -> StepSplit:
    """Cut the step after `reqs` requests, which have `tokens` queries; both parts have requests. Nothing is read back.

    The parts are views of the step's tensors. Only the start locations of the rest are new, because they begin at 0:
    one subtraction on the device. The parts do not have the indices of wanted logits.

    Args:
        common: the step, decodes first, without direct K and V.
        reqs: requests of the first part.
        tokens: their queries.
        is_cross: whether slots are of encoder tokens, which no query owns; then each part has them all.
        longest: the longest query of the first part; None if it must be computed.
    """
    end, starts, starts_cpu = common.num_reqs, common.query_start_loc, common.query_start_loc_cpu
    own = starts[reqs : end + 1] - tokens, torch.from_numpy(starts_cpu.numpy()[reqs:] - tokens)
    rest = slice(reqs, end), slice(tokens, common.num_actual_tokens)
    prefill = _part(common, *rest, own, common.max_query_len, is_cross)
    if not tokens:  # no request of the first part has new tokens
        return StepSplit(reqs, 0, None, prefill)
    own = starts[: reqs + 1], starts_cpu[: reqs + 1]
    longest = int(own[1].diff().max()) if longest is None else longest
    decode = _part(common, slice(0, reqs), slice(0, tokens), own, longest, is_cross)
    return StepSplit(reqs, tokens, decode, prefill)


def _part(
    common: CommonAttentionMetadata,
    reqs: slice,
    tokens: slice,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: int,
    is_cross: bool,
) -> CommonAttentionMetadata:
    rows = {"request": reqs, "token": tokens}
    optional: dict[str, Any] = {
        name: value[rows[per]]
        for name, per in (LENGTHS_ON_HOST | OPTIONAL_ROWS).items()
        if (value := getattr(common, name)) is not None
    }
    # Without lengths on the host, the step's bound is the part's.
    lengths, most = optional.get("seq_lens_host"), common.max_seq_len
    return CommonAttentionMetadata(
        *starts,
        common.seq_lens[reqs],
        reqs.stop - reqs.start,
        tokens.stop - tokens.start,
        longest,
        most if lengths is None else min(int(lengths.max()), most),
        common.block_table_tensor[reqs],
        common.slot_mapping if is_cross else common.slot_mapping[tokens],
        common.causal,
        common.is_cut,
        seq_lens_host_exact=common.seq_lens_host_exact,
        **optional,
    )
