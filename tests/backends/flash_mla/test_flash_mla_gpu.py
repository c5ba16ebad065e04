"""FLASH_MLA decodes latents on a Hopper GPU, by FlashMLA itself.

The order of a first run: `test_numbers` tries heads, query lengths and both storages, and requests without keys;
`test_outputs_are_complete_before_the_next_kernel` looks for a race; `test_chosen_latents` tries the sparse kernel; `test_conformance` is the kit, with captures of graphs. Then
`python benchmarks/mla.py --parts decode --only TRITON FLASH_MLA FlashMLA` compares with the library called directly,
and `get_priority` of FlashMLABackend gets the measured rank.
"""

from __future__ import annotations

import types
from inspect import signature
from typing import Any

import pytest
import torch
from fake_flash_mla import make_flash_mla
from flash_mla_on_cpu import layer

from attnplug.backends.flash_mla import FlashMLABackend
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, MLADims, SparseSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.ops.storage import typed_view
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.testing import paged_batch, parametrize_with_checks, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference


def lacking() -> str:
    missing = ", ".join(map(str, missing_requirements(FlashMLABackend.requires)))
    if not missing and torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return "FlashMLA's kernels are for compute capability 9.0"
    return missing


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(lacking()), reason=lacking()),
    # What the library warns of is none of attnplug's warnings.
    pytest.mark.filterwarnings("default", "error:::attnplug"),
]

BOTH: Any = FlashMLABackend.with_prefill(TorchBackend)
NO_ROPE = MLADims(
    q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=0, v_head_dim=128
)


def test_the_stand_in_takes_what_the_library_takes() -> None:
    real = pytest.importorskip("flash_mla")
    for name, function in vars(make_flash_mla()).items():
        if callable(function) and not name.startswith("_"):
            found = [(each.name, each.default) for each in signature(getattr(real, name)).parameters.values()]
            assert found == [(each.name, each.default) for each in signature(function).parameters.values()]


@parametrize_with_checks(FlashMLABackend)
def test_conformance(check):
    check()


@pytest.mark.parametrize("heads", [1, 4, 12, 16, 20, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "stored"), [("float16", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8_e4m3")]
)
@pytest.mark.parametrize("new", [[1] * 4, [4] * 4, [8, 8, 8, 3]], ids=["single", "uniform", "not-uniform"])
def test_numbers(heads: int, dtype: str, stored: str, new: list[int]) -> None:
    spec = layer(heads, dtype=dtype, kv_cache_dtype=stored, needs_lse=True)
    given = {"block_size": 64, "padding": 2, "k_scale": 0.7, "device": "cuda", "backend": BOTH}
    # The last but one has no keys, and the one before fewer than some of its queries see.
    batch = paged_batch(spec, new, [4000, 2, 0, 65], **given)
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(("requests", "keys"), [(1, 40), (8, 64), (300, 64), (300, 640)])
def test_outputs_are_complete_before_the_next_kernel(requests: int, keys: int, stored: str) -> None:
    # FlashMLA's second kernel may start before the first one ends, and does nothing for requests that are not split.
    spec = layer(128, kv_cache_dtype=stored)
    batch = paged_batch(spec, [1] * requests, [keys] * requests, block_size=64, device="cuda", backend=BOTH)
    impl = BOTH.get_impl_cls().from_spec(spec, backend=BOTH, layer_name="0", tensors=batch.tensors)
    config = BuilderConfig(layers={"0": types.SimpleNamespace(impl=impl)}, max_num_seqs=requests)
    cache: Any = kv_cache_spec_for(spec, 64)
    builder = BOTH.get_builder_cls()(cache, ["0"], config, torch.device("cuda"))
    step = builder.build(0, batch.common).decode
    # The pages of a batch lack the new tokens.
    pages = torch.randn(batch.kv_cache.shape, device="cuda").to(typed_view(batch.kv_cache, spec).dtype)
    for _ in range(200):
        packed = torch.randn(requests, 128, 576, dtype=torch.bfloat16, device="cuda")
        output, _ = impl.decoded(packed[..., :512], packed[..., 512:], pages, step, False)
        read = output.clone()
        torch.cuda.synchronize()
        assert torch.equal(read, output)


def test_latents_without_a_rope_part() -> None:
    spec = layer(16, mla=NO_ROPE, head_size=512, needs_lse=True)
    batch = paged_batch(spec, [1, 1, 1], [4000, 9, 65], block_size=64, device="cuda")
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(
    "sparse",
    [SparseSpec("token_topk", 2048), SparseSpec("token_topk", 24), SparseSpec("block", 8, 16)],
    ids=str,
)
@pytest.mark.parametrize("page", [16, 64])
def test_chosen_latents(heads: int, sparse: SparseSpec, page: int) -> None:
    spec = layer(heads, sparse=sparse, needs_lse=True)
    batch = paged_batch(spec, [1, 3, 200, 2], [4000, 9, 300, 0], block_size=page, padding=2, device="cuda")
    assert difference(batch, Output(*run_batch(FlashMLABackend.for_layer(spec), batch))) is None
