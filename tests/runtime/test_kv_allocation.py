"""From groups to tensors: whose bytes are whose, and in which physical order."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_layers import BLOCK, PAGE, caches, gpt_oss, layer, llama, model
from runtime_backends import HeadFirst, KeysFirst, Latent, Muddled, Plain

from attnplug.core import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LayerSpec,
    MLADims,
)
from attnplug.core.errors import LayoutError
from attnplug.runtime import (
    allocate_kv_cache,
    bind_kv_cache,
    get_kv_cache_spec,
    group_kv_caches,
    init_kv_cache,
    reshape_kv_cache,
    view_kv_cache,
)

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def bytes_of(cache: torch.Tensor) -> torch.Tensor:
    """Where each byte of a view lies, sorted."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(cache.shape, cache.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    first = (places.flatten() + cache.storage_offset()) * cache.element_size()
    return (first[:, None] + torch.arange(cache.element_size())).flatten().sort().values


def physical(spec: LayerSpec, layout: str) -> tuple[str, str]:
    """The dimensions of a cache as the contract has them, logically and in memory; b k t h d."""
    if spec.mla is not None:
        return "btd", "btd"
    if spec.head_size_v != spec.head_size:
        return "bthd", "bthd" if layout == "NHD" else "bhtd"
    return "bkthd", "bkthd" if layout == "NHD" else "bkhtd"


def strides(logical: str, order: str, sizes: dict[str, int]) -> tuple[int, ...]:
    found, step = {}, 1
    for dim in reversed(order):
        found[dim], step = step, step * sizes[dim]
    return tuple(found[dim] for dim in logical)


