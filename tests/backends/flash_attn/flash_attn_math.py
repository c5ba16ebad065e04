"""What FlashAttention's kernels compute, in float64 on the CPU, from the arguments that they take.

Written from the libraries' documentation and sources, not from attnplug: their conventions are kept, also
those that attnplug has to convert.
"""

from __future__ import annotations

import dataclasses

import torch

INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Asked:
    """Arguments that all generations share; windows are -1 where there is none."""

    scale: float
    causal: bool
    left: int
    right: int
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    empty_lse: float = INF
    shifted_alibi: bool = False
    """Whether a causal bias is slope * key position, as of FlashAttention 2."""


def check_rows(*tensors: torch.Tensor) -> None:
    """Each is of a type that the kernels read, and the elements of a row lie together."""
    for each in tensors:
        assert each.stride(-1) == 1
        assert each.dtype in (torch.float16, torch.bfloat16)


def keys_of(
    k: torch.Tensor,
    request: int,
    table: torch.Tensor | None,
    starts: torch.Tensor | None,
    used: torch.Tensor | None,
    whole_pages: bool = False,
) -> torch.Tensor:
    """The keys of one request, `[n, Hkv, D]`; with `whole_pages` also what follows them in the last page."""
    if table is None:
        assert starts is not None
        return k[int(starts[request]) : int(starts[request + 1])]
    assert used is not None
    size, length = k.shape[1], int(used[request])
    pages = table[request, : -(-length // size)].long()
    rows = k[pages].reshape(-1, *k.shape[2:])
    return rows if whole_pages else rows[:length]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: output `[q, H, Dv]` and LSE `[H, q]` in float64; `v` may have rows past the keys."""
    queries, keys = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    spread = [x.double().repeat_interleave(group, 1) for x in (k, v)]
    logits = torch.einsum("qhd,khd->hqk", q.double(), spread[0]) * asked.scale
    if asked.softcap:
        logits = asked.softcap * torch.tanh(logits / asked.softcap)
    rows = torch.arange(queries)[:, None] + keys - queries
    columns = torch.arange(keys)[None, :]
    left, right = asked.left, 0 if asked.causal else asked.right
    if asked.slopes is not None:
        plain_causal = asked.shifted_alibi and left < 0 and right == 0
        bias = columns.double() if plain_causal else -(rows - columns).abs().double()
        logits = logits + asked.slopes.double()[:, None, None] * bias
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= columns >= rows - left
    if right >= 0:
        seen &= columns <= rows + right
    logits = logits.masked_fill(~seen, -INF)
    if asked.sinks is not None:
        sink = asked.sinks.double()[:, None, None].expand(-1, queries, 1)
        lse = torch.logsumexp(torch.cat([logits, sink], 2), 2)
    else:
        lse = torch.logsumexp(logits, 2)
    weights = torch.exp(logits - lse.masked_fill(lse == -INF, 0.0)[..., None])
    values = spread[1]
    if values.shape[0] > keys:
        # Whole tiles are multiplied: a weight of 0 does not undo NaN.
        weights = torch.nn.functional.pad(weights, (0, values.shape[0] - keys))
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out, lse.masked_fill(lse == -INF, asked.empty_lse)
