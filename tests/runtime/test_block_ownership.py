"""A block is one page of one request, unless requests share tokens that are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.errors import BatchError
from attnplug.runtime import AttentionRuntime, StepBatchBuilder

SPEC = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype="float32")


def builder(**changes: Any) -> StepBatchBuilder:
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "block_sizes": [4],
        "num_blocks": 300,
    }
    return StepBatchBuilder(**sizes | changes)


POOLS = pytest.mark.parametrize("num_blocks", [300, None], ids=["known pool", "unknown pool"])
TWICE: list[Any] = [[1, 1], [5, 2, 5], (7, 8, 9, 7), [0, 3, 0, 3], np.array([2, 1, 2]), [*range(1, 100), 50]]


@POOLS
@pytest.mark.parametrize("blocks", TWICE, ids=lambda blocks: str(list(blocks))[:20])
def test_a_block_twice_in_one_request_is_refused(blocks, num_blocks):
    made = builder(num_blocks=num_blocks)
    twice = max(set(blocks) - {0}, key=list(blocks).count)
    with pytest.raises(
        BatchError, match=rf"block_ids\[0\]={twice} is given to two pages of one request; give each"
    ):
        made.add_request("r", [blocks])
    assert made.req_ids == []
    made.add_request("r", [[299]])
    with pytest.raises(BatchError, match=rf"block_ids\[0\]={twice} is given to two pages"):
        made.append_blocks("r", [blocks])


@POOLS
@pytest.mark.parametrize("more", [[2], [7, 3], [9, 8, 1], list(range(3, 90))], ids=len)
def test_a_block_that_the_request_has_already_is_refused(more, num_blocks):
    made = builder(num_blocks=num_blocks)
    made.add_request("r", [[1, 2, 3]])
    with pytest.raises(BatchError, match=r"block_ids\[0\]=[123] is given to two pages"):
        made.append_blocks("r", [more])
    made.append_blocks("r", [[100]])
    assert made.step(16).common.slot_mapping[-1] == 403


@POOLS
def test_null_blocks_may_repeat_and_so_may_blocks_of_groups_with_pools_of_their_own(num_blocks):
    made = builder(num_blocks=num_blocks, block_sizes=[4, 4])
    made.add_request("r", [[0, 0, 5, 6], [5, 6, 7, 8]], num_computed_tokens=8)
    made.append_blocks("r", [[0, 0], [0, 0]])
    made.add_request("s", [[0, 0, 0], [0, 0, 0]])


def test_a_block_of_another_request_is_refused_where_tokens_would_be_written_to_it():
    made = builder()
    made.add_request("a", [[1, 2, 3]])
    said = r"block_ids\[0\]={} is a block of request a, and this request writes tokens to it; share only"
    for blocks, computed, named in (([1], 0, 1), ([1, 2], 4, 2), ([1, 2, 3], 11, 3), ([9, 1], 4, 1)):
        with pytest.raises(BatchError, match=said.format(named)):
            made.add_request("b", [blocks], computed)
    made.add_request("b", [[1, 2]], 8)
    with pytest.raises(BatchError, match=said.format(3)):
        made.append_blocks("b", [[3]])
    made.append_blocks("b", [[4]])
    # Each of the two has its own new tokens.
    assert made.step({"a": 9, "b": 1}).common.slot_mapping.tolist() == [*range(4, 13), 16]


def test_a_block_is_free_for_others_once_its_request_or_its_window_left_it():
    made = builder()
    made.add_request("a", [[1, 2, 3]], 8)
    made.add_request("b", [[1, 2, 4]], 8)
    made.remove_request("a")
    with pytest.raises(BatchError, match="is a block of request b"):
        made.add_request("c", [[2]])
    made.add_request("c", [[3]])
    made.free_blocks("b", 0, 1)
    made.append_blocks("c", [[1]])
    made.remove_request("b")
    made.append_blocks("c", [[2, 4]])
    assert made.step(16).common.slot_mapping.tolist() == [*range(12, 16), *range(4, 12), *range(16, 20)]


def test_a_rollback_into_a_block_that_another_request_reads_is_refused():
    made = builder()
    made.add_request("a", [[1, 2, 3]], 9)
    made.add_request("b", [[1, 2, 4]], 8)
    made.rollback({"a": 1, "b": 0})
    with pytest.raises(BatchError, match="of request a goes back into block 2, which another request reads"):
        made.rollback({"a": 1, "b": 0})
    made.remove_request("b")
    made.rollback({"a": 1})


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_calls_is_served_as_a_simple_count_of_holders_says(seed):
    drawn = np.random.default_rng(seed)
    made, held = builder(max_num_seqs=5, num_blocks=12), {}
    for number in range(400):
        kind, blocks = drawn.integers(4), drawn.integers(0, 12, drawn.integers(1, 4)).tolist()
        names = sorted(held)
        if kind == 0 and len(names) < 5:
            name, computed = f"r{number}", int(drawn.integers(0, 9))
            own: list[int] = []
            call = lambda: made.add_request(name, [blocks], computed)  # noqa: E731, B023
        elif kind == 1 and names:
            name = names[int(drawn.integers(len(names)))]
            own, computed = held[name]
            call = lambda: made.append_blocks(name, [blocks])  # noqa: E731, B023
        elif names:
            name = names[int(drawn.integers(len(names)))]
            made.remove_request(name)
            del held[name]
            continue
        else:
            continue
        pages = own + blocks
        solid = [block for block in pages if block]
        written = [b for at, b in enumerate(pages) if at >= max(len(own), computed // 4) and b]
        others = {block for other, (theirs, _) in held.items() if other != name for block in theirs}
        if len(set(solid)) < len(solid) or others & set(written):
            with pytest.raises(BatchError, match=r"two pages|is a block of request"):
                call()
        else:
            call()
            held[name] = pages, computed


def test_groups_that_share_one_pool_refuse_a_step_whose_tokens_another_group_wrote_over():
    plan = attnplug.plan({"full": SPEC, "window": SPEC.replace(window=(7, 0))}, "cpu", num_blocks=8)
    runtime = AttentionRuntime(plan, config=BuilderConfig(max_num_seqs=2, max_model_len=64))
    made = runtime.step_batch_builder()
    made.add_request("r", [[1], [2]])
    made.step(3)
    made.finish_step()
    made.add_request("s", [[3], [1]])
    with pytest.raises(
        BatchError, match=r"block_ids\[0\]=1 is given to another KV group too, so computed tokens of"
    ):
        made.step(1)
    made.remove_request("s")
    assert made.step(1).common.seq_lens.tolist() == [4]


def test_each_output_is_right_where_requests_share_a_prefix():
    plan = attnplug.plan({"a": SPEC}, "cpu", backend="TORCH", num_blocks=8)
    runtime = AttentionRuntime(plan, config=BuilderConfig(max_num_seqs=2, max_model_len=64))
    made, size = (
        runtime.step_batch_builder(),
        plan.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
    )

    def run(scheduled: dict[str, int], values: list[float]) -> list[float]:
        runtime.begin_step(made.step(scheduled))
        rows = torch.tensor(values)[:, None, None].expand(-1, 1, 16).contiguous()
        found = runtime.forward("a", torch.zeros_like(rows), torch.zeros_like(rows), rows)
        made.finish_step()
        return found[:, 0, 0].tolist()

    made.add_request("a", [[1, 2]])
    run({"a": size}, [1.0] * size)
    made.add_request("b", [[1, 3]], size)
    first, second = run({"a": 1, "b": 1}, [1.0 + (size + 1), 1.0 - (size + 1)])
    assert first == pytest.approx(2.0)
    assert second == pytest.approx(0.0)
