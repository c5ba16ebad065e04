"""What the FLASH_ATTN family says of itself without a GPU or a library, and why it refuses."""

from __future__ import annotations

import pytest
from flash_attn_fakes import key_tile

import attnplug
from attnplug.backends.flash_attn import FlashAttn2Backend, FlashAttn3Backend, FlashAttn4Backend
from attnplug.backends.flash_attn.tiles import key_tiles
from attnplug.core import Device, LayerSpec, MultipleOf, Phase

SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
ALL = (FlashAttn2Backend, FlashAttn3Backend, FlashAttn4Backend)


def codes(backend, device="sm90", **fields):
    spec = SPEC.replace(**fields)
    return [reason.code for reason in backend.validate_configuration(spec, Device.parse(device))]


def served(device="sm90", **fields):
    return [backend.get_name()[-1] for backend in ALL if not codes(backend, device, **fields)]


@pytest.mark.parametrize(
    ("device", "generations"),
    [
        ("sm75", []),
        ("sm80", ["2"]),
        ("sm89", ["2"]),
        ("sm90", ["2", "3", "4"]),
        ("sm100", ["2", "4"]),
        ("sm110", ["2", "4"]),
        ("sm120", ["2"]),
        ("rocm:9.4", []),
        ("cpu", []),
    ],
)
def test_each_gpu_is_served_by_the_generations_made_for_it(device, generations):
    assert served(device) == generations


@pytest.mark.parametrize(
    ("fields", "generations"),
    [
        ({"has_alibi": True}, ["2"]),
        ({"has_sinks": True}, ["4"]),
        ({"logits_soft_cap": 30.0, "sliding_window": 1024}, ["2", "3", "4"]),
        ({"head_size": 192, "head_size_v": 128}, ["3", "4"]),
        ({"head_size": 128, "head_size_v": 64}, []),
        ({"head_size": 8}, ["2", "3"]),
        ({"head_size": 40}, ["2", "3"]),
        ({"head_size": 40, "direct_kv": True}, ["2", "3", "4"]),
        ({"head_size": 40, "attn_type": "encoder_only"}, ["2", "3", "4"]),
        ({"head_size": 96}, ["2", "3", "4"]),
        ({"head_size": 96, "causal": False}, ["2", "3"]),
        ({"head_size": 96, "causal": False, "window": (9, 9)}, ["2", "3", "4"]),
        ({"head_size": 96, "causal": False, "direct_kv": True}, ["2", "3", "4"]),
        ({"head_size": 96, "attn_type": "encoder_decoder"}, ["2", "3"]),
        ({"head_size": 264}, []),
        ({"head_size": 100}, []),
        ({"dtype": "float32"}, []),
        ({"kv_cache_dtype": "fp8"}, []),
        ({"chunk_size": 8192}, ["2", "3", "4"]),
        ({"chunk_size": 8192, "block_size": 16}, ["3", "4"]),
        ({"chunk_size": 100}, []),
        ({"attn_type": "encoder_only"}, ["2", "3", "4"]),
        ({"attn_type": "encoder_decoder"}, ["2", "3", "4"]),
        ({"attn_type": "encoder_decoder", "window": (5, -1)}, ["3", "4"]),
        ({"attn_type": "encoder_only", "window": (5, -1)}, ["2", "3", "4"]),
        ({"direct_kv": True, "needs_lse": True}, ["2", "3", "4"]),
        ({"direct_kv": True, "chunk_size": 8192}, []),
        ({"block_size": 16}, ["3", "4"]),
        ({"block_size": 128}, []),
        ({"block_size": 256}, ["2", "4"]),
        ({"mm_prefix": True}, []),
    ],
    ids=str,
)
def test_a_layer_is_served_by_the_generations_that_honour_all_it_asks(fields, generations):
    assert served(**fields) == generations


