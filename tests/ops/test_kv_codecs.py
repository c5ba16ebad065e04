"""The codecs that attnplug ships: their bytes by hand, and their planes in pages."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnplug.core.errors import LayoutError, SpecError
from attnplug.core.kv_format import kv_format, kv_formats
from attnplug.ops.kv_codec import KVCodec, make_codec, page_planes
from attnplug.ops.kv_write import _write, write_kv_cache
from attnplug.ops.storage import round_to_float

CODED = [row.name for row in kv_formats() if row.codec]


def codec(name: str, size: int = 64) -> KVCodec:
    return make_codec(kv_format(name), size)


def test_int8_rows_have_the_integers_of_their_own_scale() -> None:
    rows = torch.tensor([[127.0, -63.6, 1.4, 0.0] * 16, [2.54, 0.02, -2.54, 0.0] * 16])
    data, scale = codec("int8_token_head").encode(rows, 1.0)
    torch.testing.assert_close(scale, torch.tensor([[1.0], [0.02]]))
    assert data[:, :4].tolist() == [[127, -64, 1, 0], [127, 1, -127, 0]]


def test_nvfp4_has_e2m1_codes_with_ties_to_even_and_a_scale_of_16() -> None:
    values = [6.0, -6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, -0.74, 0.0, -0.5, 3.0, 4.0, 2.0]
    codes = [7, 15, 0, 2, 2, 4, 4, 6, 6, 1, 9, 0, 9, 5, 6, 4]
    data, scale = codec("nvfp4", 16).encode(torch.tensor([values]), 1.0)
    assert scale.float().tolist() == [[1.0]]
    found = torch.stack([data & 15, data >> 4], -1).flatten()
    assert found.tolist() == codes
    halved, same = codec("nvfp4", 16).encode(torch.tensor([values]) * 0.5, 0.5)
    assert torch.equal(halved, data)
    assert torch.equal(same.view(torch.uint8), scale.view(torch.uint8))


def test_rotated4_has_one_error_whatever_channel_stands_out() -> None:
    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    rows[:, :4] *= 50
    made = codec("rotated4", 128)
    error = (made.decode(made.encode(rows, 1.0), 1.0) - rows).norm() / rows.norm()
    assert error < kv_format("rotated4").rms_error
    plain = codec("nvfp4", 128)
    assert (plain.decode(plain.encode(rows, 1.0), 1.0) - rows)[:, 4:16].norm() > rows[:, 4:16].norm() * 0.5


@pytest.mark.parametrize("name", CODED)
def test_planes_follow_each_other_in_a_block_in_both_orders(name: str) -> None:
    row, blocks, size, heads = kv_format(name), 3, 4, 2
    width = row.width(64)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        sizes = [(blocks, size, heads, width)[dim] for dim in order]
        pages = torch.arange(blocks * size * heads * width).to(torch.uint8).view(sizes).permute(*order)
        planes = page_planes(pages, row, 64)
        assert [plane.shape for plane in planes] == [
            (blocks, size, heads, each.bytes(64)) for each in row.planes
        ]
        begins = [plane.data_ptr() - pages.data_ptr() for plane in planes]
        assert begins == [0, size * heads * row.planes[0].bytes(64)]  # type: ignore[operator]
        assert sum(plane[0].numel() for plane in planes) == size * heads * width
        addresses = {plane[:1].data_ptr() for plane in planes}
        assert len(addresses) == len(planes)


def test_pages_that_no_planes_fit_are_refused() -> None:
    row = kv_format("nvfp4")
    pages = torch.zeros(3, 4, 2, 2 * row.width(64), dtype=torch.uint8)[..., ::2]
    with pytest.raises(LayoutError, match=r"kv_cache='torch.uint8 with strides .* in NHD or HND"):
        page_planes(pages, row, 64)


@pytest.mark.parametrize(("tokens", "heads"), [(16, 1), (1, 2)])
def test_pages_with_other_bytes_between_tokens_or_heads_are_refused(tokens: int, heads: int) -> None:
    row = kv_format("int8_token_head")
    width = row.width(64)
    pages = torch.zeros(4, tokens, heads, 2 * width, dtype=torch.uint8)[..., :width]
    with pytest.raises(LayoutError, match=r"kv_cache=.* must be torch\.uint8, with the 68 bytes of each row"):
        page_planes(pages, row, 64)


@pytest.mark.parametrize("name", CODED)
def test_a_row_with_nan_is_not_taken_for_zeros(name: str) -> None:
    rows = torch.ones(2, 64)
    rows[0, 3] = torch.nan
    found = codec(name).decode(codec(name).encode(rows, 1.0), 1.0)
    assert bool(found[0].isnan().any())
    assert bool(found[1].isfinite().all())


def test_a_head_size_without_whole_blocks_is_refused_with_the_multiple() -> None:
    with pytest.raises(SpecError, match="head_size=72 must be a multiple of 16 with kv_cache_dtype='nvfp4'"):
        kv_format("nvfp4").width(72)


def test_a_codec_that_cannot_be_made_is_named() -> None:
    row = dataclasses.replace(kv_format("nvfp4"), codec="attnplug.ops.kv_codecs:Nothing")
    with pytest.raises(LayoutError, match=r"codec='attnplug.ops.kv_codecs:Nothing' cannot be made"):
        make_codec(row, 64)
    with pytest.raises(LayoutError, match="has no codec"):
        make_codec(kv_format("fp8_e4m3"), 64)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("name", CODED)
def test_pages_of_a_gpu_have_the_bytes_of_the_host(name: str, size: int, scale: float) -> None:
    # Numbers of few bits are often in the middle between two codes.
    rows = torch.randn(4096, size, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    made = codec(name, size)
    for on_host, on_gpu in zip(made.encode(rows, scale), made.encode(rows.cuda(), scale), strict=True):
        assert torch.equal(on_host.view(torch.uint8), on_gpu.cpu().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_of_a_gpu_are_those_of_the_host(dtype: torch.dtype) -> None:
    rows = torch.randn(1024, 2, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    pages = [torch.zeros(64, 16, 2, 64, dtype=dtype, device=device) for device in ("cpu", "cuda")]
    for each in pages:
        key, value = rows.to(each.device), (3 * rows).to(each.device)
        slots = torch.arange(1024, device=each.device)
        write_kv_cache(key, value, each, torch.zeros_like(each), slots, 0.7, 0.3)
        # Half of the slots again in plain torch, which serves without triton.
        _write(each, value[:512], slots[:512], 0.7, round_to_float)
    assert torch.equal(*(each.cpu().view(torch.uint8) for each in pages))
