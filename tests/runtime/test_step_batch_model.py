"""The builder against a naive model of it, over any sequence of calls."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tables_on_device import check_tables, keep_tables_on_device

from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatch, StepBatchBuilder

SEQS, TOKENS, LENGTH, ENCODER = 4, 20, 24, 7


@dataclasses.dataclass
class Request:
    name: str
    pages: list[list[int]]
    computed: int
    encoder_len: int = 0
    encoder_written: bool = False
    scheduled: int = 0
    served: int = 0
    items: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def slot(self, group: int, position: int, size: int) -> int:
        block = self.pages[group][position // size]
        return block * size + position % size if block else -1


class StepBatchModel(RuleBasedStateMachine):
    """Requests in a list, everything computed token by token."""

    @initialize(
        data=st.data(),
        sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3) | st.just([4, 4]),
        cross=st.booleans(),
    )
    def start(self, data: Any, sizes: list[int], cross: bool) -> None:
        self.sizes = [*sizes, 2] if cross else sizes
        self.cross = {len(sizes)} if cross else set()
        self.requests: list[Request] = []
        self.names = 0
        self.stepped: list[str] | None = None
        self.builder = StepBatchBuilder(
            max_num_seqs=SEQS,
            max_num_batched_tokens=TOKENS,
            max_model_len=LENGTH,
            block_sizes=self.sizes,
            cross_groups=sorted(self.cross),
            max_encoder_len=ENCODER if cross else 0,
        )
        self.on_device = data.draw(st.booleans())
        if self.on_device:
            keep_tables_on_device(self.builder, data.draw(st.sampled_from([0, 3, 100])))
        for _ in range(data.draw(st.integers(0, SEQS))):
            self.add_one(data, data.draw(st.integers(0, 8)), LENGTH)

    def some_pages(self, data: Any, tokens: int) -> list[list[int]]:
        """Enough pages for so many tokens, or one too few; some of them null, some past 32 bits of slots."""
        drawn = random.Random(data.draw(st.integers(0, 999)))
        pages = []
        for group, size in enumerate(self.sizes):
            wanted = ENCODER if group in self.cross else tokens
            count = max(-(-wanted // size) - (drawn.random() < 0.03), 0)
            blocks = [
                drawn.choice([0, drawn.randrange(1, 100), drawn.randrange(2**31)]) for _ in range(count)
            ]
            # No request has a block twice, but for the null block.
            pages.append([block if block not in blocks[:at] else 0 for at, block in enumerate(blocks)])
        return pages

    @precondition(lambda self: len(self.requests) < SEQS)
    @rule(data=st.data(), computed=st.integers(0, 8), tokens=st.integers(0, LENGTH))
    def add(self, data: Any, computed: int, tokens: int) -> None:
        self.add_one(data, computed, tokens)

    def add_one(self, data: Any, computed: int, tokens: int) -> None:
        self.names += 1
        request = Request(f"r{self.names}", self.some_pages(data, tokens), computed)
        if self.cross:
            request.encoder_len = data.draw(st.integers(0, ENCODER))
        cuts = data.draw(st.lists(st.integers(0, LENGTH), max_size=4, unique=True).map(sorted))
        request.items = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        index = self.builder.add_request(
            request.name, request.pages, computed, request.encoder_len, {"image": request.items}
        )
        assert index == len(self.requests)
        request.pages = [list(pages) for pages in request.pages]
        request.served = computed if any(0 in pages for pages in request.pages) else 0
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def append(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.requests))
        width = self.builder._requests.tables.shape[2]
        more = [
            data.draw(
                st.lists(
                    st.integers(1, 99).filter(lambda block, pages=pages: block not in pages),
                    max_size=min(2, width - len(pages)),
                    unique=True,
                )
            )
            for pages in request.pages
        ]
        self.builder.append_blocks(request.name, more)
        for pages, new in zip(request.pages, more, strict=True):
            pages += new

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), group=st.integers(0, 3))
    def free(self, data: Any, group: int) -> None:
        group %= len(self.sizes)
        request = data.draw(st.sampled_from(self.requests))
        if group not in self.cross:
            most = min(request.computed // self.sizes[group], len(request.pages[group]))
            count = data.draw(st.integers(0, most))
            self.builder.free_blocks(request.name, group, count)
            if any(request.pages[group][:count]):
                request.served = request.computed
            request.pages[group][:count] = [0] * count

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.builder.remove_request(self.requests[index].name)
        last = self.requests.pop()
        if index < len(self.requests):
            self.requests[index] = last

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def swap(self, data: Any) -> None:
        places = st.integers(0, len(self.requests) - 1)
        i, j = data.draw(places), data.draw(places)
        self.builder.swap_states(i, j)
        self.requests[i], self.requests[j] = self.requests[j], self.requests[i]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), most=st.sampled_from([1, 3, 8, 30]))
    def step(self, data: Any, most: int) -> None:
        counts = [data.draw(st.integers(most == 1, most)) for _ in self.requests]
        given = dict(zip((r.name for r in self.requests), counts, strict=True))
        if not self.fits(counts):
            with pytest.raises(BatchError):
                self.builder.step(given if data.draw(st.booleans()) else counts)
            return
        batch = self.builder.step(given if data.draw(st.booleans()) else counts)
        self.check(batch, counts)
        for request, count in zip(self.requests, counts, strict=True):
            request.scheduled = count
        self.stepped = [r.name for r in self.requests]

    def fits(self, counts: list[int]) -> bool:
        if sum(counts) > TOKENS:
            return False
        for request, count in zip(self.requests, counts, strict=True):
            length = request.computed + count
            held = [len(pages) * size for pages, size in zip(request.pages, self.sizes, strict=True)]
            if length > LENGTH:
                return False
            for group, tokens in enumerate(held):
                encoder = request.encoder_len if count else 0
                if tokens < (encoder if group in self.cross else length):
                    return False
        return True

    def check(self, batch: StepBatch, counts: list[int]) -> None:
        common, starts = batch.common, [0]
        for count in counts:
            starts.append(starts[-1] + count)
        lengths = [r.computed + count for r, count in zip(self.requests, counts, strict=True)]
        assert batch.req_ids == tuple(r.name for r in self.requests)
        if self.on_device:
            check_tables(self.builder, batch.block_tables)
        assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == starts
        assert common.seq_lens.tolist() == common.seq_lens_host.tolist() == lengths
        assert common.num_actual_tokens == starts[-1]
        assert common.max_query_len == max(counts, default=0)
        assert common.max_seq_len == max(lengths, default=0)
        for group, size in enumerate(self.sizes):
            table, slots = batch.of_group(group)
            expected = []
            for request, count in zip(self.requests, counts, strict=True):
                positions = range(request.computed, request.computed + count)
                if group in self.cross:
                    new = count and not request.encoder_written
                    positions = range(request.encoder_len if new else 0)
                expected += [request.slot(group, p, size) for p in positions]
            assert slots.tolist() == expected
            for row, request in enumerate(self.requests):
                assert table[row, : len(request.pages[group])].tolist() == request.pages[group]
        self.check_placeholders(batch, counts, starts)

    def check_placeholders(self, batch: StepBatch, counts: list[int], starts: list[int]) -> None:
        tokens, rows, base = [], [], 0
        for request, count, start in zip(self.requests, counts, starts, strict=False):
            for offset, length in request.items:
                seen = [
                    p
                    for p in range(request.computed, request.computed + count)
                    if offset <= p < offset + length
                ]
                tokens += [start + p - request.computed for p in seen]
                rows += [base + p - offset for p in seen]
                base += length if seen else 0
        found = batch.placeholders.get("image")
        assert (found is None) == (not tokens)
        if found is not None:
            assert found.token_indices.tolist() == tokens
            assert found.embedding_indices.tolist() == rows

    @rule(data=st.data(), partly=st.booleans())
    def finish(self, data: Any, partly: bool) -> None:
        if self.stepped is None:
            with pytest.raises(BatchError):
                self.builder.finish_step()
            return
        counts = [data.draw(st.integers(0, r.scheduled)) if partly else r.scheduled for r in self.requests]
        names = [r.name for r in self.requests]
        if partly:
            by_place = names == self.stepped and data.draw(st.booleans())
            self.builder.finish_step(counts if by_place else dict(zip(names, counts, strict=True)))
        else:
            self.builder.finish_step()
        for request, count in zip(self.requests, counts, strict=True):
            request.computed += count
            request.encoder_written |= request.scheduled > 0
            request.scheduled = 0
        self.stepped = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def rollback(self, data: Any) -> None:
        counts = [data.draw(st.integers(0, r.computed)) for r in self.requests]
        bad = any(
            count and r.computed - count < r.served for r, count in zip(self.requests, counts, strict=True)
        )
        if self.stepped is not None or bad:
            with pytest.raises(BatchError):
                self.builder.rollback(counts)
            return
        self.builder.rollback(counts)
        for request, count in zip(self.requests, counts, strict=True):
            request.computed -= count

    @invariant()
    def the_order_and_the_computed_tokens_agree(self) -> None:
        assert self.builder.req_ids == [r.name for r in self.requests]
        assert self.builder.num_computed_tokens_cpu.tolist() == [r.computed for r in self.requests]
        assert self.builder.num_reqs == len(self.requests)


def test_the_builder_does_what_the_model_does():
    run_state_machine_as_test(
        StepBatchModel, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.rare
def test_the_builder_does_what_the_model_does_for_long():
    run_state_machine_as_test(
        StepBatchModel, settings=settings(max_examples=1000, stateful_step_count=60, deadline=None)
    )
