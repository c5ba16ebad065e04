"""The configurations of examples/models, read in full."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from attnplug.core import LayerSpec, MLADims, SparseSpec
from attnplug.testing.conformance.cases.model_sizes import of_models

MODELS = Path(__file__).parents[2] / "examples" / "models"
BF16 = {"dtype": "bfloat16"}


def heads(num_heads: int, num_kv_heads: int, head_size: int) -> dict[str, int]:
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}


def latent_dims(q_lora_rank: int | None, qk_nope_head_dim: int = 128, v_head_dim: int = 128) -> MLADims:
    return MLADims(
        q_lora_rank=q_lora_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=64,
        v_head_dim=v_head_dim,
    )


def yarn_scale(factor: float, mscale: float) -> float:
    """The scale of an expanded head of 192, with the factor for longer contexts squared."""
    wider = 0.1 * mscale * math.log(factor) + 1.0
    return 192**-0.5 * wider * wider


EXPECTED = {
    "llama-3.1-8b": {LayerSpec(**heads(32, 8, 128)): 32},
    "llama-3.1-70b": {LayerSpec(**heads(64, 8, 128)): 80},
    "qwen3-8b": {LayerSpec(**heads(32, 8, 128)): 36},
    "qwen3-30b-a3b": {LayerSpec(**heads(32, 4, 128)): 48},
    "mistral-7b-v0.1": {LayerSpec(**heads(32, 8, 128), window=(4095, 0)): 32},
    "phi-3-mini-4k": {LayerSpec(**heads(32, 32, 96), window=(2046, 0)): 32},
    "gemma-2-9b": {
        LayerSpec(**heads(16, 8, 256), scale=256**-0.5, logits_soft_cap=50.0, window=(4095, 0)): 21,
        LayerSpec(**heads(16, 8, 256), scale=256**-0.5, logits_soft_cap=50.0): 21,
    },
    "gemma-3-27b-text": {
        LayerSpec(**heads(32, 16, 128), scale=168**-0.5, window=(1023, 0)): 52,
        LayerSpec(**heads(32, 16, 128), scale=168**-0.5): 10,
    },
    "gpt-oss-20b": {LayerSpec(**heads(64, 8, 64), has_sinks=True, window=(127, 0)): 12, LayerSpec(**heads(64, 8, 64), has_sinks=True): 12},
    "llama-4-scout-text": {LayerSpec(**heads(40, 8, 128), chunk_size=8192): 36, LayerSpec(**heads(40, 8, 128)): 12},
    "deepseek-v2-lite": {LayerSpec(**heads(16, 1, 576), mla=latent_dims(None), scale=yarn_scale(40, 0.707)): 27},
    "deepseek-v3": {LayerSpec(**heads(128, 1, 576), mla=latent_dims(1536), scale=yarn_scale(40, 1.0)): 61},
    "deepseek-v3.2": {LayerSpec(**heads(128, 1, 576), mla=latent_dims(1536), sparse=SparseSpec("token_topk", 2048), scale=yarn_scale(40, 1.0)): 61},
    "glm-4.7-flash": {LayerSpec(**heads(20, 1, 576), mla=latent_dims(768, qk_nope_head_dim=192, v_head_dim=256), scale=256**-0.5): 47},
    "kimi-k2": {LayerSpec(**heads(64, 1, 576), mla=latent_dims(1536), scale=yarn_scale(32, 1.0)): 61},
    "bloom-7b1": {LayerSpec(**heads(32, 32, 128), dtype="float16", scale=1 / 128**0.5, has_alibi=True): 30},
    "bert-base-uncased": {LayerSpec(**heads(12, 12, 64), dtype="float32", attn_type="encoder_only", direct_kv=True): 12},
    "whisper-large-v3": {
        LayerSpec(**heads(20, 20, 64), dtype="float16", attn_type="encoder", direct_kv=True): 32,
        LayerSpec(**heads(20, 20, 64), dtype="float16"): 32,
        LayerSpec(**heads(20, 20, 64), dtype="float16", attn_type="encoder_decoder"): 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_every_layer_of_the_example_is_read(name, example):
    model = example(name)

    assert Counter(model.layers.values()) == EXPECTED[name]
    assert not model.other_layers
    assert not model.kv_sharing


@pytest.mark.parametrize("name", EXPECTED)
def test_the_conformance_kit_tries_the_sizes_of_the_example(name):
    for spec in EXPECTED[name]:
        sizes = {
            "heads": (spec.num_heads, spec.num_kv_heads),
            "chunk_size": spec.chunk_size,
            "sparse": spec.sparse,
        }
        sizes |= {"window": spec.window} if spec.is_windowed else {}
        if spec.mla is None:
            sizes["head_size"] = spec.head_size
        else:
            sizes["mla"] = dataclasses.replace(spec.mla, q_lora_rank=None)
        for axis, size in sizes.items():
            assert size is None or size in of_models(axis)


def test_the_scale_of_multi_head_latent_attention_counts_both_parts_of_a_query_and_yarn(example):
    (scale,) = {spec.scale for spec in example("deepseek-v3").layers.values()}

    assert scale == 192**-0.5 * (0.1 * math.log(40) + 1.0) ** 2


FACTS = {
    "bert-base-uncased": ("bert", 512, None, None, 0.125),
    "bloom-7b1": ("bloom", 2048, None, None, 0.0883883),
    "deepseek-v2-lite": ("deepseek_v2", 163840, "yarn", 10000, 0.1147214),
    "deepseek-v3": ("deepseek_v3", 163840, "yarn", 10000, 0.1352338),
    "deepseek-v3.2": ("deepseek_v32", 163840, "yarn", 10000, 0.1352338),
    "gemma-2-9b": ("gemma2", 8192, None, 10000, 0.0625),
    "gemma-3-27b-text": ("gemma3_text", 131072, "linear", 1000000, 0.0771517),
    "glm-4.7-flash": ("glm4_moe_lite", 202752, None, 1000000, 0.0625),
    "gpt-oss-20b": ("gpt_oss", 131072, "yarn", 150000, 0.125),
    "kimi-k2": ("kimi_k2", 131072, "yarn", 50000, 0.1308608),
    "kimi-linear-48b": ("kimi_linear", 1048576, None, 10000, 0.0721688),
    "llama-3.1-70b": ("llama", 131072, "llama3", 500000, 0.0883883),
    "llama-3.1-8b": ("llama", 131072, "llama3", 500000, 0.0883883),
    "llama-4-scout-text": ("llama4_text", 10485760, "llama3", 500000, 0.0883883),
    "mistral-7b-v0.1": ("mistral", 32768, None, 10000, 0.0883883),
    "nemotron-3-nano-30b": ("nemotron_h", 262144, None, 10000, 0.0883883),
    "phi-3-mini-4k": ("phi3", 4096, None, 10000, 0.1020621),
    "qwen3-30b-a3b": ("qwen3_moe", 40960, None, 1000000, 0.0883883),
    "qwen3-8b": ("qwen3", 40960, None, 1000000, 0.0883883),
    "qwen3-next-80b": ("qwen3_next", 262144, None, 10000000, 0.0625),
    "whisper-large-v3": ("whisper", 448, None, None, 0.125),
}
"""Facts of the published files: model type, positions, kind and base of the rotary embedding, softmax scale."""


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_an_example_has_the_facts_of_the_published_file(path, example):
    data = json.loads(path.read_text())
    names = ("max_position_embeddings", "max_target_positions", "seq_length", "model_max_length")
    positions = next(data[name] for name in names if name in data)
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    base = data.get("rope_theta", rope.get("rope_theta"))
    model = example(path.stem)
    (scale,) = {round(spec.scale, 7) for spec in model.layers.values() if spec.state is None}

    found = (model.model_type, positions, None if kind == "default" else kind, base, scale)
    assert found == FACTS[path.stem]
    assert data["model_type"] == model.model_type


def test_gemma_3_attends_globally_in_every_sixth_layer(example):
    windowed = [spec.is_windowed for spec in example("gemma-3-27b-text").layers.values()]

    assert windowed == [(index + 1) % 6 != 0 for index in range(62)]


def test_llama_4_attends_globally_in_every_fourth_layer(example):
    chunks = [spec.chunk_size for spec in example("llama-4-scout-text").layers.values()]

    assert chunks == [8192, 8192, 8192, None] * 12


def test_layers_are_named_by_their_module_path_in_order(example):
    assert list(example("llama-3.1-8b").layers)[:2] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]


def test_whisper_has_an_encoder_layer_and_two_decoder_layers_under_names_of_their_own(example):
    names = list(example("whisper-large-v3").layers)

    assert names[0] == "model.encoder.layers.0.self_attn"
    assert names[32:34] == ["model.decoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"]


def test_a_model_says_which_class_it_was_read_from(example):
    model = example("qwen3-30b-a3b")

    assert (model.model_type, model.name) == ("qwen3_moe", "Qwen3MoeForCausalLM")
