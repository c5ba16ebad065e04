"""SGLang's ForwardBatch: the lengths of its requests, and a reason for each field that no backend would see."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.integrations.sglang.caches import OTHER
from attnplug.integrations.sglang.fields import HARMLESS, READ, REFUSED

_FREE = READ | HARMLESS
_CHAINS = ("EagleVerifyInput", "FrozenKVMTPVerifyInput", "DFlashVerifyInput")
"""The verifications whose drafts of one branch see each other causally."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a batch's requests.

    Args:
        queries: int32 `[R]` on the host.
        keys: int32 `[R]` on the device.
        keys_host: the same on the host, if SGLang gave it.
    """

    queries: npt.NDArray[np.int32]
    keys: torch.Tensor
    keys_host: npt.NDArray[np.int32] | None

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have as many queries."""
        return bool((self.queries == self.queries[:1]).all())


def check_fields(batch: Any, has_image_masks: bool) -> None:
    """BatchError for a field that no backend would see.

    Args:
        batch: a ForwardBatch, or a view with a part of its fields.
        has_image_masks: whether the model gives its images masks that SGLang passes to its TRITON backend alone.
    """
    for name in vars(batch).keys() - _FREE:
        value = getattr(batch, name)
        if value is not None and value is not False and not name.startswith("_"):
            why = REFUSED.get(name, "is a field that attnplug does not know, and may change the result")
            raise BatchError(name, type(value).__name__, why, OTHER)
    if has_image_masks and any(item is not None for item in getattr(batch, "mm_inputs", None) or ()):
        limit = "has images that see all of themselves, which is not served in SGLang"
        raise BatchError("mm_inputs", "images", limit, "send text, or choose --attention-backend triton")


def lengths_of(batch: Any) -> Lengths:
    """The lengths of a batch that has queries.

    BatchError: a mode that is not served, drafts in a tree, or a batch without lengths on the host.
    """
    mode, reqs = batch.forward_mode, batch.batch_size
    keys, given = batch.seq_lens[:reqs], getattr(batch, "seq_lens_cpu", None)
    host = None if given is None else given[:reqs].numpy().astype(np.int32)
    if mode.is_decode():
        if batch.spec_info is not None:
            limit = "is a draft that decodes, which needs SGLang's backend for drafts"
            raise BatchError("spec_info", type(batch.spec_info).__name__, limit)
        return Lengths(np.ones(reqs, dtype=np.int32), _int32(keys), host)
    if mode.is_target_verify():
        drafts = drafts_of(batch)
        queries = np.full(reqs, drafts, dtype=np.int32)
        return Lengths(queries, _int32(keys) + drafts, None if host is None else host + np.int32(drafts))
    if mode.is_draft_extend_v2():
        check_spec(batch.spec_info)
        return Lengths(_extended(batch, reqs), _int32(keys), host)
    if mode.name not in ("EXTEND", "MIXED", "SPLIT_PREFILL"):
        raise BatchError("forward_mode", mode.name, "is not served in SGLang", OTHER)
    check_spec(batch.spec_info)
    queries = _extended(batch, reqs)
    prefixes = getattr(batch, "extend_prefix_lens_cpu", None)
    if prefixes is not None:
        host = np.asarray(prefixes[:reqs], dtype=np.int32) + queries
    return Lengths(queries, _int32(keys), host)


def drafts_of(batch: Any) -> int:
    """The tokens that a verification has for each request.

    BatchError: drafts with branches, or of unlike numbers.
    """
    info = batch.spec_info
    check_spec(info)
    kind = type(info).__name__
    branches = getattr(info, "topk", None)
    if getattr(info, "custom_mask", None) is not None and (kind not in _CHAINS or branches != 1):
        limit = "has a mask of its own, because its drafts may have branches, which is not served"
        raise BatchError("spec_info", kind, limit, "pass --speculative-eagle-topk 1")
    return int(info.draft_token_num)


def check_spec(info: Any) -> None:
    """BatchError for drafts whose numbers differ between requests."""
    if info is not None and getattr(info, "ragged_verify_layout", None) is not None:
        raise BatchError("ragged_verify_layout", "a layout", "is not served: drafts of unlike numbers", OTHER)


def _extended(batch: Any, reqs: int) -> npt.NDArray[np.int32]:
    given = getattr(batch, "extend_seq_lens_cpu", None)
    if given is None:
        # Views for graphs have no lists: each request has as many tokens.
        each = getattr(batch.spec_info, "num_tokens_per_req", None)
        if each is None or each < 1:
            raise BatchError("extend_seq_lens_cpu", None, "is required: queries are counted on the host")
        return np.full(reqs, each, dtype=np.int32)
    return np.asarray(given[:reqs], dtype=np.int32)


def _int32(lengths: torch.Tensor) -> torch.Tensor:
    return lengths if lengths.dtype == torch.int32 else lengths.int()
