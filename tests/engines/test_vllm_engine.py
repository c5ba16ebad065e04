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


def run(
    source: Path, *words: str, script: str = "served_models.py", given: str = ""
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (source, HERE.parents[1], HERE)))
    command = [sys.executable, "-W", "ignore", str(HERE / script), *words]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=source, env=environment, input=given, capture_output=True, text=True, check=False
    )


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
@pytest.mark.parametrize(("base", "backend"), [("qwen3-8b", ""), ("deepseek-v2-lite", "_MLA")])
def test_ranks_that_share_tokens_draw_those_that_attention_finds(
    source: Path, tmp_path: Path, base: str, backend: str
) -> None:
    config = json.loads((HERE.parents[1] / "examples" / "models" / f"{base}.json").read_text())
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "vocab_size": 512}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | tokens))
    settings = {
        "model": str(tmp_path / "config.json"),
        "layers": 4,
        "dense": bool(backend),
        "workloads": {"some": [100, 40, 170, 33]},
        "max_tokens": 8,
        "rounds": 1,
        "memory": 0.1,
        "eager": True,
        "ranks": 2,
    }
    name = f"ATTNPLUG_TORCH{backend}"
    done = run(source, name, script="served_ranks.py", given=json.dumps(settings))
    *_, line = [line for line in done.stdout.splitlines() if "layers" in line] or [done.stderr]
    found = json.loads(line.partition(": ")[2])
    assert found["workloads"]["some"]["right"] == 1.0
    assert [len(group["layers"]) for group in found["layers"]] == [4]


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
