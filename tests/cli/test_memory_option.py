"""`attnplug select --memory`: the arithmetic by hand, and the words around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnplug.cli.output.select_report import left_out
from attnplug.integrations.model_spec import ModelSpec

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
    [("lots", "must be bytes"), ("", "must be bytes"), ("1KiB", "must have room for two blocks")],
)
def test_memory_that_cannot_be_is_bad_usage(run, memory, said):
    outcome = run("select", MODELS / "llama-3.1-8b.json", "--device", "cpu", "--memory", memory)
    assert outcome.code == 2
    assert said in outcome.err


def hybrid(folder, **fields):
    """A small model of a family with states, as a file."""
    path = folder / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    path.write_text(json.dumps({**sizes, "vocab_size": 128, **fields}))
    return path


MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 128}
HYBRIDS = {
    "mamba": (
        {"model_type": "jamba", "num_hidden_layers": 8, "mamba_dt_rank": 4, "mamba_d_state": 4}
        | {"use_mamba_kernels": False, "num_experts": 2},
        7,
    ),
    "linear_attention": (
        {"model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        | {"num_experts": 2, "num_experts_per_tok": 1},
        3,
    ),
    "conv": (
        {"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        2,
    ),
    "mamba beside attention": (
        {"model_type": "falcon_h1", "num_hidden_layers": 2, "head_dim": 16} | MAMBA,
        2,
    ),
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_of_hybrids_are_counted_in_each_layer(run, tmp_path, kind):
    fields, count = HYBRIDS[kind]
    path = hybrid(tmp_path, **fields)
    options = ("select", path, "--device", "cpu", "--memory", "1GiB")
    outcome = run(*options)
    assert outcome.code == 0, outcome.err
    assert "Not counted" not in outcome.out
    found = run(*options, "--json").json
    assert found["not_counted"] == {}
    states = [each["spec"]["state"] for each in found["decisions"]]
    # Each mixer has a short convolution.
    assert sum(state is not None and state["rule"] == "conv" for state in states) == count


def test_parts_that_keep_no_state_are_not_named():
    others = {"model.layers.1.mamba": "mamba", "model.layers.3": "moe", "audio_tower.layers.0.conv": "conv"}
    others |= {
        "vision_tower": "vision encoder, not read: its conv",
        "model.layers.2.linear_attn": "linear_attention",
    }
    model = ModelSpec(layers={}, other_layers=others, kv_sharing={}, model_type="x", name="X")
    assert left_out(model) == {"mamba": 1, "linear_attention": 1}


def test_a_model_without_states_names_none(run):
    outcome = run("select", MODELS / "gemma-2-9b.json", "--device", "cpu", "--memory", "8GiB")
    assert "Not counted" not in outcome.out


@pytest.mark.parametrize(
    ("model", "options", "each", "share"),
    [
        ("deepseek-v3.2", (), 2 * 128, "22%"),
        ("deepseek-v3.2", ("--tp", "8"), 2 * 128, "22%"),
        ("deepseek-v3.2", ("--kv-cache-dtype", "fp8"), 128 + 4, "23%"),
        ("deepseek-v3.2", ("--dtype", "float32"), 4 * 128, "22%"),
    ],
)
def test_index_keys_of_sparse_layers_are_part_of_each_block(run, model, options, each, share):
    asked = ("select", MODELS / f"{model}.json", "--device", "cpu", "--memory", "80GiB", *options)
    found = run(*asked, "--json").json["budget"]
    (group,) = found["groups"]
    keys = 61 * group["block_size"] * each
    assert found["index_keys"] == keys
    assert found["bytes_per_block"] == 61 * group["page_size_bytes"] + keys
    assert found["num_blocks"] == 80 * 2**30 // found["bytes_per_block"]
    assert (
        f"Index keys of 61 sparse layers: {keys:,} bytes of each block, {share} of its pages."
        in run(*asked).out
    )


def test_the_full_reader_finds_the_index_keys_too(run, tmp_path):
    data = json.loads((MODELS / "deepseek-v3.2.json").read_text())
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
    small |= {
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    }
    small |= {
        "index_head_dim": 40,
        "index_n_heads": 2,
        "index_topk": 16,
        "vocab_size": 128,
        "n_routed_experts": 8,
    }
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**data, **small, "a_field_that_no_rule_knows": 1, "moe_intermediate_size": 16})
    )
    found = run("select", path, "--device", "cpu", "--memory", "1GiB", "--json").json["budget"]
    assert found["index_keys"] == 3 * found["groups"][0]["block_size"] * 2 * 40


def test_shared_blocks_and_the_memory_of_steps_that_share_are_said(run):
    asked = ("--device", "cpu", "--memory", "80GiB", "--dtype", "float32")
    said = " ".join(run("select", MODELS / "qwen3-8b.json", *asked).out.split())
    # An output of 32 heads of 128 float32 numbers, and an LSE for each head.
    more = f"{32 * (128 * 4 + 4):,} bytes more for each new token and shared prefix."
    assert f"Blocks that requests share are stored once. Steps that read them together take {more}" in said
    latent = run("select", MODELS / "deepseek-v3.json", *asked).out
    assert "Blocks that requests share" not in latent, "latents have no pieces yet"
