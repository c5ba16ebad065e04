"""The KV cache of a backend: its shape, its views, its order in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from sample_backends import Generous, Latent, Plain
from spec_strategies import MLA_SIZES, SIZES

from attnplug.core import LayerSpec
from attnplug.errors import LayoutError

BLOCKS, BLOCK_SIZE = 5, 16
USUAL = LayerSpec(**SIZES)
WIDE_VALUES = LayerSpec(**SIZES, head_size_v=96)
LATENT = LayerSpec(**MLA_SIZES)
CASES = [(Generous, USUAL), (Generous, WIDE_VALUES), (Latent, LATENT)]
LAYOUTS = [None, "NHD", "HND"]


def shape_of(backend: type[Plain], spec: LayerSpec) -> tuple[int, ...]:
    return backend.get_kv_cache_shape(
        BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
    )


def cache_in_order(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """A cache of logical `shape` whose dimensions lie in memory as `order` says."""
    numel = torch.Size(shape).numel()
    stored = torch.arange(numel, dtype=torch.float32).view([shape[dim] for dim in order])
    return stored.permute([order.index(dim) for dim in range(len(order))])


def test_the_logical_shape_is_blocks_then_k_and_v() -> None:
    assert shape_of(Generous, USUAL) == (5, 2, 16, 2, 64)
    assert Generous.get_kv_cache_shape(5, 16, 2, 64) == (5, 2, 16, 2, 64)
    assert Generous.get_kv_cache_shape(5, 16, 2, 64, head_size_v=64) == (5, 2, 16, 2, 64)


def test_values_of_another_size_lie_behind_the_keys() -> None:
    assert shape_of(Generous, WIDE_VALUES) == (5, 16, 2, 64 + 96)


def test_a_latent_cache_holds_one_vector_per_token() -> None:
    assert shape_of(Latent, LATENT) == (5, 16, 576)


@pytest.mark.parametrize(("backend", "spec"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_and_v_are_views_of_the_cache(backend: type[Plain], spec: LayerSpec, layout: str | None) -> None:
    order = backend.get_kv_cache_stride_order(layout=layout, spec=spec)
    cache = cache_in_order(shape_of(backend, spec), order)
    key, value = backend.split_kv(cache, spec)
    assert key.shape == (BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
    assert value.shape == (BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_size_v)
    for view in (key, value):
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert view.stride(-1) == 1
    value.fill_(-1.0)
    key[1, 2, 0, 3] = -2.0
    assert (cache == -1.0).sum() >= value.numel() - 1
    assert (cache == -2.0).sum() == 1


@pytest.mark.parametrize(("backend", "spec"), CASES[:2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_and_v_share_no_element_and_leave_none_out(
    backend: type[Plain], spec: LayerSpec, layout: str | None
) -> None:
    order = backend.get_kv_cache_stride_order(layout=layout, spec=spec)
    cache = cache_in_order(shape_of(backend, spec), order)
    key, value = backend.split_kv(cache, spec)
    together = torch.cat([key.reshape(-1), value.reshape(-1)]).sort().values
    assert torch.equal(together, torch.arange(cache.numel(), dtype=torch.float32))


def test_the_value_of_a_latent_is_its_first_part() -> None:
    cache = torch.rand(5, 16, 576)
    key, value = Latent.split_kv(cache, LATENT)
    assert torch.equal(key[..., 0, :], cache)
    assert torch.equal(value[..., 0, :], cache[..., :512])


@pytest.mark.parametrize(("backend", "spec"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [False, True])
def test_a_stride_order_is_a_permutation_of_the_shape(
    backend: type[Plain], spec: LayerSpec, layout: str | None, layers: bool
) -> None:
    order = backend.get_kv_cache_stride_order(layers, layout=layout, spec=spec)
    dims = len(shape_of(backend, spec)) + layers
    assert sorted(order) == list(range(dims))
    assert all(type(dim) is int for dim in order)


def test_heads_lie_outside_tokens_in_hnd_only() -> None:
    nhd, hnd = (Generous.get_kv_cache_stride_order(layout=layout) for layout in ("NHD", "HND"))
    blocks, kv, token, head, element = range(5)
    assert nhd == (blocks, kv, token, head, element)
    assert hnd == (blocks, kv, head, token, element)
    wide_nhd, wide_hnd = (
        Generous.get_kv_cache_stride_order(layout=layout, spec=WIDE_VALUES) for layout in ("NHD", "HND")
    )
    assert (wide_nhd, wide_hnd) == ((0, 1, 2, 3), (0, 2, 1, 3))


def test_a_blocks_layers_lie_together() -> None:
    for (backend, spec), layout in itertools.product(CASES, LAYOUTS):
        order = backend.get_kv_cache_stride_order(True, layout=layout, spec=spec)
        without = backend.get_kv_cache_stride_order(layout=layout, spec=spec)
        assert order[:2] == (1, 0)
        assert tuple(dim - 1 for dim in order[2:]) == without[1:]


def test_without_a_spec_the_usual_shape_of_the_backend_is_meant() -> None:
    assert Generous.get_kv_cache_stride_order() == Generous.get_kv_cache_stride_order(spec=USUAL)
    assert Latent.get_kv_cache_stride_order() == Latent.get_kv_cache_stride_order(spec=LATENT) == (0, 1, 2)


def test_the_first_layout_is_the_default_and_the_only_one_is_required() -> None:
    class HeadsFirst(Plain):
        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[str, ...]:
            return ("HND",)

    assert Plain.get_required_kv_cache_layout() is None
    assert HeadsFirst.get_required_kv_cache_layout() == "HND"
    assert Plain.get_kv_cache_stride_order() == (0, 1, 2, 3, 4)
    assert HeadsFirst.get_kv_cache_stride_order() == (0, 1, 3, 2, 4)
    with pytest.raises(LayoutError, match="layout='NHD' must be one that PLAIN reads: HND"):
        HeadsFirst.get_kv_cache_stride_order(layout="NHD")


@pytest.mark.parametrize("layout", ["hnd", "", "DNH"])
def test_a_layout_that_cannot_be_read_is_refused(layout: str) -> None:
    with pytest.raises(LayoutError, match="must be one that PLAIN reads: NHD, HND"):
        Plain.get_kv_cache_stride_order(layout=layout)
