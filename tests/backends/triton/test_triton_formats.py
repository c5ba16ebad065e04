"""Pages with planes on TRITON: decodes, prefills and drafts beside the oracle's numbers, and what is refused."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend
from attnplug.backends.triton.backend import TritonMLABackend
from attnplug.backends.triton.bindings import BoundLayer
from attnplug.backends.triton.formats import format_values, opened_scale, rotation_of, row_of
from attnplug.backends.triton.opened import PageOpener
from attnplug.backends.triton.registers import register_launch, row_tile
from attnplug.core import LayerSpec
from attnplug.core.device import Device
from attnplug.core.kv_format import kv_format
from attnplug.ops.kv_codec import make_codec
from attnplug.ops.triton.rotation import Rotation
from attnplug.testing import assert_step_correct

FORMATS = ("int8_token_head", "nvfp4", "rotated4")
MIXED = [1, 1, 5, 0, 40], [33, 130, 64, 7, 70]


def layer(name: str, **fields: Any) -> LayerSpec:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
    return LayerSpec(**{**sizes, "kv_cache_dtype": name, **fields})


@pytest.mark.parametrize("name", FORMATS)
def test_mixed_steps(name: str) -> None:
    assert_step_correct(TritonBackend, layer(name), *MIXED, padding=2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "fields",
    [
        {"has_sinks": True, "sliding_window": 30, "needs_lse": True},
        {"logits_soft_cap": 20.0, "has_alibi": True, "dtype": "bfloat16"},
        {"head_size": 96, "dtype": "float16", "num_heads": 6},
        {"chunk_size": 24, "head_size": 32},
    ],
    ids=["sinks", "cap", "96", "chunk"],
)
def test_features_and_sizes(name: str, fields: dict[str, Any]) -> None:
    assert_step_correct(TritonBackend, layer(name, **fields), *MIXED, block_size=16, layout="HND")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_size"), [("int8_token_head", 352), ("nvfp4", 288), ("nvfp4", 320)])
def test_programs_share_wide_rows(name: str, head_size: int) -> None:
    spec = layer(name, head_size=head_size, dtype="float16", has_sinks=True)
    assert_step_correct(TritonBackend, spec, [1, 5, 0, 40], [130, 64, 7, 70])


@pytest.mark.parametrize("numbers", ["far", "sharp", "wide"])
@pytest.mark.parametrize("name", FORMATS)
def test_sizes_of_numbers(name: str, numbers: str) -> None:
    spec = layer(name, dtype="bfloat16", has_sinks=True)
    assert_step_correct(TritonBackend, spec, *MIXED, numbers=numbers)


def test_latents_have_no_planes() -> None:
    assert not {*FORMATS} & {*TritonMLABackend.supported_kv_cache_dtypes}


@pytest.mark.parametrize("name", FORMATS)
def test_equal_bits_are_refused(name: str) -> None:
    reason = TritonBackend.supports_combination(layer(name, invariance=("batch",)), Device("cuda"))
    assert reason is not None
    assert name in reason


def test_scales_that_a_format_has_not_are_left_out() -> None:
    assert opened_scale(layer("int8_token_head"), (2.0, 3.0)) == (1.0, 1.0)
    assert opened_scale(layer("nvfp4"), (2.0, 3.0)) == (1024.0, 1536.0)
    assert opened_scale(layer("fp8_e4m3"), (2.0, 3.0)) == (2.0, 3.0)
    assert row_of(layer("fp8_e4m3")) is None


@pytest.mark.parametrize("inner", [(2, 3), (3, 2)], ids=["NHD", "HND"])
def test_places_come_from_the_tensor(inner: tuple[int, int]) -> None:
    width = kv_format("rotated4").width(64)
    sizes = {2: 16, 3: 4}
    raw = torch.zeros(5, 2 * 16 * 4 * width + 64, dtype=torch.uint8)[:, : 2 * 16 * 4 * width]
    cache = raw.view(5, 2, *(sizes[at] for at in inner), width).permute(0, 1, *inner, 4)
    values = format_values(layer("rotated4", num_heads=8, num_kv_heads=4), cache[:, 0], cache[:, 1])
    token, head = (4 * 32, 32) if inner == (2, 3) else (32, 16 * 32)
    assert (values["stride_kb"], values["stride_kt"], values["stride_kh"]) == (raw.stride(0), token, head)
    scales = (4 * 2, 2) if inner == (2, 3) else (2, 16 * 2)
    assert values["FORMAT"] == ("rotated4", 16 * 4 * 32, *scales, True, True, 1, 32)


def test_a_rotation_is_that_of_the_codec() -> None:
    codec: Any = make_codec(kv_format("rotated4"), 96)
    rotation = rotation_of(layer("rotated4", head_size=96), torch.device("cpu"))
    assert rotation is Rotation.of(codec, torch.device("cpu"))
    rows = torch.randn(7, 2, 96, generator=torch.Generator().manual_seed(0))
    turned, back = torch.empty_like(rows), torch.full_like(rows, 7.0)
    starts = torch.tensor([1, 3, 6], dtype=torch.int32)
    rotation.turn(rows, turned, starts, 2, 7)
    torch.testing.assert_close(turned[1:6], codec.rotate(rows[1:6]))
    rotation.turn(turned, back, starts, 2, 7, back=True)
    torch.testing.assert_close(back[1:6], rows[1:6])
    # Tokens of no request keep what they had.
    assert (back[[0, 6]] == 7.0).all()


@pytest.mark.parametrize("head_size", [64, 96, 256])
def test_many_rows_are_turned_in_large_tiles(head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec: Any = make_codec(kv_format("rotated4"), head_size)
    monkeypatch.setattr("attnplug.ops.triton.rotation._LEAST_MANY", 300)
    known = Rotation.of(codec, torch.device("cpu"))
    rotation = Rotation(known.matrix, known.factor, head_size)
    rows = torch.randn(100, 3, head_size, generator=torch.Generator().manual_seed(0))
    # 99 tokens are few rows, and 100 are many.
    starts = torch.tensor([0, 41, 99], dtype=torch.int32)
    few, many = torch.empty_like(rows), torch.full_like(rows, 7.0)
    rotation.turn(rows, few, starts, 2, 99)
    rotation.turn(rows, many, starts, 2, 100)
    torch.testing.assert_close(many[:99], codec.rotate(rows[:99]))
    torch.testing.assert_close(many[:99], few[:99])
    assert (many[99] == 7.0).all()
    assert {tile for _, tile, _ in rotation._bound.values()} == {16, 64 if head_size == 256 else 128}


def test_the_loop_in_registers_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row_tile(rows) for rows in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 0]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    cache = torch.zeros(3, 2, 16, 2, kv_format("nvfp4").width(128), dtype=torch.uint8)
    spec = layer("nvfp4", head_size=128, dtype="bfloat16")
    pages: Any = type("Pages", (), {"k": cache[:, 0], "v": cache[:, 1]})
    assert register_launch(spec, pages, 4, torch.device("cpu")) is None
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        pytest.skip("this version of Triton has no Gluon")
    device = torch.device("cuda", 0)
    found = register_launch(spec, pages, 4, device)
    assert found is not None
    assert found.values["NAME"] == "nvfp4"
    for other in (
        spec.replace(has_alibi=True),
        spec.replace(dtype="float32"),
        spec.replace(head_size=96),
        spec.replace(kv_cache_dtype="auto"),
    ):
        assert register_launch(other, pages, 4, device) is None
    assert register_launch(spec, pages, 17, device) is None
    odd: Any = type("Pages", (), {"k": cache[:, 0, :8], "v": cache[:, 1, :8]})
    assert register_launch(spec, odd, 4, device) is None


_OPEN = PageOpener.__call__
EXTENDS = [1, 1, 20, 30, 17], [33, 130, 64, 101, 17]
PROMPTS = [20, 30, 17], [64, 30, 19]


@pytest.mark.parametrize("step", [EXTENDS, PROMPTS], ids=["mixed", "prompts"])
@pytest.mark.parametrize("name", [*FORMATS, "fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"dtype": "bfloat16", "needs_lse": True}, {}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ({"dtype": "float16", "has_sinks": True, "sliding_window": 40}, {"block_size": 24}),
                ({"dtype": "bfloat16", "head_size": 96, "has_alibi": True}, {"layout": "HND", "padding": 3}),
                ({"dtype": "bfloat16", "chunk_size": 24}, {"numbers": "wide", "block_size": 128}),
                ({"dtype": "float16", "logits_soft_cap": 20.0}, {"numbers": "sharp"}),
            )
        ),
    ],
    ids=["lse", "window", "96", "chunk", "cap"],
)
def test_pages_that_many_tiles_read_are_opened_once(
    name: str,
    fields: dict[str, Any],
    given: dict[str, Any],
    step: tuple[list[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []

    def opened(self: PageOpener, *args: Any) -> Any:
        found.append(_OPEN(self, *args))
        return found[-1]

    monkeypatch.setattr(PageOpener, "__call__", opened)
    monkeypatch.setattr(BoundLayer, "fills_gpu", lambda *_: True)
    spec = layer(name, num_heads=32, num_kv_heads=1, **fields)
    assert_step_correct(TritonBackend, spec, *step, **given)
    assert found
    rows = name in ("int8_token_head", "rotated4")
    assert {each.form is not None for each in found} == {rows}


def test_a_window_over_long_contexts_and_too_many_keys_are_not_opened() -> None:
    from attnplug.backends.triton.opened import gains, may_open

    def step(queries: int, keys: int) -> Any:
        counts = {"num_reqs": 2, "num_decodes": 1, "num_actual_tokens": queries + 3, "num_decode_tokens": 3}
        return SimpleNamespace(key_bounds=np.array([keys]), **counts)

    spec = layer("fp8_e4m3", num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
    assert may_open(spec)
    assert gains(spec, step(128, 60_000), 16)
    assert not gains(spec, step(127, 60_000), 16), "few rows read each page"
    assert not gains(spec, step(128, 66_000), 16), "256 MiB"
    assert gains(spec, step(128, 65_000), 65_536)
    assert not gains(spec, step(128, 300), 131_072), "a page has room for more tokens than the request has"
    window = spec.replace(sliding_window=512)
    assert gains(window, step(512, 4096), 16)
    assert not gains(window, step(512, 4097), 16)
    for other in ({"invariance": ("batch",)}, {"dtype": "float32"}, {"head_size_v": 64}, {"head_size": 288}):
        assert not may_open(spec.replace(**other)), other
    assert not may_open(spec.replace(head_scales=True))
    assert not may_open(spec.replace(kv_cache_dtype="auto"))
