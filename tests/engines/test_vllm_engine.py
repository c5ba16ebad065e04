"""Whole models in vLLM's engine on a CPU: its scheduler, block tables and prefix cache, with attnplug's attention.

`ATTNPLUG_VLLM_SOURCE` is as in test_vllm.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = [Path(path) for path in os.environ.get("ATTNPLUG_VLLM_SOURCE", "").split(os.pathsep) if path]


@pytest.fixture(params=SOURCES or [None], ids=lambda path: path.name if path else "none")
def source(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("no source tree of vLLM: ATTNPLUG_VLLM_SOURCE is not set")
    assert isinstance(request.param, Path)
    return request.param


def run(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (source, HERE.parents[1], HERE)))
    command = [sys.executable, "-W", "ignore", str(HERE / "served_models.py"), *words]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)


def check_tokens(source: Path, *words: str) -> None:
    done = run(source, *words)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("served_models: ")] or [
        done.stderr
    ]
    found = json.loads(line.removeprefix("served_models: "))
    assert found["served"] == found["right"]
    assert found["again"] == found["right"], "from the prefix cache"
    assert set(found["chosen"].values()) == {"TORCH"}
    assert len(found["chosen"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3", "llama4", "deepseek"])
def test_served_tokens_are_those_of_the_model_alone(source: Path, model: str) -> None:
    check_tokens(source, model, "ATTNPLUG_TORCH_MLA" if model == "deepseek" else "ATTNPLUG_TORCH")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_served_tokens_are_those_that_attention_finds(source: Path, model: str) -> None:
    check_tokens(source, model, "ATTNPLUG_TORCH", "LOOKUP")


@pytest.mark.slow
def test_a_refusal_is_in_vllms_error(source: Path) -> None:
    done = run(source, "gemma3", "ATTNPLUG_FLASH_ATTN_2")
    assert done.returncode != 0
    assert "FLASH_ATTN_2: device type not supported: cpu is not cuda" in done.stderr


@pytest.mark.slow
def test_a_refusal_of_sparse_layers_is_in_vllms_error(source: Path) -> None:
    done = run(source, "deepseek", "ATTNPLUG_FLASHINFER_MLA")
    assert done.returncode != 0
    assert "FLASHINFER: sparse token_topk 16 not supported" in done.stderr
