"""Sparse layers of latent attention by vLLM's own comparison, which has cases for its GPU backends only.

Run beside vLLM's tests as vllm_harness says; pytest collects it when it is named alone.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import vllm_harness
from latent_cases_for_vllm import CHOSEN, one_rank, write_latents
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

# Off a GPU the module of these tests skips itself.
with (
    mock.patch.object(type(current_platform), "is_cuda", return_value=True),
    mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
):
    from tests.v1.attention import test_sparse_mla_backends as theirs

__all__ = ["one_rank"]

BLOCK = 64


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = theirs.create_vllm_config
    folder = vllm_harness.folder("deepseek-ai/DeepSeek-R1")
    monkeypatch.setattr(theirs, "create_vllm_config", lambda **given: made(**given | {"model_name": folder}))
    monkeypatch.setattr(theirs.ops, "concat_and_cache_mla", write_latents)


def compare(name: Any, batch: str, dtype: str = "auto", k_scale: float = 1.0) -> None:
    """vLLM's comparison with its reference in torch: each query has keys of its own, and -1 after them."""
    backend = name.get_class()
    # The test takes sizes that are listed, and no multiples.
    sized = type(backend.__name__, (backend,), {"get_supported_kernel_block_sizes": lambda: [BLOCK]})
    with set_current_vllm_config(VllmConfig()):
        theirs.test_sparse_backend_decode_correctness(
            *(None, None, sized, batch, dtype, 4, BLOCK, None),
            q_scale=1.0,
            k_scale=k_scale,
        )


@pytest.mark.parametrize("name", CHOSEN, ids=lambda name: str(name.name))
@pytest.mark.parametrize("batch", ["small_prefill", "mixed_small", "large_q_pure_prefill"])
def test_latents(name: Any, batch: str) -> None:
    compare(name, batch)


@pytest.mark.parametrize("name", CHOSEN, ids=lambda name: str(name.name))
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_latents_of_8_bits(name: Any, scale: float) -> None:
    compare(name, "mixed_small", "fp8", scale)
