"""benchmarks/mla.py runs without a GPU, as far as it can, and judges what was measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KERNEL = """
import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

assert not current_platform.is_rocm()
assert tl is triton.language


def decode_attention_fwd(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
                         page_size=1, logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False):
    assert is_mla and attn_logits.shape == (*o.shape[:2], num_kv_splits, o.shape[2] + 1)
    for row, length in enumerate(b_seq_len.tolist()):
        pages = req_to_token[row, : -(-length // page_size)].long()
        keys = k_buffer[pages].flatten(0, 1)[:length, 0].float() * k_scale
        values = v_buffer[pages].flatten(0, 1)[:length, 0].float() * v_scale
        o[row] = (q[row].float() @ keys.T * sm_scale).softmax(1) @ values
"""


@pytest.mark.slow
def test_the_smoke_test_checks_every_part(tmp_path: Path) -> None:
    kernel = tmp_path / "vllm/v1/attention/ops/triton_decode_attention.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(KERNEL)
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "mla.py"), "--smoke"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_SOURCE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all right"
    for contender in ("TRITON", "TORCH", "vLLM Triton"):
        assert sum(line.startswith(f"    {contender} ") and "relative error" in line for line in lines) == 5
    for part in ("expanded; chosen", "chunks of 64 rows", "24 keys of each", "builder: backend TORCH"):
        assert any(part in line for line in lines), part


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from mla_goals import judged

    return judged


def cell(us: dict[str, float], heads: int = 16, length: int = 8192, **fields: Any) -> dict[str, Any]:
    from mla_latents import Cell

    told = Cell(64 if length == 8192 else 8, length, heads, **fields)
    return {**dataclasses.asdict(told), "cell": told.name, "bytes": told.bytes, "flops": told.flops, "us": us}


def test_goals_are_ratios_within_the_run(judged: Any) -> None:
    cells = [
        cell({"TRITON": 150.0, "FLASHINFER": 153.0, "FlashInfer fa3": 150.0, "vLLM Triton": 330.0}),
        cell({"TRITON": 300.0, "FlashInfer fa3": 150.0}, 32),
        cell({"TRITON": 400.0, "vLLM Triton": 1800.0}, 128),
        cell({"TRITON": 180.0}, queries=4),
        cell({"TRITON": 100.0}, stored="fp8"),
        cell({"TRITON": 1.0, "FlashInfer fa3": 900.0}, page=1),
    ]
    found = {
        goal["name"]: (goal["value"], goal["met"]) for goal in judged({"cells": cells, "copy_tbps": 4.3})
    }
    share = 64 * 8192 * 576 * 2 / 150e-6 / 4.3e12
    assert found == {
        "TRITON 64 x 8192, 16 heads, share of copy": (pytest.approx(share), True),
        "TRITON 64 x 8192, 32 heads, share of copy": (pytest.approx(share / 2), False),
        "TRITON 64 x 8192, 128 heads, TFLOP/s": (pytest.approx(365.07, abs=0.01), True),
        "TRITON 64 x 8192, 128 heads, TFLOP/s, beyond the goal": (pytest.approx(365.07, abs=0.01), False),
        "TRITON against FlashInfer fa3, geometric mean of 2": (pytest.approx(0.5**0.5), False),
        "TRITON against vLLM's kernel, 16 heads, least (64 x 8192, 16 heads)": (pytest.approx(2.2), True),
        "TRITON against vLLM's kernel, 128 heads, least (64 x 8192, 128 heads)": (pytest.approx(4.5), False),
        "TRITON 4 queries against one, 16 heads, most (64 x 8192, 16 heads, 4 queries)": (pytest.approx(1.2), True),
        "TRITON fp8 latents against bfloat16, 16 heads, most (64 x 8192, 16 heads, fp8)": (pytest.approx(2 / 3), False),
        "FLASHINFER against FlashInfer called directly, most (64 x 8192, 16 heads)": (pytest.approx(1.02), True),
    }  # fmt: skip


def test_goals_of_the_other_parts(judged: Any) -> None:
    errors = {"chunks of 4096 rows": 0.002, "one pass": 0.002}
    report = {
        "prefill": [{"cell": "4 x 4096", "chosen": "A", "us": {"A": 106.0, "A, kernel alone": 80.0, "product": 20.0}}],
        "chunked": [{"cell": "B", "relative_errors": errors, "from_one_pass": {"chunks of 4096 rows": 0.02, "one pass": 0}}],
        "selection": [{"topk": 2048, "heads": 16, "us": {"dense": 10.0, "8192": 12.0, "131072": 12.5}}],
        "host": [
            {"backend": "FLASHINFER", "requests": 64, "besides_us": 61.0, "waits": 0},
            {"backend": "FLASHINFER", "requests": 8, "error": "absent"},
        ],
    }  # fmt: skip
    found = [(round(goal["value"], 3), goal["goal"], goal["met"]) for goal in judged(report)]
    assert found == [
        (1.06, "<= 1.05", False),
        (0.02, "<= 0.01", False),
        (1.25, "<= 1.3", True),
        (1.042, "<= 1.05", True),
        (61.0, "<= 60", False),
        (0, "<= 0", True),
    ]
    nan = {**report["host"][0], "besides_us": float("nan")}
    assert not judged({"host": [nan]})[0]["met"]
    assert judged({}) == []


def test_a_part_that_fails_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import mla

    def broken(*_: Any) -> Any:
        yield {"backend": "TRITON", "requests": 1}
        raise RuntimeError("no kernel\nfor this")

    host = {"backend": "FLASHINFER", "requests": 64, "besides_us": 50.0, "waits": 0}
    monkeypatch.setattr(mla, "PARTS", {"chunked": broken, "host": lambda *_: iter([host])})
    monkeypatch.setattr(mla, "judged", lambda report: [len(report.get("host", ()))])
    report: dict[str, Any] = {}
    chosen = argparse.Namespace(parts=["chunked", "host"], json=tmp_path / "mla.json")
    mla.measure(chosen, {}, report)
    assert report["failed"] == {"chunked": "RuntimeError: no kernel"}
    assert report["chunked"] == [{"backend": "TRITON", "requests": 1}]
    assert report["host"] == [host]
    assert report["goals"] == [1]
    assert json.loads((tmp_path / "mla.json").read_text()) == report
    assert "no kernel" in capsys.readouterr().err
