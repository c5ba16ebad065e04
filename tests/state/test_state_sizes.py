"""State layers of eleven published models: their sizes on each rank, and their bytes, against sizes derived by hand.

Layers of one model are alike, so configurations here have one period of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from attnplug.core import LayerSpec
from attnplug.core.state.caches import state_cache_for
from attnplug.integrations.model_spec import ModelSpec
from attnplug.integrations.transformers import read_config

MODELS = Path(__file__).parents[2] / "examples" / "models"
MIB = 2**20
LINEAR, FULL = "linear_attention", "full_attention"
QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR] * 3 + [FULL],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model: its configuration, its state layers, and by ranks (value heads, key heads, channels) of each."""

    config: dict[str, Any] | str
    layers: int
    state: tuple[int, int] | None
    ranks: dict[int, tuple[int, int, int]]
    bytes_of_layer: int
    mib: float


TABLE = {
    "Qwen3-Next-80B": Sizes(
        "qwen3-next-80b",
        36,
        (128, 128),
        {1: (32, 16, 8192), 2: (16, 8, 4096), 8: (4, 2, 1024)},
        2_146_304,
        73.7,
    ),
    "Qwen3.5-27B": Sizes(
        QWEN35,
        48,
        (128, 128),
        {1: (48, 16, 10240), 2: (24, 8, 5120), 8: (6, 2, 1280)},
        3_207_168,
        146.8,
    ),
    "Qwen3.5-397B": Sizes(
        {**QWEN35, "linear_num_value_heads": 64, "num_attention_heads": 32, "num_key_value_heads": 2},
        45,
        (128, 128),
        {1: (64, 16, 12288), 2: (32, 8, 6144), 8: (8, 2, 1536)},
        4_268_032,
        183.2,
    ),
    "Kimi-Linear-48B": Sizes(
        "kimi-linear-48b",
        20,
        (128, 128),
        {1: (32, 32, 12288), 2: (16, 16, 6144), 8: (4, 4, 1536)},
        2_170_880,
        41.4,
    ),
    "Nemotron-3-Nano-30B": Sizes(
        "nemotron-3-nano-30b",
        23,
        (128, 64),
        {1: (64, 8, 6144), 2: (32, 4, 3072), 8: (8, 1, 768)},
        2_134_016,
        46.8,
    ),
    "Nemotron-H-56B": Sizes(
        {
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 8192,
            "intermediate_size": 32768,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 256,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 256,
            "conv_kernel": 4,
        },
        54,
        (256, 64),
        {1: (256, 8, 20480), 2: (128, 4, 10240), 8: (32, 1, 2560)},
        16_900_096,
        870.3,
    ),
    "Granite-4.0-H-Small": Sizes(
        {
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
        36,
        (128, 64),
        # One group, which each rank has whole.
        {1: (128, 1, 8448), 2: (64, 1, 4352), 8: (16, 1, 1280)},
        4_244_992,
        145.7,
    ),
    "Falcon-H1-34B": Sizes(
        {
            "model_type": "falcon_h1",
            "architectures": ["FalconH1ForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 5120,
            "intermediate_size": 21504,
            # The model has 20, which 8 ranks do not divide.
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_hidden_layers": 1,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
        },
        72,
        (256, 128),
        {1: (32, 2, 5120), 2: (16, 1, 2560), 8: (4, 1, 1024)},
        4_225_024,
        290.1,
    ),
    "LFM2-8B-A1B": Sizes(
        {
            "model_type": "lfm2_moe",
            "architectures": ["Lfm2MoeForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 2,
            "layer_types": ["conv", FULL],
            "num_dense_layers": 2,
            "conv_L_cache": 3,
        },
        18,
        None,
        {1: (0, 0, 2048), 2: (0, 0, 1024), 8: (0, 0, 256)},
        8_192,
        0.14,
    ),
    "MiniMax-Text-01": Sizes(
        {
            "model_type": "minimax",
            "architectures": ["MiniMaxForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 2,
            "layer_types": [LINEAR, FULL],
            "num_local_experts": 32,
        },
        70,
        (128, 128),
        {1: (64, 64, 0), 2: (32, 32, 0), 8: (8, 8, 0)},
        4_194_304,
        280.0,
    ),
    "Jamba-1.5-Large": Sizes(
        {
            "model_type": "jamba",
            "architectures": ["JambaForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 8192,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_hidden_layers": 2,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "num_experts": 16,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_dt_rank": 512,
        },
        63,
        (16, 1),
        {1: (16384, 1, 16384), 2: (8192, 1, 8192), 8: (2048, 1, 2048)},
        1_146_880,
        68.9,
    ),
}
CONFIGURED = {"Qwen3-Next-80B", "Kimi-Linear-48B", "Nemotron-3-Nano-30B"}


@functools.cache
def read(name: str, ranks: int) -> ModelSpec:
    config = TABLE[name].config
    if isinstance(config, str):
        return read_config(MODELS / f"{config}.json", tensor_parallel_size=ranks)
    return read_config(transformers.AutoConfig.for_model(**config), tensor_parallel_size=ranks)


def first_of(model: ModelSpec, kind: str) -> LayerSpec | None:
    return next((spec for spec in model.layers.values() if spec.kinds == (kind,)), None)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", TABLE)
def test_sizes_are_those_derived_by_hand(name: str, ranks: int) -> None:
    row, model = TABLE[name], read(name, ranks)
    heads, key_heads, channels = row.ranks[ranks]
    state, conv = first_of(model, "state"), first_of(model, "conv")
    assert (state is None) is (row.state is None)
    assert (conv is None) is (channels == 0)
    if state is not None:
        assert (state.num_heads, state.num_kv_heads) == (heads, key_heads)
        assert (state.head_size, state.head_size_v) == row.state
    if conv is not None:
        assert conv.num_heads == channels
    assert not {*model.other_layers.values()} & {"mamba", LINEAR, "conv"}
    states = {spec for spec in model.layers.values() if spec.state is not None}
    # All layers of a kind are alike.
    assert len(states) == (state is not None) + (conv is not None)


@pytest.mark.parametrize("name", TABLE)
def test_bytes_are_those_of_the_published_sizes(name: str) -> None:
    row, model = TABLE[name], read(name, 1)
    kinds = [first_of(model, kind) for kind in ("state", "conv")]
    caches = [state_cache_for(spec) for spec in kinds if spec is not None]
    found = sum(cache.page_size_bytes for cache in caches if cache is not None)
    assert found == row.bytes_of_layer
    assert row.layers * found / MIB == pytest.approx(row.mib, rel=0.01)
    if name in CONFIGURED:
        specs = [spec for spec in model.layers.values() if spec.state is not None]
        assert len(specs) == row.layers * len(caches)


def test_a_family_of_an_example_is_a_rule() -> None:
    rules = {}
    for name in ("qwen3-next-80b", "kimi-linear-48b", "nemotron-3-nano-30b"):
        found = next(each for each, row in TABLE.items() if row.config == name)
        state = first_of(read(found, 1), "state")
        assert state is not None
        rules[json.loads((MODELS / f"{name}.json").read_text())["model_type"]] = (
            str(state.state),
            state.scale,
        )
    assert rules == {
        "qwen3_next": ("delta, decay per head", 128**-0.5),
        "kimi_linear": ("delta, decay per row", 128**-0.5),
        "nemotron_h": ("linear, decay per head", 1.0),
    }
