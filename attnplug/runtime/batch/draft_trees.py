"""Trees of draft tokens, which one step verifies: each node sees its ancestors, and no other node."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attnplug.core.arguments import instance, integer, integers
from attnplug.core.errors import BatchError
from attnplug.runtime.batch.engine_values import Ints


class TreeShape(NamedTuple):
    """What the parents of a tree say.

    Args:
        parents: int64 `[n]`, the node before each node; -1 for one that follows the computed tokens.
        depths: int64 `[n]`, the nodes before each node on its path.
        members: int64, the nodes of each node's path from the first to itself, one path after the other.
        counts: int64 `[n]`, the nodes of each path.
    """

    parents: Ints
    depths: Ints
    members: Ints
    counts: Ints


@functools.lru_cache(maxsize=256)
def shape_of(parents: tuple[int, ...]) -> TreeShape:
    """The shape of a tree whose parents come before their nodes; engines have few shapes, so they are kept."""
    paths = list[list[int]]()
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    counts = np.array([len(path) for path in paths], dtype=np.int64)
    members = np.array([*itertools.chain(*paths)], dtype=np.int64)
    return TreeShape(np.array(parents, dtype=np.int64), counts - 1, members, counts)


@dataclasses.dataclass(slots=True, eq=False)
class DraftTree:
    """The new tokens of one request, as a tree.

    Args:
        shape: of the tree.
        kept: the node whose path `AttentionRuntime.keep_path` has moved behind the computed tokens; None before.
    """

    shape: TreeShape
    kept: int | None = None

    @property
    def depths(self) -> Ints:
        """int64 `[n]`, the nodes before each node on its path."""
        return self.shape.depths

    @property
    def size(self) -> int:
        """The number of nodes."""
        return int(self.shape.parents.size)

    def path(self, node: int) -> list[int]:
        """The nodes from the first to `node`, itself included; empty for -1."""
        found = []
        while node >= 0:
            found.append(node)
            node = int(self.shape.parents[node])
        return found[::-1]

    def is_in_place(self, node: int) -> bool:
        """Whether the keys of the path of `node` are behind the computed tokens, in order."""
        if node < 0:
            return True
        if self.kept is None or self.kept < 0 or int(self.depths[self.kept]) == self.kept:
            # Nothing was moved: the path is the first nodes of the tree, or it is not there.
            return int(self.depths[node]) == node
        path = self.path(node)
        # Keys of the kept path replaced those of other nodes.
        return path == self.path(self.kept)[: len(path)]


def checked_shape(field: str, parents: Sequence[int]) -> TreeShape:
    """The shape of a tree with these parents.

    Raises:
        BatchError: no node, or a parent that is not an earlier node.
    """
    found = tuple(integers(field, parents))
    if not found:
        raise BatchError(field, (), "must have at least one node")
    for node, parent in enumerate(found):
        if not -1 <= parent < node:
            limit = f"must be in -1 .. {node - 1}, the nodes before it"
            raise BatchError(f"{field}[{node}]", parent, limit, "order nodes from the first level on")
    return shape_of(found)


def checked_trees(
    trees: Mapping[str, Sequence[int]], names: Collection[str], scheduled: Ints
) -> dict[str, DraftTree]:
    """The trees of a step by request.

    Raises:
        BatchError: no mapping of requests in flight to parents; a tree without nodes, or of another size than the
            scheduled tokens; a parent that is not an earlier node.
    """
    instance("trees", trees, Mapping)  # type: ignore[type-abstract]
    if unknown := trees.keys() - set(names):
        raise BatchError("trees", sorted(unknown, key=str), "are not in flight")
    made = {}
    for name, count in zip(names, scheduled.tolist(), strict=True):
        if name not in trees:
            continue
        field = f"trees[{name!r}]"
        parents = integers(field, trees[name])
        if len(parents) != count or not parents:
            limit = f"nodes must be the {count} scheduled tokens of the request, at least one"
            raise BatchError(field, len(parents), limit, "schedule one token for each node")
        made[name] = DraftTree(checked_shape(field, parents))
    return made


def accepted_tokens(trees: Mapping[str, DraftTree], accepted: object) -> dict[str, int]:
    """The tokens that each request with a tree keeps, from the last node of its path; -1 keeps none.

    Raises:
        BatchError: no mapping; a tree without a node; a node that is not in its tree, or whose path was not moved.
    """
    if not isinstance(accepted, Mapping):
        limit = "must be a mapping with a node for each tree: the step has trees"
        raise BatchError("accepted", accepted, limit, "give the last node of each accepted path, or -1")
    counts = {}
    for name, tree in trees.items():
        field = f"accepted[{name!r}]"
        if name not in accepted:
            raise BatchError(field, None, "must name a node of the request's tree", "give -1 for none")
        node = integer(field, accepted[name])
        if not -1 <= node < tree.size:
            raise BatchError(field, node, f"must be in -1 .. {tree.size - 1}, the nodes of its tree")
        if not tree.is_in_place(node):
            limit = "is a node whose keys are not behind the computed tokens"
            raise BatchError(field, node, limit, "call runtime.keep_path(batch, accepted) first")
        counts[name] = len(tree.path(node))
    return counts
