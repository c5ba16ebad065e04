"""Continuous batching over paged KV caches: admit, preempt, draft, run a step, draw tokens."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from draws import draw_tokens
from graphs import GraphSteps, batch_sizes
from model import page_model
from pages import Pages
from ranks import Ranks
from request import Request as Request
from states import StatePages
from transformers import PreTrainedModel

from attnplug.core import BuilderConfig
from attnplug.errors import BatchError
from attnplug.runtime import SharingPrices, StateStep, StepBatch


class Engine:
    """Serves requests on a causal language model of transformers, whose attention it replaces.

    `num_blocks` is the KV pool, of blocks as large as their backend likes where `block_size` is None. A step
    runs at most `max_num_seqs` requests and `max_num_batched_tokens` tokens: long prompts are computed in chunks.
    A step verifies up to `draft_tokens` guesses for each request, found in its own tokens: it draws the same
    tokens as without, and text that repeats itself takes fewer steps. With `draft_branches` above 1 they are a tree of
    what followed at so many places. Layers with latent attention expand at most
    `context_chunk_rows` computed tokens at once, as many as the plan says where it is None. With `ranks`, several
    processes run the same requests, and each has its part of the heads or the tokens. `planning` are further
    arguments of `attnplug.plan`, such as `tuned`. `invariance` has the words of equal bits that all layers ask for.
    `prefix_sharing` is that of AttentionRuntime. `graphs` runs decodes and drafts in CUDA graphs; None does so on a GPU
    if the model and its layers allow it, and `no_graphs` has the reason if not. Pages are stored in `kv_cache_dtype`.

    Raises:
        BatchError: an argument that no step can serve, or graphs that a layer refuses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int = 256,
        block_size: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        draft_tokens: int = 0,
        context_chunk_rows: int | None = None,
        ranks: Ranks | None = None,
        planning: Mapping[str, Any] | None = None,
        invariance: Sequence[str] = (),
        draft_branches: int = 1,
        prefix_sharing: SharingPrices | bool = True,
        graphs: bool | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.model = model
        self.ranks = Ranks() if ranks is None else ranks
        if graphs not in (None, True, False):
            raise BatchError("graphs", graphs, "must be True, False or None")
        # Graphs pad their batches, and nobody has shown that bits stay equal then.
        may_capture = (model.device.type == "cuda" and not invariance) if graphs is None else graphs
        most = min(max_num_seqs, max_num_batched_tokens) if may_capture else 0
        self.limits = BuilderConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_speculative_tokens=draft_tokens,
            context_chunk_rows=context_chunk_rows,
            cudagraph_batch_sizes=batch_sizes(most) if most else (),
        )
        asked = planning, invariance, prefix_sharing, kv_cache_dtype
        self.runtime = page_model(model, num_blocks, block_size, self.limits, self.ranks, *asked)
        self.pages = Pages(self.runtime.block_pool, self.runtime.plan.tokens_per_block)
        self.builder = self.runtime.step_batch_builder(self.pages.max_tokens)
        self.states = StatePages(self.runtime, self.pages.size) if self.runtime.state_layers else None
        self.branches = integer(
            "draft_branches", draft_branches, 1, max(draft_tokens, 1), "draft more tokens"
        )
        if self.branches > 1 and (reason := self.runtime.tree_refusal):
            limit = f"cannot be verified: {reason}"
            raise BatchError("draft_branches", draft_branches, limit, "draft chains: draft_branches=1")
        self.runtime.warm_up()
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        # Models with an embedding for each position have none past these.
        positions = getattr(model.config, "max_position_embeddings", None) or self.pages.max_tokens
        self.longest = min(self.pages.max_tokens, positions)
        why = "graphs=False" if graphs is False else "equal bits" if invariance else "no CUDA graphs of a CPU"
        self.graphs, self.no_graphs = self._graphs(draft_tokens) if may_capture else (None, why)
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.added = self.steps = self.preemptions = self.drawn = self.drafted = self.accepted = 0

        if graphs and self.graphs is None:
            raise BatchError("graphs", True, self.no_graphs, "run without graphs=True")

    def _graphs(self, drafts: int) -> tuple[GraphSteps | None, str]:
        """The graphs of steps with `drafts`, or the reason why there are none."""
        if self.ranks.watch is not None:
            return None, "ranks watch each other between layers"
        depth = drafts // self.branches
        tree = [-1, *(0 if at % depth == 0 else at for at in range(depth * self.branches))]
        try:
            return GraphSteps(self.model, self.runtime, self.longest, tree), ""
        except BatchError as error:
            return None, str(error)

    def __str__(self) -> str:
        """The tokens drawn, the steps, and with drafts how many were right."""
        text = f"{self.drawn} tokens in {self.steps} steps"
        if self.drafted:
            # A request draws one token in each of its steps, and each accepted draft is one more.
            share, gain = self.accepted / self.drafted, self.drawn / (self.drawn - self.accepted)
            text += f", {self.accepted} of {self.drafted} drafts accepted ({share:.0%})"
            text += f", {gain:.2f} tokens per step of a request"
        return text

    def add(self, prompt: Iterable[int], **sampling: Any) -> Request:
        """Queue a prompt with `max_tokens`, `temperature`, `seed` and `stop`, the tokens that end the output.

        Raises:
            BatchError: an argument no step can serve, or a prompt that can never fit. Nothing is queued.
        """
        request = self._request(prompt, **sampling)
        self.waiting.append(request)
        return request

    def _request(
        self,
        prompt: Iterable[int],
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Iterable[int] = (),
    ) -> Request:
        """Checked before any step has it, because a step that raises would stop the other requests too."""
        tokens, last = (
            integers("prompt", prompt, self.vocab_size),
            frozenset(integers("stop", stop, self.vocab_size)),
        )
        max_tokens = integer("max_tokens", max_tokens, 1, self.longest - 1, "give the engine more blocks")
        room = self.longest - max_tokens
        if not 1 <= len(tokens) <= room:
            limit = f"must be in 1 .. {room} with max_tokens={max_tokens}"
            raise BatchError("len(prompt)", len(tokens), limit, "give the engine more blocks")
        if not isinstance(temperature, (int, float)) or not (
            temperature == 0 or 1e-3 <= temperature < math.inf
        ):
            raise BatchError("temperature", temperature, "must be 0, or finite and at least 0.001")
        seed = integer("seed", seed, 0, 2**63 - 1)
        request = Request(str(self.added), tokens, len(tokens), max_tokens, float(temperature), seed, last)
        request.generator.manual_seed(seed)
        self.added += 1
        return request

    def cancel(self, request: Request) -> None:
        """Drop a request that is waiting or running; one that is done stays as it is."""
        if self.running.get(request.name) is request:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def stream(self, prompts: Iterable[Iterable[int]] = (), **sampling: Any) -> Iterator[Request]:
        """Serve prompts, all or none, and all that is queued: gives a request each time it has more tokens."""
        self.waiting.extend([self._request(prompt, **sampling) for prompt in prompts])
        while self.waiting or self.running:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one batch; gives the requests that have more tokens, or an error.

        If the model raises, no token is drawn or counted, and the next step runs the same tokens again.
        """
        counts = self._schedule()
        if self.limits.num_speculative_tokens:
            self._draft(counts)
        wanted = {}
        for name, count in counts.items():
            request = self.running[name]
            # A prompt that later steps complete wants no logits; drafts want those that verify them, too.
            if request.computed + count == len(request.tokens) + len(request.drafts):
                wanted[name] = 1 + len(request.drafts)
        trees = {name: self.running[name].parents for name in counts if self.running[name].parents}
        batch = self.builder.step(counts, wanted, trees)
        tokens, positions = [], batch.positions.tolist()
        for request in map(self.running.__getitem__, batch.req_ids):
            end = request.computed + counts.get(request.name, 0)
            tokens += (request.tokens[request.computed : end] + request.drafts)[: end - request.computed]
        ready = [self.running[name] for name in batch.req_ids if name in wanted]
        inputs = torch.tensor([tokens, positions], device=self.runtime.device)
        with self.ranks.step(batch.req_ids, tokens, positions):
            logits = self._logits(batch, inputs, counts)
        nodes = self._draw(ready, logits, counts)
        kept = {name: nodes[name] for name in trees}
        self.runtime.keep_path(batch, kept)
        self.builder.finish_step(counts | kept)
        if self.states is not None:
            self.states.finish(counts)
        self.steps += 1
        for name, count in counts.items():
            request = self.running[name]
            self._advance(request, count)
            if self.states is not None and not request.error:
                self.states.store(name, request.keys)
        for request in ready:
            if request.error:
                # Its K and V may be NaN too, so no other request may find them.
                self.pages.forget(block for page in request.pages for block in page)
            if request.is_done:
                self._release(request)
        return ready

    def _logits(self, batch: StepBatch, inputs: torch.Tensor, counts: dict[str, int]) -> torch.Tensor:
        """The wanted rows of the model's logits, by a graph where the step has one; `inputs` has tokens and positions."""
        found = None if self.graphs is None else self.graphs.logits(batch, inputs)
        if found is not None:
            return found
        self.runtime.begin_step(batch, states=self._states_of(batch, counts))
        rows, (ids, at) = batch.common.logits_indices_padded, inputs
        given = {"position_ids": at[None], "logits_to_keep": rows, "use_cache": False}
        return self.model(ids[None], **given).logits[0]

    def _states_of(self, batch: StepBatch, counts: dict[str, int]) -> StateStep | None:
        """The states of a step; None for a model without any."""
        if self.states is None:
            return None
        running = self.running
        drafts = {name: len(running[name].drafts) for name in counts if running[name].drafts}
        ends = {
            name: (running[name].computed, running[name].computed + count) for name, count in counts.items()
        }
        return self.states.step(batch, drafts, ends)

    def _draw(self, ready: list[Request], logits: torch.Tensor, counts: dict[str, int]) -> dict[str, int]:
        """Draw the tokens of requests, whose logits are in order, and leave only accepted drafts in `counts`.

        Gives the last accepted node of each request: 0 is its last token.
        """
        drawn, row, nodes = draw_tokens(ready, logits), 0, dict.fromkeys(counts, 0)
        for request in ready:
            tokens = drawn[row : row + len(request.drafts) + 1]
            row += len(tokens)
            if -1 in tokens:
                request.error = "the model gave logits of NaN or infinity"
                counts[request.name] -= len(request.drafts)
                continue
            # A draft is kept if it is the token that would be drawn without drafts, from the same random numbers.
            node, kept = 0, 0
            request.append(tokens[node])
            while not request.is_done and tokens[node] in (children := request.children(node)):
                node, kept = children[tokens[node]], kept + 1
                request.append(tokens[node])
            nodes[request.name] = node
            counts[request.name] -= len(request.drafts) - kept
            self.drawn += kept + 1
            self.accepted += kept
            self.drafted += len(request.drafts)
        return nodes

    def _advance(self, request: Request, count: int) -> None:
        """Count tokens as computed, and store the pages that they filled."""
        before, request.computed = request.computed, request.computed + count
        full = range(before // self.pages.size, request.computed // self.pages.size)
        if full:
            self.pages.add_keys(request.keys, request.tokens)
        for page in full:
            self.pages.store(request.keys[page], request.pages[page])

    def _schedule(self) -> dict[str, int]:
        """The number of tokens of each request to run: first for those running, then for those that still fit."""
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

    def _draft(self, counts: dict[str, int]) -> None:
        """Give requests that will draw a token drafts, from the tokens and pages that are left."""
        left = self.limits.max_num_batched_tokens - sum(counts.values())
        for name, count in counts.items():
            request = self.running[name]
            request.drafts, request.parents = [], []
            if request.computed + count == len(request.tokens):
                most = request.max_tokens - len(request.output) - 1
                count_of_drafts = min(self.limits.num_speculative_tokens, left, most)
                drafts, parents = request.look_up(count_of_drafts), []
                # Only the last token has a tree behind it: other tokens of the step are a chain.
                if count == 1 and self.branches > 1:
                    drafts, parents = request.branch(count_of_drafts, self.branches)
                if self._grow(request, len(request.tokens) + len(drafts)):
                    request.drafts, request.parents = drafts, parents if drafts else []
                    counts[name] += len(drafts)
                    left -= len(drafts)
        if self.graphs is not None and any(self.running[name].drafts for name in counts):
            self._fit_drafts(counts, self.graphs)

    def _fit_drafts(self, counts: dict[str, int], graphs: GraphSteps) -> None:
        """Give all requests drafts of the shape that a graph verifies, unless one of them computes more or has no room."""
        requests = [self.running[name] for name in counts]
        fits = len(requests) == len(self.running) and graphs.has_room(len(requests))
        for request in requests:
            length = request.computed + len(graphs.parents)
            fits = fits and request.computed + 1 == len(request.tokens) and length <= self.longest
        if fits and all(self._grow(request, request.computed + len(graphs.parents)) for request in requests):
            for request in requests:
                request.fit_drafts(graphs.parents, graphs.is_tree)
                counts[request.name] = len(graphs.parents)

    def _admit(self, request: Request) -> bool:
        """Start a request on the pages found of its prefix, and new ones for the rest, if they are free."""
        self.pages.add_keys(request.keys, request.tokens)
        # The last token is always computed: its logits are wanted.
        keys = request.keys[: (len(request.tokens) - 1) // self.pages.size]
        if self.states is not None:
            # Keys and values without the state after them are of no use.
            keys = keys[: self.states.longest(keys)]
        request.pages = self.pages.find(keys)
        found = len(request.pages)
        if self.states is not None and found < len(keys):
            self.pages.free(request.pages)
            request.pages, found = [], 0
        if not self._grow(request, len(request.tokens)):
            self.pages.free(request.pages)
            return False
        self.pages.shared += found
        request.computed = found * self.pages.size
        self.builder.add_request(request.name, self.pages.by_group(request.pages), request.computed)
        if self.states is not None:
            self.states.add(request.name, request.keys[:found])
        self.running[request.name] = request
        return True

    def _grow(self, request: Request, length: int) -> bool:
        """Give a request the pages that `length` tokens need, if they are free."""
        missing = -(-length // self.pages.size) - len(request.pages)
        pages = self.pages.allocate(missing) if missing > 0 else []
        if pages:
            request.pages += pages
            if request.name in self.running:
                self.builder.append_blocks(request.name, self.pages.by_group(pages))
        return pages is not None

    def _release(self, request: Request) -> None:
        del self.running[request.name]
        self.builder.remove_request(request.name)
        if self.states is not None:
            self.states.remove(request.name)
        self.pages.free(request.pages)
        request.pages, request.computed = [], 0

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it starts over, with those that can then still be found."""
        self._release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1


def integer(field: str, value: object, least: int, most: int, remedy: str | None = None) -> int:
    """`value` as an int; BatchError unless it is an integer from `least` to `most`."""
    try:
        if not isinstance(value, bool) and least <= (number := operator.index(value)) <= most:
            return number
    except TypeError:
        pass
    raise BatchError(field, value, f"must be an integer in {least} .. {most}", remedy)


def integers(field: str, values: Iterable[object], size: int) -> list[int]:
    """`values` as ints; BatchError unless they are integers below `size`."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise BatchError(field, values, f"must be a sequence of integers in 0 .. {size - 1}")
    return [integer(field, value, 0, size - 1) for value in values]
