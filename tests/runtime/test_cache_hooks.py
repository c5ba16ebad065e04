"""Hooks of a backend about its cache that give what no cache can have: the error names backend, hook, value and limit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.core.interface.answers import HookError
from attnplug.errors import LayoutError
from attnplug.runtime import AttentionRuntime

pytestmark = pytest.mark.attack("cache hooks")
SPEC = attnplug.LayerSpec(num_heads=2, num_kv_heads=2, head_size=16, dtype="float32")
WIDE = SPEC.replace(head_size_v=32)


def runtime(monkeypatch: pytest.MonkeyPatch, hook: str, value: Any, **arguments: Any) -> AttentionRuntime:
    """A runtime on TORCH whose `hook` is replaced after the plan was made."""
    plan = attnplug.plan({"a": arguments.pop("spec", SPEC)}, "cpu", num_blocks=8, backend="TORCH")
    monkeypatch.setattr(TorchBackend, hook, classmethod(value))
    return AttentionRuntime(plan, **arguments)


@pytest.mark.parametrize(
    "value",
    [None, 5, "shape", (2.0, 2), ("8", 2), itertools.count(), [None], (True,), torch.zeros(2), (1,) * 20],
)
def test_a_shape_is_a_tuple_of_integers(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.raises(
        HookError, match=r"TorchBackend returned .* from get_kv_cache_shape, which must be a tuple"
    ):
        runtime(monkeypatch, "get_kv_cache_shape", lambda cls, *sizes: value)


@pytest.mark.parametrize("value", [(), (8, 2), (-8, 2, -16, 2, 16), (8, 2, 16, 2, 15)])
def test_a_shape_has_the_elements_of_the_pages(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.raises(LayoutError):
        runtime(monkeypatch, "get_kv_cache_shape", lambda cls, *sizes: value)


@pytest.mark.parametrize(
    "value", [None, 5, "01234", (0, 1.0, 2, 3, 4), iter((0, 1, 2, 3, 4)), {0, 1, 2, 3, 4}]
)
def test_an_order_is_a_tuple_of_integers(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.raises(HookError, match=r"from get_kv_cache_stride_order, which must be a tuple of integers"):
        runtime(monkeypatch, "get_kv_cache_stride_order", lambda cls, *given, **named: value)


@pytest.mark.parametrize("value", [(0, 1, 2, 3), (0, 1, 2, 3, 3), (1, 2, 3, 4, 5), ()])
def test_an_order_names_each_dimension_once(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.raises(LayoutError, match="is not an order of the 5 dimensions"):
        runtime(monkeypatch, "get_kv_cache_stride_order", lambda cls, *given, **named: value)


HALVES: dict[str, Any] = {
    "none": lambda cache: None,
    "one tensor": lambda cache: cache,
    "one": lambda cache: (cache[:, 0],),
    "three": lambda cache: (cache[:, 0], cache[:, 1], cache[:, 1]),
    "numbers": lambda cache: (1, 2),
    "no value": lambda cache: (cache[:, 0], None),
    "fewer tokens": lambda cache: (cache[:, 0, :4], cache[:, 1, :4]),
    "fewer blocks": lambda cache: (cache[:4, 0], cache[:4, 1]),
    "fewer heads": lambda cache: (cache[:, 0, :, :1], cache[:, 1, :, :1]),
    "fewer elements": lambda cache: (cache[:, 0, ..., :8], cache[:, 1, ..., :8]),
    "fewer values alone": lambda cache: (cache[:, 0], cache[:, 1, :4]),
    "unlike order": lambda cache: (cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)),
    "copies": lambda cache: (cache[:, 0].clone(), cache[:, 1].clone()),
    "a copy of values": lambda cache: (cache[:, 0], cache[:, 1].clone()),
    "another type": lambda cache: (cache[:, 0].view(torch.int32), cache[:, 1].view(torch.int32)),
    "keys twice": lambda cache: (cache[:, 0], cache[:, 0]),
    "one token for all": lambda cache: (cache[:, 0, :1].expand(-1, 16, -1, -1), cache[:, 1]),
    "one head for all": lambda cache: (cache[:, 0], cache[:, 1, :, :1].expand(-1, -1, 2, -1)),
}


@pytest.mark.parametrize("kind", HALVES)
def test_k_and_v_are_views_of_all_tokens(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with pytest.raises(HookError, match=r"TorchBackend returned .* split_kv"):
        runtime(monkeypatch, "split_kv", lambda cls, cache, spec: HALVES[kind](cache))


@pytest.mark.parametrize("kind", ["fewer tokens", "none", "copies", "keys twice"])
def test_memory_of_an_engine_is_checked_too_and_not_written(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    memory = torch.full((8 * 2 * 16 * 2 * 16 * 4,), 7, dtype=torch.uint8)
    plan = attnplug.plan({"a": SPEC}, "cpu", num_blocks=8, backend="TORCH")
    monkeypatch.setattr(TorchBackend, "split_kv", classmethod(lambda cls, cache, spec: HALVES[kind](cache)))
    with pytest.raises(HookError, match="split_kv"):
        AttentionRuntime(plan, kv_caches={"a": memory})
    assert bool((memory == 7).all())


@pytest.mark.parametrize(
    "error", [RuntimeError("acme"), SystemExit(0), TypeError("acme"), KeyError("acme"), GeneratorExit()]
)
@pytest.mark.parametrize("hook", ["get_kv_cache_shape", "get_kv_cache_stride_order", "split_kv"])
def test_a_hook_that_raises_is_named(
    monkeypatch: pytest.MonkeyPatch, hook: str, error: BaseException
) -> None:
    def fail(cls: type, *given: object, **named: object) -> Any:
        raise error

    with pytest.raises(HookError, match=f"TorchBackend raised {type(error).__name__}.* in {hook}") as caught:
        runtime(monkeypatch, hook, fail)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("hook", ["get_kv_cache_shape", "split_kv"])
def test_an_interrupt_in_a_hook_goes_on(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    def fail(cls: type, *given: object, **named: object) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime(monkeypatch, hook, fail)


@pytest.mark.parametrize("value", [None, "NHD", (), (b"NHD",), itertools.repeat("NHD"), 5])
def test_layouts_are_a_tuple_of_the_two(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.raises(
        HookError, match=r"TorchBackend returned .* from supported_kv_cache_layouts, which must be"
    ):
        runtime(monkeypatch, "supported_kv_cache_layouts", lambda cls: value)


@pytest.mark.parametrize("value", [None, 16, (16.0,), itertools.count(16), "16"])
def test_block_sizes_of_a_layer_are_a_tuple_of_integers(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.raises(
        HookError, match=r"from get_supported_kernel_block_sizes, which must be a tuple or list"
    ):
        runtime(monkeypatch, "get_supported_kernel_block_sizes", lambda cls, *given: value)


@pytest.mark.parametrize("spec", [SPEC, WIDE, SPEC.replace(kv_cache_dtype="fp8_e4m3")])
def test_right_halves_of_every_form_are_taken(spec: attnplug.LayerSpec) -> None:
    plan = attnplug.plan({"a": spec}, "cpu", num_blocks=8, backend="TORCH")
    assert set(AttentionRuntime(plan).kv_caches) == {"a"}
