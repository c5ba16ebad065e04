"""The kernels for latents on Hopper have right numbers, and no group of warps waits for ever; emulated on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_emulation import emulated

from attnplug.backends.triton import TritonBackend, latent
from attnplug.backends.triton.launch import Gpu
from attnplug.core import LayerSpec, MLADims, SparseSpec
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference


@pytest.fixture(autouse=True)
def _emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = emulated("latent_wide", "latent_narrow")
    wide = {64: kernels["latent_wide"]}
    by_rows = {16: kernels["latent_narrow"], 32: kernels["latent_narrow"], **wide}

    def serving(impl: Any, queries: torch.Tensor, _: torch.Tensor, cache: torch.Tensor) -> Any:
        return by_rows if cache.element_size() == 2 or queries.dtype == torch.bfloat16 else wide

    monkeypatch.setattr(latent.TritonMLAImpl, "_hopper_kernels", serving)


def layer(heads: int, dtype: str = "bfloat16", rope: int = 32, stored: str = "auto") -> LayerSpec:
    rank = 128 if stored == "auto" else 256
    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=rope, v_head_dim=16
    )
    size = {"num_kv_heads": 1, "head_size": rank + rope, "mla": dims}
    return LayerSpec(num_heads=heads, dtype=dtype, kv_cache_dtype=stored, needs_lse=True, **size)


def expect_right(spec: LayerSpec, new: list[int], tokens: list[int], block_size: int) -> None:
    scales = {"k_scale": 0.5, "v_scale": 0.5} if spec.has_quantized_kv_cache else {}
    batch = paged_batch(spec, new, tokens, block_size=block_size, padding=3, skip_blocks=2, **scales)
    found = Output(*run_batch(TritonBackend, batch))
    assert difference(batch, found) is None


@pytest.mark.parametrize(
    "heads",
    [pytest.param(2, marks=pytest.mark.slow), 20, pytest.param(40, marks=pytest.mark.slow), 96],
    ids="{} heads".format,
)
@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3"])
def test_requests_of_several_shares(heads: int, stored: str) -> None:
    expect_right(layer(heads, stored=stored), [1, 1, 1, 1], [700, 1, 64, 300], 16)


@pytest.mark.parametrize("heads", [3, 24], ids="{} heads".format)
@pytest.mark.parametrize("stored", ["auto", "fp8_e5m2"])
@pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.slow), 64])
def test_drafts_and_requests_without_queries_or_keys(heads: int, stored: str, block_size: int) -> None:
    expect_right(
        layer(heads, "float16" if stored == "auto" else "bfloat16", stored=stored),
        [0, 3, 2, 0, 4, 1],
        [70, 200, 0, 3, 131, 0],
        block_size,
    )


@pytest.mark.parametrize("heads", [4, 64])
def test_latents_without_a_rope_part(heads: int) -> None:
    expect_right(layer(heads, rope=0), [1, 2], [90, 65], 32)


@pytest.mark.parametrize(
    ("heads", "stored"),
    [
        (20, "auto"),
        (40, "fp8_e4m3"),
        pytest.param(20, "fp8_e4m3", marks=pytest.mark.slow),
        pytest.param(40, "auto", marks=pytest.mark.slow),
    ],
)
def test_shares_past_the_chosen_keys(heads: int, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made for more keys than some layers choose: then shares have tiles that nobody loads."""
    monkeypatch.setattr(latent, "gpu_of", lambda device: Gpu(10, 1 << 18))
    spec = layer(heads, stored=stored).replace(sparse=SparseSpec("token_topk", 300))
    backend = TritonBackend.for_layer(spec)
    scales = {"k_scale": 0.5, "v_scale": 0.5} if spec.has_quantized_kv_cache else {}
    batch = paged_batch(spec, [1, 2, 1], [400, 350, 90], block_size=16, backend=backend, **scales)
    chosen = batch.common.selection
    assert chosen is not None
    for row, count in enumerate((10, 300, 0, 65)):
        chosen.positions[row, count:] = -1
        chosen.counts[row] = chosen.counts[row].clamp(max=count)
    assert difference(batch, Output(*run_batch(backend, batch))) is None
