"""TRITON's tiles of heads: no tile of 8-bit elements is narrower than 64 columns beside a wider one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings, latent, share_bindings
from attnplug.backends.triton.latent import latent_tiles
from attnplug.backends.triton.launch import Gpu, is_one_range, prefill_launch
from attnplug.backends.triton.layout import (
    WIDE_COLUMNS,
    head_tiles,
    tile_parts,
    tile_side,
    value_parts,
    window_class,
)
from attnplug.core import LayerSpec, MLADims
from attnplug.core.device import Device
from attnplug.ops.triton.launch import BoundKernel
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = TritonBackend.get_supported_head_sizes()
WIDE = tuple(size for size in SIZES if size > 256)
ODD_SIZES = (40, 48, 72, 80, 88, 96, 136, 144, 152, 160)
"""Sizes whose second tile has 16 or 32 columns where elements have 16 bits."""
FP8 = ("fp8_e4m3", "fp8_e5m2")


def are_safe(*widths: int) -> bool:
    used = [width for width in widths if width]
    return min(used) == max(used) or min(used) >= 64


@pytest.mark.parametrize("whole", [False, True])
def test_no_tile_of_bytes_is_narrow_beside_a_wider_one(whole):
    for pair in itertools.product((*SIZES, 512, 576), repeat=2):
        tiles = head_tiles(*pair, 1, whole=whole)
        assert are_safe(*tiles.keys, *tiles.values), pair
        for size, (first, second) in zip(pair, tiles, strict=True):
            assert size <= first + second
            assert not second or size > first, "a tile without elements"


def test_programs_that_share_wide_values_have_equal_columns_and_whole_scales():
    assert [value_parts(size, None) for size in SIZES] == [1] * len(SIZES)
    for size, most, step in itertools.product(SIZES, (WIDE_COLUMNS, 256), (8, 16)):
        parts = value_parts(size, most, step)
        assert size % parts == 0
        assert parts == 1 or size // parts % step == 0
        # Columns that cannot be halved once more are at most 3 steps more than a tile.
        assert size // parts <= most or size // parts % (2 * step)
        for key_size in WIDE:
            tiles = head_tiles(key_size, size // parts, 1)
            assert size < 64 or are_safe(*tiles.keys, *tiles.values), (key_size, size, parts)
    assert [value_parts(size, WIDE_COLUMNS) for size in (128, 256, 288, 512)] == [1, 2, 4, 4]


def test_other_elements_take_the_fewest_columns():
    for pair, stored in itertools.product(itertools.product(SIZES, repeat=2), (2, 4)):
        assert head_tiles(*pair, stored) == (tile_parts(pair[0]), tile_parts(pair[1]))
        assert head_tiles(*pair, stored, whole=True) == ((tile_side(pair[0]), 0), (tile_side(pair[1]), 0))
    assert tuple(size for size in SIZES if not are_safe(*tile_parts(size))) == (*ODD_SIZES, 288)


def test_bytes_take_no_more_columns_than_one_tile():
    assert [head_tiles(size, size, 1).keys for size in (16, 32, 40, 96, 136, 192, 200)] == [
        (16, 0), (32, 0), (64, 0), (128, 0), (128, 64), (128, 64), (256, 0),
    ]  # fmt: skip
    assert all(head_tiles(size, size, 1).columns <= tile_side(size) for size in SIZES)
    assert head_tiles(32, 128, 1, whole=True) == ((64, 0), (128, 0))
    assert head_tiles(16, 24, 1) == ((32, 0), (32, 0))


@pytest.mark.parametrize("rank", [32, 64, 96, 128, 256, 512])
def test_latents_of_bytes_and_their_rope_parts_are_safe(rank):
    for rope in range(8, 257, 8):
        assert are_safe(*latent_tiles(rank, rope, 1)), rope
        assert latent_tiles(rank, rope, 2) == (tile_side(rank), tile_side(rope))
    assert latent_tiles(rank, 0, 1) == (tile_side(rank), 16)


def bound_kernels(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The constants of kernels that multiply, in order of their launches."""
    found: list[dict[str, Any]] = []

    def bound(kernel: Any, number: int, values: Any, **options: Any) -> BoundKernel:
        found.append({name: values[name] for name in WIDTHS if name in values})
        return BoundKernel(kernel, number, values, **options)

    for module in (bindings, share_bindings, latent):
        monkeypatch.setattr(module, "BoundKernel", bound)
    return found


