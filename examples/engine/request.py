"""A request of the engine: its tokens and pages, the drafts of its next tokens, and the numbers that draw them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence

import torch
from pages import Page


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """`tokens` are prompt and output, which a token of `stop` ends, or an `error`; `pages` hold K and V of `computed`.

    A step verifies `drafts`, guesses of the next tokens: a chain, or with `parents` a tree. `places` says where each pair
    of tokens was. `ahead` are numbers of the `generator` that no token has used yet.
    """

    name: str
    tokens: list[int]
    prompt_len: int
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    error: str = ""
    computed: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = dataclasses.field(default_factory=dict)
    placed: int = 2
    pages: list[Page] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    generator: torch.Generator = dataclasses.field(default_factory=torch.Generator)
    ahead: deque[float] = dataclasses.field(default_factory=deque)

    @property
    def output(self) -> list[int]:
        """The tokens drawn so far."""
        return self.tokens[self.prompt_len :]

    @property
    def is_done(self) -> bool:
        """Whether the last token drawn, or an error, ends the output."""
        count = len(self.tokens) - self.prompt_len
        return bool(self.error) or count >= self.max_tokens or (count > 0 and self.tokens[-1] in self.stop)

    def look_up(self, count: int) -> list[int]:
        """`count` tokens that followed the last two tokens before, over and over; none if these are new."""
        place = (self._known() or [len(self.tokens)])[-1]
        return list(itertools.islice(itertools.cycle(self.tokens[place:]), count))

    def branch(self, count: int, branches: int) -> tuple[list[int], list[int]]:
        """At most `count` drafts in a tree of `branches` chains, and the parents of its nodes: 0 is the last token."""
        drafts, nodes = list[int](), {(): 0}
        parents = [-1]
        for place in reversed(self._known()[-branches:]):
            path: tuple[int, ...] = ()
            for token in itertools.islice(itertools.cycle(self.tokens[place:]), count // branches):
                parent, path = nodes[path], (*path, token)
                if path not in nodes:
                    nodes[path] = len(parents)
                    parents.append(parent)
                    drafts.append(token)
        return drafts, parents

    def children(self, node: int) -> dict[int, int]:
        """The drafts that follow a node, and their nodes; without a tree the next draft follows."""
        if not self.parents:
            return dict.fromkeys(self.drafts[node : node + 1], node + 1)
        nodes = [at for at, parent in enumerate(self.parents) if parent == node]
        # Of equal tokens the first has the longer path.
        return {self.drafts[at - 1]: at for at in reversed(nodes)}

    def fit_drafts(self, shape: Sequence[int], is_tree: bool) -> None:
        """Put the drafts on the nodes of a tree of this shape; nodes without one get token 0."""
        parents = self.parents or range(-1, len(self.drafts))
        left = [[at for at, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
        own: list[int | None] = [0]
        for parent in shape[1:]:
            node = own[parent]
            own.append(left[node].pop(0) if node is not None and left[node] else None)
        self.drafts = [0 if node is None else self.drafts[node - 1] for node in own[1:]]
        self.parents = list(shape) if is_tree else []

    def _known(self) -> list[int]:
        """The places of the tokens that followed the last two tokens before, in order."""
        for place in range(self.placed, len(self.tokens)):
            self.places.setdefault(tuple(self.tokens[place - 2 : place]), []).append(place)
        self.placed = max(self.placed, len(self.tokens))
        return self.places.get(tuple(self.tokens[-2:]), [])

    def depths(self) -> list[int]:
        """How many drafts are on the path to each row: 0 for the last token, and for each draft its own counts."""
        found = [0]
        for parent in self.parents[1:] or range(len(self.drafts)):
            found.append(found[parent] + 1)
        return found

    def numbers(self, count: int) -> list[float]:
        """The next numbers in 0 .. 1 of the request's own generator; each token that is appended uses one."""
        if len(self.ahead) < count:
            # One call gives more numbers in the same time, and always in the same order.
            more = torch.rand(count + 32, dtype=torch.float64, generator=self.generator)
            self.ahead.extend(more.tolist())
        return list(itertools.islice(self.ahead, count))

    def append(self, token: int) -> None:
        """Add a token that was drawn."""
        self.tokens.append(token)
        if self.temperature > 0:
            self.ahead.popleft()
