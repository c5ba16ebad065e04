"""Memory that no layer can use is refused by layer, value and limit, and is not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_pools import interleaved, like, own, poisoned, raw_bytes, separate, shared, whole
from model_layers import layer
from runtime_backends import KeysFirst, Latent

from attnplug import plan
from attnplug.core.errors import LayoutError
from attnplug.core.kv_cache_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, kv_cache_spec_for
from attnplug.core.mla.dims import MLADims
from attnplug.runtime import AttentionRuntime, ModelPlan
from attnplug.runtime.caches.engine_caches import check_kv_caches

FULL = layer(dtype="float32")
PAGE = 16 * 2 * 2 * 8 * 4
"""Bytes of a block: tokens, K and V, heads, elements, bytes of a float32."""
SHAPE = (4, 2, 16, 2, 8)

ONE_BUFFER = poisoned(4 * PAGE)


class Wrapped(torch.Tensor):
    """A subclass, as of engines that track their tensors."""


def two() -> ModelPlan:
    return plan({"a": FULL, "b": FULL}, "cpu", num_blocks=4)


def refused(made: ModelPlan, memory: dict[str, Any], *said: str) -> None:
    """The runtime is refused with these words, and no byte of the memory has changed."""
    given = memory.get("kv_caches", {})
    stored = [t for t in given.values() if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    pools = [
        whole(t)
        for t in stored
        if type(t) is torch.Tensor and t.device.type == "cpu" and not t.is_inference()
    ]
    before = [pool.clone() for pool in pools]
    with pytest.raises(LayoutError) as error:
        AttentionRuntime(made, **memory)
    for words in said:
        assert words in str(error.value)
    for pool, bytes_before in zip(pools, before, strict=True):
        assert torch.equal(pool, bytes_before)


def floats(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def shifted(elements: int) -> torch.Tensor:
    """A cache whose first element is this many elements past an aligned address."""
    return floats(4 * PAGE // 4 + elements)[elements:].view(SHAPE)


def freed() -> torch.Tensor:
    """A cache whose storage an engine has released, as for sleep."""
    cache = floats(*SHAPE)
    cache.untyped_storage().resize_(16)
    return cache


def made_in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return floats(*SHAPE)


WRONG: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no tensor": (lambda: [0.0], ("type(kv_caches['b'])='list' must be a plain torch.Tensor",)),
    "an array": (lambda: floats(*SHAPE).numpy(), ("type(kv_caches['b'])='ndarray'",)),
    "a subclass": (lambda: floats(*SHAPE).as_subclass(Wrapped), ("type(kv_caches['b'])='Wrapped'", "plain")),
    "a sparse tensor": (lambda: torch.zeros(SHAPE).to_sparse(), ("layout", "must be torch.strided")),
    "a nested tensor": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), ("kv_caches['b']",)),
    "another device": (lambda: torch.empty(SHAPE, device="meta"), ("kv_caches['b'].device='meta' must be cpu",)),
    "a gradient": (lambda: floats(*SHAPE).requires_grad_(), ("requires_grad=True must be False", "detach()")),
    "a part of a graph": (lambda: floats(*SHAPE).requires_grad_() * 2, ("requires_grad=True must be False",)),
    "a negative view": (lambda: torch.zeros(SHAPE, dtype=torch.complex64).conj().imag, ("kv_caches['b']='a lazy view'",)),
    "made in inference mode": (made_in_inference, ("kv_caches['b']='an inference tensor' can only be written under torch.inference_mode()",)),
    "a freed storage": (freed, ("kv_caches['b'].untyped_storage()=16 bytes must be at least 8192",)),
    "another dtype": (lambda: floats(*SHAPE).half(), ("kv_caches['b'].dtype=torch.float16 must be torch.float32 with kv_cache_dtype='auto'",)),
    "bytes in the shape of a cache": (lambda: torch.zeros(SHAPE, dtype=torch.uint8), ("kv_caches['b'].dtype=torch.uint8 must be torch.float32",)),
    "fewer blocks": (lambda: floats(3, *SHAPE[1:]), ("kv_caches['b'].shape=(3, 2, 16, 2, 8) must be (4, 2, 16, 2, 8) on TORCH, 4 blocks",)),
    "more blocks": (lambda: floats(5, *SHAPE[1:]), ("shape=(5, 2, 16, 2, 8) must be (4, 2, 16, 2, 8)",)),
    "keys and values first": (lambda: floats(2, 4, 16, 2, 8), ("shape=(2, 4, 16, 2, 8) must be",)),
    "no dimension": (lambda: torch.tensor(0.0), ("shape=() must be",)),
    "nothing": (lambda: floats(0, *SHAPE[1:]), ("shape=(0, 2, 16, 2, 8) must be",)),
    "heads before tokens": (
        lambda: floats(4, 2, 2, 16, 8).transpose(2, 3),
        (
            "kv_caches['b'].stride()=(512, 256, 8, 128, 1) must be (512, 256, 16, 8, 1) for the layout NHD",
            "call set_kv_cache_layout('HND') before the plan is made",
        ),
    ),
    "values apart from keys": (
        lambda: floats(2, 4, 16, 2, 8).transpose(0, 1),
        ("stride()=(256, 1024, 16, 8, 1) must be (512, 256, 16, 8, 1)", "keep each block in one piece"),
    ),
    "one block for all": (lambda: floats(1, *SHAPE[1:]).expand(SHAPE), ("stride()=(0, 256, 16, 8, 1) must be (512, 256, 16, 8, 1)",)),
    "one head for all": (lambda: floats(4, 2, 16, 1, 8).expand(SHAPE), ("stride()=(256, 128, 8, 0, 1) must be",)),
    "one number for all": (lambda: floats(1).expand(SHAPE), ("stride()=(0, 0, 0, 0, 0) must be",)),
    "blocks that overlap": (lambda: floats(4096).as_strided(SHAPE, (508, 256, 16, 8, 1)), ("stride()=(508, 256, 16, 8, 1) must be (512,",),),
    "padded tokens": (lambda: floats(4, 2, 16, 3, 8)[:, :, :, :2], ("stride()=(768, 384, 24, 8, 1) must be",)),
    "every second element": (lambda: floats(4, 2, 16, 2, 16)[..., ::2], ("stride()", "must be")),
    "blocks between 16-byte steps": (
        lambda: floats(4 * 514).as_strided(SHAPE, (514, 256, 16, 8, 1)),
        ("kv_caches['b'].stride(0)=2056 bytes of dimension 0 must be a multiple of 16 bytes",),
    ),
    "an address between 16-byte steps": (lambda: shifted(1), ("kv_caches['b'].data_ptr()=", "must be a multiple of 16 bytes")),
    "bytes at an address between 16-byte steps": (
        lambda: poisoned(4 * PAGE + 8)[8:],
        ("kv_caches['b'].data_ptr()=", "must be a multiple of 16 bytes"),
    ),
    "fewer bytes": (lambda: poisoned(3 * PAGE), (f"kv_caches['b'].numel()={3 * PAGE} bytes must be {4 * PAGE}: 4 blocks of {PAGE}", "num_blocks")),
    "more bytes": (lambda: poisoned(4 * PAGE + 16), (f"bytes must be {4 * PAGE}",)),
    "flat elements": (
        lambda: floats(4 * PAGE // 4),
        ("dtype=torch.float32 must be bytes, uint8 or int8, if 1-D", f"or a cache {SHAPE} of torch.float32"),
    ),
    "every second byte": (lambda: poisoned(8 * PAGE)[::2], ("kv_caches['b'].stride()=(2,) must be (1,)",)),
    "one byte for all": (lambda: poisoned(1).expand(4 * PAGE), ("stride()=(0,) must be (1,)",)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_memory_that_does_not_fit_its_layer_is_refused(wrong):
    make, said = WRONG[wrong]
    refused(two(), {"kv_caches": {"a": floats(*SHAPE), "b": make()}}, *said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: {"a": c["a"]}, "kv_caches=1 has no memory for b: every layer with pages needs some"),
        (lambda c: {}, "kv_caches=0 has no memory for a, b"),
        (lambda c: c | {"z": c["a"]}, "kv_caches=['z'] are not among the plan's 2 layers with pages"),
        (lambda c: c | {3: c["a"]}, "kv_caches=[3] are not among"),
        (lambda c: list(c.values()), "kv_caches='list' must be a mapping of layers to tensors"),
    ],
)
def test_each_layer_with_pages_is_named_once(change, said):
    made = two()
    with pytest.raises(LayoutError) as error:
        AttentionRuntime(made, kv_caches=change(separate(made)["kv_caches"]))
    assert said in str(error.value)


def test_a_layer_without_pages_has_no_memory():
    made = plan({"a": FULL, "e": layer(dtype="float32", direct_kv=True)}, "cpu", num_blocks=4)
    caches = separate(made)["kv_caches"]
    refused(made, {"kv_caches": caches | {"e": floats(*SHAPE)}}, "['e'] are not among the plan's 1 layers")


def test_a_cache_in_physical_order_is_refused_with_the_view_to_pass():
    made = plan({"a": FULL}, "cpu", num_blocks=4)
    hnd = floats(4, 2, 2, 16, 8)
    refused(made, {"kv_caches": {"a": hnd}}, "shape=(4, 2, 2, 16, 8) must be (4, 2, 16, 2, 8)")
    config, name = made.kv_cache_config, "a"
    given: tuple[Any, ...] = made.specs, {name: made.decisions[name].get_backend_cls()}, torch.device("cpu")
    with pytest.raises(LayoutError, match=r"pass the logical view, tensor.permute\(\[0, 1, 3, 2, 4\]\)"):
        check_kv_caches(config, {name: hnd}, *given, {name: "HND"}, {})
    back = check_kv_caches(config, {name: hnd.permute(0, 1, 3, 2, 4)}, *given, {name: "HND"}, {})[name]
    assert back.stride() == (512, 256, 8, 128, 1)


# Layers against each other


def of_two(make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], size: int) -> dict[str, Any]:
    first, second = make(poisoned(size))
    return {"kv_caches": {"a": first, "b": second}}


@pytest.mark.parametrize(
    "make",
    [
        lambda pool: (pool[: 4 * PAGE], pool[: 4 * PAGE]),
        lambda pool: (pool[: 4 * PAGE], pool[PAGE : 5 * PAGE]),
        lambda pool: (pool[16 : 16 + 4 * PAGE], pool[: 4 * PAGE]),
        lambda pool: (pool[: 4 * PAGE], pool[: 4 * PAGE].view(torch.float32).view(SHAPE)),
        lambda pool: (
            pool.view(torch.float32).as_strided(SHAPE, (1024, 256, 16, 8, 1)),
            pool.view(torch.float32).as_strided(SHAPE, (1024, 256, 16, 8, 1), 508),
        ),
        lambda pool: (
            pool.view(torch.float32).as_strided(SHAPE, (1024, 256, 16, 8, 1)),
            pool.view(torch.float32).as_strided(SHAPE, (1536, 256, 16, 8, 1), 512),
        ),
        lambda pool: (
            pool[: 4 * PAGE],
            torch.frombuffer(memoryview(pool.numpy())[2 * PAGE :], dtype=torch.uint8)[: 4 * PAGE],
        ),
    ],
    ids=["same", "blocks later", "bytes later", "forms", "interleaved", "other steps", "two storages"],
)
def test_layers_of_one_group_never_overlap(make):
    memory = of_two(make, 12 * PAGE)
    refused(two(), memory, "kv_caches['b']='overlapping' shares bytes with layer a; give each its own memory")


@pytest.mark.parametrize(
    "make",
    [
        lambda pool: (pool[: 4 * PAGE], pool[4 * PAGE :]),
        lambda pool: (pool[4 * PAGE :], pool[: 4 * PAGE]),
        lambda pool: (
            pool.view(torch.float32).as_strided(SHAPE, (1024, 256, 16, 8, 1)),
            pool.view(torch.float32).as_strided(SHAPE, (1024, 256, 16, 8, 1), 512),
        ),
    ],
    ids=["behind", "in front", "interleaved"],
)
def test_layers_may_be_neighbours(make):
    AttentionRuntime(two(), **of_two(make, 8 * PAGE))


def hybrid() -> ModelPlan:
    """Two groups, of layers 0 and 2 and of layers 1 and 3; 0 shares memory with 1, and 2 with 3."""
    window = layer(dtype="float32", sliding_window=9)
    made = plan({"0": FULL, "1": window, "2": FULL, "3": window}, "cpu", num_blocks=4)
    assert [set(t.shared_by) for t in made.kv_cache_config.kv_cache_tensors] == [{"0", "1"}, {"2", "3"}]
    return made


def test_layers_of_two_groups_share_memory_as_planned_or_not_at_all():
    made = hybrid()
    AttentionRuntime(made, **shared(made))
    AttentionRuntime(made, **separate(made))
    for name, other in (("3", "0"), ("2", "0"), ("1", "2")):
        caches = separate(made)["kv_caches"]
        refused(made, {"kv_caches": caches | {name: caches[other]}}, "'overlapping' shares bytes with layer")


def test_groups_share_a_block_whole_or_not_at_all():
    made = hybrid()
    pool, caches = poisoned(5 * PAGE), separate(made)["kv_caches"]
    overlapping = caches | {"0": pool[: 4 * PAGE], "1": pool[PAGE:]}
    refused(made, {"kv_caches": overlapping}, "'overlapping' shares bytes with layer")


def test_a_layer_that_reads_anothers_pages_has_its_memory():
    made = plan({"a": FULL, "b": FULL}, "cpu", num_blocks=4, kv_sharing={"b": "a"})
    cache = floats(*SHAPE)
    AttentionRuntime(made, kv_caches={"a": cache, "b": whole(cache)})
    said = "is not the memory of layer a, whose pages it reads; pass the same tensor"
    refused(made, {"kv_caches": {"a": cache, "b": floats(*SHAPE)}}, "kv_caches['b']=", said)


def test_planes_of_keys_and_values_are_not_shared_by_groups():
    spec, window = FULL, layer(dtype="float32", sliding_window=9)
    pages = [kv_cache_spec_for(each, 16) for each in (spec, window)]
    groups = tuple(KVCacheGroupSpec((name,), page) for name, page in zip("ab", pages, strict=True))
    config = KVCacheConfig(4, (KVCacheTensor(4 * PAGE, ("a", "b")),), groups)
    given: tuple[Any, ...] = {"a": spec, "b": window}, dict.fromkeys("ab", KeysFirst), torch.device("cpu")
    raw = poisoned(8 * PAGE)
    apart = {"a": raw[: 4 * PAGE], "b": raw[4 * PAGE :]}
    found = check_kv_caches(config, apart, *given, dict.fromkeys("ab", "NHD"), {})
    assert found["a"].stride() == (256, 1024, 16, 8, 1)
    with pytest.raises(LayoutError, match="shares bytes with layer a"):
        check_kv_caches(config, dict.fromkeys("ab", apart["a"]), *given, dict.fromkeys("ab", "NHD"), {})
    # Its blocks are in two pieces, so they cannot be apart.
    wide = floats(2, 8, 16, 2, 8)[:, ::2].transpose(0, 1)
    with pytest.raises(
        LayoutError, match=r"stride\(\)=\(512, 2048, 16, 8, 1\) must be \(256, 1024, 16, 8, 1\)"
    ):
        check_kv_caches(config, apart | {"b": wide}, *given, dict.fromkeys("ab", "NHD"), {})


def test_latents_may_be_apart():
    dims = MLADims(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    spec = layer(dtype="float32", num_kv_heads=1, head_size=12, mla=dims)
    page = kv_cache_spec_for(spec, 16)
    config = KVCacheConfig(
        3, (KVCacheTensor(3 * page.page_size_bytes, ("a",)),), (KVCacheGroupSpec(("a",), page),)
    )
    pool = floats(3, 2, 16, 12)
    given: tuple[Any, ...] = {"a": spec}, {"a": Latent}, torch.device("cpu"), {"a": "NHD"}, {}
    found = check_kv_caches(config, {"a": pool[:, 1]}, *given)["a"]
    assert (found.shape, found.stride()) == ((3, 16, 12), (384, 12, 1))
    assert found.data_ptr() == pool[:, 1].data_ptr()
    with pytest.raises(LayoutError, match=r"shape=\(3, 2, 16, 12\) must be \(3, 16, 12\)"):
        check_kv_caches(config, {"a": pool}, *given)


def test_strides_of_single_elements_are_made_those_of_the_layout():
    spec = layer(dtype="float32", num_kv_heads=1)
    made = plan({"a": spec}, "cpu", num_blocks=2)
    given = floats(512).as_strided((2, 2, 16, 1, 8), (256, 128, 8, 3, 1))
    found = AttentionRuntime(made, kv_caches={"a": given}).kv_caches["a"]
    assert found.stride() == own(made)["a"].stride()


# The allocator


@pytest.mark.parametrize(
    ("allocator", "said"),
    [
        (lambda size, device: None, "allocator(...)=None must be"),
        (lambda size, device: poisoned(size - 1), f"must be {4 * PAGE} bytes, 1-D uint8 or int8, for layers a"),
        (lambda size, device: poisoned(size + 16), f"({torch.uint8}, {4 * PAGE + 16}) must be {4 * PAGE} bytes"),
        (lambda size, device: floats(size), f"(torch.float32, {4 * PAGE}) must be"),
        (lambda size, device: poisoned(size).view(4, -1), "must be"),
        (lambda size, device: poisoned(size + 1)[1:], "must be a multiple of 16 bytes"),
        (lambda size, device: torch.empty(size, dtype=torch.uint8, device="meta"), "device='meta' must be cpu"),
        (lambda size, device: ONE_BUFFER[:size], "shares bytes with layer a"),
    ],
)  # fmt: skip
def test_an_allocator_that_gives_other_memory_is_refused(allocator, said):
    with pytest.raises(LayoutError) as error:
        AttentionRuntime(two(), allocator=allocator)
    assert said in str(error.value)


def test_an_allocator_is_a_function():
    with pytest.raises(LayoutError, match="allocator=3 must be a function of a number of bytes and a device"):
        AttentionRuntime(two(), allocator=3)


def test_memory_comes_from_one_place():
    made = two()
    with pytest.raises(LayoutError, match="must be None if kv_caches is given"):
        AttentionRuntime(made, **separate(made), allocator=lambda size, device: poisoned(size))


@pytest.mark.parametrize("pool", [raw_bytes, interleaved])
def test_a_plan_of_another_size_does_not_take_the_pool(pool):
    large = plan({"a": FULL, "b": FULL}, "cpu", num_blocks=5)
    refused(large, pool(two()), "kv_caches['a']")


def test_a_plan_of_another_layer_does_not_take_the_pool():
    other = plan(
        {"a": layer(dtype="float32", num_kv_heads=4), "b": FULL.replace(num_kv_heads=4)}, "cpu", num_blocks=4
    )
    refused(other, separate(two()), "kv_caches['a'].shape=(4, 2, 16, 2, 8) must be (4, 2, 16, 4, 8)")
    assert like(own(two())["a"]).isnan().all()
