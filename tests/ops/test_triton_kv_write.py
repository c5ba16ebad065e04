"""The KV write kernel stores the very bytes that plain torch does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnplug.core.errors import BatchError, LayoutError
from attnplug.ops import kv_write, write_kv_cache
from attnplug.ops import triton as kernels

BLOCKS = 5
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SLOTS = [4, -1, 11, 5, 19, -1, 8]


@dataclasses.dataclass(frozen=True)
class Pages:
    """K and V side by side in one allocation, filled with what no test writes."""

    layout: str
    heads: int
    sizes: tuple[int, int]
    dtype: torch.dtype
    block_size: int = 4

    def on(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        per_head = (self.heads, self.block_size) if self.layout == "HND" else (self.block_size, self.heads)
        both = torch.full((BLOCKS, *per_head, sum(self.sizes)), -7.0, device=device).to(self.dtype)
        both = both if self.layout == "NHD" else both.transpose(1, 2)
        return both[..., : self.sizes[0]], both[..., self.sizes[0] :]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.cpu()


def both_ways(device, key, value, pages, slots, *scales):
    """The caches after the kernel's write and after plain torch's."""
    ours, theirs = pages.on(device), pages.on("cpu")
    kernels.write_kv_cache(key.to(device), value.to(device), *ours, slots.to(device), *scales)
    write_kv_cache(key.cpu(), value.cpu(), *theirs, slots.cpu(), *scales)
    return ours, theirs


def assert_the_same(device, key, value, pages, slots, *scales):
    ours, theirs = both_ways(device, key, value, pages, slots, *scales)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(raw(our), raw(their))
    return ours


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *EIGHT_BITS], ids=str)
@pytest.mark.parametrize(("heads", "sizes"), [(8, (16, 16)), (1, (80, 80)), (3, (128, 64)), (2, (40, 256))])
def test_it_writes_the_bytes_that_torch_writes(device, layout, dtype, heads, sizes):
    given = dtype if dtype.itemsize > 1 else torch.bfloat16
    key, value = (randn(len(SLOTS) + 2, heads, size, seed=size).to(given) for size in sizes)
    pages = Pages(layout, heads, sizes, dtype)
    ours = assert_the_same(device, key, value, pages, torch.tensor(SLOTS), 0.3, 1.7)
    assert not torch.equal(raw(ours[0]), raw(pages.on("cpu")[0]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_each_head_is_divided_by_its_own_scale(device, layout, dtype):
    key, value = (randn(len(SLOTS), 3, size, seed=size).bfloat16() for size in (24, 16))
    pages, slots = Pages(layout, 3, (24, 16), dtype), torch.tensor(SLOTS)
    scales = torch.tensor([0.3, 1.7, 0.05]), torch.tensor([2.0, 0.01, 0.6])
    ours, theirs = pages.on(device), pages.on("cpu")
    from attnplug.ops.triton.kv_write import BoundWrite

    given = key.to(device), value.to(device), *ours, slots.to(device)
    BoundWrite(*given, tuple(each.to(device) for each in scales))(*given)
    kv_write.bound_kv_write(key, value, *theirs, slots, scales)(key, value, *theirs, slots)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(raw(our), raw(their))
    for head in range(3):
        alone = pages.on("cpu")
        write_kv_cache(key, value, *alone, slots, float(scales[0][head]), float(scales[1][head]))
        for our, their in zip(ours, alone, strict=True):
            assert torch.equal(raw(our)[:, :, head], raw(their)[:, :, head])


@pytest.mark.parametrize("block_size", [1, 3, 48])
def test_pages_hold_any_number_of_tokens(device, block_size):
    pages = Pages("HND", 2, (16, 16), torch.float32, block_size)
    slots = torch.randperm(BLOCKS * block_size, generator=torch.Generator().manual_seed(2))
    key, value = randn(len(slots), 2, 16, seed=1), randn(len(slots), 2, 16, seed=2)
    assert_the_same(device, key, value, pages, slots)


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1], [6]])
def test_what_has_no_slot_is_not_written(device, slots):
    pages = Pages("NHD", 2, (16, 16), torch.bfloat16)
    key = randn(3, 2, 16).bfloat16()
    ours = assert_the_same(device, key, key, pages, torch.tensor(slots, dtype=torch.int64))
    written = (ours[0].cpu() != -7.0).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    assert written == [slot for slot in slots if slot >= 0]


def test_many_tokens_fill_more_than_one_program(device):
    pages = Pages("NHD", 3, (64, 64), torch.float16, 64)
    slots = torch.randperm(BLOCKS * 64, generator=torch.Generator().manual_seed(2))[:131]
    assert_the_same(device, randn(131, 3, 64).half(), randn(131, 3, 64, seed=1).half(), pages, slots)


def test_views_of_a_fused_projection_are_read_in_place(device):
    fused = randn(5, (6 + 2 * 2) * 32).bfloat16().to(device)
    key, value = (fused[:, first : first + 64].view(5, 2, 32) for first in (192, 256))
    assert_the_same(device, key, value, Pages("HND", 2, (32, 32), torch.bfloat16), torch.arange(5))


def test_no_stride_need_be_1(device):
    key = randn(32, 2, 5).to(device).permute(2, 1, 0)
    value = randn(5, 2, 64).to(device)[..., ::2]
    both = torch.full((32, 2, 4, BLOCKS, 2), -7.0, device=device).permute(3, 2, 1, 0, 4)
    slots = torch.tensor([3, 99, 17, 99, 4, 99, -1, 99, 8], device=device)[::2]
    kernels.write_kv_cache(key, value, both[..., 0], both[..., 1], slots)
    expected = torch.full((BLOCKS * 4, 2, 32, 2), -7.0)
    for row, slot in ((0, 3), (1, 17), (2, 4), (4, 8)):
        expected[slot] = torch.stack([key[row], value[row]], -1).cpu()
    assert torch.equal(both.cpu().reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_every_finite_half_is_rounded_to_8_bits_as_torch_does(device, dtype, monkeypatch):
    from attnplug.ops.triton import kv_write as host

    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    every = every.where(every.isfinite(), 0.0).view(32, 8, 256)
    pages = Pages("NHD", 8, (256, 256), dtype, 8)
    assert_the_same(device, every, every.flip(0), pages, torch.arange(32), 1.0, 2.0**-9)
    if device.type == "cuda":  # again without the instructions that this GPU may have
        monkeypatch.setattr(host, "_converts", lambda dtype, device: False)
        monkeypatch.setattr(host, "_format", host._format.__wrapped__)
        assert_the_same(device, every, every.flip(0), pages, torch.arange(32), 1.0, 2.0**-9)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_8_bits_hold_infinities_as_the_largest_number_and_nan_as_nan(device, dtype):
    key = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan]).repeat(4).view(1, 1, 16)
    ours, _ = both_ways(device, key, key, Pages("NHD", 1, (16, 16), dtype), torch.tensor([5]))
    limit = torch.finfo(dtype).max
    for cache in ours:
        found = cache[1, 1, 0].cpu().float()[:4]
        assert found[:2].tolist() == [limit, -limit]
        assert found[2:].isnan().all()


def test_float32_is_rounded_to_the_dtype_of_the_pages(device):
    key = randn(7, 2, 16)
    ours, theirs = both_ways(device, key, key, Pages("NHD", 2, (16, 16), torch.bfloat16), torch.tensor(SLOTS))
    # The interpreter cuts a float32 off where a GPU rounds it to nearest: up to one unit in the last place.
    tolerance = 0.0 if device.type == "cuda" else 2.0**-7
    torch.testing.assert_close(ours[0].cpu(), theirs[0], rtol=tolerance, atol=0.0)


def test_offsets_past_2_to_the_31_are_right(device):
    far = 2**30 + 2**20
    memory = torch.empty(2 * far + 256, dtype=torch.float8_e5m2, device=device)
    rows, k_cache, v_cache = (memory[first:] for first in (0, 64, 128))
    key = rows.as_strided((3, 1, 16), (far, 16, 1))
    caches = [cache.as_strided((3, 2, 1, 16), (far, 16, 16, 1)) for cache in (k_cache, v_cache)]
    key[2] = randn(1, 16).to(device, torch.float8_e5m2)
    slots = torch.tensor([-1, -1, 5], device=device)
    kernels.write_kv_cache(key, key, *caches, slots)
    for cache in caches:
        assert torch.equal(raw(cache[2, 1]), raw(key[2]))


BAD = [
    ({"key": (2, 2, 16)}, BatchError, r"key=\(2, 2, 16\) must have a row for each of 3 slots"),
    ({"value": (2, 2, 16)}, BatchError, r"value=\(2, 2, 16\) must have a row for each of 3 slots"),
    ({"key": (3, 1, 16)}, BatchError, r"key=\(3, 1, 16\) must be of shape \(tokens, 2, 16\)"),
    ({"value": (3, 32)}, BatchError, r"value=\(3, 32\) must be of shape \(tokens, 2, 16\)"),
    ({"k_cache": (2, 4, 16)}, LayoutError, r"must be \[num_blocks, block_size, num_kv_heads, head_size\]"),
    ({"v_cache": (2, 4, 1, 16)}, LayoutError, r"k_cache, v_cache=\(\(2, 4, 2, 16\), \(2, 4, 1, 16\)\)"),
    ({"slot_mapping": (3, 1)}, BatchError, r"slot_mapping=\(3, 1\) must have one dimension"),
    ({"k_cache": torch.uint8}, LayoutError, r"k_cache\.dtype=torch\.uint8 must be a float type; view raw"),
    ({"v_cache": torch.int8}, LayoutError, r"v_cache\.dtype=torch\.int8 must be a float type; view raw"),
    ({"v_cache": torch.float16}, LayoutError, r"v_cache\.dtype=torch\.float16 must be that of k_cache"),
]


@pytest.mark.parametrize(("change", "error", "said"), BAD)
@pytest.mark.parametrize("side", ["triton", "torch"])
def test_arguments_that_do_not_fit_are_refused_in_the_same_words(device, side, change, error, said):
    shapes = {"key": (3, 2, 16), "value": (3, 2, 16), "k_cache": (2, 4, 2, 16), "v_cache": (2, 4, 2, 16)}
    given = {name: torch.zeros(shape) for name, shape in shapes.items()}
    given["slot_mapping"] = torch.tensor([4, 5, 6])
    for name, changed in change.items():
        old = given[name]
        given[name] = old.to(changed) if isinstance(changed, torch.dtype) else old.new_zeros(changed)
    with pytest.raises(error, match=said):
        (kernels if side == "triton" else kv_write).write_kv_cache(**given)


def test_8_bit_types_without_numbers_to_clamp_to_are_refused(device):
    cache = torch.zeros(2, 4, 2, 16, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    key = torch.zeros(1, 2, 16, device=device)
    with pytest.raises(LayoutError, match=r"float8_e8m0fnu must be one of torch\.float8_e4m3fn, "):
        kernels.write_kv_cache(key, key, cache, torch.empty_like(cache), torch.tensor([3], device=device))


def test_the_public_function_uses_the_kernel_on_a_gpu(device, on_gpu, launches_of):
    calls = launches_of("kv_write")
    key = randn(7, 2, 16)
    caches = Pages("NHD", 2, (16, 16), torch.float32).on(device)
    write_kv_cache(on_gpu(key), on_gpu(key), *caches, torch.tensor(SLOTS, device=device))
    assert len(calls) == 1
    assert torch.equal(caches[0].flatten(0, 1)[19].cpu(), key[4])
    write_kv_cache(key, key, *Pages("NHD", 2, (16, 16), torch.float32).on("cpu"), torch.tensor(SLOTS))
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_on_a_gpu_nothing_waits_nothing_is_allocated_and_a_graph_replays_it(sync_errors, dtype):
    key = randn(7, 2, 64).bfloat16().cuda()
    caches = Pages("NHD", 2, (64, 64), dtype).on("cuda")
    slots = torch.tensor(SLOTS, device="cuda")
    write_kv_cache(key, key, *caches, slots)
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with sync_errors():
        write_kv_cache(key, key, *caches, slots)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    with torch.cuda.graph(graph):
        write_kv_cache(key, key, *caches, slots)
    for cache in caches:
        cache.fill_(0.0)
    slots[0] = -1
    graph.replay()
    written = caches[1].float().flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    assert written == sorted(slot for slot in SLOTS[1:] if slot >= 0)
