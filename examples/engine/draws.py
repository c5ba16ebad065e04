"""Draws the tokens of a step: all rows together, each by a random number of its own request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from request import Request

_MOST = {"cpu": 1 << 18, "gpu": 1 << 24}
"""Chances at once, in float64: 128 MiB on a GPU, and on a CPU those of its cache. Larger steps are drawn in several parts."""


def draw_tokens(requests: Sequence[Request], logits: torch.Tensor) -> list[int]:
    """The token of each row: the likeliest, or one drawn at the temperature of its request; -1 if logits are not finite.

    Args:
        requests: in order; each has a row for its last token, and one for each of its drafts.
        logits: `[rows, vocabulary]`.
    """
    tokens, row, warm = logits.argmax(-1), 0, list[tuple[float, float, float]]()
    for request in requests:
        if request.temperature > 0:
            depths = request.depths()
            numbers = request.numbers(max(depths) + 1)
            warm += [(row + node, request.temperature, numbers[depth]) for node, depth in enumerate(depths)]
        row += len(request.drafts) + 1
    if warm:
        # Pinned, so that the host sends it and the work on it while the model still runs.
        given = torch.tensor(warm, dtype=torch.float64, pin_memory=logits.is_cuda)
        given = given.to(logits.device, non_blocking=True)
        most = _MOST["cpu" if logits.device.type == "cpu" else "gpu"]
        for part in given.chunk(-(-len(warm) * logits.shape[1] // most)):
            rows = part[:, 0].long()
            tokens.index_copy_(0, rows, _drawn(logits[rows], *part[:, 1:, None].unbind(1)))
    # One copy to the host, which waits for the model.
    return torch.where(logits.amax(-1).isfinite(), tokens, -1).tolist()


def _drawn(logits: torch.Tensor, temperatures: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token of each row of `logits [n, vocabulary]` at which the sum of chances passes a number, `[n, 1]`."""
    ends = logits.double().div_(temperatures).softmax(-1).cumsum_(-1)
    return torch.searchsorted(ends, numbers * ends[:, -1:], right=True)[:, 0]
