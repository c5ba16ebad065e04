"""sglang_demo.py with a stand-in for SGLang, and on a CPU with SGLang itself where `ATTNPLUG_SGLANG_SOURCE` names it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import sglang_demo
import sglang_model
import torch

ROOT = Path(__file__).parents[2]
SOURCE = os.environ.get("ATTNPLUG_SGLANG_SOURCE")
CPU = [
    "--device",
    "cpu",
    "--eager",
    "--requests",
    "4",
    "--rounds",
    "1",
    "--max-tokens",
    "8",
    "--page-size",
    "16",
]
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STAND_IN = '''
"""What sglang_run.py uses of SGLang. flashinfer cannot start, triton draws a wrong token, fa3 wants for pages."""
import json
import types

import lookup

CONFIG = types.SimpleNamespace(num_hidden_layers=2, vocab_size=600)

class Engine:
    def __init__(self, *, attention_backend, context_length, stream_interval, page_size, device, **rest):
        if attention_backend == "flashinfer":
            raise ValueError("flashinfer is not [here]")
        assert rest["load_format"] == "dummy" and rest["disable_cuda_graph"] and rest["max_running_requests"] == 4
        assert (page_size, device) == (16, "cpu")
        assert rest["max_total_tokens"] >= 2 * 4 * 48
        self.name, self.longest, self.interval = attention_backend, context_length, stream_interval
        self.tokenizer_manager = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_text_config=CONFIG))
        self.flushes = 0
        assert self.run_scheduler_process_func.func.__name__ == "run_scheduler"

    def flush_cache(self):
        self.flushes += 1
        return types.SimpleNamespace(success=self.flushes % 2 == 0)

    def generate(self, input_ids, sampling_params, stream=False):
        count = sampling_params["max_new_tokens"]
        assert sampling_params == {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        assert all(len(prompt) + count <= self.longest for prompt in input_ids)
        plan = lookup.Plan.of(CONFIG)
        drawn = [plan.follow(prompt, count) for prompt in input_ids]
        if self.name == "triton":
            drawn[1][-1] += 1
        meta = {"num_retractions": int(self.name == "fa3")}
        if not stream:
            assert count == 1
            return None
        assert self.interval == count
        parts = [(i, tokens[:end]) for end in (1, count) for i, tokens in enumerate(drawn)]
        return iter([{"index": i, "output_ids": tokens, "meta_info": meta} for i, tokens in parts])

    def collective_rpc(self, method, path):
        assert method == "write_attnplug_layers"
        with open(path, "w") as file:
            json.dump([LAYERS], file)

    def shutdown(self):
        pass

LAYERS = {"backend": "TORCH", "kinds": "full", "why": ["prefill on TORCH: first by priority"], "block_size": 16,
          "accepted": [["TORCH", 0]], "refused": [], "layers": ["a", "b"]}
'''


def test_a_machine_without_sglang_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else found(name))
    assert sglang_demo.main([]) == 2
    said = "sglang_demo: sglang is not installed; pip install sglang, on a machine with an NVIDIA GPU\n"
    assert capsys.readouterr().err == said


def test_a_machine_without_a_gpu_is_refused_unless_the_cpu_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sglang_demo.main([]) == 2
    said = "sglang_demo: torch finds no NVIDIA GPU here; give --device cpu --eager, and small sizes\n"
    assert capsys.readouterr().err == said
    with pytest.raises(SystemExit):
        sglang_demo.main(["--device", "cpu"])
    assert "--device cpu has no CUDA graphs; give --eager too" in capsys.readouterr().err


@pytest.mark.slow
def test_one_command_prints_one_table_of_all_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sglang" / "srt" / "entrypoints" / "engine.py"
    file.parent.mkdir(parents=True)
    file.write_text(STAND_IN)
    path = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sglang_demo, "missing", lambda options: None)
    figures = tmp_path / "figures.json"
    choices = ["attnplug", "fa3", "triton", "flashinfer", "torch_native"]

    asked = [*CPU, "--prompts", "40", "35-200", "--choices", *choices, "--json", str(figures)]
    assert sglang_demo.main(asked) == 1, "two choices failed"

    shown = capsys.readouterr().out
    rows = {tuple(line.split("│")[1:3]): line for line in shown.splitlines() if line.startswith("│ ")}
    shares = {
        (name.strip(), load.strip()): line.split("│")[-2].strip() for (name, load), line in rows.items()
    }
    assert shares == {
        (name, load): share
        for name, share in (("attnplug", "100%"), ("triton", "75%"), ("torch_native", "100%"))
        for load in ("4 x 40", "4 x 35 to 200")
    }
    assert "fa3 did not run: RuntimeError: SGLang stopped a request for want of pages" in shown
    assert "flashinfer did not run: ValueError: flashinfer is not [here]" in shown
    assert (
        "2 layers (a to b), full, pages of 16 tokens: TORCH\n  prefill on TORCH: first by priority\n" in shown
    )
    report = json.loads(figures.read_text())
    assert (report["benchmark"], report["settings"]["page_size"], report["settings"]["device"]) == (
        "sglang",
        16,
        "cpu",
    )
    assert set(report["choices"]) == set(choices)
    ours = report["choices"]["attnplug"]["workloads"]
    assert set(ours) == {"4 x 40", "4 x 35 to 200"}
    assert all(figure > 0 for workload in ours.values() for figure in workload.values())
    assert report["choices"]["torch_native"]["layers"] == []


WRONG = """
from attnplug.backends.torch_native import TorchBackend, hookimpl
from attnplug.backends.torch_native.builder import TorchMetadataBuilder

