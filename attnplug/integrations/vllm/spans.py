"""vLLM's ranges of multimodal tokens as attnplug's spans: one for each token of a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""By request, the first and the last position of each range."""


def spans_of(
    ranges: Ranges | None,
    starts: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32] | None,
    tokens: int,
) -> torch.Tensor | None:
    """int32 `[T, 2]` on the host, as `CommonAttentionMetadata.mm_prefix_spans_cpu`; None where no token is in a range.

    Args:
        ranges: vLLM's, None for a step of text. A range of one token is none: it is causal.
        starts: where requests start in the step, int32 `[R + 1]`.
        lengths: of the requests, int32 `[R]`; exact for prompts.
        tokens: of the step, T, with padding.

    Raises:
        BatchError: the host does not know lengths, or ranges of a request share tokens.
    """
    found: npt.NDArray[np.int32] | None = None
    for request, own in (ranges or {}).items():
        spans = sorted((first, last) for first, last in own if first < last)
        if not spans:
            continue
        if lengths is None:
            raise BatchError("mm_req_doc_ranges", "a value", "needs lengths on the host to find its tokens")
        if any(later[0] <= earlier[1] for earlier, later in itertools.pairwise(spans)):
            limit = f"must have no token twice in request {request}"
            raise BatchError("mm_req_doc_ranges", spans, limit)
        begin, end = int(starts[request]), int(starts[request + 1])
        position = int(lengths[request]) - (end - begin)
        for first, last in spans:
            rows = begin + max(first - position, 0), min(begin + last + 1 - position, end)
            if rows[0] < rows[1]:
                found = np.zeros((tokens, 2), dtype=np.int32) if found is None else found
                found[slice(*rows)] = first, last + 1
    return None if found is None else torch.from_numpy(found)
