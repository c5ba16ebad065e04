"""Partial results of ranks that share the keys of each request, as one result: in one process, and over a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import at_least, checked, flag, rank_group, sequence_of, torch_device
from attnplug.core.context_parallel import MOST_SENT_BYTES
from attnplug.core.errors import BatchError
from attnplug.ops.checks import check_apart, check_merge, check_written, is_same
from attnplug.ops.merging import merge_into

Exchange: TypeAlias = Literal["ag_rs", "a2a"]
"""The exchange of partial results: ranks sum weighted outputs, or send the outputs themselves."""
_EXCHANGES = ("ag_rs", "a2a")

# torch 2.13 gave these a new name, and warns about the old one.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# Kernels load and store vectors of 16 bytes, so each output and LSE begins at a multiple.
_ALIGN = 16


def _exchange(field: str, value: object) -> object:
    if not isinstance(value, str) or value not in _EXCHANGES:
        raise BatchError(field, value, f"must be one of {', '.join(_EXCHANGES)}, or None")
    return value


class ExchangeBuffers(NotCopied):
    """The memory of `combine_partials` on one rank: it grows until `freeze`, and never afterwards.

    CUDA graphs keep addresses, so a buffer that grows after a capture would leave graphs with freed memory.

    Args:
        device: of the partial results.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch_device("device", device)
        self._memory: dict[str, torch.Tensor] = {}
        self._is_frozen = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.numel() for buffer in self._memory.values())

    def freeze(self) -> None:
        """Refuse to grow from now on."""
        self._is_frozen = True

    @checked(name=str, shape=sequence_of(at_least(0), "sizes"), dtype=torch.dtype)
    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the buffer `name`: the same memory in each call.

        Raises:
            BatchError: more bytes than the frozen buffer has.
        """
        needed = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.numel() < needed:
            if self._is_frozen:
                found = 0 if memory is None else memory.numel()
                limit = f"is above the {found} bytes of buffer {name!r}, which is frozen"
                raise BatchError("nbytes", needed, limit, "reserve for the largest step before freeze()")
            memory = self._memory[name] = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return memory[:needed].view(dtype).view(tuple(shape))

    @checked(
        tokens=at_least(0), heads=at_least(1), head_size=at_least(1), dtype=torch.dtype, group=rank_group
    )
    def partial(
        self, tokens: int, heads: int, head_size: int, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An output `[T, H, D]` and LSE `[T, H]` to write, in the memory that a2a without scattered heads sends."""
        block = self._block(tokens, heads, head_size, dtype, group.size())[group.rank()]
        return _views(block, tokens, heads, head_size, dtype)

    @checked(like="T H D: floats", group=rank_group)
    def partial_or_new(
        self, like: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An output shaped as `like [T, H, D]` and its LSE to write before `combine_partials` of all heads.

        They are in the memory that is sent if partial results of this size are sent, else new.
        """
        tokens, heads, head_size = like.shape
        if tokens and group.size() > 1 and _chosen(tokens, heads, head_size, like.dtype) == "a2a":
            return self.partial(tokens, heads, head_size, like.dtype, group)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=like.device)
        return torch.empty(like.shape, dtype=like.dtype, device=like.device), lse

    @checked(
        tokens=at_least(0),
        heads=at_least(1),
        head_size=at_least(1),
        dtype=torch.dtype,
        group=rank_group,
        scatter_heads=flag,
        backend=_exchange,
    )
    def reserve(
        self,
        tokens: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        *,
        scatter_heads: bool = False,
        backend: Exchange | None = None,
    ) -> None:
        """Allocate for steps of up to `tokens` rows, with the backend that `combine_partials` then uses."""
        size = group.size()
        # Small steps send outputs, large ones sum them, and either may need the most memory.
        for rows in {tokens, min(tokens, _most_sent_rows(heads, head_size, dtype))}:
            if (backend or _chosen(rows, heads, head_size, dtype)) == "a2a":
                self._block(rows, heads, head_size, dtype, size)
                if scatter_heads:
                    self._block(rows, heads, head_size, dtype, size, "sent")
            else:
                self.take("lses", (size, rows, heads), torch.float32)
                self.take("weighted", (rows, heads, head_size), dtype)

    def _block(
        self, tokens: int, heads: int, head_size: int, dtype: torch.dtype, size: int, name: str = "partials"
    ) -> torch.Tensor:
        """Bytes `[size, block]` of the outputs and LSEs of all ranks."""
        out = -(-tokens * heads * head_size * dtype.itemsize // _ALIGN) * _ALIGN
        lse = -(-tokens * heads * 4 // _ALIGN) * _ALIGN
        return self.take(name, (size, out + lse), torch.uint8)


def combine(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial results of N ranks as one, in one process: the reference of `combine_partials`.

    A rank without keys has LSE -inf, and any output: NaN and infinity there have no effect. An LSE of NaN or +inf,
    as some kernels write for rows without keys, counts as -inf. A row without keys on every rank has output 0.

    Args:
        outs: `[N, T, H, D]`, or N of `[T, H, D]`.
        lses: `[N, T, H]`, natural log.

    Returns:
        The output in the dtype of `outs`, and the LSE, computed in float32, or float64 where given.

    Raises:
        BatchError: no partial, or shapes that do not fit each other.
    """
    check_merge(outs, lses, name="outs")
    stacked, logs = torch.stack(tuple(outs)), torch.stack(tuple(lses))
    precise = torch.float64 if torch.float64 in (stacked.dtype, logs.dtype) else torch.float32
    weights, total = _weights(logs.to(precise))
    parts = stacked.to(precise) * weights[..., None]
    # A weight of 0 does not remove NaN, because 0 * NaN is NaN.
    out = torch.where(weights[..., None] > 0, parts, 0.0).sum(0)
    return out.to(stacked.dtype), total


@checked(
    out="T H D: floats",
    lse="T H: float32",
    group=rank_group,
    scatter_heads=flag,
    backend=_exchange,
    buffers=ExchangeBuffers,
    output="T _ D: floats",
    output_lse="T _: float32",
)
def combine_partials(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    scatter_heads: bool = False,
    backend: Exchange | None = None,
    buffers: ExchangeBuffers | None = None,
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the partial results of all ranks of a group; each rank calls it with its own, of equal shapes.

    The host never waits for the device, and no size depends on values, so a CUDA graph can capture it. Sums are in the order
    of the ranks, and equal inputs give equal results. See `combine` for ranks without keys.

    Args:
        out: `[T, H, D]` of this rank.
        lse: float32 `[T, H]`, natural log; NaN and +inf count as -inf.
        group: the ranks that share the keys.
        scatter_heads: give each rank its own H / N heads, as with tensor parallelism after it; else all heads.
        backend: "ag_rs" gathers the LSEs, weights the own output and sums the outputs (reduce-scatter, or all-reduce
            for all heads), in the dtype of `out`. "a2a" sends output and LSE in one collective (all-to-all, or
            all-gather for all heads), and each rank merges in float32. None chooses by size.
        buffers: the memory of the exchange; None allocates.
        output: `[T, H, D]`, or `[T, H / N, D]` with scattered heads, written where given.
        output_lse: float32, its LSE, written where given.

    Returns:
        The merged output and its LSE.

    Raises:
        BatchError: shapes that do not fit each other; heads that the ranks cannot split; an unknown backend.
    """
    tokens, heads, head_size = out.shape
    if scatter_heads and heads % group.size():
        limit = f"must be a multiple of {group.size()}, the ranks that split them"
        raise BatchError("out.shape[1]", heads, limit)
    own = heads // group.size() if scatter_heads else heads
    for name, written in (("output", output), ("output_lse", output_lse)):
        if written is not None:
            if written.shape[1] != own:
                expected = (tokens, own, head_size)[: written.ndim]
                raise BatchError(name, tuple(written.shape), f"must have the shape {expected}")
            others = {"out": out, "lse": lse, "output_lse": output_lse}
            own_places = {
                n: t
                for n, t in others.items()
                if t is not None and t is not written and not is_same(t, written)
            }
            check_written(name, written)
            check_apart(name, written, **own_places)
    if output is None:
        output = out.new_empty(tokens, own, head_size)
    if output_lse is None:
        output_lse = lse.new_empty(tokens, own)
    # Shapes are equal on all ranks, so all of them leave here and none waits in a collective.
    if not out.numel():
        return output, output_lse
    if group.size() == 1:
        # As in a group, rows without keys are 0, also if a kernel left NaN there.
        return merge_into([out], [without_nan(lse)], output, output_lse)
    memory = buffers or ExchangeBuffers(out.device)
    if (backend or _chosen(tokens, heads, head_size, out.dtype)) == "a2a":
        _send_partials(out, lse, group, scatter_heads, memory, output, output_lse)
    else:
        _sum_weighted(out, lse, group, scatter_heads, memory, output, output_lse)
    return output, output_lse


def _send_partials(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: dist.ProcessGroup,
    scatter_heads: bool,
    memory: ExchangeBuffers,
    output: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    """One collective of outputs and LSEs together, then one merge."""
    size, (tokens, heads, head_size), dtype = group.size(), out.shape, out.dtype
    own = heads // size if scatter_heads else heads
    blocks = memory._block(tokens, own, head_size, dtype, size)
    if scatter_heads:
        sent = memory._block(tokens, own, head_size, dtype, size, "sent")
        for rank in range(size):
            part, part_lse = _views(sent[rank], tokens, own, head_size, dtype)
            part.copy_(out[:, rank * own : (rank + 1) * own])
            without_nan(lse[:, rank * own : (rank + 1) * own], part_lse)
        dist.all_to_all_single(blocks.view(-1), sent.view(-1), group=group)
    else:
        mine = blocks[group.rank()]
        part, part_lse = _views(mine, tokens, own, head_size, dtype)
        # A kernel that wrote to `ExchangeBuffers.partial` has written what is sent.
        if part.data_ptr() != out.data_ptr():
            part.copy_(out)
        without_nan(lse, part_lse)
        all_gather(blocks.view(-1), mine, group=group)
    parts = [_views(block, tokens, own, head_size, dtype) for block in blocks]
    merge_into([part for part, _ in parts], [each for _, each in parts], output, output_lse)


def _sum_weighted(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: dist.ProcessGroup,
    scatter_heads: bool,
    memory: ExchangeBuffers,
    output: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    """Gather the LSEs, then sum the weighted outputs."""
    size, rank, (tokens, heads, head_size) = group.size(), group.rank(), out.shape
    lses = memory.take("lses", (size, tokens, heads), torch.float32)
    # gloo gathers into flat tensors only.
    all_gather(lses.view(-1), lse.contiguous().view(-1), group=group)
    weights, total = _weights(lses)
    weight = weights[rank][..., None]
    # NaN of a rank without keys must not reach the sum.
    weighted = torch.where(weight > 0, out.float() * weight, 0.0)
    if scatter_heads:
        own = heads // size
        by_rank = memory.take("weighted", (size, tokens, own, head_size), out.dtype)
        by_rank.copy_(weighted.view(tokens, size, own, head_size).transpose(0, 1))
        # Collectives write contiguous tensors only.
        result = (
            output
            if output.is_contiguous()
            else torch.empty_like(output, memory_format=torch.contiguous_format)
        )
        _reduce_scatter(result.view(-1), by_rank.view(-1), group=group)
        if result is not output:
            output.copy_(result)
        output_lse.copy_(total[:, rank * own : (rank + 1) * own])
        return
    summed = memory.take("weighted", (tokens, heads, head_size), out.dtype).copy_(weighted)
    dist.all_reduce(summed, group=group)
    output.copy_(summed)
    output_lse.copy_(total)


def _weights(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of each partial `[N, T, H]`, 0 for those without keys, and the LSE of all together `[T, H]`."""
    lses = without_nan(lses)
    top = lses.amax(0)
    # In rows without any key a finite pivot keeps -inf - pivot from becoming NaN.
    pivot = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(lses - pivot)
    total = weights.sum(0)
    return weights / torch.where(total == 0, 1.0, total), pivot + total.log()


def gather_rows(
    own: torch.Tensor, most: int, group: dist.ProcessGroup, buffers: ExchangeBuffers, name: str
) -> torch.Tensor:
    """The rows `own [t, ...]` of each rank, `most` of them for each, in the order of ranks: `[N * most, ...]`.

    Rows past those that a rank gave are unspecified. The result is in the buffer `name`, `[N, most, ...]`; `own` may
    already be in this rank's part of it.
    """
    blocks = buffers.take(name, (group.size(), most, *own.shape[1:]), own.dtype)
    mine = blocks[group.rank()]
    if own.data_ptr() != mine.data_ptr():
        mine[: own.shape[0]].copy_(own)
    # gloo gathers into flat tensors only.
    all_gather(blocks.view(-1), mine.view(-1), group=group)
    return blocks.view(-1, *own.shape[1:])


def without_nan(lse: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """The LSE with -inf for NaN and +inf, in `into` if given."""
    return torch.nan_to_num(lse, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf, out=into)


def _views(
    block: torch.Tensor, tokens: int, heads: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[T, H, D]` and LSE `[T, H]` in a rank's bytes: first the output, and the LSE from an aligned byte."""
    lse = -(-tokens * heads * 4 // _ALIGN) * _ALIGN
    end = block.numel() - lse
    used = tokens * heads * head_size * dtype.itemsize
    out = block[:used].view(dtype).view(tokens, heads, head_size)
    return out, block[end : end + tokens * heads * 4].view(torch.float32).view(tokens, heads)


def _chosen(tokens: int, heads: int, head_size: int, dtype: torch.dtype) -> Exchange:
    return "a2a" if tokens <= _most_sent_rows(heads, head_size, dtype) else "ag_rs"


def _most_sent_rows(heads: int, head_size: int, dtype: torch.dtype) -> int:
    return max(MOST_SENT_BYTES // (heads * head_size * dtype.itemsize), 1)
