"""The kernel that writes pages with planes: its bytes are the codec's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnplug.core import LayerSpec
from attnplug.core.kv_format import kv_format
from attnplug.ops.kv_codec import write_pages
from attnplug.ops.triton.kv_format_write import BoundFormatWrite, bound_codec_write

FORMATS = ("int8_token_head", "nvfp4", "rotated4")
HEADS, SIZE, BLOCKS, BLOCK = 3, 64, 7, 5
SLOTS = (3, 17, -1, 30, 34, 8, 9, 10, 22)


def rows(dtype: torch.dtype, device: torch.device, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, len(SLOTS) + 2, HEADS, size, generator=generator)
    key[2], key[4], value[5] = 0.0, key[4] * 1e4, value[5] * 1e-6
    return key.to(device, dtype), (5 * value).to(device, dtype)


def written(
    name: str,
    given: tuple[torch.Tensor, torch.Tensor],
    *,
    by_codec: bool,
    inner: tuple[int, int] = (2, 3),
    gap: int = 0,
) -> torch.Tensor:
    """The bytes of a cache, with gaps of `gap` bytes after blocks; `inner` (3, 2) is HND."""
    key, value = given
    size = key.shape[-1]
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=size, dtype="bfloat16", kv_cache_dtype=name
    )
    scales = (0.375, 2.0) if kv_format(name).layer_scales else (1.0, 1.0)
    shape = [2, *((BLOCK, HEADS) if inner == (2, 3) else (HEADS, BLOCK)), kv_format(name).width(size)]
    raw = torch.full((BLOCKS, torch.Size(shape).numel() + gap), 255, dtype=torch.uint8, device=key.device)
    cache = raw[:, : torch.Size(shape).numel()].unflatten(1, shape).permute(0, 1, *inner, 4)
    pages = cache[:, 0], cache[:, 1]
    slots = torch.tensor(SLOTS, device=key.device)
    if by_codec:
        write_pages(spec, scales, key, value, *pages, slots)
    else:
        write = bound_codec_write(spec, key, value, *pages, slots, scales)
        assert isinstance(write, BoundFormatWrite)
        write(key, value, *pages, slots)
    return raw.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_the_codecs_and_no_others_are_written(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    given = rows(dtype, device)
    found, wanted = (written(name, given, by_codec=each) for each in (False, True))
    if name == "rotated4" and device.type != "cpu" and dtype != torch.float32:
        # Tensor cores add in another order, which the last bit of a scale can show.
        assert (found != wanted).sum() <= 2
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "options", [{"inner": (3, 2)}, {"gap": 48}, {"gap": 7}], ids=["HND", "gap", "odd gap"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_pages_of_other_strides(name: str, options: dict[str, Any], device: torch.device) -> None:
    given = rows(torch.float32, device)
    found, wanted = (written(name, given, by_codec=each, **options) for each in (False, True))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [16, 96, 80, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_other_head_sizes(name: str, size: int, device: torch.device) -> None:
    given = rows(torch.float32, device, size)
    assert torch.equal(*(written(name, given, by_codec=each) for each in (False, True)))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_with_strides_of_their_own(name: str, device: torch.device) -> None:
    key, value = rows(torch.float32, device)
    turned = tuple(each.transpose(0, 1).contiguous().transpose(0, 1) for each in (key, value))
    wide = torch.stack([key, key], -1)[..., 0], value
    plain = written(name, (key, value), by_codec=False)
    assert torch.equal(plain, written(name, (turned[0], turned[1]), by_codec=False))
    assert torch.equal(plain, written(name, wide, by_codec=False))


@pytest.mark.parametrize("name", FORMATS)
def test_infinities_and_not_a_number(name: str, device: torch.device) -> None:
    key, value = rows(torch.float32, device)
    key[3, 0, 3], value[3, 1, 5] = torch.inf, -torch.inf
    assert torch.equal(*(written(name, (key, value), by_codec=each) for each in (False, True)))
    value[4, 1, 9] = torch.nan
    found, wanted = (written(name, (key, value), by_codec=each) for each in (False, True))
    # Codes of NaN have no meaning, and its scale is one.
    assert (found != wanted).sum() <= SIZE


def test_formats_of_plugins_are_written_by_their_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnplug.ops.triton import kv_format_write

    monkeypatch.setattr(kv_format_write, "_TILES", {})
    given = rows(torch.float32, torch.device("cpu"))
    key, value = given
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=SIZE, dtype="bfloat16", kv_cache_dtype="nvfp4"
    )
    cache = torch.zeros(BLOCKS, 2, BLOCK, HEADS, kv_format("nvfp4").width(SIZE), dtype=torch.uint8)
    slots = torch.tensor(SLOTS)
    write = bound_codec_write(spec, key, value, cache[:, 0], cache[:, 1], slots, (1.0, 1.0))
    assert not isinstance(write, BoundFormatWrite)
    write(key, value, cache[:, 0], cache[:, 1], slots)
    assert cache.any()
