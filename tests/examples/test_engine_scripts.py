"""demo.py and serve.py say what they promise, and refuse bad arguments in a sentence."""

from __future__ import annotations

import re

import demo
import pytest
import serve
from small_models import MODELS

LLAMA = str(MODELS / "llama-3.1-8b.json")


def test_the_demo_shows_plan_speed_and_equal_tokens(capsys):
    assert demo.main(["--requests", "3", "--max-tokens", "8"]) == 0

    shown = capsys.readouterr().out
    assert "model.layers.5.self_attn" in shown
    assert "TORCH" in shown
    assert "24 tokens in 8 steps" in shown
    assert "tokens equal: yes" in shown


def test_the_demo_shows_what_drafts_bring(capsys):
    assert demo.main(["--requests", "2", "--max-tokens", "24", "--vocab-size", "16"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "without drafts: 48 tokens in 24 steps, " in shown
    found = re.search(r"with 4 draft tokens: 48 tokens in (\d+) steps, (\d+) of (\d+) drafts accepted", shown)
    steps, accepted, drafted = map(int, found.groups())
    assert steps < 24
    assert 0 < accepted <= drafted
    assert f"({accepted / drafted:.0%}), {48 / (48 - accepted):.2f} tokens per step of a request, " in shown
    assert "tokens equal: yes" in shown


def test_serve_compares_drafts_with_a_run_without(capsys):
    gemma = str(MODELS / "gemma-3-27b-text.json")
    arguments = ["--model", gemma, "--scale", "tiny", "--requests", "4", "--max-blocks", "100"]

    assert serve.main([*arguments, "--max-tokens", "24", "--draft-tokens", "3"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"constrained: 96 tokens in \d+ steps, [1-9]\d* of \d+ drafts accepted", shown)
    assert re.search(r"without drafts: 96 tokens in \d+ steps, [\d,]+ tokens per second", shown)
    assert "4 of 4 requests finished, 0 lost" in shown
    assert "outputs equal: yes" in shown


def test_the_demo_and_serve_run_latent_attention(capsys):
    model = str(MODELS / "deepseek-v2-lite.json")

    assert demo.main(["--model", model, "--requests", "2", "--max-tokens", "8"]) == 0
    few = ["--model", model, "--scale", "tiny", "--requests", "6", "--max-blocks", "16", "--max-tokens", "16"]
    assert serve.main([*few, "--draft-tokens", "2"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "a prefill workspace of 12,058,624 bytes" in shown
    assert " mla " in shown
    assert "tokens equal: yes" in shown
    assert "6 of 6 requests finished, 0 lost" in shown
    assert " 0 preemptions, 0 pages" not in shown
    assert "outputs equal: yes" in shown


@pytest.mark.parametrize(
    ("kind", "size"), [("fp8_e4m3", 2048), ("int8_token_head", 2304), ("rotated4", 1152)]
)
def test_the_demo_and_serve_keep_pages_in_a_format(capsys, kind, size):
    assert demo.main(["--requests", "2", "--max-tokens", "8", "--kv-cache-dtype", kind]) == 0
    few = ["--model", LLAMA, "--scale", "tiny", "--requests", "4", "--max-tokens", "8", "--max-blocks", "60"]
    assert serve.main([*few, "--kv-cache-dtype", kind]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert f"1,024 blocks of {size:,} bytes" in shown
    assert f"60 blocks of {2 * size:,} bytes" in shown
    assert "4 of 4 requests finished, 0 lost" in shown


def test_serve_finishes_all_requests_on_few_blocks(capsys):
    arguments = ["--model", LLAMA, "--scale", "tiny", "--requests", "12", "--max-blocks", "24"]

    assert serve.main(arguments) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "12 of 12 requests finished, 0 lost" in shown
    assert " 0 preemptions, 0 pages" not in shown
    assert "unconstrained: 0 preemptions" in shown
    assert "outputs equal: yes" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere.json"], "nowhere.json: no such file"),
        (["--model", str(MODELS / "bert-base-uncased.json"), "--scale", "tiny"], "encoder_only"),
        (["--model", LLAMA, "--scale", "tiny", "--max-blocks", "4"], "give the engine more blocks"),
        (["--model", LLAMA, "--scale", "tiny", "--draft-tokens", "-1"], "num_speculative_tokens=-1 must be"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(arguments, message, capsys):
    assert serve.main(arguments) == 2

    assert message in capsys.readouterr().err


def test_serve_in_bfloat16_loses_nothing(capsys):
    arguments = ["--model", LLAMA, "--scale", "tiny", "--requests", "4", "--max-tokens", "8"]

    assert serve.main([*arguments, "--dtype", "bfloat16"]) == 0

    assert "4 of 4 requests finished, 0 lost" in " ".join(capsys.readouterr().out.split())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_and_serve_run_on_a_gpu(dtype, capsys):
    where = ["--device", "cuda", "--dtype", dtype, "--max-tokens", "8"]

    assert demo.main([*where, "--requests", "3"]) == 0
    assert serve.main([*where, "--model", LLAMA, "--scale", "tiny", "--requests", "12"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "24 tokens in 8 steps" in shown
    assert "12 of 12 requests finished, 0 lost" in shown


@pytest.mark.parametrize("device", ["nowhere", "meta"])
def test_a_device_that_cannot_be_used_ends_with_the_usage(device, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--device", device])

    assert stopped.value.code == 2
    assert f"'{device}' is not a device that torch can use here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--model", LLAMA, "--requests", "0"], ["--model", LLAMA, "--chunk", "1"]]
)
def test_bad_arguments_end_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        serve.main(arguments)

    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err
