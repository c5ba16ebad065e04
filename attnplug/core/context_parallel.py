"""The place of a process among ranks that share the tokens of each request."""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self

from attnplug.core.checks import check_size
from attnplug.core.errors import SpecError


class RankGroup(Protocol):
    """A group of processes, such as `torch.distributed.ProcessGroup`."""

    def size(self) -> int:
        """Number of processes."""
        ...

    def rank(self) -> int:
        """The number of this process in the group."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ContextParallel:
    """The size of a context-parallel group and the rank of this process in it.

    It is always given by the caller. The default process group says nothing about context: under tensor
    parallelism its ranks share heads, not tokens.

    Args:
        size: ranks that share each request's tokens; 1 without context parallelism.
        rank: of this process, from 0 to `size` - 1.

    Raises:
        SpecError: a size below 1, or a rank outside the group.
    """

    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size))
        object.__setattr__(self, "rank", check_size("rank", self.rank, 0))
        if self.rank >= self.size:
            raise SpecError("rank", self.rank, f"must be below {self.size}, the size of the group")

    @classmethod
    def of(cls, group: RankGroup) -> Self:
        """Size and rank of a process group, such as `mesh["dcp"].get_group()` of torch."""
        return cls(group.size(), group.rank())
