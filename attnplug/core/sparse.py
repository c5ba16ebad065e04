"""The keys that a sparse layer attends: their number for each query, and their units."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from attnplug.core.checks import MOST_TOKENS, check_size
from attnplug.core.errors import SpecError

SPARSE_KINDS: tuple[str, ...] = ("token_topk", "block")
"""The kinds of a SparseSpec."""


@dataclasses.dataclass(frozen=True, slots=True)
class SparseSpec:
    """Each query attends only the keys that an indexer picks for it; the model's indexer fills the step's Selection.

    Args:
        kind: "token_topk": single keys, such as in DeepSeek sparse attention; "block": blocks of `block`
            consecutive keys, the first block at position 0.
        topk: most keys, or blocks, of a query.
        block: tokens of a block: at least 2 with kind "block", else 1.

    Raises:
        SpecError: an unknown kind, a size below 1 or above MOST_TOKENS, or a block that does not fit the kind.
    """

    kind: Literal["token_topk", "block"]
    topk: int
    block: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in SPARSE_KINDS:
            raise SpecError("sparse.kind", self.kind, f"must be one of {', '.join(SPARSE_KINDS)}")
        # The exact types are kept, because a spec is written as JSON.
        object.__setattr__(self, "kind", str(self.kind))
        object.__setattr__(self, "topk", check_size("sparse.topk", self.topk, most=MOST_TOKENS))
        object.__setattr__(self, "block", check_size("sparse.block", self.block, most=MOST_TOKENS))
        if self.kind == "token_topk" and self.block != 1:
            raise SpecError("sparse.block", self.block, "must be 1 with kind token_topk", "use kind block")
        if self.kind == "block" and self.block == 1:
            limit = "must be at least 2 with kind block: the tokens of a block"
            raise SpecError("sparse.block", 1, limit, "single keys are kind token_topk")

    def __str__(self) -> str:
        """The words of tables and reasons: "token_topk 2048", "block 16 of 64 tokens"."""
        return f"{self.kind} {self.topk}" + (f" of {self.block} tokens" if self.kind == "block" else "")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The spec of a JSON object with `kind`, `topk` and, for kind "block", `block`. SpecError for other fields."""
        if not isinstance(data, Mapping):
            raise SpecError("sparse", data, "must be a mapping of kind and topk, and block for kind block")
        if not {"kind", "topk"} <= set(data) <= {"kind", "topk", "block"}:
            raise SpecError("sparse", dict(data), "must name kind and topk, and block for kind block")
        return cls(**data)


def check_sparse(value: object) -> SparseSpec | None:
    """`value`, if it is a SparseSpec or None; False means None. SpecError for anything else."""
    if isinstance(value, SparseSpec):
        return value
    # Files of earlier versions have a flag. False is clear, but True does not say which keys are attended.
    if value is None or value is False:
        return None
    remedy = "give a SparseSpec, such as SparseSpec('token_topk', topk=2048)"
    raise SpecError("sparse", value, "does not say how many keys an indexer picks", remedy)