@pytest.mark.parametrize("head_size", [16, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("window", [(-1, 0), (63, 0), (-1, -1), (63, 5), (-1, 5)])
def test_flash_attn_4_refuses_pages_of_its_key_tile(head_size, window):
    causal = window[1] == 0
    spec = SPEC.replace(head_size=head_size, head_size_v=head_size, causal=causal, window=window, scale=0.1)
    tiles = {key_tile(head_size, head_size, True, window[0] >= 0)}
    if not causal:
        tiles.add(key_tile(head_size, head_size, False, window != (-1, -1)))
    assert set(key_tiles(spec, Device.parse("sm90"))) == tiles
    for tile in tiles:
        asked = spec.replace(block_size=tile)
        if tile % 16 == 0:
            reasons = FlashAttn4Backend.validate_configuration(asked, Device.parse("sm90"))
            (reason,) = (each for each in reasons if each.code == "block_size")
            assert f"{tile} is not a multiple of 16 other than" in reason
    (sizes,) = FlashAttn4Backend.get_supported_kernel_block_sizes(spec, Device.parse("sm90"))
    assert [size for size in range(16, 1025, 16) if size not in sizes] == sorted(tiles)


@pytest.mark.parametrize("head_size", range(16, 257, 16))
@pytest.mark.parametrize("window", [(-1, 0), (63, 0), (-1, -1), (63, 5)])
def test_flash_attn_4_reads_pages_where_rounds_of_rows_end_with_the_tile(head_size, window):
    causal = window[1] == 0
    spec = SPEC.replace(head_size=head_size, head_size_v=head_size, causal=causal, window=window, scale=0.1)
    tiles = {key_tile(head_size, head_size, True, window[0] >= 0)}
    if not causal:
        tiles.add(key_tile(head_size, head_size, False, window != (-1, -1)))
    # 128 threads copy 16 bytes each, and so many sit side by side as share a row's largest power of two.
    side_by_side = next(threads for threads in (8, 4, 2) if head_size % (8 * threads) == 0)
    spill = [tile for tile in sorted(tiles) if tile % (128 // side_by_side)]
    reasons = FlashAttn4Backend.validate_configuration(spec, Device.parse("sm90"))
    assert [reason.code for reason in reasons] == ["combination"] * bool(spill)
    if spill:
        assert f"tile of {spill[0]} keys is read in rounds of {128 // side_by_side}" in reasons[0]
    assert codes(FlashAttn4Backend, "sm100", head_size=96, causal=False, window=(-1, -1)) == []


def test_on_blackwell_the_key_tile_is_128_and_head_sizes_are_fewer():
    blackwell = Device.parse("sm100")
    assert key_tiles(SPEC.replace(head_size=64), blackwell) == (128,)
    assert codes(FlashAttn4Backend, "sm100", head_size=256) == []
    assert codes(FlashAttn4Backend, "sm100", head_size=192, head_size_v=128) == []
    assert codes(FlashAttn4Backend, "sm100", head_size=160) == ["combination"]


def test_where_the_gpu_is_not_known_no_tile_of_any_is_a_page():
    spec = SPEC.replace(head_size=256)
    assert key_tiles(spec, None) == key_tiles(spec, Device("cuda")) == (80, 128)
    assert FlashAttn4Backend.get_supported_kernel_block_sizes(spec) == (MultipleOf(16, but=(80, 128)),)
    assert FlashAttn4Backend.get_supported_kernel_block_sizes() == (MultipleOf(16),)


def test_a_chunk_is_made_of_whole_pages():
    spec = SPEC.replace(chunk_size=768)
    assert FlashAttn2Backend.get_supported_kernel_block_sizes(spec) == (256, 768)
    assert 128 not in FlashAttn4Backend.get_supported_kernel_block_sizes(spec)
    assert FlashAttn3Backend.get_supported_kernel_block_sizes(SPEC.replace(chunk_size=48)) == (16,)
    (reason,) = FlashAttn2Backend.validate_configuration(SPEC.replace(chunk_size=100), Device.parse("sm90"))
    assert "chunk_size=100 is not a multiple of a page size" in reason


def test_newer_generations_come_first_in_every_phase_on_hopper():
    hopper = Device.parse("sm90")
    for phase in (Phase.PREFILL, Phase.DECODE, None):
        places = [backend.get_priority(SPEC, hopper, phase) for backend in ALL]
        assert places == sorted(set(places))
        assert min(places) >= 200


def test_flash_attn_is_asked_for_as_a_family():
    for phase, device, name in (
        (None, "sm90", "FLASH_ATTN_4"),
        ("prefill", "sm90", "FLASH_ATTN_4"),
        (None, "sm80", "FLASH_ATTN_2"),
        (None, "sm120", "FLASH_ATTN_2"),
    ):
        decision = attnplug.select(SPEC, device, phase, backend="FLASH_ATTN", assume_installed="all")
        assert decision.backend == name
    alibi = SPEC.replace(has_alibi=True)
    assert (
        attnplug.select(alibi, "sm90", backend="FLASH_ATTN", assume_installed="all").backend == "FLASH_ATTN_2"
    )


def test_a_version_that_is_too_old_is_a_reason_with_the_line_to_install():
    found = attnplug.explain(
        SPEC, "sm90", assume_installed={"flash-attn-4": "4.0.0b20", "flash-attn": "2.6.3"}
    )
    told = {candidate.name: str(candidate.reasons[0]) for candidate in found.candidates if candidate.reasons}
    assert "4.0.0b20 is not" in told["FLASH_ATTN_4"]
    assert "pip install 'flash-attn-4<5,>=4.0.0b26'" in told["FLASH_ATTN_4"]
    assert "2.6.3 is not" in told["FLASH_ATTN_2"]
    assert told["FLASH_ATTN_3"].startswith("flash-attn-3 not installed")
