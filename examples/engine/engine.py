"""Continuous batching over paged KV caches: admit, preempt, run, draw."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from model import PagedModel
from pages import Pages
from request import Request, Sampling, draw
from transformers import PreTrainedModel

from attnplug.core import BuilderConfig
from attnplug.core.errors import BatchError


class Engine:
    """Serves requests on one model, each step a batch of whatever is ready.

    Args:
        model: a causal language model of transformers; its attention is replaced.
        num_blocks: blocks of the KV pool, the null block included.
        block_size: tokens per block.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step; longer prompts are computed in chunks.
        max_model_len: longest prompt and output together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 2048,
    ) -> None:
        config = BuilderConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.model = PagedModel(model, num_blocks, block_size, config)
        self.builder = self.model.runtime.step_batch_builder(max_model_len)
        self.pages = Pages(self.model.runtime.block_pool, self.builder.block_sizes)
        self.limits = config
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.steps = self.preemptions = self.added = 0

    def add(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Request:
        """Queue a prompt.

        Raises:
            BatchError: an empty prompt, or one that with its output can never fit.
        """
        sampling = sampling or Sampling()
        length = len(prompt) + sampling.max_tokens
        room = min(
            self.max_model_len, (self.pages.pool.num_blocks - 1) // sum(self.pages.split) * self.pages.size
        )
        if not prompt or length > room:
            limit = f"and max_tokens={sampling.max_tokens} must lie in 1 .. {room} tokens together"
            raise BatchError(
                "len(prompt)", len(prompt), limit, "give the engine more blocks or a longer model"
            )
        request = Request(str(self.added), list(prompt), sampling, len(prompt))
        self.added += 1
        self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Run one batch; gives the requests that have one more token."""
        counts = self._schedule()
        batch = self.builder.step([counts.get(name, 0) for name in self.builder.req_ids])
        tokens: list[int] = []
        positions: list[int] = []
        rows, ready = [], []
        for name in batch.req_ids:
            request, end = self.running[name], self.running[name].computed + counts.get(name, 0)
            tokens += request.tokens[request.computed : end]
            positions += range(request.computed, end)
            if end == len(request.tokens):
                rows.append(len(tokens) - 1)
                ready.append(request)
        logits = self.model(batch, tokens, positions, rows)
        self.builder.finish_step()
        self.steps += 1
        for name, count in counts.items():
            self._computed(self.running[name], count)
        for request, token in zip(ready, draw(logits, ready), strict=True):
            request.tokens.append(token)
            if request.is_done:
                self._release(request)
        return ready

    def stream(self, prompts: Iterable[Sequence[int]], sampling: Sampling | None = None) -> Iterator[Request]:
        """Serve prompts together: gives a request each time it has a new token, its last in `tokens[-1]`."""
        for prompt in prompts:
            self.add(prompt, sampling)
        while self.waiting or self.running:
            yield from self.step()

    def _schedule(self) -> dict[str, int]:
        """New tokens of each request to run; running ones first, then whoever fits."""
        counts: dict[str, int] = {}
        budget, preempted = self.limits.max_num_batched_tokens, False
        for request in list(self.running.values()):
            count = min(len(request.tokens) - request.computed, budget)
            while request.name in self.running and not self._grow(request, request.computed + count):
                self._preempt(next(reversed(self.running.values())))
                preempted = True
            if request.name in self.running and count:
                counts[request.name] = count
                budget -= count
        while self.waiting and budget and not preempted and len(self.running) < self.limits.max_num_seqs:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            counts[request.name] = min(len(request.tokens) - request.computed, budget)
            budget -= counts[request.name]
        return counts

    def _admit(self, request: Request) -> bool:
        """Start a request on the pages that others have computed of its prefix and new ones for the rest."""
        request.keys = self.pages.keys(request.tokens, request.keys)
        # The last token is always computed: its logits are wanted.
        found = self.pages.find(request.keys[: (len(request.tokens) - 1) // self.pages.size])
        missing = self.pages.count(len(request.tokens)) - len(found)
        if missing > self.pages.num_free:
            self.pages.free(found)
            return False
        request.pages = found + self.pages.allocate(missing)
        request.computed = len(found) * self.pages.size
        self.pages.shared += len(found)
        self.builder.add_request(request.name, self.pages.by_group(request.pages), request.computed)
        self.running[request.name] = request
        return True

    def _grow(self, request: Request, length: int) -> bool:
        """Give a request the pages for `length` tokens, if they are free."""
        missing = self.pages.count(length) - len(request.pages)
        if missing > self.pages.num_free:
            return False
        if missing > 0:
            pages = self.pages.allocate(missing)
            request.pages += pages
            self.builder.append_blocks(request.name, self.pages.by_group(pages))
        return True

    def _computed(self, request: Request, count: int) -> None:
        before, request.computed = request.computed // self.pages.size, request.computed + count
        full = request.computed // self.pages.size
        if full > before:
            request.keys = self.pages.keys(request.tokens, request.keys)
            for index in range(before, full):
                self.pages.store(request.keys[index], request.pages[index])

    def _release(self, request: Request) -> None:
        del self.running[request.name]
        self.builder.remove_request(request.name)
        self.pages.free(request.pages)
        request.pages, request.computed = [], 0

    def _preempt(self, request: Request) -> None:
        """Take the pages back; the request starts over, from what is then still found of them."""
        self._release(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