ATTNPLUG_API = (1, 1)

class WrongBuilder(TorchMetadataBuilder):
    def build(self, prefix, common, fast_build=False):
        return super().build(prefix, common.changed(block_table_tensor=common.block_table_tensor.roll(1, 1)))

class WrongBackend(TorchBackend):
    @staticmethod
    def get_name():
        return "WRONG"

    @classmethod
    def get_priority(cls, spec, device, phase):
        return 1

    @classmethod
    def get_builder_cls(cls):
        return WrongBuilder

@hookimpl
def attnplug_backends():
    return (WrongBackend,)
"""
"""A plugin whose backend reads the page before each page."""


def install_wrong_pages(folder: Path) -> None:
    (folder / "wrong_pages.py").write_text(WRONG)
    information = folder / "wrong_pages-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-pages\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[attnplug.backends]\nwrong = wrong_pages\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "choices"),
    [
        ("qwen3-8b", {"torch_native": 1.0, "attnplug_torch": 1.0, "attnplug_wrong": 0.0}),
        ("llama-3.1-8b", {"attnplug": 1.0}),
        ("gemma-3-27b-text", {"attnplug_torch": 1.0}),
        ("gpt-oss-20b", {"attnplug_torch": 1.0}),
    ],
)
def test_tokens_are_right_in_sglang_and_a_wrong_page_is_seen(
    model: str, choices: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SOURCE is None:
        pytest.skip("SGLang is not at hand: ATTNPLUG_SGLANG_SOURCE is not set")
    (tmp_path / "sitecustomize.py").write_text("import sglang_on_cpu; sglang_on_cpu.prepare()")
    if "attnplug_wrong" in choices:
        install_wrong_pages(tmp_path)
    path = [tmp_path, ROOT, ROOT / "tests" / "engines", Path(SOURCE).resolve()]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
    monkeypatch.setattr(sglang_demo, "missing", lambda options: None)
    config = json.loads((ROOT / "examples" / "models" / f"{model}.json").read_text()) | SMALL
    if config.get("sliding_window"):
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config |= {"sliding_window": 24, "layer_types": 2 * kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dense = ["--dense"] if config["model_type"] == "gpt_oss" else []
    asked = ["--model", str(tmp_path / "config.json"), *dense, "--json", str(tmp_path / "figures.json")]

    assert sglang_demo.main([*CPU, *asked, "--prompts", "64", "35-200", "--choices", *choices]) == 0

    found = json.loads((tmp_path / "figures.json").read_text())["choices"]
    for name, share in choices.items():
        shares = [each["right"] for each in found[name]["workloads"].values()]
        assert len(shares) == 2
        assert min(shares) == 1.0 if share == 1.0 else max(shares) <= share, (name, shares)
    ours = [group for name, result in found.items() if "attnplug" in name for group in result["layers"]]
    assert {group["backend"] for group in ours} == (
        {"TORCH", "WRONG"} if "attnplug_wrong" in choices else {"TORCH"}
    )


def test_the_heads_weights_take_the_place_of_embeddings_where_a_model_has_both() -> None:
    model = torch.nn.Module()
    model.config = None
    model.model = torch.nn.Module()
    model.model.embed_tokens, model.lm_head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4)

    class Logits(torch.nn.Module):
        def forward(self, inputs: object, hidden: object, head: object, *rest: object) -> tuple[object, ...]:
            return head, *rest

    model.logits_processor = Logits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_model.lookup, "fill", lambda model, config: None)
        sglang_model._fill(None, model)
    assert model.logits_processor(1, 2, model.model.embed_tokens, 3) == (model.lm_head, 3)
    other = torch.nn.Linear(2, 4)
    assert model.logits_processor(1, 2, other) == (other,)
