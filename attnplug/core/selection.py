"""The keys of a step that an indexer picked, in buffers that the model's indexer fills before a layer runs."""

from __future__ import annotations

import dataclasses
from typing import Final, Self

import torch

from attnplug.core.arguments import Shape, at_least, instance, integer, torch_device
from attnplug.core.errors import BatchError
from attnplug.core.sparse import SparseSpec

_ENDS = Shape("T: host int64")
NOT_GIVEN: Final = -1
"""The count of a query whose keys nobody picked yet."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The keys that each query of a step may attend, for layers with a SparseSpec.

    A layer reads the values when it runs, so an indexer may write them after the step was built. All layers can
    share one selection: an indexer writes it, and the layers after it read it until the next indexer writes.
    Causality, windows and chunks still hide keys. The order of the positions has no meaning.

    Args:
        positions: int32 `[at least T, K]` on the device of the step: positions within the request, or numbers of
            blocks for kind "block". A row has each position once, none past its query's own, then -1.
        counts: int32 `[at least T]`: the number of positions of each query, at most K and the layer's topk. A
            query with 0 sees no key. NOT_GIVEN (-1): nobody picked keys yet, which a layer refuses.

    Raises:
        BatchError: tensors of another shape or dtype.
    """

    positions: torch.Tensor
    counts: torch.Tensor

    def __post_init__(self) -> None:
        for name, tensor, dims in (("positions", self.positions, 2), ("counts", self.counts, 1)):
            found = (tensor.dtype, tensor.ndim) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            if found != (torch.int32, dims):
                shape = "[T, K]" if dims == 2 else "[T]"
                raise BatchError(f"selection.{name}", found, f"must be an int32 tensor {shape}")
        rows, counts = self.positions.shape[0], self.counts.shape[0]
        if rows != counts or self.positions.device != self.counts.device:
            sizes = (rows, str(self.positions.device)), (counts, str(self.counts.device))
            raise BatchError("selection", sizes, "must have as many counts as rows, on one device")

    @classmethod
    def allocate(cls, tokens: int, topk: int, device: torch.device | str) -> Self:
        """Buffers for steps of up to `tokens` queries with up to `topk` positions each, not given yet."""
        tokens, topk = at_least(0)("tokens", tokens), at_least(0)("topk", topk)
        device = torch_device("device", device)
        positions = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
        return cls(positions, torch.full((tokens,), NOT_GIVEN, dtype=torch.int32, device=device))

    def __getitem__(self, rows: slice | torch.Tensor) -> Self:
        """The selection of some tokens; of a slice views, so later writes are seen."""
        return type(self)(self.positions[rows], self.counts[rows])

    def clear(self, count: int = NOT_GIVEN) -> None:
        """Forget the positions of all rows, and set their counts; `count` 0 means that they pick no key."""
        most = self.positions.shape[1]
        if not NOT_GIVEN <= integer("count", count) <= most:
            limit = f"must be NOT_GIVEN (-1), or in 0 .. {most}, the positions of a row"
            raise BatchError("count", count, limit)
        self.positions.fill_(-1)
        self.counts.fill_(count)

    def copy_from(self, other: Selection) -> None:
        """Copy the rows of `other` to the first rows, without waiting for the device; of its columns those that fit."""
        instance("other", other, Selection)
        if other.counts.shape[0] > self.counts.shape[0]:
            raise BatchError("other", other.counts.shape[0], f"must have at most {self.counts.shape[0]} rows")
        rows, width = other.counts.shape[0], min(other.positions.shape[1], self.positions.shape[1])
        # The rest of a row may have positions of an earlier, wider step.
        self.positions[:rows, width:].fill_(-1)
        self.positions[:rows, :width].copy_(other.positions[:, :width], non_blocking=True)
        self.counts[:rows].copy_(other.counts, non_blocking=True)

    def check_size(self, tokens: int) -> None:
        """BatchError if there are fewer rows than `tokens`."""
        rows = self.counts.shape[0]
        if integer("tokens", tokens) < 0:
            raise BatchError("tokens", tokens, "must be at least 0")
        if rows < tokens:
            raise BatchError("selection", rows, f"must have a row for each of the step's {tokens} tokens")

    def check_values(self, sparse: SparseSpec, ends: torch.Tensor) -> None:
        """Check the values of the first rows; on a device, the host waits for them.

        Args:
            sparse: of the layer that reads them.
            ends: int64 `[T]` on the host: the keys of each query are at positions below it.

        Raises:
            BatchError: a query without a selection; too many positions; a position twice, before 0, or past the keys of its
                query; a position after the counted ones. The error names the token.
        """
        instance("sparse", sparse, SparseSpec)
        _ENDS.check("ends", ends, {})
        tokens, most = ends.shape[0], min(self.positions.shape[1], sparse.topk)
        self.check_size(tokens)
        counts = self.counts[:tokens].to("cpu", torch.int64)
        what = "positions" if sparse.kind == "token_topk" else "blocks"
        _refuse(
            counts == NOT_GIVEN,
            counts,
            "counts",
            "is not given",
            "write the step's selection before the layer runs",
        )
        limit = f"must be in 0 .. {most}, the layer's topk and the width of the buffer"
        _refuse((counts < 0) | (counts > most), counts, "counts", limit)
        chosen = self.positions[:tokens].to("cpu", torch.int64)
        valid = torch.arange(chosen.shape[1], device=chosen.device) < counts[:, None]
        limit = f"must be at or after 0: the first counts[token] {what} are read"
        _refuse(valid & (chosen < 0), chosen, "positions", limit)
        _refuse(~valid & (chosen != -1), chosen, "positions", f"must be -1 after the {what} that counts says")
        ends = (ends.clamp(min=0) + sparse.block - 1) // sparse.block
        limit = f"is past the last of the {what} that the query can see"
        _refuse(valid & (chosen >= ends[:, None]), chosen, "positions", limit)
        ordered, order = chosen.sort(dim=1)
        again = torch.zeros_like(valid)
        again[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        twice = torch.zeros_like(valid).scatter_(1, order, again)
        _refuse(twice, chosen, "positions", f"comes twice: {what} of a query differ")


def _refuse(
    wrong: torch.Tensor, values: torch.Tensor, field: str, limit: str, remedy: str | None = None
) -> None:
    """BatchError about the first wrong value."""
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        index = ", ".join(map(str, at))
        raise BatchError(f"selection.{field}[{index}]", int(values[tuple(at)]), limit, remedy)
