"""vLLM's CommonAttentionMetadata as attnplug's: the same tensors under the same names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec

_OF_A_GROUP = frozenset(("block_table_tensor", "slot_mapping"))
_UNSERVED = {
    "mm_req_doc_ranges": "spans of multimodal tokens are not served in vLLM",
    "rswa_prefix_lens": "windows with a visible prefix are not served",
    "dcp_local_seq_lens": "decode context parallelism is not served in vLLM",
}


def translate(step: Any, *, exact: bool) -> CommonAttentionMetadata:
    """A step of paged layers. `exact` says that the host's lengths are no upper bounds.

    BatchError: the step asks for something that attnplug's backends would not see.
    """
    for field, why in _UNSERVED.items():
        if getattr(step, field, None) is not None:
            raise BatchError(field, "a value", why)
    if not isinstance(step.causal, bool):
        raise BatchError(
            "causal", type(step.causal).__name__, "must be a bool: requests that differ are not served"
        )
    starts, lengths = _host(step)
    return CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=starts,
        seq_lens=step.seq_lens,
        num_reqs=step.num_reqs,
        num_actual_tokens=step.num_actual_tokens,
        max_query_len=int(step.max_query_len),
        max_seq_len=int(step.max_seq_len),
        block_table_tensor=step.block_table_tensor,
        slot_mapping=step.slot_mapping,
        logits_indices_padded=step.logits_indices_padded,
        num_logits_indices=step.num_logits_indices,
        encoder_seq_lens=step.encoder_seq_lens,
        encoder_seq_lens_cpu=step.encoder_seq_lens_cpu,
        seq_lens_host=lengths,
        seq_lens_host_exact=exact,
    )


def is_same_batch(one: Any, other: Any) -> bool:
    """Whether two of vLLM's steps have the very same tensors and numbers, but for the table and slots of a KV group."""
    ours, theirs = vars(one), vars(other)
    if ours.keys() != theirs.keys():
        return False
    return _OF_A_GROUP.issuperset([name for name, value in ours.items() if value is not theirs[name]])


def _host(step: Any) -> tuple[torch.Tensor, npt.NDArray[np.int32] | None]:
    """Start locations and lengths on the host, with the padding of a graph as attnplug's builders know it.

    A graph has a fixed number of requests. vLLM fills it up with requests of no query, but counts their tokens. For
    attnplug padding requests have the queries of a decode and one key, so that a padded step has the plan of the graph.
    """
    reqs, tokens, given = step.num_reqs, step.num_actual_tokens, step.query_start_loc_cpu
    # Where vLLM cuts requests at the borders of chunks, only this field has the lengths of the parts.
    host = getattr(step, "_seq_lens_cpu", None)
    if host is None:
        host = step.seq_lens_cpu_upper_bound
    lengths = None if host is None or host.shape[0] < reqs else host.numpy()
    starts = given.numpy()
    last = int(starts[reqs])
    if last == tokens:
        return given, lengths
    used = int(np.searchsorted(starts[: reqs + 1], last))
    each, rest = divmod(tokens - last, max(1, reqs - used))
    if used == reqs or rest or each != int(step.max_query_len):
        return given, lengths
    filled = starts[: reqs + 1].copy()
    filled[used:] += np.arange(reqs + 1 - used, dtype=filled.dtype) * each
    if lengths is not None:
        lengths = lengths[:reqs].copy()
        lengths[used:] = 1
    return torch.from_numpy(filled), lengths


def for_layer(common: CommonAttentionMetadata, spec: LayerSpec) -> CommonAttentionMetadata:
    """The step as the builder of such layers needs it: encoders have their keys in the call, cross layers in pages."""
    if spec.direct_kv:
        reqs = common.num_reqs
        lens = np.diff(common.query_start_loc_cpu[: reqs + 1].numpy()).astype(np.int32)
        return dataclasses.replace(
            common,
            causal=False,
            seq_lens=common.query_start_loc[: reqs + 1].diff(),
            max_seq_len=common.max_query_len,
            block_table_tensor=common.block_table_tensor[:, :0],
            slot_mapping=torch.full_like(common.slot_mapping, -1),
            key_start_loc=common.query_start_loc,
            key_start_loc_cpu=common.query_start_loc_cpu,
            seq_lens_host=lens,
            seq_lens_host_exact=True,
        )
    if spec.attn_type is AttentionType.ENCODER_DECODER and common.encoder_seq_lens is None:
        # vLLM's builder of cross attention has put the encoder's lengths in place of the sequences'.
        host = common.seq_lens_host
        return dataclasses.replace(common, encoder_seq_lens=common.seq_lens, encoder_seq_lens_cpu=host)
    return common
