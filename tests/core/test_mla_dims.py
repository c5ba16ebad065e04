"""MLA's dimensions as configurations state them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnplug.core import MLADims
from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.mla.dims import get_mla_dims

STATED: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DIMS = MLADims(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@pytest.mark.parametrize(
    "config",
    [
        STATED,
        SimpleNamespace(**STATED),
        {"model_type": "kimi_vl", "text_config": STATED},
        SimpleNamespace(text_config=SimpleNamespace(**STATED)),
    ],
)
def test_an_object_or_a_mapping_is_read_and_so_is_its_text_part(config: Any) -> None:
    assert get_mla_dims(config) == DIMS


def test_queries_need_not_be_compressed() -> None:
    assert get_mla_dims({**STATED, "q_lora_rank": None}).q_lora_rank is None
    absent = {name: value for name, value in STATED.items() if name != "q_lora_rank"}
    assert get_mla_dims(SimpleNamespace(**absent)).q_lora_rank is None


def test_a_model_without_latent_attention_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="hf_config of 'llama' has no kv_lora_rank, qk_nope_head_dim"):
        get_mla_dims({"model_type": "llama", "hidden_size": 4096})


def test_a_dimension_that_means_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match=r"mla\.v_head_dim=0 must be an integer of at least 1"):
        get_mla_dims({**STATED, "v_head_dim": 0})
