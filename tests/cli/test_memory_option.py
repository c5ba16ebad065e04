"""`attnplug select --memory`: the arithmetic by hand, and the words around it."""

from __future__ import annotations

from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "examples" / "models"


def budget(run, model, memory="80GiB"):
    outcome = run("select", MODELS / f"{model}.json", "--device", "cpu", "--memory", memory, "--json")
    assert outcome.code == 0, outcome.err
    return outcome.json["budget"]


def test_gemma_3_shares_ten_tensors_among_seven_groups(run):
    found = budget(run, "gemma-3-27b-text")
    # A page: 16 tokens x 16 heads x (128 + 128) elements x 2 bytes, in each of 10 tensors.
    page = 16 * 16 * 256 * 2
    assert {group["page_size_bytes"] for group in found["groups"]} == {page}
    assert found["bytes_per_block"] == 10 * page
    assert found["num_blocks"] == 80 * 2**30 // (10 * page)
    kinds = [(group["kind"], len(group["layers"])) for group in found["groups"]]
    assert kinds == [("SlidingWindowSpec", count) for count in (9, 9, 9, 9, 8, 8)] + [
        ("FullAttentionSpec", 10)
    ]
    assert found["padding_layers"] == 4 * 1 + 2 * 2
    # Six sliding groups hold at most ceil(1023 / 16) + 1 = 65 pages each; the full one has the rest.
    assert found["max_tokens"] == (found["num_blocks"] - 1 - 6 * 65) * 16


def test_gpt_oss_shares_twelve_tensors_between_two_groups(run):
    found = budget(run, "gpt-oss-20b")
    page = 16 * 8 * 128 * 2
    assert found["num_blocks"] == 80 * 2**30 // (12 * page)
    assert [len(group["layers"]) for group in found["groups"]] == [12, 12]
    assert found["padding_layers"] == 0
    assert found["max_tokens"] == (found["num_blocks"] - 1 - (128 // 16 + 1)) * 16


def test_llama_4_keeps_a_chunk_in_three_groups(run):
    found = budget(run, "llama-4-scout-text", "8GiB")
    page = 16 * 8 * 256 * 2
    assert found["num_blocks"] == 8 * 2**30 // (12 * page)
    assert [len(group["layers"]) for group in found["groups"]] == [12, 12, 12, 12]
    assert found["max_tokens"] == (found["num_blocks"] - 1 - 3 * (8192 // 16)) * 16


def test_the_budget_is_printed_within_80_columns(run):
    outcome = run("select", MODELS / "gemma-3-27b-text.json", "--device", "cpu", "--memory", "80GiB")
    assert "65,536 blocks of 1,310,720 bytes" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("model", "backend", "said"),
    [
        ("deepseek-v3", "FLASH_ATTN_2", "a layer has no backend"),
        ("bert-base-uncased", "TORCH", "no layer keeps a KV cache"),
    ],
)
def test_where_there_is_no_budget_it_says_why(run, model, backend, said):
    options = ("--device", "cpu", "--memory", "1GiB", "--backend", backend)
    assert said in run("select", MODELS / f"{model}.json", *options).out


@pytest.mark.parametrize(
    ("memory", "said"),
    [("lots", "must be bytes"), ("", "must be bytes"), ("1KiB", "must hold at least two blocks")],
)
def test_memory_that_cannot_be_is_bad_usage(run, memory, said):
    outcome = run("select", MODELS / "llama-3.1-8b.json", "--device", "cpu", "--memory", memory)
    assert outcome.code == 2
    assert said in outcome.err
