"""A request in flight, and how its next token is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from pages import Page


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Greedy by default. `top_p` keeps the likeliest tokens that make up so much of the probability."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """`tokens` are prompt and output; K and V of the first `computed` of them are in `pages`."""

    name: str
    tokens: list[int]
    sampling: Sampling
    prompt_len: int = 0
    computed: int = 0
    preemptions: int = 0
    pages: list[Page] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    generator: torch.Generator | None = None

    @property
    def output(self) -> list[int]:
        """The tokens drawn so far."""
        return self.tokens[self.prompt_len :]

    @property
    def is_done(self) -> bool:
        """Whether the last token was the last."""
        drawn = len(self.tokens) - self.prompt_len
        return drawn >= self.sampling.max_tokens or (drawn > 0 and self.tokens[-1] in self.sampling.stop)


def draw(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request, from `logits [R, vocabulary]`."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, request in enumerate(requests):
        if request.sampling.temperature > 0:
            tokens[row] = _sample(logits[row].float(), request)
    return tokens


def _sample(logits: torch.Tensor, request: Request) -> int:
    if request.generator is None:
        request.generator = torch.Generator(logits.device).manual_seed(request.sampling.seed)
    probabilities, order = (logits / request.sampling.temperature).softmax(-1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities > request.sampling.top_p] = 0.0
    return int(order[torch.multinomial(probabilities, 1, generator=request.generator)])
