"""Cases that vLLM's file has for its own backends only, by its comparison: layouts of caches, sinks and scales.

Run beside that file as vllm_harness says; pytest collects it when it is named alone. ATTNPLUG_HARNESS_GRID=all runs
each batch of that file by tensor-parallel size, dtype and layout; without it they are a few small ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import vllm_harness
from tests.v1.attention import test_attention_backends as theirs
from vllm.config import VllmConfig, set_current_vllm_config

vllm_harness.adapt(theirs)
LAYOUTS = [layout.name for layout in getattr(theirs, "KVCacheLayout", ())]
EVERYTHING = os.environ.get("ATTNPLUG_HARNESS_GRID") == "all"
DECODER = [name for name in theirs.BATCH_SPECS if "encoder" not in name]


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


@pytest.mark.parametrize("batch", DECODER if EVERYTHING else ["small_decode", "mixed_small"])
@pytest.mark.parametrize("ranks", [1, 2, 4] if EVERYTHING else [1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_each_layout_of_the_cache(layout: str, ranks: int, batch: str, dtype: str) -> None:
    chosen = theirs.KVCacheLayout[layout]
    compare(batch, layout=chosen, tensor_parallel_size=ranks, kv_cache_dtype=dtype)


@pytest.mark.skipif(not LAYOUTS, reason="this version's comparison has no sinks")
@pytest.mark.parametrize("batch", DECODER if EVERYTHING else ["small_decode", "small_prefill", "mixed_small"])
def test_sinks(batch: str) -> None:
    compare(batch, use_sinks=True)
