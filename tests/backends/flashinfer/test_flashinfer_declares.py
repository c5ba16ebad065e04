"""What FLASHINFER says of itself: its place, its limits, and what it refuses."""

from __future__ import annotations

import pytest

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.flashinfer.options import Options
from attnplug.core import Device, LayerSpec, MultipleOf, Phase, SparseSpec
from attnplug.errors import PolicyError

H200 = Device.parse("sm90")


def layer(**fields: object) -> LayerSpec:
    return LayerSpec(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 128, **fields})  # type: ignore[arg-type]


def codes(device: Device = H200, **fields: object) -> list[str]:
    return [reason.code for reason in FlashInferBackend.validate_configuration(layer(**fields), device)]


def test_it_decodes_before_it_prefills() -> None:
    asked = [
        FlashInferBackend.get_priority(layer(), H200, phase) for phase in (Phase.DECODE, Phase.PREFILL, None)
    ]
    assert asked == [240, 220, 230]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_size": 64, "sliding_window": 128, "has_sinks": True, "needs_lse": True},
        {"head_size": 256, "sliding_window": 4096, "logits_soft_cap": 50.0},
        {"chunk_size": 64, "block_size": 16},
        {"kv_cache_dtype": "fp8_e5m2", "block_size": 1},
        {"attn_type": "encoder_decoder"},
        {"causal": False},
        {"scale": 1e-3},
        {"scale": 1e-4, "logits_soft_cap": 30.0},
    ],
)
def test_what_it_serves(fields: dict[str, object]) -> None:
    assert codes(**fields) == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"head_size": 80}, "head_size"),
        ({"dtype": "float32"}, "dtype"),
        ({"has_alibi": True}, "feature.alibi"),
        ({"direct_kv": True}, "feature.direct_kv"),
        ({"head_size_v": 64}, "feature.head_size_v"),
        ({"causal": False, "window": (8, 8)}, "combination"),
        ({"causal": False, "window": (8, -1)}, "combination"),
        ({"has_sinks": True, "logits_soft_cap": 3.0}, "combination"),
        ({"has_sinks": True, "kv_cache_dtype": "fp8"}, "combination"),
        ({"has_sinks": True, "causal": False}, "combination"),
        ({"scale": 1e-4}, "combination"),
        ({"chunk_size": 64, "block_size": 48}, "block_size"),
        ({"sparse": SparseSpec("token_topk", 2048)}, "sparse"),
    ],
)
def test_what_it_refuses(fields: dict[str, object], code: str) -> None:
    assert code in codes(**fields)


def test_devices_without_the_kernels_are_refused() -> None:
    assert codes(Device.parse("sm75")) == ["compute_capability"]
    assert codes(Device.parse("cpu")) == ["device_type"]
    assert codes(Device.parse("sm80"), kv_cache_dtype="fp8") == ["combination"]
    assert codes(Device.parse("sm80")) == codes(Device.parse("sm100")) == []


def test_a_chunk_begins_at_a_page() -> None:
    assert FlashInferBackend.get_supported_kernel_block_sizes() == (MultipleOf(1),)
    assert FlashInferBackend.get_supported_kernel_block_sizes(layer(chunk_size=12)) == (1, 2, 3, 4, 6, 12)
    assert FlashInferBackend.get_preferred_block_size(layer(chunk_size=8192)) == 16


def test_modules_are_told_apart_by_what_is_compiled_in() -> None:
    key = FlashInferBackend.compile_key
    assert key(layer()) == key(layer(scale=1.0, num_heads=4, causal=False))
    different = [
        {},
        {"head_size": 64},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"sliding_window": 3},
    ]
    different += [{"logits_soft_cap": 3.0}, {"has_sinks": True}]
    assert len({key(layer(**fields)) for fields in different}) == len(different)
    assert key(layer(sliding_window=3)) == key(layer(sliding_window=9))


@pytest.mark.parametrize("given", [{"prefill_backend": "fa4"}, {"workspace_bytes": 0}])
def test_options_that_mean_nothing_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match=next(iter(given))):
        Options(**given)  # type: ignore[arg-type]
