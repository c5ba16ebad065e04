"""A step puts its requests in the order that its builders need, so that each token is served as planned."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fake_backends import backend, offered, with_impl
from hypothesis import given, settings
from hypothesis import strategies as st
from model_layers import FULL, SLIDING, model
from served_model import ServedModel

from attnplug import Phase, plan
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatchBuilder

LONGEST = 64


def builder(thresholds: tuple[int, ...] = (), **changes: Any) -> StepBatchBuilder:
    sizes: dict[str, Any] = {
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "max_model_len": LONGEST,
        "block_sizes": [4, 8],
    }
    return StepBatchBuilder(**sizes | changes, reorder_batch_thresholds=thresholds)


requests = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=12)
"""Computed and scheduled tokens of each request."""
thresholds = st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple)


def filled(made: StepBatchBuilder, asked: list[tuple[int, int]]) -> StepBatchBuilder:
    page = 1
    for number, (computed, _) in enumerate(asked):
        blocks = [[*range(page, page + 16)], [*range(page, page + 8)]]
        made.add_request(f"r{number}", blocks, computed)
        page += 16
    return made


@given(requests, thresholds)
def test_short_queries_come_first_as_every_threshold_has_it(
    asked: list[tuple[int, int]], limits: tuple[int, ...]
) -> None:
    batch = filled(builder(limits), asked).step([count for _, count in asked])
    lengths = batch.common.query_start_loc_cpu.diff().numpy()
    for limit in limits:
        is_long = lengths > limit
        assert (np.sort(is_long) == is_long).all()
    rest = [int(name[1:]) for name, count in zip(batch.req_ids, lengths, strict=True) if count > max(limits)]
    is_new = [asked[number][0] == 0 for number in rest]
    assert is_new == sorted(is_new)


@given(requests, thresholds)
def test_every_request_keeps_its_lengths_pages_and_slots(
    asked: list[tuple[int, int]], limits: tuple[int, ...]
) -> None:
    counts = [count for _, count in asked]
    made, plain = filled(builder(limits), asked), filled(builder(), asked)
    batch, given_order = made.step(counts), plain.step(counts)
    place = {name: row for row, name in enumerate(given_order.req_ids)}
    starts, plain_starts = (each.common.query_start_loc_cpu.tolist() for each in (batch, given_order))
    for row, name in enumerate(batch.req_ids):
        old = place[name]
        assert batch.common.seq_lens[row] == given_order.common.seq_lens[old]
        for group in range(2):
            (table, slots), (plain_table, plain_slots) = batch.of_group(group), given_order.of_group(group)
            assert torch.equal(table[row], plain_table[old])
            mine = slots[starts[row] : starts[row + 1]]
            assert torch.equal(mine, plain_slots[plain_starts[old] : plain_starts[old + 1]])
    made.finish_step()
    plain.finish_step()
    computed = dict(zip(made.req_ids, made.num_computed_tokens_cpu.tolist(), strict=True))
    assert computed == dict(zip(plain.req_ids, plain.num_computed_tokens_cpu.tolist(), strict=True))
    for name in plain.req_ids:  # what is removed afterwards is what was meant
        made.remove_request(name)
    assert made.num_reqs == 0


@given(requests, thresholds)
def test_as_few_requests_move_as_can_and_the_order_before_is_kept(
    asked: list[tuple[int, int]], limits: tuple[int, ...]
) -> None:
    batch = filled(builder(limits), asked).step([count for _, count in asked])
    ranks = [
        sum(count > limit for limit in set(limits)) + (count > max(limits) and computed == 0)
        for computed, count in asked
    ]
    misplaced = sum(rank != wanted for rank, wanted in zip(ranks, sorted(ranks), strict=True))
    if batch.order is None:
        assert misplaced == 0
        assert batch.req_ids == tuple(f"r{number}" for number in range(len(asked)))
    else:
        assert batch.req_ids == tuple(f"r{number}" for number in batch.order)
        assert sum(number != row for row, number in enumerate(batch.order)) == misplaced
    # Each token carries the number of its request: in the order before, these ascend.
    owners = torch.tensor([int(name[1:]) for name in batch.req_ids])
    rows = torch.repeat_interleave(owners, batch.common.query_start_loc_cpu.diff())
    assert batch.in_former_order(rows[:, None]).flatten().tolist() == sorted(rows.tolist())


def test_without_thresholds_requests_keep_their_order() -> None:
    made = filled(builder(), [(0, 9), (5, 1)])
    batch = made.step([9, 1])
    assert (batch.req_ids, batch.order) == (("r0", "r1"), None)


def test_a_step_that_is_refused_moves_nothing() -> None:
    made = filled(builder((1,)), [(0, 9), (5, 1)])
    with pytest.raises(BatchError, match="max_model_len"):
        made.step([LONGEST + 1, 1])
    assert made.req_ids == ["r0", "r1"]


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(BatchError, match=r"reorder_batch_thresholds=\(0, 1\) must be"):
        builder((1, 0))


# Who serves which tokens


class Recorded(TorchImpl):
    """TORCH's impl, which records the lengths of the queries that it served."""

    served: ClassVar[list[int]]

    def attend(self, *args: Any, **more: Any) -> torch.Tensor:
        self.served += args[5].query_lens.tolist()
        return super().attend(*args, **more)


