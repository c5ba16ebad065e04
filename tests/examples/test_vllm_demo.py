"""vllm_demo.py refuses machines without vLLM or a GPU; with a stand-in for vLLM it prints one table and writes JSON."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import vllm_demo

ROOT = Path(__file__).parents[2]


STAND_IN = {
    "__init__.py": '''
"""What vllm_run.py uses of vLLM. FLASHINFER cannot start, and TRITON_ATTN draws a wrong token for two requests."""
import types

import lookup

import attnplug

NAMES = []
CONFIG = types.SimpleNamespace(num_hidden_layers=2, vocab_size=600)

class SamplingParams:
    def __init__(self, max_tokens, **rest):
        assert rest == {"temperature": 0, "ignore_eos": True, "detokenize": False}
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, attention_backend, max_model_len, load_format, **rest):
        if attention_backend == "FLASHINFER":
            raise ValueError("Selected backend FLASHINFER is not valid: no [module] named flashinfer")
        assert attention_backend in {*NAMES, "FLASH_ATTN", "TRITON_ATTN"}
        assert load_format == "attnplug_lookup"
        self.name, self.longest = attention_backend, max_model_len
        spec = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, block_size=16)
        impl = types.SimpleNamespace(decision=attnplug.explain(spec, "cpu"))
        found = {f"model.layers.{i}.self_attn.attn": types.SimpleNamespace(impl=impl) for i in range(2)}
        config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context=found),
            model_config=types.SimpleNamespace(hf_text_config=CONFIG),
        )
        self.llm_engine = types.SimpleNamespace(vllm_config=config)

    def reset_prefix_cache(self):
        return True

    def generate(self, prompts, sampling, use_tqdm):
        outputs = []
        for index, prompt in enumerate(prompts):
            assert len(prompt["prompt_token_ids"]) + sampling.max_tokens <= self.longest
            drawn = lookup.Plan.of(CONFIG).follow(prompt["prompt_token_ids"], sampling.max_tokens)
            if self.name == "TRITON_ATTN" and index < 2:
                drawn[-1] += 1
            only = types.SimpleNamespace(token_ids=drawn)
            times = types.SimpleNamespace(first_token_ts=1.0 + index, last_token_ts=6.0 + sampling.max_tokens)
            outputs.append(types.SimpleNamespace(outputs=[only], metrics=times))
        return outputs
''',
    "model_executor/__init__.py": "",
    "model_executor/model_loader/__init__.py": "def register_model_loader(name): return lambda cls: cls",
    "model_executor/model_loader/dummy_loader.py": "class DummyModelLoader: pass",
    "v1/__init__.py": "",
    "v1/attention/__init__.py": "",
    "v1/attention/backends/__init__.py": "",
    "v1/attention/backends/registry.py": """
from vllm import NAMES

class AttentionBackendEnum:
    __members__ = {}
    register = None

def register_backend(name, path):
    NAMES.append(name)
""",
}


def test_a_machine_without_vllm_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    assert vllm_demo.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "vllm_demo: vllm is not installed; pip install vllm, on a machine with an NVIDIA GPU\n"
    )


def test_a_machine_without_a_gpu_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vllm_demo.main([]) == 2
    assert (
        capsys.readouterr().err
        == "vllm_demo: torch finds no NVIDIA GPU here, and vLLM's own backends need one\n"
    )


def test_fewer_gpus_than_ranks_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert vllm_demo.main(["--ranks", "2"]) == 2
    assert capsys.readouterr().err == "vllm_demo: --ranks 2 needs as many GPUs, and torch finds 1 here\n"


@pytest.mark.slow
def test_one_command_prints_one_table_of_all_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in STAND_IN.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    path = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(vllm_demo, "missing", lambda ranks: None)
    file = tmp_path / "figures.json"
    asked = ["--requests", "4", "--prompts", "40", "35-200", "--max-tokens", "8", "--rounds", "1"]
    asked += ["--choices", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "ATTNPLUG", "ATTNPLUG=TORCH"]

    assert vllm_demo.main([*asked, "--json", str(file)]) == 1, "one choice failed"

    shown = capsys.readouterr().out
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ ")}
    assert set(rows) >= {"FLASH_ATTN", "TRITON_ATTN", "ATTNPLUG"}
    assert "100%" in rows["ATTNPLUG"]
    assert "50%" in rows["TRITON_ATTN"]
    assert (
        "FLASHINFER did not run: ValueError: Selected backend FLASHINFER is not valid: no [module]" in shown
    )
    layers = "2 layers (model.layers.0.self_attn.attn to model.layers.1.self_attn.attn)"
    chosen = f"{layers}, full, pages of 16 tokens: TORCH\n  "
    assert f"{chosen}prefill on TORCH: first by priority\n  decode on TORCH: first by priority\n" in shown
    assert f"{chosen}asked for by ATTNPLUG_BACKEND, TORCH\n" in shown
    assert "FLASHINFER refused: device type not supported" in shown

    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["settings"]["model"]) == ("vllm", "qwen3-8b.json")
    assert figures["choices"]["FLASHINFER"]["error"].startswith("ValueError")
    ours = figures["choices"]["ATTNPLUG"]
    assert set(ours["workloads"]) == {"4 x 40", "4 x 35 to 200"}
    # The last request's first token comes at 4.0, and its eighth at 14.0.
    assert ours["workloads"]["4 x 40"]["decode_ms_per_step"] == pytest.approx(10_000 / 7)
    assert all(figure > 0 for workload in ours["workloads"].values() for figure in workload.values())
    assert ours["layers"][0]["backend"] == "TORCH"
    assert [
        figures["choices"][name]["workloads"]["4 x 40"]["right"] for name in ("ATTNPLUG", "TRITON_ATTN")
    ] == [1.0, 0.5]
