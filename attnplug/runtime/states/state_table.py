"""The pages of states that requests have: their own, those of drafts, and checkpoints that others may start from."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import instance, integer
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.batch.step_batch import StepBatch, StepSerial
from attnplug.runtime.caches.block_pool import BlockPool
from attnplug.runtime.plan.state_plan import StatePlan
from attnplug.runtime.states.state_step import StateStep, batch_of

# A step has a number for each of its tokens on the host.
_MOST_TOKENS = 2**24


@dataclasses.dataclass(slots=True)
class _Request:
    """A request: its computed tokens, the page with the state after them, and its checkpoints by number of tokens."""

    computed: int
    page: int
    kept: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Stepped:
    """A request in the step that is not finished: its tokens, by token of the step the page that gets the state.

    Then the pages that are new, and the tokens whose states are checkpoints.
    """

    tokens: int
    pages: dict[int, int]
    fresh: list[int]
    kept: list[int]


class StateTable(NotCopied):
    """Gives each step the pages to start from and to write to, for all layers with a state at once.

    A page that a request starts from is also the page of its last token, unless another request may start from it too. A
    layer then runs once in a step. With `in_place=False` each step writes to other pages, and layers can be repeated.

    Args:
        plan: the pool, and its drafts and checkpoints.
        pool: counts the users of each page; the runtime's `state_pool`.
        in_place: whether a step may write the page that it reads.
        device: of the steps of models without attention layers.
    """

    def __init__(
        self,
        plan: StatePlan,
        pool: BlockPool,
        *,
        in_place: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.plan = instance("plan", plan, StatePlan)
        self.pool = instance("pool", pool, BlockPool)
        self._in_place = instance("in_place", in_place, bool)
        self._device = torch.device(device)
        self._requests: dict[str, _Request] = {}
        self._stepped: dict[str, _Stepped] = {}
        self._last: StateStep | None = None
        # Steps made before the latest number have pages that others may have by now.
        self._serial = StepSerial()

    @property
    def req_ids(self) -> list[str]:
        """The names of the requests, in order of arrival."""
        return list(self._requests)

    def add_request(self, req_id: str, num_computed_tokens: int = 0, page: int | None = None) -> None:
        """Add a request that starts from zeros, or from a checkpoint.

        Args:
            req_id: its name.
            num_computed_tokens: tokens whose state `page` has.
            page: a checkpoint of another request, or of its own before it was preempted. It gets one user more and is
                never written.

        Raises:
            BatchError: the name is in use; tokens without a page, or a page without tokens; a page that nobody has.
        """
        instance("req_id", req_id, str)
        if req_id in self._requests:
            raise BatchError("req_id", req_id, "has states already")
        computed = integer("num_computed_tokens", num_computed_tokens)
        if (page is None) is not (computed == 0):
            limit = f"must be given with the tokens that it has the state of, which are {computed}"
            raise BatchError("page", page, limit, "compute a prompt from its start, or from a checkpoint")
        if page is not None:
            if not self.pool.users(page):
                raise BatchError("page", page, "has no user, so its state may be that of another request")
            self.pool.share([page])
        self._requests[req_id] = _Request(computed, PAD_SLOT_ID if page is None else page)

    def remove_request(self, req_id: str) -> None:
        """Remove a request and give its pages back; those with another user stay."""
        request = self._request(req_id)
        if (stepped := self._stepped.pop(req_id, None)) is not None:
            self.pool.free(stepped.fresh)
            self._serial.advance("remove_request")
        self.pool.free([*([] if request.page < 0 else [request.page]), *request.kept.values()])
        del self._requests[req_id]

    def checkpoints(self, req_id: str) -> dict[int, int]:
        """The pages of a request's checkpoints, by the number of tokens whose state they have.

        A page stays valid while it has a user. `pool.share` adds one, such as for a prefix cache.
        """
        return dict(self._request(req_id).kept)

    def release_checkpoints(self, req_id: str) -> None:
        """Give back the checkpoints of a request; a page to which a prefix cache has added a user stays valid."""
        request = self._request(req_id)
        self.pool.free(request.kept.values())
        request.kept = {}

    def step(
        self,
        batch: StepBatch | Mapping[str, int],
        drafts: Mapping[str, int] | None = None,
        keep: Mapping[str, Collection[int]] | None = None,
    ) -> StateStep:
        """The pages of a step. A step that is not finished gives its pages back first.

        Args:
            batch: the step of the layers with pages; for a model without any, the new tokens by request.
            drafts: by request, the draft tokens at the end of its new tokens. The states after them, and after the
                token in front of them, are stored.
            keep: by request, the numbers of tokens at which a checkpoint is kept; by default each multiple of
                `plan.block_size`.

        Raises:
            BatchError: the step before ran on pages that it started from, and was not finished; a request that was not
                added, or whose tokens are not those of the table; more drafts than the plan has, or none but drafts; draft trees; a number of tokens that is not a multiple of the block size,
                or not reached in this step; too few free pages.
        """
        self._check_repeatable()
        names, scheduled = self._tokens_of(batch)
        drafts, keep = drafts or {}, keep or {}
        for field, given in (("drafts", drafts), ("keep", keep)):
            if unknown := set(given) - set(names):
                raise BatchError(field, min(unknown), "is no request of the step")
        reads, slots, stepped = list[int](), list[int](), dict[str, _Stepped]()
        stored = {
            name: self._stored(name, tokens, drafts.get(name, 0), keep.get(name))
            for name, tokens in zip(names, scheduled, strict=True)
        }
        reused = {name for name in names if self._may_overwrite(name)}
        wanted = sum(len(each) - (name in reused and bool(each)) for name, each in stored.items())
        unfinished = [page for each in self._stepped.values() for page in each.fresh]
        if wanted > self.pool.num_free + len(unfinished):
            self.pool.allocate(wanted)  # It raises, and the step before stays.
        self.pool.free(unfinished)
        self._stepped = {}
        free = iter(self.pool.allocate(wanted))
        for name, tokens in zip(names, scheduled, strict=True):
            request, pages, fresh = self._requests[name], dict[int, int](), list[int]()
            own = [request.page] if name in reused else []
            # The page of the request itself is for a token that is no checkpoint where there is one.
            for token in sorted(stored[name], key=stored[name].__getitem__):
                page = own.pop() if own else next(free)
                if page != request.page:
                    fresh.append(page)
                pages[token] = page
            kept = [token for token, is_kept in stored[name].items() if is_kept]
            stepped[name] = _Stepped(tokens, pages, fresh, kept)
            reads.append(request.page)
            slots += [pages.get(token, PAD_SLOT_ID) for token in range(tokens)]
        self._stepped = stepped
        stamp = self._serial.advance("step")
        common = self._common(batch, names, scheduled)
        self._last = StateStep.of(common, reads, slots, (stamp,), self.pool)
        return self._last

    def finish_step(self, accepted: Mapping[str, int] | None = None) -> None:
        """Count the tokens of the last step as computed: all, or of each request only the first, the accepted ones.

        Raises:
            BatchError: no step was begun; a request of another step; more tokens than it had, or a number after which
                no state was stored.
        """
        if not self._stepped:
            raise BatchError("step", None, "is required before finish_step, once for each")
        accepted = {} if accepted is None else accepted
        counts = {name: accepted.get(name, each.tokens) for name, each in self._stepped.items()}
        if unknown := set(accepted) - set(counts):
            raise BatchError("accepted", min(unknown), "is no request of the step")
        for name, count in counts.items():
            self._check_accepted(name, count)
        for name, count in counts.items():
            self._finish(self._requests[name], self._stepped[name], count)
        self._stepped = {}

    def rollback(self, req_id: str, num_computed_tokens: int) -> None:
        """Go back to a checkpoint, or to the start, so that later steps compute the tokens after it again.

        Raises:
            BatchError: a step is not finished, or there is no checkpoint at this number of tokens.
        """
        request, tokens = self._request(req_id), integer("num_computed_tokens", num_computed_tokens)
        if req_id in self._stepped:
            raise BatchError("step", "not finished", "cannot be rolled back", "call finish_step first")
        if tokens == request.computed:
            return
        if (tokens and tokens not in request.kept) or tokens > request.computed:
            known = ", ".join(map(str, (0, *sorted(request.kept))))
            limit = f"has no state of request {req_id}; there are those after {known} tokens"
            raise BatchError("num_computed_tokens", tokens, limit)
        page = request.kept.get(tokens, PAD_SLOT_ID)
        if page >= 0:
            self.pool.share([page])
        if request.page >= 0:
            self.pool.free([request.page])
        request.computed, request.page = tokens, page
        for later in [each for each in request.kept if each > tokens]:
            self.pool.free([request.kept.pop(later)])

    def _request(self, req_id: str) -> _Request:
        request = self._requests.get(req_id)
        if request is None:
            raise BatchError("req_id", req_id, "has no states", "call add_request first")
        return request

    def _check_repeatable(self) -> None:
        """BatchError if the step before is not finished and changed the states that it started from."""
        last = self._last
        if self._stepped and last is not None and last.overwrites and last.ran:
            limit = "ran on the pages that it started from, and was not finished"
            raise BatchError("step", f"{len(last.ran)} layers", limit, "call finish_step first")

    def _may_overwrite(self, name: str) -> bool:
        """Whether nobody else may start from the page of a request."""
        page = self._requests[name].page
        return self._in_place and page >= 0 and self.pool.users(page) == 1

    def _tokens_of(self, batch: StepBatch | Mapping[str, int]) -> tuple[list[str], list[int]]:
        """The requests of a step and their new tokens; BatchError where the table knows others."""
        if isinstance(batch, Mapping):
            names = list(batch)
            scheduled = [integer(f"batch[{name!r}]", each) for name, each in batch.items()]
            for name, count in zip(names, scheduled, strict=True):
                if not 0 <= count <= _MOST_TOKENS:
                    limit = f"new tokens must be in 0 .. {_MOST_TOKENS}"
                    raise BatchError(f"batch[{name!r}]", count, limit)
            computed = [self._request(name).computed for name in names]
        else:
            common = instance("batch", batch, StepBatch).common
            if batch.trees:
                remedy = "verify drafts as a chain, without trees"
                raise BatchError("batch.trees", sorted(batch.trees), "have no state after each node", remedy)
            names = list(batch.req_ids)
            lens = common.query_start_loc_cpu.diff()[: len(names)]
            scheduled = lens.tolist()
            known = common.seq_lens_host
            lengths = common.seq_lens[: len(names)].cpu().numpy() if known is None else known[: len(names)]
            computed = (np.asarray(lengths) - lens.numpy()).tolist()
        for name, count in zip(names, computed, strict=True):
            if (own := self._request(name).computed) != count:
                limit = f"of request {name} are not the {own} whose state there is"
                raise BatchError("num_computed_tokens", count, limit, "finish each step of both")
        return names, scheduled

    def _stored(self, name: str, tokens: int, drafts: int, keep: Collection[int] | None) -> dict[int, bool]:
        """The tokens of a step after which the state is stored, and whether that is a checkpoint."""
        if not 0 <= drafts <= self.plan.drafts or (drafts and drafts >= tokens):
            limit = f"must be in 0 .. {min(self.plan.drafts, max(tokens - 1, 0))}: the plan has {self.plan.drafts}"
            raise BatchError(f"drafts[{name!r}]", drafts, f"{limit}, and one of {tokens} tokens is no draft")
        size, before = self.plan.block_size, self._requests[name].computed
        found = dict.fromkeys(range(tokens - 1 - drafts, tokens), False) if tokens else {}
        if size is not None and keep is None:
            keep = range(-(-(before + 1) // size) * size, before + tokens + 1, size)
        for count in keep or ():
            if size is None or count % size or not before < count <= before + tokens:
                limit = f"is no border of blocks of {size} tokens within {before} .. {before + tokens}"
                raise BatchError(f"keep[{name!r}]", count, limit)
            found[count - before - 1] = True
        return found

    def _common(
        self, batch: StepBatch | Mapping[str, int], names: list[str], scheduled: list[int]
    ) -> CommonAttentionMetadata:
        if isinstance(batch, StepBatch):
            return batch.common
        common = batch_of(names, scheduled, [self._requests[name].computed for name in names])
        return common.changed(
            query_start_loc=common.query_start_loc.to(self._device),
            seq_lens=common.seq_lens.to(self._device),
        )

    def _check_accepted(self, name: str, count: int) -> None:
        stepped = self._stepped[name]
        if not 0 <= integer(f"accepted[{name!r}]", count) <= stepped.tokens:
            raise BatchError(f"accepted[{name!r}]", count, f"must be in 0 .. {stepped.tokens}")
        if count == 0 and self._requests[name].page in stepped.pages.values():
            limit = "would need the state before the step, whose page was written"
            raise BatchError(f"accepted[{name!r}]", 0, limit, "name draft tokens in step()")
        if count and count - 1 not in stepped.pages:
            known = ", ".join(str(token + 1) for token in sorted(stepped.pages))
            limit = f"has no state; those after {known} tokens were stored"
            raise BatchError(f"accepted[{name!r}]", count, limit, "name draft tokens in step()")

    def _finish(self, request: _Request, stepped: _Stepped, count: int) -> None:
        """Make the page of the last accepted token that of the request; checkpoints stay, and other pages are free."""
        if count == 0:
            self.pool.free(stepped.fresh)
            return
        last = stepped.pages[count - 1]
        released = [page for page in (*stepped.fresh, request.page) if page >= 0]
        kept = {request.computed + token + 1: stepped.pages[token] for token in stepped.kept if token < count}
        # A page that is both has two users: the request, and its checkpoint.
        self.pool.share([last, *kept.values()])
        self.pool.free(released)
        request.page, request.computed = last, request.computed + count
        request.kept |= kept
