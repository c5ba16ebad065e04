"""What TRITON says of itself without a GPU, and where it stands among the others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import attnplug
from attnplug.backends.flash_attn import FlashAttn4Backend
from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.triton import TritonBackend
from attnplug.core import Device, Feature, LayerSpec, MLADims, Phase
from attnplug.errors import PolicyError

SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
H200 = Device.parse("sm90")


def codes(spec: LayerSpec, device: Device = H200) -> list[str]:
    return [reason.code for reason in TritonBackend.validate_configuration(spec, device)]


@pytest.mark.parametrize("value", ["shares", "requests"])
def test_the_option_of_earlier_versions_is_refused(value):
    asked = {"TRITON": {"decode_split": value}}
    says = rf"options=\{{'decode_split': '{value}'\}} cannot be set: TRITON has no options; leave them out"
    with pytest.raises(PolicyError, match=says):
        attnplug.select(SPEC, "sm90", assume_installed="all", options=asked)


@pytest.mark.parametrize("device", ["sm80", "sm89", "sm90", "sm100", "sm120", "rocm:9.4"])
def test_it_comes_before_torch_on_every_gpu_that_it_serves(device):
    where = Device.parse(device)
    assert TritonBackend.validate_configuration(SPEC, where) == []
    assert TritonBackend.get_priority(SPEC, where, None) > TorchBackend.get_priority(SPEC, where, None)


@pytest.mark.parametrize(
    ("fields", "comes_first"),
    [
        ({"head_size": 256}, True),
        ({"head_size": 208, "sliding_window": 64}, True),
        ({"head_size": 128}, True),
        ({"head_size": 64, "has_sinks": True}, True),
        ({"head_size": 256, "logits_soft_cap": 50.0}, True),
        ({"head_size": 256, "has_alibi": True}, False),
        ({"head_size": 128, "logits_soft_cap": 2000.0}, False),
        ({"head_size": 256, "kv_cache_dtype": "fp8"}, False),
        ({"head_size": 200}, False),
    ],
    ids=str,
)
def test_prefills_come_before_flashinfer_where_the_kernel_for_hopper_serves_them(fields, comes_first):
    spec, hopper, blackwell = SPEC.replace(**fields), Device.parse("sm90"), Device.parse("sm100")
    ranks = [TritonBackend.get_priority(spec, hopper, phase) for phase in (Phase.PREFILL, None)]
    theirs = [FlashInferBackend.get_priority(spec, hopper, phase) for phase in (Phase.PREFILL, None)]
    assert [ours > other for ours, other in zip(ranks, theirs, strict=True)] == [comes_first] * 2
    assert TritonBackend.get_priority(spec, blackwell, Phase.PREFILL) == 100


@pytest.mark.parametrize(
    ("fields", "comes_first"),
    [
        ({"head_size": 64, "sliding_window": 128}, True),
        ({"head_size": 64, "sliding_window": 129}, False),
        ({"head_size": 64}, False),
        ({"head_size": 128, "sliding_window": 128}, False),
    ],
    ids=str,
)
def test_prefills_of_short_windows_come_before_flash_attention_4(fields, comes_first):
    spec, hopper = SPEC.replace(**fields), Device.parse("sm90")
    ours = TritonBackend.get_priority(spec, hopper, Phase.PREFILL)
    assert (ours > FlashAttn4Backend.get_priority(spec, hopper, Phase.PREFILL)) is comes_first


def test_a_cpu_is_served_by_torch_even_where_triton_is_interpreted():
    assert attnplug.select(SPEC, device="cpu").backend == "TORCH"


def test_everything_that_torch_honours_is_honoured_but_sparse_layers():
    assert TritonBackend.features == TorchBackend.features & ~Feature.SPARSE
    assert TritonBackend.supported_dtypes == TorchBackend.supported_dtypes


def test_old_gpus_and_odd_head_sizes_are_refused():
    assert codes(SPEC, Device.parse("sm75")) == ["compute_capability"]
    assert codes(SPEC.replace(head_size=8)) == ["head_size"]
    assert codes(SPEC.replace(head_size=100)) == ["head_size"]
    assert codes(SPEC.replace(head_size=304)) == ["head_size"]
    assert codes(SPEC.replace(head_size=544)) == ["head_size"]
    assert codes(SPEC.replace(head_size=96, head_size_v=544)) == ["head_size"]


@pytest.mark.parametrize("head_size", range(288, 513, 32))
@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90", "sm100", "sm120", "gfx942"])
def test_wide_heads_are_served_as_others_are_or_refused_with_a_reason(head_size, device):
    wide, where = SPEC.replace(head_size=head_size), Device.parse(device)
    for fields in (
        *({"kv_cache_dtype": name} for name in ("auto", "fp8_e5m2", "int8_token_head", "nvfp4")),
        *({"head_size_v": size} for size in (64, 256, 512)),
        {"has_sinks": True, "logits_soft_cap": 5.0, "sliding_window": 64},
        {"dtype": "float32", "has_alibi": True, "chunk_size": 64},
        {"direct_kv": True, "causal": False},
    ):
        assert codes(wide.replace(**fields), where) == [], fields
    (reason,) = TritonBackend.validate_configuration(wide.replace(kv_cache_dtype="rotated4"), where)
    assert "exceeds the shared memory; other types have room" in str(reason)


def test_fp8_e4m3_needs_hardware_that_knows_it_and_e5m2_does_not():
    ampere = Device.parse("sm80")
    assert codes(SPEC.replace(kv_cache_dtype="fp8_e4m3"), ampere) == ["combination"]
    assert codes(SPEC.replace(kv_cache_dtype="fp8_e5m2"), ampere) == []
    assert codes(SPEC.replace(kv_cache_dtype="fp8_e4m3"), Device.parse("sm89")) == []


@pytest.mark.parametrize(
    ("head_size", "head_size_v", "served"),
    [
        (128, 64, True),
        (128, 32, False),
        (64, 48, True),
        (64, 32, False),
        (64, 24, False),
        (32, 16, False),
        (32, 24, True),
        (24, 16, False),
        (16, 16, True),
        (16, 24, True),
        (256, 64, True),
        (192, 128, True),
    ],
)
def test_narrow_values_over_fp8_are_refused_because_they_are_compiled_wrong(head_size, head_size_v, served):
    layer = SPEC.replace(head_size=head_size, head_size_v=head_size_v)
    assert codes(layer) == []
    for storage in ("fp8_e4m3", "fp8_e5m2"):
        for dtype, expected in (("float16", served), ("bfloat16", served), ("float32", True)):
            asked = layer.replace(kv_cache_dtype=storage, dtype=dtype)
            assert codes(asked) == ([] if expected else ["combination"])


def test_groups_too_large_for_a_tile_are_refused():
    assert codes(LayerSpec(num_heads=128, num_kv_heads=1, head_size=64)) == []
    assert codes(LayerSpec(num_heads=256, num_kv_heads=1, head_size=64)) == ["combination"]


def test_groups_of_wide_heads_in_float32_are_refused_where_a_program_has_little_memory():
    wide = LayerSpec(num_heads=128, num_kv_heads=1, head_size=136, dtype="float32")
    for device in ("sm80", "sm90", "sm100"):
        assert codes(wide, Device.parse(device)) == []
    for device in ("sm86", "sm89", "sm120", "rocm:9.4"):
        assert codes(wide, Device.parse(device)) == ["combination"]
    for served in ({"head_size": 128}, {"dtype": "float16"}, {"num_heads": 64}):
        assert codes(wide.replace(**served), Device.parse("sm86")) == []


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "most"),
    [
        ("sm80", "bfloat16", 512, 128),
        ("sm90", "bfloat16", 512, 128),
        ("sm86", "bfloat16", 512, 64),
        ("sm86", "bfloat16", 320, 128),
        ("sm80", "float32", 512, 32),
        ("sm90", "float32", 512, 64),
        ("sm120", "float32", 288, 16),
    ],
)
def test_groups_of_wide_heads_are_refused_where_their_smallest_tile_has_no_room(
    device, dtype, head_size, most
):
    spec = LayerSpec(num_heads=1, num_kv_heads=1, head_size=head_size, dtype=dtype)
    groups = [1 << power for power in range(8)]
    served = [group for group in groups if not codes(spec.replace(num_heads=group), Device.parse(device))]
    assert served == [group for group in groups if group <= most]


def test_rope_parts_too_wide_for_the_smallest_tiles_are_refused():
    for rope, refused in ((256, []), (257, ["combination"])):
        dims = MLADims(
            q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=8, qk_rope_head_dim=rope, v_head_dim=128
        )
        layer = LayerSpec(num_heads=16, num_kv_heads=1, head_size=512 + rope, mla=dims)
        reasons = TritonBackend.validate_configuration(layer, H200, Phase.DECODE)
        assert [reason.code for reason in reasons] == refused


def test_storage_that_nothing_would_use_is_refused():
    assert codes(SPEC.replace(direct_kv=True, kv_cache_dtype="fp8")) == ["combination"]


@pytest.mark.parametrize(
    ("interpreted", "served"), [("0", False), ("1", True), ("yes", True), ("Y", True), ("2", False)]
)
def test_a_cpu_is_declared_only_where_triton_interprets_kernels(interpreted, served):
    code = "from attnplug.backends.triton import TritonBackend as T; import sys; print('cpu' in T.device_types, 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ, TRITON_INTERPRET=interpreted),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.split() == [str(served), "False"]


def test_what_is_compiled_depends_on_sizes_and_features_and_not_on_lengths(monkeypatch):
    monkeypatch.setattr("attnplug.backends.triton.backend._INTERPRETED", False)
    key = TritonBackend.compile_key
    assert key(SPEC.replace(sliding_window=600)) == key(SPEC.replace(sliding_window=1000))
    assert key(SPEC.replace(sliding_window=5000)) == key(SPEC.replace(sliding_window=9000))
    # Prompts within a window have a kernel without one.
    assert key(SPEC.replace(sliding_window=1500)) != key(SPEC.replace(sliding_window=2500))
    assert key(SPEC.replace(chunk_size=8192)) != key(SPEC.replace(chunk_size=512))
    # Short windows have launches of their own, and very large caps another kernel.
    assert key(SPEC.replace(sliding_window=200)) != key(SPEC.replace(sliding_window=1024))
    assert key(SPEC.replace(logits_soft_cap=30.0)) == key(SPEC.replace(logits_soft_cap=50.0))
    assert key(SPEC.replace(logits_soft_cap=30.0)) != key(SPEC.replace(logits_soft_cap=2000.0))
    assert key(SPEC) == key(SPEC.replace(num_heads=16, num_kv_heads=4, scale=0.5))
    assert len({key(SPEC), key(SPEC.replace(sliding_window=1)), key(SPEC.replace(head_size=64))}) == 3
    monkeypatch.setattr("attnplug.backends.triton.backend._INTERPRETED", True)
    assert key(SPEC) is None
