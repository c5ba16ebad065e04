"""The layer that a cell stands for."""

from __future__ import annotations

import pytest

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core import dtypes
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.spec import Phase
from attnplug.matrix.axes import FEATURES, axes_of, phase_of, spec_of
from attnplug.matrix.model import Cell

IMPLIED = {
    "encoder": Feature.DIRECT_KV | Feature.NON_CAUSAL,
    "cross": Feature.NON_CAUSAL,
    "head_scales": Feature.FP8_KV,
    "state_drafts": Feature.STATE,
    "state_checkpoints": Feature.STATE,
}


def cell(feature: str, head_size: int = 128, kv: str = "auto", block_size: int | None = 16) -> Cell:
    layout = None if block_size is None else "NHD"
    return Cell(feature, "prefill", head_size, "bfloat16", kv, block_size, layout)


def natural(feature: str) -> Cell:
    if feature in ("direct_kv", "encoder") or feature.startswith("state"):
        return cell(feature, block_size=None)
    if feature == "mla":
        return cell(feature, 576)
    return cell(feature, kv="fp8_e4m3" if feature in ("fp8_kv", "head_scales") else "auto")


def test_every_dtype_that_a_layer_can_have_is_asked() -> None:
    assert set(axes_of(TorchBackend)["dtype"]) == set(dtypes.DTYPES)


def test_there_is_a_value_for_every_feature() -> None:
    assert list(FEATURES) == ["plain", *(name for flag in Feature for name in flag.names())]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_layer_asks_for_the_feature_of_its_cell_and_what_that_means(feature: str) -> None:
    own = Feature(0) if feature == "plain" else Feature[feature.upper()]
    assert spec_of(natural(feature)).required_features() == own | IMPLIED.get(feature, Feature(0))


def test_a_layer_has_the_sizes_and_dtypes_of_its_cell() -> None:
    spec = spec_of(Cell("sinks", "decode", 80, "float16", "fp8_e5m2", 32, "HND"))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (4, 2, 80)
    assert (spec.dtype, spec.kv_cache_dtype, spec.block_size) == ("float16", "fp8_e5m2", 32)


def test_a_latent_is_shared_by_all_heads() -> None:
    spec = spec_of(cell("mla", 576))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size_v) == (4, 1, 512)
    assert spec.mla is not None
    assert spec.mla.qk_rope_head_dim == 64


def test_sparse_attention_of_a_latent_is_mla_and_of_other_heads_is_not() -> None:
    assert spec_of(cell("sparse", 576)).required_features() == Feature.MLA | Feature.SPARSE
    assert spec_of(cell("sparse", 128)).required_features() == Feature.SPARSE


@pytest.mark.parametrize(
    ("block_size", "chunk"), [(1, 24), (8, 24), (16, 32), (32, 32), (64, 64), (256, 256)]
)
def test_a_chunk_is_a_whole_number_of_pages(block_size: int, chunk: int) -> None:
    assert spec_of(cell("chunked_local", block_size=block_size)).chunk_size == chunk


@pytest.mark.parametrize("head_size", [8, 16, 64, 72, 80, 128, 136, 192, 256])
def test_values_of_another_size_have_64_or_128_elements(head_size: int) -> None:
    size = spec_of(cell("head_size_v", head_size)).head_size_v
    assert size == (64 if 64 < head_size <= 128 else 128)
    assert size != head_size


def test_a_mixed_batch_asks_for_both_phases() -> None:
    assert phase_of(Cell("plain", "mixed", 64, "bfloat16", "auto", 16, "NHD")) is None
    assert phase_of(cell("plain")) is Phase.PREFILL


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (cell("telepathy"), "telepathy.*must be one of plain, sliding_window"),
        (cell("fp8_kv"), "'auto'.*does not go with the feature fp8_kv"),
        (cell("mla", 64), "64.*must be more than 64 with the feature mla"),
    ],
)
def test_a_cell_that_no_layer_can_be_is_an_error(asked: Cell, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec_of(asked)