@st.composite
def layers(draw: st.DrawFn) -> LayerSpec:
    """Any paged layer whose cache has an element type of its own."""
    asked: dict[str, Any] = {"kv_cache_dtype": draw(st.sampled_from(["auto", "fp8", "fp8_e5m2", "float32"]))}
    if draw(st.booleans()):
        dims = MLADims(q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
        return layer(num_kv_heads=1, head_size=8, mla=dims, **asked)
    return layer(
        num_heads=12,
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        head_size=draw(st.sampled_from([4, 8])),
        head_size_v=draw(st.sampled_from([None, 4, 6])),
        **asked,
    )


@given(
    spec=layers(),
    layout=st.sampled_from(["NHD", "HND"]),
    num_layers=st.none() | st.integers(1, 3),
    num_blocks=st.integers(1, 4),
    block_size=st.integers(1, 5),
)
def test_a_view_has_the_logical_shape_over_the_declared_physical_order(
    spec, layout, num_layers, num_blocks, block_size
):
    backend = Latent if spec.mla else Plain
    cache = get_kv_cache_spec({"layer": spec}, block_size)["layer"]
    raw = torch.zeros(cache.page_size_bytes * num_blocks * (num_layers or 1), dtype=torch.uint8)
    view = view_kv_cache(raw, cache, spec, backend, layout, num_layers)

    logical, order = physical(spec, layout)
    elements = (
        spec.head_size
        if spec.head_size_v == spec.head_size or spec.mla
        else spec.head_size + spec.head_size_v
    )
    sizes = {"b": num_blocks, "k": 2, "t": block_size, "h": spec.num_kv_heads, "d": elements}
    if num_layers is not None:  # a block's layers lie together
        logical, order = f"l{logical}", f"bl{order[1:]}"
        sizes["l"] = num_layers
    assert view.shape == tuple(sizes[dim] for dim in logical)
    expected = strides(logical, order, sizes)
    assert all(a == b for a, b, n in zip(view.stride(), expected, view.shape, strict=True) if n > 1)
    assert view.data_ptr() == raw.data_ptr()
    assert torch.equal(bytes_of(view), torch.arange(raw.numel()))
    stored = {"auto": torch.bfloat16, "float32": torch.float32} | FP8
    assert view.dtype == stored[spec.kv_cache_dtype]


@given(
    kinds=st.lists(st.sampled_from([{}, {"sliding_window": 4}, {"chunk_size": 8}]), min_size=1, max_size=9),
    layout=st.sampled_from(["NHD", "HND"]),
    changes=st.sampled_from([{}, {"head_size_v": 4}, {"kv_cache_dtype": "fp8"}, {"num_kv_heads": 1}]),
    num_blocks=st.integers(1, 3),
    data=st.data(),
)
def test_layers_of_a_group_never_overlap_and_layers_of_a_tensor_have_the_same_bytes(
    kinds, layout, changes, num_blocks, data
):
    specs = model([changes | kind for kind in kinds])
    cached = get_kv_cache_spec(specs, BLOCK)
    names = list(specs)
    sharing: dict[str, str] = {}
    for one, other in itertools.combinations(names, 2):
        if cached[one] == cached[other] and one not in sharing and data.draw(st.booleans()):
            sharing.setdefault(other, one)
    sharing = {reader: target for reader, target in sharing.items() if target not in sharing}
    config = group_kv_caches(cached, num_blocks, sharing)
    raw = allocate_kv_cache(config, "cpu")
    found = reshape_kv_cache(config, raw, specs, dict.fromkeys(names, Plain), layout)

    places = {name: (raw[name].data_ptr(), bytes_of(cache)) for name, cache in found.items()}
    assert set(places) == set(specs)
    for tensor in config.kv_cache_tensors:
        owner, *others = (places[name] for name in tensor.shared_by)
        assert owner[1].numel() == tensor.size
        assert all(other[0] == owner[0] and torch.equal(other[1], owner[1]) for other in others)
        assert len({raw[name].data_ptr() for name in tensor.shared_by}) == 1
    for group in config.kv_cache_groups:
        own = [name for name in group.layer_names if name not in sharing]
        assert len({places[name][0] for name in own}) == len(own)
    for reader, target in sharing.items():
        assert places[reader][0] == places[target][0]


def test_what_one_layer_writes_only_those_that_share_its_tensor_read():
    specs = gpt_oss()
    config = group_kv_caches(caches(gpt_oss), 4, {"layers.22": "layers.20"})
    found = init_kv_cache(config, specs, dict.fromkeys(specs, Plain), "cpu")
    assert all((cache == 0).all() for cache in found.values())
    found["layers.20"][3] = 5.0
    shared = {"layers.20", "layers.21", "layers.22"}
    for name, cache in found.items():
        assert (cache[3] == 5.0).all() if name in shared else (cache == 0).all()
        assert (cache[:3] == 0).all()


def test_groups_that_share_a_tensor_may_have_other_layouts_each():
    config = group_kv_caches(caches(gpt_oss), 4)
    specs = gpt_oss()
    layouts = {name: "HND" if spec.sliding_window else "NHD" for name, spec in specs.items()}
    found = init_kv_cache(config, specs, dict.fromkeys(specs, Plain), "cpu", layouts)
    found["layers.0"][1] = 1.0
    assert (found["layers.1"][1] == 1.0).all()
    assert (found["layers.1"][[0, 2, 3]] == 0).all()
    assert found["layers.0"].stride() != found["layers.1"].stride()


def test_each_backend_has_its_preferred_layout_where_none_is_given():
    specs = model([{}])
    config = group_kv_caches(get_kv_cache_spec(specs, BLOCK), 3)
    found = init_kv_cache(config, specs, {"layers.0": HeadFirst}, "cpu")["layers.0"]
    assert found.shape == (3, 2, 16, 2, 8)
    assert found.stride() == (512, 256, 8, 128, 1)


# Refusals


def config_of(
    tensors: list[tuple[int, tuple[str, ...]]], groups: list[tuple[str, ...]], num_blocks: int = 2
) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype="bfloat16")
    return KVCacheConfig(
        num_blocks,
        tuple(KVCacheTensor(size, names) for size, names in tensors),
        tuple(KVCacheGroupSpec(names, spec) for names in groups),
    )


@pytest.mark.parametrize(
    ("tensors", "groups", "said"),
    [
        ([("a",)], [("a", "b")], "missing ['b'], extra [], twice []"),
        ([("a",), ("b",)], [("a",)], "missing [], extra ['b'], twice []"),
        ([("a", "c"), ("a",)], [("a", "b")], "missing ['b'], extra ['c'], twice ['a']"),
        ([("a", "b")], [("a", "b"), ("a",)], "kv_cache_groups=['a'] must name each layer in one group only"),
        ([("a",)], [("a", "a")], "kv_cache_groups=['a'] must name each layer in one group only"),
    ],
)
def test_every_layer_is_in_one_group_and_one_tensor(tensors, groups, said):
    with pytest.raises(LayoutError) as error:
        allocate_kv_cache(config_of([(2 * PAGE, names) for names in tensors], groups), "cpu")
    assert said in str(error.value)


@pytest.mark.parametrize("size", [1, PAGE - 1, 2 * PAGE + 1])
def test_bytes_that_are_no_whole_number_of_pages_are_refused(size):
    with pytest.raises(LayoutError) as error:
        allocate_kv_cache(config_of([(size, ("a",))], [("a",)]), "cpu")
    said = f"kv_cache_tensors.size={size} is not a whole number of pages of {PAGE} bytes (layer a)"
    assert str(error.value) == said


