"""The recurrence of all families of state layers: one token of many requests, or many tokens of one, in chunks.

Tensors have all heads as their first dimension after requests. A decay has one element per head, or K.
"""

from __future__ import annotations

import torch

# Pairs of tokens, of all heads and rows, whose decays a chunk holds at once: 64 MiB in float32.
_MOST_PAIRS = 1 << 24
_LONGEST, _SHORTEST = 64, 4


def one_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[R, H, V]` and the next states of one token of each of R requests.

    Args:
        q: `[R, H, K]`, scaled.
        k: `[R, H, K]`.
        v: `[R, H, V]`.
        g: `[R, H, 1]` or `[R, H, K]`, the logarithm of the decay.
        beta: `[R, H]` with the delta rule; None without.
        state: `[R, H, K, V]`.
    """
    state = state * g.exp()[..., None]
    u = v
    if beta is not None:
        u = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
    state = state + k[..., None] * u[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def many_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs `[T, H, V]` and the last state `[H, K, V]` of T tokens of one request.

    Args:
        q: `[T, H, K]`, scaled.
        k: `[T, H, K]`.
        v: `[T, H, V]`.
        g: `[T, H, 1]` or `[T, H, K]`.
        beta: `[T, H]`, or None.
        state: `[H, K, V]`.
        chunk: tokens that are computed at once; by default as many as memory allows, at most 64.
    """
    size = chunk or _chunk(k.shape[1], g.shape[2])
    outputs = []
    for begin in range(0, q.shape[0], size):
        query, key, value, gate = (each[begin : begin + size].transpose(0, 1) for each in (q, k, v, g))
        own = None if beta is None else beta[begin : begin + size].T
        output, state = _chunk_of_tokens(query, key, value, gate, own, state)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def _chunk(heads: int, rows: int) -> int:
    size = _LONGEST
    while size > _SHORTEST and size * size * heads * rows > _MOST_PAIRS:
        size //= 2
    return size


def _chunk_of_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk, with heads first: `[H, n, ...]`."""
    since, tokens = g.cumsum(1).exp(), q.shape[1]
    pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    # The decay between two tokens is a sum of its own. A quotient of exponentials overflows for strong decays, and a
    # difference of sums loses the weak decays after a strong one.
    between = g[:, :, None].masked_fill(pairs.triu()[..., None], 0.0).cumsum(1)
    between = between.masked_fill_(pairs.triu(1)[..., None], -torch.inf).exp_()
    u = v
    if beta is not None:
        system = (beta[..., None] * _products(k, k, between)).tril(-1)
        system.diagonal(dim1=1, dim2=2).fill_(1.0)
        known = beta[..., None] * (v - (k * since) @ state)
        u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    output = (q * since) @ state + _products(q, k, between) @ u
    return output, since[:, -1][..., None] * state + (k * between[:, -1]).mT @ u


def _products(rows: torch.Tensor, columns: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """The products of each two tokens with the decay between them, `[H, n, n]`."""
    if between.shape[-1] == 1:
        return (rows @ columns.mT) * between[..., 0]
    return (rows[:, :, None] * columns[:, None] * between).sum(3)