def threshold_builder(threshold: int) -> type[TorchMetadataBuilder]:
    class Builder(TorchMetadataBuilder):
        reorder_batch_threshold = threshold

    return Builder


def decoder(name: str, threshold: int) -> tuple[type[Any], list[int]]:
    """A backend for decodes of up to `threshold` tokens, and the lengths of the queries that it serves."""

    class Decodes(Recorded):
        served: ClassVar[list[int]] = []

    parts = {**with_impl(Decodes), "get_builder_cls": lambda: threshold_builder(threshold)}
    return backend(name, 10, supported_phases=(Phase.DECODE,), **parts), Decodes.served


# By rules, the backends of the decodes of the two layers: the first is full, the second slides.
RULES = {
    "decode=ACME": ("ACME", "ACME"),
    "TORCH,decode=ACME": ("ACME", "ACME"),
    "TORCH+ACME": ("ACME", "ACME"),
    "decode=ACME,prefill=TORCH,*.1=TORCH": ("ACME", "TORCH"),
    "sliding=TORCH,decode=OTHER": ("OTHER", "TORCH"),
    "full=TORCH+ACME,decode=OTHER": ("ACME", "OTHER"),
    "full=TORCH+OTHER,sliding=TORCH+ACME": ("OTHER", "ACME"),
}


@pytest.mark.parametrize("rules", RULES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_each_token_is_served_by_the_backend_that_the_plan_names(rules: str, data: st.DataObject) -> None:
    thresholds = {name: data.draw(st.integers(1, 8)) for name in ("ACME", "OTHER")}
    made = {name: decoder(name, threshold) for name, threshold in thresholds.items()}
    with offered(*(cls for cls, _ in made.values())):
        planned = plan(model([FULL, SLIDING]), "cpu", num_blocks=128, backend=rules)
        config = BuilderConfig(max_num_seqs=8, max_num_batched_tokens=256)
        served = ServedModel(planned.specs, planned=planned, config=config)
    assert [each[Phase.DECODE] for each in planned.members.values()] == [*RULES[rules]]
    names = [f"r{number}" for number in range(data.draw(st.integers(2, 5)))]
    for name in names:
        served.add(name)
    for _ in range(3):
        counts = {name: data.draw(st.sampled_from([1, 1, 2, 3, 4, 6, 9, 11])) for name in names}
        for _, lengths in made.values():
            lengths.clear()
        served.step(**counts)  # each layer of it is compared with the oracle
        for name, (_, lengths) in made.items():
            decodes = [count for count in counts.values() if count <= thresholds[name]]
            assert sorted(lengths) == sorted(RULES[rules].count(name) * decodes)


def test_a_batch_that_hides_decodes_behind_prefills_is_refused() -> None:
    acme = backend("ACME", 10, supported_phases=(Phase.DECODE,))
    with offered(acme):
        planned = plan(model([FULL]), "cpu", num_blocks=32, backend="decode=ACME")
        served = ServedModel(planned.specs, planned=planned)
    made = builder(block_sizes=[planned.decisions["layers.0"].block_size], max_num_seqs=4)
    made.add_request("long", [[1, 2, 3, 4]])
    made.add_request("short", [[5, 6, 7, 8]], 5)
    batch = made.step([9, 1])
    with pytest.raises(BatchError, match="step_batch_builder"):
        served.runtime.begin_step(batch)
