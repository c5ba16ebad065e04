"""vllm_demo.py refuses machines without vLLM or a GPU; with a stand-in for vLLM it prints one table and writes JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "engines"))
import vllm_demo  # noqa: E402

STAND_IN = '''
"""What vllm_run.py uses of vLLM. FLASHINFER cannot start, and TRITON_ATTN draws other tokens for one request."""
import types

import attnplug

class SamplingParams:
    def __init__(self, max_tokens, **rest):
        assert rest == {"temperature": 0, "ignore_eos": True, "detokenize": False}
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, attention_backend, max_model_len, **rest):
        if attention_backend == "FLASHINFER":
            raise ValueError("Selected backend FLASHINFER is not valid: no [module] named flashinfer")
        self.name, self.longest = attention_backend, max_model_len
        spec = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, block_size=16)
        impl = types.SimpleNamespace(decision=attnplug.explain(spec, "cpu"))
        found = {f"model.layers.{i}.self_attn.attn": types.SimpleNamespace(impl=impl) for i in range(2)}
        config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context=found),
            model_config=types.SimpleNamespace(get_vocab_size=lambda: 96),
        )
        self.llm_engine = types.SimpleNamespace(vllm_config=config)

    def generate(self, prompts, sampling, use_tqdm):
        outputs = []
        for index, prompt in enumerate(prompts):
            assert len(prompt["prompt_token_ids"]) + sampling.max_tokens <= self.longest
            token = 1 if self.name == "TRITON_ATTN" and index == 0 else 0
            tokens = types.SimpleNamespace(token_ids=[token] * sampling.max_tokens)
            outputs.append(types.SimpleNamespace(outputs=[tokens]))
        return outputs
'''


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "none.json"], "none.json: no such file"),
        (["--max-tokens", "1"], "at least 2 are needed"),
        (["--requests", "0"], "'0' is not an integer from 1"),
    ],
)
def test_bad_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        vllm_demo.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_one_command_prints_one_table_of_all_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    path = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(vllm_demo, "missing", lambda: None)
    file = tmp_path / "figures.json"
    asked = ["--requests", "4", "--prompt", "40", "--max-tokens", "8", "--rounds", "1"]

    assert vllm_demo.main([*asked, "--json", str(file)]) == 1, "one choice failed"

    shown = capsys.readouterr().out
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ ")}
    assert set(rows) >= {"FLASH_ATTN", "TRITON_ATTN", "ATTNPLUG"}
    assert "100%" in rows["ATTNPLUG"]
    assert "75%" in rows["TRITON_ATTN"]
    assert (
        "FLASHINFER did not run: ValueError: Selected backend FLASHINFER is not valid: no [module]" in shown
    )
    layers = "2 layers (model.layers.0.self_attn.attn to model.layers.1.self_attn.attn)"
    assert f"{layers}, full, pages of 16 tokens: TORCH, chosen by priority" in shown
    assert "FLASHINFER refused: device type not supported" in shown

    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["settings"]["model"]) == ("vllm", "qwen3-8b.json")
    assert figures["choices"]["FLASHINFER"]["error"].startswith("ValueError")
    ours = figures["choices"]["ATTNPLUG"]
    assert set(ours["workloads"]) == {"4 x 40", "4 ragged"}
    assert all(figure > 0 for workload in ours["workloads"].values() for figure in workload.values())
    assert ours["layers"][0]["backend"] == "TORCH"
    assert figures["choices"]["TRITON_ATTN"]["same_tokens"] == 0.75


def test_results_without_a_single_run_are_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    vllm_demo.show(Console(), {"FLASH_ATTN": {"error": "out of memory"}})
    assert "FLASH_ATTN did not run: out of memory" in capsys.readouterr().out


def test_ragged_prompts_differ_in_length() -> None:
    lengths = vllm_demo.workloads(64, 2048)["64 ragged"]
    assert min(lengths) < 300 < 10_000 < max(lengths) <= 7 * 2048 + 1
