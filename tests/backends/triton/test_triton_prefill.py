"""TRITON's prefill: heads in two tiles, and programs for long and short prompts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings, layout
from attnplug.backends.triton.launch import Gpu, PrefillLaunch, prefill_launch, tile_parts
from attnplug.backends.triton.layout import value_parts
from attnplug.core import LayerSpec
from attnplug.core.errors import BatchError
from attnplug.ops.reach import Reach
from attnplug.testing import direct_batch, paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = Gpu(132, 227 << 10)
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float16", block_size=16)


@pytest.mark.parametrize(
    "fields",
    [
        {"head_size": 40},
        {"head_size": 80, "head_size_v": 48, "needs_lse": True},
        {"head_size": 96, "head_size_v": 64, "dtype": "bfloat16", "has_alibi": True},
        {"head_size": 192, "head_size_v": 96, "logits_soft_cap": 5.0, "has_sinks": True},
        {"head_size": 80, "kv_cache_dtype": "fp8", "dtype": "bfloat16"},
        {"head_size": 48, "sliding_window": 50},
        {"head_size": 48, "chunk_size": 64, "block_size": 8},
    ],
    ids=lambda fields: ", ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_prompts_and_extends_are_right_for_heads_of_one_and_two_tiles(monkeypatch, fields):
    launch, asked = PrefillLaunch(64, 16, 4, 2), []
    monkeypatch.setattr(bindings, "prefill_launch", lambda *sizes: asked.append(sizes) or launch)
    # Few requests do not fill a GPU, so their keys would be divided.
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: True)
    spec = SPEC.replace(**fields)
    # A prompt of several full tiles, an extend without any at its window's left edge, and one of a single token.
    batch = paged_batch(spec, [70, 40, 1, 20], [70, 150, 90, 20], device=DEVICE)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert asked


@pytest.mark.parametrize(
    "columns", [256, pytest.param(128, marks=() if DEVICE == "cuda" else pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"head_size": 512, "needs_lse": True},
        {"head_size": 64, "head_size_v": 512, "has_sinks": True},
        {"head_size": 320, "head_size_v": 288, "dtype": "bfloat16", "sliding_window": 50},
        {"head_size": 288, "kv_cache_dtype": "fp8", "dtype": "bfloat16"},
        {"head_size": 448, "direct_kv": True, "causal": False, "num_heads": 10},
    ],
    ids=lambda fields: ", ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_programs_share_the_values_of_wide_heads(monkeypatch, fields, columns):
    launch = PrefillLaunch(64, 16, 4, 2, columns=columns)
    monkeypatch.setattr(bindings, "prefill_launch", lambda *_: launch)
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: True)
    found = []
    monkeypatch.setattr(
        bindings, "value_parts", lambda *sizes: found.append(value_parts(*sizes)) or found[-1]
    )
    spec = SPEC.replace(**fields)
    # More than 64 rows of a request, lengths that fill no tile, and an extend that begins within one.
    if spec.direct_kv:
        batch = direct_batch(spec, [35, 3], [35, 3], device=DEVICE)
    else:
        batch = paged_batch(spec, [35, 1, 20], [35, 60, 55], device=DEVICE)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert {*found} == {512 // columns}


def test_a_head_is_in_the_fewest_columns_that_two_tiles_allow():
    assert [tile_parts(size) for size in (8, 24, 40, 80, 96, 112)] == [
        (16, 0), (32, 0), (32, 16), (64, 16), (64, 32), (128, 0),
    ]  # fmt: skip
    assert [tile_parts(size) for size in (128, 160, 192, 256, 576)] == [
        (128, 0), (128, 32), (128, 64), (256, 0), (512, 64),
    ]  # fmt: skip
    widths = [sum(tile_parts(size)) for size in range(1, 577)]
    assert widths == sorted(widths)
    assert all(size <= width for size, width in enumerate(widths, 1))


def test_keys_of_more_bytes_never_take_larger_tiles():
    launches = [prefill_launch(size, 2, 1 << 20, H200) for size in range(8, 513, 8)]
    assert [launch.block_n for launch in launches] == sorted(
        (launch.block_n for launch in launches), reverse=True
    )


def test_programs_of_short_prompts_are_smaller():
    short, unknown = (prefill_launch(128, 2, 512, H200, keys) for keys in (128, None))
    assert short.block_m * short.num_warps < unknown.block_m * unknown.num_warps
    assert prefill_launch(128, 2, 1 << 20, H200, 1 << 18) == unknown
    assert prefill_launch(128, 2, 32, H200, 8) == prefill_launch(128, 2, 32, H200)


@pytest.mark.parametrize(
    ("heads", "tokens", "reqs", "fills"),
    [
        ((32, 8), 512, 1, True),
        ((8, 1), 2048, 1, True),
        ((32, 8), 16 * 64, 16, True),
        ((32, 8), 100, 1, False),
        ((8, 1), 1024, 1, False),
        ((8, 1), 200, 100, True),
    ],
)
def test_extends_are_not_divided_where_most_multiprocessors_have_a_tile(heads, tokens, reqs, fills):
    layer = SimpleNamespace(group=heads[0] // heads[1], kv_heads=heads[1], _gpu=H200)
    assert bindings.BoundLayer.fills_gpu(layer, tokens, reqs) is fills


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_an_encoders_layer_needs_room_in_the_table_only_where_it_has_pages(kind):
    spec = SPEC.replace(attn_type=kind)
    batch = direct_batch(spec, [3, 30], [3, 30], device=DEVICE)
    assert batch.common.block_table_tensor.shape[1] == 1
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    paged = paged_batch(spec, [3, 30], [3, 30], device=DEVICE)
    assert difference(paged, Output(*run_batch(TritonBackend, paged))) is None
    narrow = dataclasses.replace(paged.common, block_table_tensor=paged.common.block_table_tensor[:, :1])
    with pytest.raises(
        BatchError, match=r"seq_lens=30 is past the 16 tokens of 1 pages.*widen block_table_tensor"
    ):
        run_batch(TritonBackend, dataclasses.replace(paged, common=narrow))


@pytest.mark.parametrize(
    ("fields", "lens", "limited"),
    [
        ({"sliding_window": 80}, ([80, 64], [80, 64]), False),
        ({"sliding_window": 79}, ([80, 64], [80, 64]), True),
        # The host tells prompts alone from those with tokens before.
        ({"sliding_window": 90}, ([80, 64], [80, 65]), True),
        ({"chunk_size": 80}, ([80, 64], [80, 64]), False),
        ({"chunk_size": 79}, ([80, 64], [80, 64]), True),
        ({"causal": False, "window": (79, 20)}, ([80, 64], [80, 64]), False),
        # Prompts of fewer tokens than those of a warm-up would compile kernels of their own.
        ({"sliding_window": 50}, ([40, 30], [40, 30]), True),
        ({"sliding_window": 300}, ([201, 30], [201, 30]), True),
        ({"sliding_window": 80, "invariance": ("batch",)}, ([80, 64], [80, 64]), True),
    ],
    ids=str,
)
def test_limits_that_hide_no_key_of_new_prompts_are_left_out(monkeypatch, fields, lens, limited):
    monkeypatch.setattr(layout, "SEEN_PROMPT", 64)
    monkeypatch.setattr(layout, "FEW_KEYS", 200)
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: True)
    bound, make = [], bindings.BoundKernel

    def noted(kernel, given, values, **options):
        bound.append(values["HAS_LEFT"] or values["HAS_CHUNK"])
        return make(kernel, given, values, **options)

    monkeypatch.setattr(bindings, "BoundKernel", noted)
    batch = paged_batch(SPEC.replace(**fields), *lens, device=DEVICE)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert bound == [limited]


@pytest.mark.parametrize(
    ("fields", "most_keys", "has_limit"),
    [
        ({}, None, False),
        ({"sliding_window": 100}, None, True),
        ({"sliding_window": 100}, 5000, True),
        ({"sliding_window": 4096}, None, False),
        ({"sliding_window": 4096}, 5000, True),
        ({"sliding_window": 4096}, 2000, False),
        ({"chunk_size": 8192}, None, False),
    ],
    ids=str,
)
def test_tiles_of_few_keys_are_taken_in_turn(fields, most_keys, has_limit):
    layer = bindings.BoundLayer.__new__(bindings.BoundLayer)
    spec = SPEC.replace(**fields)
    layer.reach, layer._tile = Reach.of(spec, None), None
    assert layer._limits(most_keys) == has_limit
