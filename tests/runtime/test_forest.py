"""The prefixes that requests share: which nodes are found, and that each row attends each of its keys once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from attnplug.core.errors import SpecError
from attnplug.core.kv_cache_spec import FullAttentionSpec
from attnplug.runtime.batch.forest import Forest, find_forest, first_seen, may_share, reach_of
from attnplug.runtime.batch.forest_prices import LayerPrices, SharingPrices, prices_of


def shared(readers: int, rows: int, keys: int) -> float:
    return (readers - 1) * keys


def found(
    tables: list[list[int]], computed: list[int], new: list[int] | None = None, size: int = 4, left: int = -1
) -> list[tuple[list[int], int, int]]:
    table, counts = padded(tables), np.array([1] * len(tables) if new is None else new)
    reach = reach_of(np.array(computed), counts, size, left)
    forest = find_forest(table, size, counts, reach, shared)
    nodes = [] if forest is None else forest.nodes
    return sorted((sorted(n.readers.tolist()), n.first, n.last) for n in nodes)


def padded(tables: list[list[int]]) -> np.ndarray:
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    return table


def test_a_stranger_takes_no_prefix_away() -> None:
    assert found([[1, 2, 3], [9, 8, 7], [1, 2, 4]], [9, 9, 9]) == [([0, 2], 0, 2)]


def test_two_prompts_are_two_nodes() -> None:
    assert found([[1, 2], [5, 6], [1, 3], [5, 7]], [5] * 4) == [([0, 2], 0, 1), ([1, 3], 0, 1)]


def test_a_node_within_a_node() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 8, 9]]
    assert found(tables, [13] * 4) == [([0, 1], 2, 3), ([0, 1, 2, 3], 0, 2)]


def test_a_shorter_request_leaves_the_others_to_go_on() -> None:
    assert found([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]], [13, 13, 6]) == [([0, 1], 1, 3), ([0, 1, 2], 0, 1)]


def test_requests_without_computed_tokens_or_without_new_ones_read_nothing() -> None:
    assert found([[1, 2], [1, 3], [1, 4]], [5, 0, 5], [1, 5, 0]) == []
    assert found([[1, 2], [1, 3], [1, 4]], [5, 3, 5]) == [([0, 2], 0, 1)]


def test_the_null_block_is_shared_by_nobody() -> None:
    assert found([[0, 2, 3], [0, 2, 3]], [11, 11]) == []
    assert found([[1, 0, 3], [1, 0, 3]], [11, 11]) == [([0, 1], 0, 1)]


def test_a_window_must_begin_at_the_border_of_a_block() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]]
    # The key 7 before position 12 is in the middle of a block, and 8 before it begins one.
    assert found(tables, [12] * 3, left=7) == []
    assert found(tables, [12] * 3, left=8) == [([0, 1, 2], 1, 3)]
    assert found(tables, [12, 12, 13], left=8) == [([0, 1], 1, 3)]
    assert found(tables, [12, 12, 12], [1, 1, 2], left=8) == [([0, 1], 1, 3)]


def test_a_node_that_does_not_pay_gives_its_keys_to_the_next() -> None:
    table = padded([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7, 8]])
    counts, computed = np.ones(3, dtype=np.int64), np.array([13] * 3)
    pairs = find_forest(table, 4, counts, reach_of(computed, counts, 4), lambda n, rows, keys: keys - 9)
    assert pairs is not None
    assert [(node.readers.tolist(), node.first, node.last) for node in pairs.nodes] == [([0, 1], 0, 3)]
    assert pairs.kept.tolist() == [3, 3, 0]


def test_one_column_says_that_nothing_is_shared() -> None:
    assert not may_share(np.arange(1, 9, dtype=np.int32).reshape(4, 2))
    assert may_share(padded([[1, 2], [3, 4], [1, 5]]))


def random_tables(rng: random.Random) -> tuple[list[list[int]], int, list[int], list[int]]:
    """Requests that branch from a few trees at unequal depths, some without any shared block."""
    size, blocks, stems = rng.choice((1, 2, 4, 8)), iter(range(1, 100_000)), [list[int]()]
    for _ in range(rng.randint(0, 6)):
        stem = rng.choice(stems)
        stems.append(stem[: rng.randint(0, len(stem))] + [next(blocks) for _ in range(rng.randint(1, 30))])
    tables, computed, new = [], [], []
    for _ in range(rng.randint(1, 12)):
        stem, queries = rng.choice(stems), rng.choice((0, 1, 1, 1, 2, 5))
        stem = stem[: rng.randint(0, len(stem))] if rng.random() < 0.3 else stem
        length = len(stem) * size + queries + rng.choice((0, 0, rng.randint(0, 3 * size)))
        tables.append(
            [*stem, *(next(blocks) for _ in range(-(-length // size) - len(stem)))] or [next(blocks)]
        )
        computed.append(length - queries)
        new.append(queries)
    return tables, size, computed, new


@pytest.mark.parametrize("seed", range(150))
def test_each_row_has_each_of_its_keys_once(seed: int) -> None:
    rng = random.Random(seed)
    tables, size, computed, new = random_tables(rng)
    longest = max(a + b for a, b in zip(computed, new, strict=True))
    left = rng.choice((-1, -1, longest, rng.randint(0, longest), size * rng.randint(0, 4)))
    chunk = rng.choice((None, None, size * rng.randint(1, 6)))
    counts, before = np.array(new), np.array(computed)
    reach = reach_of(before, counts, size, left, chunk)
    forest = find_forest(padded(tables), size, counts, reach, shared) or Forest([], reach.first, 0.0)
    for request, (blocks, past, count) in enumerate(zip(tables, computed, new, strict=True)):
        for position in range(past, past + count):
            low = int(first_seen(np.array([position]), left, chunk)[0])
            expected = [(blocks[p // size], p % size) for p in range(low, position + 1)]
            keys = [
                (tables[int(node.readers[0])][column], offset)
                for node in forest.nodes
                if request in node.readers
                for column in range(node.first, node.last)
                for offset in range(size)
            ]
            begin = max(low, int(forest.kept[request]) * size)
            keys += [(blocks[p // size], p % size) for p in range(begin, position + 1)]
            assert sorted(keys) == sorted(expected)


CACHE = FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=128, dtype="bfloat16")
H100 = SharingPrices(bandwidth=2.7e12, reread=0.45, products=3.2e14, calls=6e-5)


@pytest.mark.parametrize(
    ("prompts", "keys", "readers", "own", "pays"),
    [
        (8, 4096, 16, 128, True),
        (8, 4096, 16, 512, True),
        (16, 16384, 8, 1024, True),
        (1, 8192, 64, 256, True),
        (4, 2048, 4, 512, False),
        (2, 4096, 3, 1024, False),
    ],
)
def test_the_model_declines_the_forests_that_lost_on_an_h100(
    prompts: int, keys: int, readers: int, own: int, pays: bool
) -> None:
    prices = LayerPrices.of(H100, 32, CACHE)
    plain = prices.plain(prompts * readers * (keys + own))
    assert prices.pays(prompts * prices.saved(readers, readers, keys), plain) is pays


def test_two_readers_never_pay_and_free_prices_always_do() -> None:
    assert LayerPrices.of(H100, 32, CACHE).saved(2, 2, 1 << 16) < 0
    free = LayerPrices.of(SharingPrices.free(), 32, CACHE)
    assert free.pays(free.saved(2, 2, 1), free.plain(3))


def test_prices_are_numbers_and_a_backend_may_have_none() -> None:
    with pytest.raises(SpecError, match="bandwidth"):
        SharingPrices(bandwidth=0.0, reread=0.5, products=1.0, calls=0.0)
    assert prices_of(torch.device("cpu"), "TORCH") is not None
    assert prices_of(torch.device("cpu"), "FLEX") is None
    assert prices_of(torch.device("meta"), "TORCH") is None


@pytest.mark.parametrize(
    ("prompts", "readers", "keys", "layers", "pays"),
    [
        (8, 16, 4096, 32, True),
        # A plain layer of these rollouts takes 87 us. The host takes half a millisecond more, but for all layers.
        (2, 16, 4096, 36, True),
        (2, 16, 4096, 2, False),
        (4, 4, 2048, 32, False),
        (2, 3, 4096, 32, False),
    ],
)
def test_a_graph_shares_where_the_savings_of_all_layers_pay_for_the_host(
    prompts: int, readers: int, keys: int, layers: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    built_in = prices_of(torch.device("cuda"), "TRITON")
    assert built_in is not None
    prices = LayerPrices.of(built_in, 32, CACHE)
    plain = prices.plain(prompts * readers * (keys + 128))
    saved = prompts * (prices.saved(readers, readers, keys, 16) - readers * prices.merge)
    assert prices.pays(saved - prices.of_graph(layers), plain) is pays
