"""Commands about hybrids: the note about rules, the bytes of states, unknown recurrences, and layers that are not timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_state_spec import GDN
from typer.testing import CliRunner

from attnplug.cli.app import app
from attnplug.core import LayerSpec
from attnplug.tuning.workloads import measurable, workload_from_lists

MODELS = Path(__file__).parents[2] / "examples" / "models"
GIB = 2**30


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_rule_for_all_layers_is_explained_in_one_line() -> None:
    found = run("select", MODELS / "nemotron-3-nano-30b.json", "--device", "h100", "--backend", "TORCH")
    text = " ".join(found.output.split())
    assert "TORCH is for attention layers: 46 layers with a state are served by TRITON" in text
    assert "a rule such as conv=NAME,state=NAME chooses for them" in text
    same = run("select", MODELS / "nemotron-3-nano-30b.json", "--device", "cpu", "--backend", "TORCH")
    assert "is for attention layers" not in same.output
    named = run(
        *("select", MODELS / "nemotron-3-nano-30b.json", "--device", "cpu"),
        *("--backend", "TORCH,state=TORCH,conv=TORCH"),
    )
    assert "is for attention layers" not in named.output


@pytest.mark.parametrize("requests", [None, 64])
def test_memory_takes_the_states_first(requests: int | None) -> None:
    more = [] if requests is None else ["--requests", requests]
    path = MODELS / "nemotron-3-nano-30b.json"
    found = run("select", path, "--device", "cpu", "--memory", "40GiB", *more, "--json")
    budget = json.loads(found.output)["budget"]
    page = 23 * 2_134_016
    assert budget["states"]["bytes_per_state"] == page
    assert budget["states"]["bytes"] == ((requests or 256) + 1) * page
    # Six layers of 16 tokens with 2 heads of 128 elements, K and V in 16 bits.
    assert budget["num_blocks"] == (40 * GIB - budget["states"]["bytes"]) // (6 * 16 * 2 * 256 * 2)


def test_too_little_memory_is_an_error_with_the_bytes_of_both() -> None:
    found = run("select", MODELS / "nemotron-3-nano-30b.json", "--device", "cpu", "--memory", "11.5GiB")
    assert found.exit_code != 0
    assert "must have room for 257 states of 49,082,368 bytes" in str(found.exception)


def test_requests_need_memory() -> None:
    found = run("select", MODELS / "nemotron-3-nano-30b.json", "--device", "cpu", "--requests", "8")
    assert "needs --memory" in str(found.exception)


def test_the_state_of_an_unknown_recurrence_is_not_counted(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "vocab_size": 64, **sizes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = run("select", path, "--device", "cpu")
    assert "2 x rwkv" in found.output
    assert "their state is not counted" in " ".join(found.output.split())


def test_a_layer_with_a_state_is_not_timed() -> None:
    shapes, why = measurable(LayerSpec(**GDN), workload_from_lists("1,8", "1k", None))
    assert not shapes
    assert why == "keeps a state: no workload has the pages of its steps"


def test_transformers_runs_its_states_itself_and_one_sentence_says_so() -> None:
    found = run("select", MODELS / "qwen3-next-80b.json", "--device", "sm90", "--for", "transformers")
    text = " ".join(found.output.split())
    assert "transformers runs 36 layers that keep a state, such as model.layers.0.linear_attn" in text
    assert "not counted" not in text