WIDTHS = ("BLOCK_D", "TAIL", "BLOCK_DV", "TAIL_V", "BLOCK_L", "BLOCK_R")
STEPS = {
    "decode": ([1, 1], [70, 33]),
    "drafts": ([4, 4], [70, 33]),
    "prompts": ([70, 40], [70, 40]),
    "extends": ([70, 1], [150, 20]),
    "mixed": ([1, 70, 1], [50, 90, 30]),
}
FORMS = [
    *(((size, size), "float16") for size in (40, 96, 136, 80)),
    *((pair, "float16") for pair in ((32, 128), (96, 48), (192, 128))),
    ((128, 24), "float32"),
    ((96, 96), "float32"),
    *((pair, "float16") for pair in ((288, 288), (320, 512))),
]
QUICK = [FORMS[number] for number in (0, 1, 4, 7)]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        pytest.param(*form, marks=() if form in QUICK or DEVICE == "cuda" else pytest.mark.slow)
        for form in FORMS
    ],
    ids=str,
)
def test_every_launch_over_bytes_has_safe_tiles_and_right_numbers(monkeypatch, sizes, dtype):
    launches = bound_kernels(monkeypatch)
    size, size_v = sizes
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=size, head_size_v=size_v, dtype=dtype,
        kv_cache_dtype=FP8[size % 3 > 0], block_size=8,
    )  # fmt: skip
    for name in STEPS if (size, dtype) == (96, "float16") else ("mixed",):
        batch = paged_batch(spec, *STEPS[name], device=DEVICE)
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None, name
    assert launches
    for launch in launches:
        assert are_safe(*launch.values()), launch


@pytest.mark.parametrize(
    ("rank", "rope"),
    [(96, 8), (96, 16), (96, 32), (32, 64), *((256, rope) for rope in (16, 32) if DEVICE == "cuda")],
)
def test_decodes_over_latents_of_bytes_have_safe_tiles_and_right_numbers(monkeypatch, rank, rope):
    launches = bound_kernels(monkeypatch)
    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=rope, v_head_dim=16
    )
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"
    spec = LayerSpec(
        num_heads=16, num_kv_heads=1, head_size=rank + rope, mla=dims, dtype=dtype, kv_cache_dtype="fp8", block_size=16
    )  # fmt: skip
    backend = TritonBackend.for_layer(spec)
    batch = paged_batch(spec, [1, 6], [70, 33], device=DEVICE, backend=backend)
    assert difference(batch, Output(*run_batch(backend, batch))) is None
    decodes = [launch for launch in launches if "BLOCK_L" in launch]
    assert decodes
    # Kernels in Gluon lay out tiles by themselves.
    for launch in decodes:
        assert are_safe(launch["BLOCK_L"], launch["BLOCK_R"]), launch


def test_values_whose_tile_is_widened_are_refused_and_no_others():
    plain = LayerSpec(num_heads=8, num_kv_heads=2, head_size=128, dtype="bfloat16")
    hopper = Device.parse("sm90")
    for size, size_v, storage in itertools.product(SIZES, SIZES, FP8):
        spec = plain.replace(head_size=size, head_size_v=size_v, kv_cache_dtype=storage)
        (widened, _) = head_tiles(size, size_v, 1, whole=True).values
        why = TritonBackend.supports_combination(spec, hopper)
        assert (why is None) == (widened == tile_side(size_v))
        assert TritonBackend.supports_combination(spec.replace(dtype="float32"), hopper) is None
        if why is not None:
            least = int(why.rpartition("at least ")[2].split()[0])
            fewest = spec.replace(head_size_v=-(-least // 8) * 8)
            assert TritonBackend.supports_combination(fewest, hopper) is None


def test_layouts_are_said_without_torch():
    code = "import sys, attnplug.backends.triton.layout; assert not {'torch', 'triton'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["auto", *FP8])
@pytest.mark.parametrize("head_size", [*ODD_SIZES, *WIDE])
def test_steps_of_many_rows_are_right_on_a_gpu(head_size, storage):
    spec = LayerSpec(
        num_heads=8, num_kv_heads=2, head_size=head_size, dtype="bfloat16", kv_cache_dtype=storage, block_size=16
    )  # fmt: skip
    for dtype, heads in (("bfloat16", 2), ("float16", 2), ("bfloat16", 8)):
        asked = spec.replace(dtype=dtype, num_kv_heads=heads)
        for new, tokens in (([600, 130], [600, 130]), ([300, 70], [700, 400]), ([1, 200, 1], [90, 500, 33])):
            batch = paged_batch(asked, new, tokens, device="cuda")
            assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None, (dtype, heads, new)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_steps_of_heads_of_96_over_bytes_in_pages_of_8_are_right_on_a_gpu(dtype, storage):
    spec = LayerSpec(
        num_heads=32, num_kv_heads=32, head_size=96, dtype=dtype, kv_cache_dtype=storage, block_size=8
    )
    for new, tokens in (([1, 80, 1, 300], [100, 80, 40, 700]), ([1, 40], [17, 40])):
        batch = paged_batch(spec, new, tokens, device="cuda")
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None


@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
def test_windows_of_one_class_have_one_launch(size: int) -> None:
    """A warm-up runs one layer of each class."""
    found: dict[tuple[bool, int], set[object]] = {}
    for left in range(-1, 1100):
        launch = prefill_launch(size, 2, 1 << 16, Gpu(132, 227 << 10, has_warp_groups=True), left=left)
        one = 0 <= left < 2 * launch.block_n
        shares = [is_one_range(rows, keys, left, False) for rows in (32, 64) for keys in (16, 32, 64, 128)]
        found.setdefault((left >= 0, window_class(left)), set()).add((launch, one, *shares))
    assert {len(launches) for launches in found.values()} == {1}