def test_fewer_pages_than_blocks_are_refused():
    with pytest.raises(LayoutError) as error:
        allocate_kv_cache(config_of([(2 * PAGE, ("a",))], [("a",)], num_blocks=3), "cpu")
    assert f"must hold num_blocks=3 pages of {PAGE} bytes (layer a)" in str(error.value)


def one_layer() -> tuple[KVCacheConfig, dict[str, LayerSpec], dict[str, torch.Tensor]]:
    config = group_kv_caches(get_kv_cache_spec(model([{}]), BLOCK), 2)
    return config, model([{}]), allocate_kv_cache(config, "cpu")


@pytest.mark.parametrize("size", [0, PAGE + 1])
def test_raw_bytes_that_hold_no_pages_are_refused(size):
    config, specs, _ = one_layer()
    raw = {"layers.0": torch.zeros(size, dtype=torch.uint8)}
    with pytest.raises(
        LayoutError, match=f"raw={size} bytes are not a whole number of pages of {PAGE} bytes"
    ):
        reshape_kv_cache(config, raw, specs, {"layers.0": Plain})


@pytest.mark.parametrize(
    "raw",
    [
        torch.zeros(PAGE, dtype=torch.bfloat16),
        torch.zeros(1, PAGE, dtype=torch.uint8),
        torch.zeros(2 * PAGE, dtype=torch.uint8)[::2],
    ],
)
def test_what_is_not_raw_bytes_is_refused(raw):
    config, specs, _ = one_layer()
    with pytest.raises(LayoutError, match="must be contiguous bytes"):
        reshape_kv_cache(config, {"layers.0": raw}, specs, {"layers.0": Plain})


def test_layers_missing_from_any_argument_are_listed():
    config, specs, raw = one_layer()
    backends = {"layers.0": Plain}
    with pytest.raises(LayoutError, match=r"raw=0 must name every layer .* missing \['layers.0'\]"):
        reshape_kv_cache(config, {}, specs, backends)
    with pytest.raises(LayoutError, match=r"raw=2 must name .* extra \['other'\]"):
        reshape_kv_cache(config, raw | {"other": raw["layers.0"]}, specs, backends)
    with pytest.raises(LayoutError, match=r"specs=\['layers.0'\] are missing"):
        reshape_kv_cache(config, raw, {}, backends)
    with pytest.raises(LayoutError, match=r"backends=\['layers.0'\] are missing"):
        reshape_kv_cache(config, raw, specs, {})
    with pytest.raises(LayoutError, match=r"layouts=\['layers.0'\] are missing"):
        reshape_kv_cache(config, raw, specs, backends, {})


def test_two_layouts_in_one_group_are_refused_with_a_layer_of_each():
    specs = model([{}, {}, {}])
    config = group_kv_caches(get_kv_cache_spec(specs, BLOCK), 2)
    backends = {"layers.0": Plain, "layers.1": HeadFirst, "layers.2": Plain}
    with pytest.raises(LayoutError) as error:
        init_kv_cache(config, specs, backends, "cpu")
    said = str(error.value)
    assert "NHD for layer layers.0 (PLAIN), HND for layer layers.1 (HEAD_FIRST)" in said
    found = init_kv_cache(config, specs, backends, "cpu", "HND")
    assert len({cache.stride() for cache in found.values()}) == 1


@pytest.mark.parametrize(("backend", "layout"), [(HeadFirst, "NHD"), (Plain, "DNH")])
def test_a_layout_that_the_backend_cannot_read_is_refused(backend, layout):
    config, specs, raw = one_layer()
    with pytest.raises(LayoutError, match=f"layout='{layout}' must be one that {backend.get_name()} reads"):
        reshape_kv_cache(config, raw, specs, {"layers.0": backend}, layout)


def test_an_order_that_is_none_is_refused():
    config, specs, raw = one_layer()
    with pytest.raises(
        LayoutError, match=r"stride_order=\(0, 1, 2, 3, 3\) is not an order of the 5 dimensions"
    ):
        reshape_kv_cache(config, raw, specs, {"layers.0": Muddled})


