"""What FLASH_MLA declares, refuses with a reason, and where it ranks."""

from __future__ import annotations

import types
from typing import Any

import pytest
from fake_flash_mla import make_flash_mla
from flash_mla_on_cpu import layer

import attnplug.backends.flash_mla.library as adapter
from attnplug.backends.flash_mla import FlashMLABackend
from attnplug.backends.flash_mla.library import library
from attnplug.backends.flashinfer.latent_backend import FlashInferMLABackend
from attnplug.backends.triton.backend import TritonMLABackend
from attnplug.core import Device, LayerSpec, MLADims, Phase, SparseSpec
from attnplug.core.errors import BackendUnavailableError

HOPPER = Device("cuda", (9, 0))


def reasons(spec: LayerSpec, device: Device = HOPPER) -> list[str]:
    backend = FlashMLABackend.for_layer(spec)
    return [str(each) for each in backend.validate_configuration(spec, device, Phase.DECODE)]


def sparse(topk: int = 2048, **fields: Any) -> LayerSpec:
    return layer(**{"heads": 16, "sparse": SparseSpec("token_topk", topk)} | fields)


NO_ROPE = MLADims(
    q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=0, v_head_dim=128
)


@pytest.mark.parametrize(
    "spec",
    [
        layer(1),
        layer(128, dtype="float16", needs_lse=True),
        layer(20, block_size=64),
        layer(16, mla=NO_ROPE, head_size=512),
        layer(64, kv_cache_dtype="fp8_e4m3"),
        sparse(needs_lse=True),
        sparse(192, block_size=16, heads=128),
        layer(64, sparse=SparseSpec("block", 16, 64)),
        sparse(mla=NO_ROPE, head_size=512),
    ],
    ids=str,
)
def test_layers_that_it_serves(spec: LayerSpec) -> None:
    assert reasons(spec) == []


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (layer(dtype="float32"), "float32"),
        (layer(block_size=16), "block_size"),
        (layer(block_size=96), "block_size"),
        (layer(scale=5e-4), "masks with a finite logit"),
        (layer(kv_cache_dtype="fp8_e5m2"), "fp8_e5m2"),
        (layer(kv_cache_dtype="fp8_ds_mla"), "fp8_ds_mla"),
        (layer(kv_cache_dtype="fp8", dtype="float16"), "outputs over 8-bit latents are bfloat16"),
        (layer(kv_cache_dtype="fp8", mla=NO_ROPE, head_size=512), "512 \\+ 64"),
        (layer(window=(63, 0)), "sliding_window"),
        (layer(logits_soft_cap=30.0), "soft_cap"),
        (layer(has_sinks=True), "sink"),
        (sparse(dtype="float16"), "sparse kernel is for bfloat16"),
        (sparse(kv_cache_dtype="fp8"), "656 bytes"),
        (sparse(heads=129), "num_heads=129 is more than 128"),
    ],
    ids=lambda each: None if isinstance(each, LayerSpec) else each,
)
def test_other_layers_are_refused_with_the_limit(spec: LayerSpec, why: str) -> None:
    found = reasons(spec)
    assert len(found) == 1
    with pytest.raises(ValueError, match=why):
        raise ValueError(found[0])


def test_other_latents_are_refused() -> None:
    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert any(
        "256+64 is not one of 512+64, 512+0" in each for each in reasons(layer(mla=dims, head_size=320))
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_refused(capability: tuple[int, int]) -> None:
    assert reasons(layer(), Device("cuda", capability))


@pytest.mark.parametrize(
    ("spec", "order"),
    [
        (layer(8), "TRITON FLASHINFER FLASH_MLA"),
        (layer(15), "TRITON FLASHINFER FLASH_MLA"),
        (layer(16), "FLASH_MLA TRITON FLASHINFER"),
        (layer(64), "FLASH_MLA TRITON FLASHINFER"),
        (layer(128), "FLASH_MLA TRITON FLASHINFER"),
        # Its queries are rounded.
        (layer(128, kv_cache_dtype="fp8"), "TRITON FLASHINFER FLASH_MLA"),
        (sparse(heads=128), "TRITON FLASHINFER FLASH_MLA"),
    ],
    ids=str,
)
def test_latent_decodes_are_ranked_by_heads(spec: LayerSpec, order: str) -> None:
    backends = (TritonMLABackend, FlashInferMLABackend, FlashMLABackend)
    ranks = {each.get_name(): each.get_priority(spec, HOPPER, Phase.DECODE) for each in backends}
    assert " ".join(sorted(ranks, key=lambda name: -ranks[name])) == order


def test_heads_of_sparse_layers_are_padded_to_those_of_the_kernel() -> None:
    selecting: Any = FlashMLABackend.for_layer(sparse())
    assert [selecting.padded_heads(heads) for heads in (1, 16, 64, 65, 128)] == [64, 64, 64, 128, 128]
    assert [FlashMLABackend.padded_heads(heads) for heads in (1, 16, 100)] == [1, 16, 100]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the backend a module in the place of FlashMLA."""
    library.cache_clear()
    yield lambda module: monkeypatch.setattr(adapter, "import_library", lambda backend: module)
    library.cache_clear()


def test_a_library_that_is_missing_is_named_with_its_remedy() -> None:
    library.cache_clear()
    with pytest.raises(BackendUnavailableError, match="sgl-flash-mla is not installed; pip install"):
        FlashMLABackend.get_impl_cls()


def test_a_library_without_a_function_or_an_argument_is_refused(imported: Any) -> None:
    module = make_flash_mla()
    del module.get_mla_decoding_metadata
    imported(module)
    with pytest.raises(BackendUnavailableError, match="flash_mla has no get_mla_decoding_metadata; pip"):
        library()
    module = make_flash_mla()
    module.flash_mla_sparse_fwd = lambda q, kv, indices, sm_scale, d_v: None  # type: ignore[attr-defined]
    imported(module)
    with pytest.raises(BackendUnavailableError, match="no return_log2_lse, topk_length, use_legacy;"):
        FlashMLABackend.get_builder_cls()


def test_a_library_without_kernels_for_hopper_is_refused(imported: Any) -> None:
    module: types.ModuleType = make_flash_mla()
    module.has_legacy = lambda: False  # type: ignore[attr-defined]
    imported(module)
    with pytest.raises(BackendUnavailableError, match="without its kernels for Hopper"):
        library()


@pytest.mark.parametrize(("heads", "most"), [(16, 4), (32, 4), (48, 8), (64, 8), (128, 4)])
def test_few_requests_are_decoded_by_triton(heads: int, most: int) -> None:
    ranges = TritonMLABackend.get_step_priorities(layer(heads), HOPPER)
    assert [(str(each.steps), each.priority) for each in ranges] == [
        (f"decode requests ..{most}", 125),
        ("draft requests ..2", 125),
    ]
    assert all(
        each.priority > FlashMLABackend.get_priority(layer(64), HOPPER, Phase.DECODE) for each in ranges
    )
    assert TritonMLABackend.get_step_priorities(layer(heads), Device("cuda", (10, 0))) == ()
