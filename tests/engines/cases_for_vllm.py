"""Cases that vLLM's file has for its own backends only, by its comparison: layouts of caches, sinks and scales.

Run beside that file as vllm_harness says; pytest collects it when it is named alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import vllm_harness
from tests.v1.attention import test_attention_backends as theirs
from vllm.config import VllmConfig, set_current_vllm_config

vllm_harness.adapt(theirs)
LAYOUTS = [layout.name for layout in getattr(theirs, "KVCacheLayout", ())]


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def causal(b: object, h: object, q_idx: int, kv_idx: int, *, context_len: int) -> bool:
    return q_idx + context_len >= kv_idx


def compare(batch: str, **options: object) -> None:
    model = "Qwen/Qwen3-0.6B"
    theirs._test_backend_correctness(
        theirs.BATCH_SPECS[batch], model, theirs.BACKENDS_TO_TEST, causal, **options
    )


@pytest.mark.parametrize("batch", ["small_decode", "mixed_small"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_each_layout_of_the_cache(layout: str, batch: str, dtype: str) -> None:
    compare(batch, layout=theirs.KVCacheLayout[layout], kv_cache_dtype=dtype)


@pytest.mark.skipif(not LAYOUTS, reason="this version's comparison has no sinks")
@pytest.mark.parametrize("batch", ["small_decode", "small_prefill", "mixed_small"])
def test_sinks(batch: str) -> None:
    compare(batch, use_sinks=True)
