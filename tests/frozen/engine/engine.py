"""Continuous batching over paged KV caches: admit, preempt, run a step, draw tokens."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from model import page_model
from pages import Page, Pages
from transformers import PreTrainedModel

from attnplug.core import BuilderConfig
from attnplug.errors import BatchError


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """`tokens` are prompt and output, which a token of `stop` ends; K and V of `computed` ones are in `pages`."""

    name: str
    tokens: list[int]
    prompt_len: int
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    computed: int = 0
    pages: list[Page] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    generator: torch.Generator = dataclasses.field(default_factory=torch.Generator)

    @property
    def output(self) -> list[int]:
        """The tokens drawn so far."""
        return self.tokens[self.prompt_len :]

    @property
    def is_done(self) -> bool:
        """Whether the last token drawn ends the output."""
        return len(self.output) >= self.max_tokens or not self.stop.isdisjoint(self.output[-1:])


class Engine:
    """Serves requests on a causal language model of transformers, whose attention it replaces.

    `num_blocks` is the KV pool, of blocks as large as their backend likes where `block_size` is None. A step
    runs at most `max_num_seqs` requests and `max_num_batched_tokens` tokens: long prompts are computed in chunks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int = 256,
        block_size: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
    ) -> None:
        self.model = model
        self.limits = BuilderConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.runtime = page_model(model, num_blocks, block_size, self.limits)
        self.pages = Pages(self.runtime.block_pool, self.runtime.kv_cache_config)
        self.builder = self.runtime.step_batch_builder(self.pages.max_tokens)
        self.runtime.warm_up()
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.added = self.steps = self.preemptions = 0

    def add(self, prompt: Sequence[int], **sampling: Any) -> Request:
        """Queue a prompt; BatchError if it is empty, or if it and its output can never fit."""
        request = Request(str(self.added), list(prompt), len(prompt), **sampling)
        room = self.pages.max_tokens - request.max_tokens
        if not 1 <= len(prompt) <= room:
            limit = f"must lie in 1 .. {room} with max_tokens={request.max_tokens}"
            raise BatchError("len(prompt)", len(prompt), limit, "give the engine more blocks")
        request.generator.manual_seed(request.seed)
        self.added += 1
        self.waiting.append(request)
        return request

    def stream(self, prompts: Sequence[Sequence[int]] = (), **sampling: Any) -> Iterator[Request]:
        """Serve prompts, and all that is queued: gives a request each time `tokens` has one more."""
        for prompt in prompts:
            self.add(prompt, **sampling)
        while self.waiting or self.running:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one batch; gives the requests that have one more token."""
        counts = self._schedule()
        batch = self.builder.step([counts.get(name, 0) for name in self.builder.req_ids])
        tokens, positions, rows, ready = [], [], [], []
        for request in map(self.running.__getitem__, batch.req_ids):
            end = request.computed + counts.get(request.name, 0)
            tokens += request.tokens[request.computed : end]
            positions += range(request.computed, end)
            if end == len(request.tokens):
                rows.append(len(tokens) - 1)
                ready.append(request)
        ids, at = torch.tensor([tokens, positions], device=self.model.device)
        kept = torch.tensor(rows, dtype=torch.int64, device=self.model.device)
        self.runtime.begin_step(batch)
        logits = self.model(ids[None], position_ids=at[None], logits_to_keep=kept, use_cache=False).logits[0]
        self.builder.finish_step()
        self.steps += 1
        for name, count in counts.items():
            request, before = self.running[name], self.running[name].computed // self.pages.size
            request.computed += count
            self.pages.add_keys(request.keys, request.tokens)
            for page in range(before, request.computed // self.pages.size):
                self.pages.store(request.keys[page], request.pages[page])
        for request, likeliest, row in zip(ready, logits.argmax(-1).tolist(), logits, strict=True):
            request.tokens.append(likeliest)
            if request.temperature > 0:
                chances = (row.float() / request.temperature).softmax(-1).cpu()
                request.tokens[-1] = int(torch.multinomial(chances, 1, generator=request.generator))
            if request.is_done:
                self._release(request)
        return ready

    def _schedule(self) -> dict[str, int]:
        """How many tokens of each request to run: first of those running, then of whoever still fits."""
        counts: dict[str, int] = {}
        budget, preempted = self.limits.max_num_batched_tokens, self.preemptions
        for request in list(self.running.values()):
            count = min(len(request.tokens) - request.computed, budget)
            while request.name in self.running and not self._grow(request, request.computed + count):
                self._preempt(next(reversed(self.running.values())))
            if request.name in self.running:
                counts[request.name] = count
                budget -= count
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            if self.preemptions > preempted or not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            counts[request.name] = min(len(request.tokens) - request.computed, budget)
            budget -= counts[request.name]
        return counts

    def _admit(self, request: Request) -> bool:
        """Start a request on the pages found of its prefix, and new ones for the rest, if they are free."""
        self.pages.add_keys(request.keys, request.tokens)
        # The last token is always computed: its logits are wanted.
        request.pages = self.pages.find(request.keys[: (len(request.tokens) - 1) // self.pages.size])
        found = len(request.pages)
        if not self._grow(request, len(request.tokens)):
            self.pages.free(request.pages)
            return False
        self.pages.shared += found
        request.computed = found * self.pages.size
        self.builder.add_request(request.name, self.pages.by_group(request.pages), request.computed)
        self.running[request.name] = request
        return True

    def _grow(self, request: Request, length: int) -> bool:
        """Give a request the pages that `length` tokens need, if they are free."""
        pages = self.pages.allocate(max(0, -(-length // self.pages.size) - len(request.pages)))
        if pages:
            request.pages += pages
            if request.name in self.running:
                self.builder.append_blocks(request.name, self.pages.by_group(pages))
        return pages is not None

    def _release(self, request: Request) -> None:
        del self.running[request.name]
        self.builder.remove_request(request.name)
        self.pages.free(request.pages)
        request.pages, request.computed = [], 0

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it starts over, with those that can then still be found."""
        self._release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
