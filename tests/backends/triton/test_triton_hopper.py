"""The kernels in Gluon for Hopper compile here, without a GPU, and are chosen only where they serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnplug.backends.triton import latent, launch, specialized
from attnplug.backends.triton.latent import hopper_kernels, hopper_launch
from attnplug.backends.triton.launch import Gpu, tile_parts, tile_side

CUDA = torch.device("cuda", 0)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(latent, "gpu_of", lambda device: Gpu(132, 227 << 10))
    hopper_kernels.cache_clear()


Form = tuple[int, int, int, str, str]
QUICK: list[Form] = [
    (16, 512, 64, "*bf16", "*bf16"),
    (16, 512, 64, "*bf16", "*fp8e4nv"),
    (32, 512, 64, "*bf16", "*fp8e4nv"),
    (64, 512, 64, "*bf16", "*fp8e4nv"),
]
FORMS: list[Form] = [
    (rows, rank, rope, queries, latents)
    for rows in (16, 32, 64)
    for rank, rope in ((512, 64), (512, 0), (256, 64), (256, 32), (256, 16), (128, 16))
    for queries, latents in (("*bf16", "*bf16"), ("*fp16", "*fp8e4nv"), ("*bf16", "*fp8e5"))
    if latents == "*bf16" or (rank > 128 and (rows == 64 or (queries == "*bf16" and rope != 16)))
]


def compiled_forms(forms: Iterable[Any]) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("hopper_forms.py")
    done = subprocess.run(
        [sys.executable, script, json.dumps(list(forms))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_prefill_compiles_within_a_multiprocessor() -> None:
    forms = [
        (128, 64, 3, 3, False, 0),
        (64, 64, 4, 3, True, 0),
        (128, 64, 3, 2, True, 0),
        (256, 64, 2, 2, True, 0),
        (80, 64, 4, 3, False, 0),
        (192, 64, 3, 2, True, 0),
        (224, 64, 2, 2, True, 0),
        (128, 64, 3, 3, False, 1),
        (80, 64, 4, 3, True, 1),
        (192, 64, 3, 2, True, 1),
        (256, 64, 2, 2, True, 1),
        (80, 64, 3, 3, False, 2),
        (128, 64, 3, 2, True, 2),
        # Keys of the call; groups in turn, which hold their queries.
        (128, 64, 3, 3, False, 0, True),
        (96, 64, 4, 3, False, 0, True, True, True),
        (192, 64, 3, 2, False, 0, True, True, True),
        (80, 64, 4, 2, True, 0, False, True, True),
        # Tiles of 128 keys in three groups.
        (64, 128, 3, 3, False, 0, True),
        (64, 128, 3, 3, False, 0),
    ]
    compiled = compiled_forms(["prefill", *form] for form in forms)
    for (size, block_n, stages, groups, _, numbers, *call), found in zip(forms, compiled, strict=True):
        parts = [tile_side(size)] if numbers == 2 else [part for part in tile_parts(size) if part]
        rows = 64 * groups + 2 * block_n * stages
        room = 2 * sum(parts) * (rows + sum(parts) if numbers == 2 else rows)
        assert room <= found["shared"] <= room + groups * specialized.scratch((*parts, 0)[:2])
        assert found["registers by group"]
        assert found["copies"]
        assert found["block copies"] == any(call[:1])
        assert found["narrow copies"] == (parts[-1] < 64), (
            "each copy has 16 bytes, but those of a narrow part"
        )
        assert not found["serialized"]
        assert found["products"] == sorted({f"m64n{width}k16" for width in (block_n, *parts)})
        # As compiled when the bounds were set, no loop over keys has a spill, but for five words with tiles of 128 keys in
        # three groups; rows are turned outside of them.
        most = 200 if numbers == 2 else 400 if (block_n, groups) == (128, 3) else 80
        assert size > 128 or found["spilled"] <= most


@pytest.mark.slow
@pytest.mark.parametrize("forms", [QUICK, pytest.param(FORMS, marks=pytest.mark.rare)], ids=["quick", "all"])
def test_compiles_within_a_multiprocessor(forms: list[Form]) -> None:
    compiled = compiled_forms(["latents", *form] for form in forms)
    for (rows, rank, _, _, latents), found in zip(forms, compiled, strict=True):
        assert found["shared"] <= latent._SHARED_MEMORY
        assert found["registers by group"]
        assert not found["serialized"]
        products = {f"m64n{width}k16" for width in ((64, rank // 2) if rows == 64 else (rows,))}
        if rows < 64 and latents != "*bf16":
            # Keys stay as they are, and queries have two parts.
            products |= {f"m64n{2 * rows}k32"}
        assert found["products"] == sorted(products)
        assert rows > 16 or found["spilled"] <= 16
        # Queries are copied, and latents too unless they are converted.
        assert found["copies"]
        stored = {"*fp8e4nv": ["e4m3"], "*fp8e5": ["e5m2"]}.get(latents, [])
        assert found["conversions"] == stored


@pytest.mark.usefixtures("h200")
def test_serves_latents_of_16_and_8_bits() -> None:
    kernels = hopper_kernels(512, 64, torch.bfloat16, torch.bfloat16, CUDA)
    assert set(kernels) == {16, 32, 64}
    assert hopper_kernels(512, 64, torch.bfloat16, torch.float8_e4m3fn, CUDA) == kernels
    sides = [hopper_launch(rows, 1, kernels).block_m for rows in (1, 16, 17, 32, 33, 512)]
    assert sides == [16, 16, 32, 32, 64, 64]
    # Two parts of 8 bits hold a query in bfloat16, and none in float16.
    precise = hopper_kernels(512, 64, torch.float16, torch.float8_e4m3fn, CUDA)
    assert precise == {64: kernels[64]}
    assert hopper_launch(1, 1, precise).block_m == 64
    assert set(hopper_kernels(512, 16, torch.bfloat16, torch.float8_e5m2, CUDA)) == {64}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 384},
        {"cache_dtype": torch.float8_e5m2, "rank": 128},
        {"rope": 24},
        {"dtype": torch.float32},
        {"cache_dtype": torch.float16},
        {"device": torch.device("cpu")},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_kernel_serves_the_rest(changed: dict[str, Any]) -> None:
    given = {"rank": 512, "rope": 64, "dtype": torch.bfloat16, "cache_dtype": torch.bfloat16, "device": CUDA}
    assert hopper_kernels(**given)
    assert not hopper_kernels(**given | changed)


@pytest.mark.parametrize(
    ("capability", "memory"), [((8, 0), 227 << 10), ((10, 0), 227 << 10), ((9, 0), 99 << 10)]
)
def test_other_gpus_have_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], memory: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(latent, "gpu_of", lambda device: Gpu(132, memory))
    hopper_kernels.cache_clear()
    assert not hopper_kernels(512, 64, torch.bfloat16, torch.bfloat16, CUDA)
    hopper_kernels.cache_clear()


@pytest.mark.usefixtures("h200")
def test_gluon_before_triton_3_6_has_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.experimental.gluon import language

    def found() -> tuple[bool, bool]:
        for each in (launch.has_gluon, hopper_kernels, specialized.specialized_kernel):
            each.cache_clear()
        layer = 512, 64, torch.bfloat16, torch.bfloat16, CUDA
        return bool(hopper_kernels(*layer)), specialized.specialized_kernel(CUDA) is not None

    def of_3_5(default_args, default_partition, worker_args, worker_partitions, *others): ...  # type: ignore[no-untyped-def]

    assert found() == (True, True)
    with monkeypatch.context() as patch:
        patch.setattr(language, "warp_specialize", of_3_5)
        assert found() == (False, False)
        patch.delattr(language, "warp_specialize")
        assert found() == (False, False)
    assert found() == (True, True)


def test_latents_apart_by_half_of_16_elements_have_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "hopper_kernels", lambda *_: {16: "kernel"})
    layer = SimpleNamespace(dims=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64))
    queries = torch.empty(3, 16, 512, dtype=torch.bfloat16), torch.empty(3, 16, 64, dtype=torch.bfloat16)
    for padding, served in ((0, True), (16, True), (8, False)):
        block = 16 * 576 + padding
        cache = torch.empty(4 * block, dtype=torch.bfloat16).as_strided((4, 16, 576), (block, 576, 1))
        assert bool(latent.TritonMLAImpl._hopper_kernels(layer, *queries, cache)) == served
