"""The place of a process among ranks that share the tokens of each request, and the rule that gives tokens to ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self

from attnplug.core.checks import check_rank_group, check_size
from attnplug.core.errors import SpecError

MOST_SENT_BYTES = 4 << 20
"""Up to this many bytes on each rank one exchange of whole partial results is faster than two collectives.

On two H200 the all-gather of 64 x 32 x 128 outputs takes 13 us and the pair of LSE and sum 21; of 8 MB both take 56.
"""


class RankGroup(Protocol):
    """A group of processes, such as `torch.distributed.ProcessGroup`."""

    def size(self) -> int:
        """Number of processes."""
        ...

    def rank(self) -> int:
        """The number of this process in the group."""
        ...


def _positions(position: Any) -> Any:
    """`position`, an int or an array or tensor of integers; SpecError for anything else."""
    # The name of a dtype tells integers of numpy and of torch, which is not imported here.
    if type(position) is int:
        return check_size("position", position, 0)
    if "int" not in str(getattr(position, "dtype", "")):
        raise SpecError("position", position, "must be an integer, or an array or tensor of integers")
    return position


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ContextParallel:
    """The size of a context-parallel group, the rank of this process in it, and the rule of placement.

    Runs of `interleave` tokens go round the ranks: the token at position p is on rank `p // interleave % size`. A
    rank stores its tokens one after another, so a block of B slots on each rank covers `B * size` tokens.

    It is always given by the caller. The default process group says nothing about context: under tensor
    parallelism its ranks share heads, not tokens.

    Args:
        size: ranks that share each request's tokens; 1 without context parallelism.
        rank: of this process, from 0 to `size` - 1.
        interleave: tokens in a run; it must divide the block size of every sharded layer.

    Raises:
        SpecError: a size or an interleave below 1, or a rank outside the group.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size))
        object.__setattr__(self, "rank", check_size("rank", self.rank, 0))
        object.__setattr__(self, "interleave", check_size("interleave", self.interleave))
        if self.rank >= self.size:
            raise SpecError("rank", self.rank, f"must be below {self.size}, the size of the group")

    # Written here, so that a place that also has its process group equals the plain value.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContextParallel):
            return NotImplemented
        return (self.size, self.rank, self.interleave) == (other.size, other.rank, other.interleave)

    def __hash__(self) -> int:
        return hash((self.size, self.rank, self.interleave))

    @classmethod
    def of(cls, group: RankGroup, interleave: int = 1) -> Self:
        """Size and rank of a process group, such as `mesh["cp"].get_group()` of torch.

        Raises:
            SpecError: `group` has no `size()` and `rank()`, or they give no place in a group.
        """
        check_rank_group("group", group)
        try:
            size, rank = group.size(), group.rank()
        except Exception as error:
            limit = f"has a size() or rank() that raised {type(error).__name__}"
            raise SpecError("group", group, limit) from error
        return cls(size, rank, interleave)

    def owner(self, position: Any) -> Any:
        """The rank of the token at a position: an int, or elementwise for an array or tensor of integers."""
        return _positions(position) // self.interleave % self.size

    def local_position(self, position: Any) -> Any:
        """The place of a token among the tokens of its own rank: an int, or elementwise."""
        _positions(position)
        return position // (self.interleave * self.size) * self.interleave + position % self.interleave

    def local_length(self, length: int, rank: int | None = None) -> int:
        """Tokens of a request of `length` tokens that a rank stores; `rank` is that of this process if None.

        Raises:
            SpecError: a negative length, or a rank outside the group.
        """
        length = check_size("length", length, 0)
        rank = self.rank if rank is None else check_size("rank", rank, 0)
        if rank >= self.size:
            raise SpecError("rank", rank, f"must be below {self.size}, the size of the group")
        rounds, left = divmod(length, self.interleave * self.size)
        return rounds * self.interleave + min(max(left - rank * self.interleave, 0), self.interleave)

    def most_local(self, length: int) -> int:
        """The most tokens of a request of at most `length` tokens that any rank stores."""
        return -(-check_size("length", length, 0) // (self.interleave * self.size)) * self.interleave

    def to_dict(self) -> dict[str, int]:
        """A JSON object."""
        return {"size": self.size, "rank": self.rank, "interleave": self.interleave}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ContextParallel:
        """The value that `to_dict` wrote. SpecError for damaged data."""
        names = {field.name for field in dataclasses.fields(ContextParallel)}
        if not isinstance(data, Mapping) or set(data) != names:
            raise SpecError("context_parallel", data, f"must have exactly {', '.join(sorted(names))}")
        return ContextParallel(**data)
