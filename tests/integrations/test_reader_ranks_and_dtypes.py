"""What tensor parallelism and the dtypes do to the specs."""

from __future__ import annotations

import copy
import pickle

import pytest

from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config


def only(model):
    (spec,) = set(model.layers.values())
    return spec


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(1, 64, 8), (4, 16, 2), (8, 8, 1), (16, 4, 1), (64, 1, 1)]
)
def test_heads_are_divided_and_few_kv_heads_replicated(ranks, heads, kv_heads, example):
    spec = only(example("llama-3.1-70b", tensor_parallel_size=ranks))

    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (heads, kv_heads, 128)


def test_a_latent_is_on_every_rank(example):
    spec = only(example("deepseek-v3", tensor_parallel_size=16))

    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (8, 1, 576)


def test_ranks_that_do_not_divide_the_heads_are_refused_with_both_numbers(example):
    with pytest.raises(
        ModelConfigError,
        match=r"tensor_parallel_size=5 does not divide the 32 attention heads; use one that does, such as 4",
    ):
        example("llama-3.1-8b", tensor_parallel_size=5)


def test_ranks_that_do_not_divide_the_kv_heads_are_refused_with_both_numbers(small):
    config = small("Llama", num_attention_heads=12, num_key_value_heads=3, hidden_size=192)

    with pytest.raises(ModelConfigError, match=r"tensor_parallel_size=2 and the 3 KV heads"):
        read_config(config, tensor_parallel_size=2)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True])
def test_ranks_must_be_a_positive_integer(ranks, example):
    with pytest.raises(ModelConfigError, match="tensor_parallel_size"):
        example("llama-3.1-8b", tensor_parallel_size=ranks)


def test_the_kv_cache_dtype_is_that_of_layers_with_pages(example):
    layers = example("whisper-large-v3", kv_cache_dtype="fp8").layers.values()

    assert {(str(s.attn_type), s.kv_cache_dtype) for s in layers} == {
        ("encoder", "auto"),
        ("decoder", "fp8"),
        ("encoder_decoder", "fp8"),
    }


def test_an_encoder_alone_keeps_no_cache_to_have_a_dtype(example):
    assert only(example("bert-base-uncased", kv_cache_dtype="fp8")).kv_cache_dtype == "auto"


def test_a_kv_cache_dtype_that_is_no_name_is_refused(example):
    with pytest.raises(ModelConfigError, match="kv_cache_dtype"):
        example("llama-3.1-8b", kv_cache_dtype=8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtype_is_that_of_the_configuration(dtype, small):
    assert only(read_config(small("Llama", dtype=dtype))).dtype == dtype


def test_a_configuration_without_a_dtype_is_read_as_bfloat16(small):
    assert only(read_config(small("Llama"))).dtype == "bfloat16"


def test_a_dtype_that_no_spec_has_is_refused(small):
    with pytest.raises(ModelConfigError, match="dtype=float64: must be float16, bfloat16 or float32"):
        read_config(small("Llama", dtype="float64"))


def test_reading_changes_nothing_of_the_configuration(small):
    config = small("Gemma2", sliding_window=8)
    before = copy.deepcopy(config.to_dict())

    read_config(config)

    assert config.to_dict() == before
    assert config._attn_implementation != "attnplug_reader"


def test_reading_leaves_nothing_registered_with_transformers(small):
    transformers = pytest.importorskip("transformers")
    read_config(small("Llama"))

    assert "attnplug_reader" not in transformers.AttentionInterface()
    assert "attnplug_reader" not in transformers.AttentionMaskInterface()


def test_a_model_spec_cannot_be_changed_and_pickles(small):
    model = read_config(small("Llama"))

    with pytest.raises(TypeError):
        model.layers["x"] = None
    assert pickle.loads(pickle.dumps(model)) == model
