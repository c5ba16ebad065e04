"""What TORCH declares, and what it costs to ask."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnplug.backends import torch_native
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device, Feature, LayerSpec, MLADims, Phase, SparseSpec

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 80}


def test_asking_torch_what_it_can_do_does_not_import_torch() -> None:
    code = (
        "import sys; from attnplug.backends import torch_native; from attnplug.core import LayerSpec, Device;"
        "s = LayerSpec(num_heads=4, num_kv_heads=2, head_size=80);"
        "assert not torch_native.TorchBackend.validate_configuration(s, Device('cuda', (9, 0)));"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_plugin_offers_one_backend() -> None:
    assert torch_native.ATTNPLUG_API == (1, 1)
    assert torch_native.attnplug_backends() == (TorchBackend,)
    assert TorchBackend.get_name() == "TORCH"
    assert TorchBackend.get_priority(LayerSpec(**SIZES), Device("cpu"), None) == 0
    assert not TorchBackend.step_safe


@pytest.mark.parametrize("device", ["cpu", "sm70", "sm90", "rocm:9.4", "xpu", "mps"])
@pytest.mark.parametrize(
    "asked",
    [
        {"sliding_window": 5},
        {"chunk_size": 8, "logits_soft_cap": 3.0, "has_sinks": True, "has_alibi": True, "needs_lse": True},
        {"head_size_v": 129, "causal": False, "kv_cache_dtype": "fp8_e5m2", "block_size": 7},
        {"attn_type": "encoder", "direct_kv": True},
        {"mm_prefix": True, "sliding_window": 5},
        {"sparse": SparseSpec("token_topk", 2048)},
        {"sparse": SparseSpec("block", 16, 64), "chunk_size": 128, "has_sinks": True},
        {"attn_type": "encoder_decoder", "dtype": "float32", "kv_cache_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_everything_it_honours_is_accepted(asked: dict[str, object], device: str) -> None:
    assert TorchBackend.validate_configuration(LayerSpec(**SIZES, **asked), Device.parse(device)) == []


LATENT: dict[str, object] = {
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_size": 40,
    "mla": MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
}


@pytest.mark.parametrize(
    "asked",
    [{}, {"needs_lse": True}, {"kv_cache_dtype": "fp8"}, {"dtype": "float32"}, {"num_heads": 3}],
    ids=str,
)
@pytest.mark.parametrize("phase", [None, *Phase])
def test_latent_attention_is_served_by_a_class_of_its_own(
    asked: dict[str, object], phase: Phase | None
) -> None:
    spec = LayerSpec(**LATENT | asked)
    assert TorchBackend.validate_configuration(spec, Device("cpu"), phase) == []
    assert TorchBackend.for_layer(spec).get_name() == "TORCH"
    assert TorchBackend.for_layer(LayerSpec(**SIZES)) is TorchBackend


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (LayerSpec(**SIZES, mm_prefix=True, attn_type="encoder_decoder"), "mm_prefix"),
        (LayerSpec(**SIZES, kv_cache_dtype="int8"), "kv_cache_dtype"),
        (LayerSpec(**SIZES, direct_kv=True, kv_cache_dtype="fp8"), "combination"),
        (LayerSpec(**LATENT, has_sinks=True), "sink"),
        (LayerSpec(**LATENT, sliding_window=5), "feature.sliding_window"),
        (LayerSpec(**LATENT, logits_soft_cap=3.0), "feature.soft_cap"),
        (LayerSpec(**LATENT, has_alibi=True), "feature.alibi"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_else_is_refused_with_one_reason(spec: LayerSpec, code: str) -> None:
    reasons = TorchBackend.validate_configuration(spec, Device("cpu"))
    assert [reason.code for reason in reasons] == [code]


def test_an_unknown_device_is_refused() -> None:
    reasons = TorchBackend.validate_configuration(LayerSpec(**SIZES), Device("tpu"))
    assert [reason.code for reason in reasons] == ["device_type"]


def test_a_feature_of_a_later_release_is_not_declared() -> None:
    declared = {flag.name for flag in Feature if flag in TorchBackend.features}
    assert declared == {
        "SLIDING_WINDOW",
        "CHUNKED_LOCAL",
        "SOFT_CAP",
        "SINKS",
        "ALIBI",
        "SPARSE",
        "MM_PREFIX",
        "LSE",
        "HEAD_SIZE_V",
        "NON_CAUSAL",
        "DIRECT_KV",
        "FP8_KV",
        "HEAD_SCALES",
        "INVARIANCE",
        "CROSS",
        "ENCODER",
    }
