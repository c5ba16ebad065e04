"""Multimodal placeholders: which row of which embedding goes to which token of a step."""

from __future__ import annotations

import pytest
import torch

from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatchBuilder


def builder() -> StepBatchBuilder:
    return StepBatchBuilder(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, block_sizes=[4])


def pages(first: int) -> list[list[int]]:
    return [list(range(first, first + 8))]


def test_a_prompts_placeholders_get_the_rows_of_its_items_in_order():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(2, 3), (7, 2)]})
    found = made.step(10).placeholders["image"]
    assert found.token_indices.tolist() == [2, 3, 4, 7, 8]
    assert found.embedding_indices.tolist() == [0, 1, 2, 3, 4]
    assert found.items == (("a", 0), ("a", 1))
    assert found.token_indices.dtype == found.embedding_indices.dtype == torch.int64


def test_the_maps_put_each_embedding_where_its_token_is():
    made = builder()
    made.add_request("text", pages(1))
    made.add_request("a", pages(9), placeholders={"image": [(0, 2)], "audio": [(3, 1)]})
    made.add_request("b", pages(17), placeholders={"image": [(1, 2)]})
    maps = made.step([2, 4, 3]).placeholders
    embeddings = {"image": torch.tensor([10.0, 11.0, 20.0, 21.0]), "audio": torch.tensor([50.0])}
    assert maps["image"].items == (("a", 0), ("b", 0))
    assert maps["audio"].items == (("a", 0),)
    hidden = torch.zeros(9)
    for modality, found in maps.items():
        hidden[found.token_indices] = embeddings[modality][found.embedding_indices]
    assert hidden.tolist() == [0, 0, 10, 11, 0, 50, 0, 20, 21]


def test_a_prompt_in_chunks_meets_parts_of_an_item():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(2, 4), (8, 1)]})
    tokens, rows, items = [], [], []
    for count in (1, 3, 4, 3):
        maps = made.step(count).placeholders
        made.finish_step()
        tokens.append(maps["image"].token_indices.tolist() if maps else None)
        rows.append(maps["image"].embedding_indices.tolist() if maps else None)
        items.append(maps["image"].items if maps else None)
    assert tokens == [None, [1, 2], [0, 1], [0]]
    assert rows == [None, [0, 1], [2, 3], [0]]
    assert items == [None, (("a", 0),), (("a", 0),), (("a", 1),)]


def test_an_item_met_in_part_counts_with_all_its_rows():
    made = builder()
    made.add_request("a", pages(1), num_computed_tokens=3, placeholders={"image": [(1, 4)]})
    made.add_request("b", pages(9), placeholders={"image": [(0, 2)]})
    found = made.step([2, 2]).placeholders["image"]
    assert found.token_indices.tolist() == [0, 1, 2, 3]
    assert found.embedding_indices.tolist() == [2, 3, 4, 5]


def test_decodes_past_their_placeholders_have_no_map():
    made = builder()
    made.add_request("a", pages(1), num_computed_tokens=5, placeholders={"image": [(1, 4)]})
    made.add_request("b", pages(9), placeholders={"image": [(0, 2)]})
    assert made.step([1, 0]).placeholders == {}


def test_tokens_that_were_not_accepted_are_placed_again():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(1, 3)]})
    made.step(4)
    made.finish_step([2])
    found = made.step(2).placeholders["image"]
    assert found.token_indices.tolist() == [0, 1]
    assert found.embedding_indices.tolist() == [1, 2]


def test_placeholders_follow_their_request_and_leave_with_it():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(0, 1)]})
    made.add_request("b", pages(9))
    made.swap_states(0, 1)
    assert made.step([2, 1]).placeholders["image"].token_indices.tolist() == [2]
    made.remove_request("a")
    assert made.req_ids == ["b"]
    assert not made._requests.placeholders
    made.add_request("a", pages(1))
    assert made.step([2, 1]).placeholders == {}


def test_a_whole_prompt_of_placeholders_fits():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(0, 16)], "video": [(16, 16)]})
    maps = made.step(32).placeholders
    assert maps["image"].token_indices.tolist() == list(range(16))
    assert maps["video"].token_indices.tolist() == list(range(16, 32))
    assert maps["video"].embedding_indices.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        (
            {"image": [(0, 0)]},
            "placeholders['image'][0]=(0, 0) (offset, length) must be within max_model_len=32",
        ),
        ({"image": [(-1, 2)]}, "placeholders['image'][0]=(-1, 2) (offset, length) must be within"),
        ({"image": [(0, 1), (31, 2)]}, "placeholders['image'][1]=(31, 2) (offset, length) must be within"),
        ({"image": [(4, 2), (1, 2)]}, "placeholders['image'][1]=(1, 2) must come after the item before it"),
        (
            {"image": [(1, 3), (3, 2)]},
            "placeholders['image'][1]=(3, 2) overlaps 'image' item 0, which ends at 4",
        ),
        ({"image": [(1, 3)], "audio": [(0, 2)]}, "placeholders['image'][0]=(1, 3) overlaps 'audio' item 0"),
    ],
)
def test_placeholders_that_cannot_be_are_refused_and_add_no_request(ranges, said):
    made = builder()
    with pytest.raises(BatchError) as error:
        made.add_request("a", pages(1), placeholders=ranges)
    assert said in str(error.value)
    assert made.num_reqs == 0
    made.add_request("a", pages(1))
    assert made.step(5).placeholders == {}