def test_a_backend_whose_shape_is_not_that_of_the_pages_is_refused():
    config, specs, raw = one_layer()
    with pytest.raises(LayoutError, match=r"is not an order of the 3 dimensions"):
        reshape_kv_cache(config, raw, specs, {"layers.0": Latent})

    class Wide(Plain):
        @classmethod
        def get_kv_cache_shape(cls, num_blocks: int, *sizes: Any) -> tuple[int, ...]:
            return (2 * num_blocks, *super().get_kv_cache_shape(num_blocks, *sizes)[1:])

    with pytest.raises(
        LayoutError, match=rf"kv_cache_shape=.* of PLAIN is not that of \d+ pages of {PAGE} bytes"
    ):
        reshape_kv_cache(config, raw, specs, {"layers.0": Wide})


def test_a_storage_type_that_torch_lacks_is_refused():
    config, specs, raw = one_layer()
    cache = dataclasses.replace(config.kv_cache_groups[0].kv_cache_spec, dtype="fp8_ds_mla")
    with pytest.raises(LayoutError, match="dtype='fp8_ds_mla' must be one of float16, bfloat16"):
        view_kv_cache(raw["layers.0"], cache, specs["layers.0"], Plain)


def test_a_leading_dimension_has_at_least_one_layer():
    config, specs, raw = one_layer()
    cache = config.kv_cache_groups[0].kv_cache_spec
    with pytest.raises(LayoutError, match="num_layers=0 must be at least 1"):
        view_kv_cache(raw["layers.0"], cache, specs["layers.0"], Plain, num_layers=0)


def test_groups_that_share_bytes_must_have_their_pages_in_one_piece():
    config = group_kv_caches(caches(gpt_oss), 4)
    specs = gpt_oss()
    with pytest.raises(
        LayoutError, match=r"of layer layers\.0 spreads a page over bytes that layers of other"
    ):
        init_kv_cache(config, specs, dict.fromkeys(specs, KeysFirst), "cpu")
    # Alone in its tensor a layer may do as it likes.
    config = group_kv_caches(caches(llama), 4)
    found = init_kv_cache(config, llama(), dict.fromkeys(llama(), KeysFirst), "cpu")
    assert found["layers.0"].stride(1) > found["layers.0"].stride(0)


# Binding


def test_layers_and_the_runners_list_get_their_caches_in_layer_order():
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.0.self", "model.layers.0.cross"]
    found = {name: torch.zeros(2, 3) for name in names}
    objects = {name: SimpleNamespace() for name in names}
    runner: list[torch.Tensor] = []
    bind_kv_cache(found, objects, runner)
    assert all(objects[name].kv_cache is found[name] for name in names)
    order = ["model.layers.0.self", "model.layers.0.cross", "model.layers.9.attn", "model.layers.10.attn"]
    assert [id(cache) for cache in runner] == [id(found[name]) for name in order]


@pytest.mark.parametrize("kinds", [["self", "cross"], ["cross", "self"], ["b", "a", "c"]])
def test_layers_of_one_number_keep_the_order_of_the_caller(kinds: list[str]):
    names = [f"layers.{number}.{kind}" for number in (1, 0) for kind in kinds]
    found = {name: torch.zeros(1) for name in names}
    runner: list[torch.Tensor] = []
    bind_kv_cache(found, {name: SimpleNamespace() for name in names}, runner)
    expected = [f"layers.{number}.{kind}" for number in (0, 1) for kind in kinds]
    assert [id(cache) for cache in runner] == [id(found[name]) for name in expected]


def test_layers_that_share_are_bound_to_one_cache():
    cache = torch.zeros(1)
    objects = {"layers.0": SimpleNamespace(), "layers.1": SimpleNamespace()}
    runner: list[torch.Tensor] = []
    bind_kv_cache(dict.fromkeys(objects, cache), objects, runner)
    assert objects["layers.0"].kv_cache is objects["layers.1"].kv_cache
    assert len(runner) == 2


def test_binding_twice_or_to_other_layers_is_refused_and_binds_nothing():
    found = {"layers.0": torch.zeros(1)}
    objects = {"layers.0": SimpleNamespace()}
    with pytest.raises(LayoutError, match="runner_kv_caches=1 must be empty"):
        bind_kv_cache(found, objects, [torch.zeros(1)])
    runner: list[torch.Tensor] = []
    with pytest.raises(LayoutError, match=r"missing \['layers.1'\], extra \[\]"):
        bind_kv_cache(found, objects | {"layers.1": SimpleNamespace()}, runner)
    with pytest.raises(LayoutError, match=r"missing \[\], extra \['layers.1'\]"):
        bind_kv_cache(found | {"layers.1": torch.zeros(1)}, objects, runner)
    assert not runner
    assert not hasattr(objects["layers.0"], "kv_cache")
