"""What each command prints at 60, 80 and 120 columns, compared with files that a person has looked at.

`WRITE_CAPTURES=1 python -m pytest -n 0 tests/cli/test_captures.py` writes the files again: look at the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from attnplug.cli.commands import doctor
from attnplug.cli.output.doctor_sections import EngineState
from attnplug.cli.probe_run import Probe
from attnplug.testing.isolation import listing
from attnplug.testing.isolation import run as isolation_run
from attnplug.testing.isolation.failures import Failure
from attnplug.testing.isolation.listing import Listing, SuiteRequest
from attnplug.testing.isolation.results import CheckOutcome, Result

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = Path(__file__).with_name("captures")
WIDTHS = (60, 80, 120)
ALL = ("--assume-installed", "all")
GPT = "examples/models/gpt-oss-20b.json"
COMMANDS = {
    "list": ("list",),
    "list-no-load": ("list", "--no-load"),
    "list-known": ("list", "--known"),
    "show": ("show", "TRITON"),
    "select": ("select", GPT, "--device", "h100", "--memory", "80GiB", *ALL),
    "select-why": ("select", GPT, "--device", "a100", "--kv-cache-dtype", "fp8", "--why"),
    "select-per-phase": ("select", "examples/models/deepseek-v3.json", "--device", "h100", "--per-phase", *ALL),
    "select-hybrid": (
        "select", "examples/models/qwen3-next-80b.json", "--device", "h100", "--memory", "40GiB", "--backend", "TRITON", *ALL,
    ),
    "explain": ("explain", "--device", "h100"),
    "explain-state": ("explain", "--state", "delta,head,3", "--device", "cpu"),
    "explain-none": ("explain", "--mla", "1536,512,128,64,128", "--sinks", "--device", "h100"),
    "explain-code": ("explain-code", "head_size"),
    "explain-code-all": ("explain-code",),
    "matrix": ("matrix", "--device", "h100", "--backend", "TRITON", "--backend", "TORCH", "--backend", "FLASHINFER"),
    "matrix-one": ("matrix", "--device", "h100", "--backend", "TRITON", "--feature", "sinks"),
    "doctor": ("doctor",),
    "conformance": ("conformance", "TORCH", "--device", "cpu", "--summary"),
    **{
        f"help-{name.replace(' ', '-')}": (*name.split(), "--help")
        for name in (
            "list", "show", "select", "explain", "explain-code", "doctor", "conformance", "completion",
            "new-backend", "new-format", "tune", "warm", "matrix", "matrix merge", "matrix diff",
        )
    },
    "help": ("--help",),
}  # fmt: skip


def probe(plugin: str | None, backend: str | None, timeout: float) -> Probe:
    """What a probe finds on a machine with one broken library."""
    device = {"type": "cuda", "capability": [9, 0], "name": "NVIDIA H100 80GB HBM3"}
    if plugin is None:
        return Probe({"device": device, "used": {"prefill": "TRITON", "decode": "TRITON"}}, None)
    name = plugin.partition(":")[2].upper()
    if backend is None:
        return Probe({"status": "loaded", "reason": None, "backends": {name: None}}, None)
    if name == "FLASHINFER":
        return Probe(
            {"unmet": ["flashinfer-python not installed; pip install 'flashinfer-python<0.8,>=0.5'"]}, None
        )
    if name == "FLASH_ATTN":
        return Probe({}, "raised in get_impl_cls: ImportError: undefined symbol: _ZN3c104cuda9SetDeviceEi")
    return Probe({"unmet": [], "get_impl_cls": f"{name}Impl", "get_builder_cls": f"{name}Builder"}, None)


IGNORED = "sliding window ignored"
PRINTED = """from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core import LayerSpec
from attnplug.testing import assert_step_correct

def test_sliding_window_ignored():
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype="float32", window=(0, 0))
    assert_step_correct(TorchBackend, layer, query_lens=[1], seq_lens=[2], block_size=1)"""
RESULTS = (
    Result("correct/decode-h4x2-d64-float32-b16-NHD", CheckOutcome.PASSED, 0.2),
    Result(
        "correct/mixed-h4x2-d64-float32-b16-NHD-window40.0", CheckOutcome.FAILED, 0.2, f"wrong: {IGNORED}",
        failure=Failure(IGNORED, is_named=True, tokens=644),
    ),
    Result(
        "correct/mixed-h4x2-d64-float32-b16-NHD-window6.0", CheckOutcome.FAILED, 3.4, f"wrong: {IGNORED}",
        failure=Failure(IGNORED, is_named=True, tokens=60, size="1 request of 2 tokens", test=PRINTED),
    ),
    Result("declaration/light-import", CheckOutcome.FAILED, 1.4, "the import of the backend loads torch"),
    Result("cache/negative-slots", CheckOutcome.PASSED),
    Result("refused/feature-lse", CheckOutcome.PASSED),
    Result("merge/2-parts", CheckOutcome.SKIPPED, 0.0, "layer not served: TORCH serves no layer with LSE"),
    Result("declared/layout-HND", CheckOutcome.UNTESTED, 0.0, "layout HND: only cuda devices serve it"),
)  # fmt: skip


ENGINES = (
    EngineState("vLLM", "0.33.0", "inactive", "VLLM_PLUGINS='' leaves it out", "VLLM_PLUGINS=attnplug"),
    EngineState(
        "transformers", "5.17.0", "ready", "forward, generate and generate_batch; each program activates it",
        "attnplug.integrations.transformers.set_attention(model)",
    ),
)  # fmt: skip


@pytest.fixture
def captured(run, monkeypatch):
    """The output of a command at a width, with what differs between machines left out."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(doctor, "run_probe", probe)
    monkeypatch.setattr(
        doctor, "_environment", lambda: {"Python": "3.12.1", "attnplug": "0.1.0", "torch": "2.9.0"}
    )
    monkeypatch.setattr(doctor, "engine_states", lambda: list(ENGINES))
    monkeypatch.setattr(listing, "list_checks", lambda request, *rest, **more: _listing(request))
    monkeypatch.setattr(isolation_run, "run_checks", _run_checks)

    def call(arguments: tuple[str, ...], width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        outcome = run(*arguments)
        assert outcome.code in (0, 1, 3), outcome.err
        text = re.sub(r"\d{4}-\d{2}-\d{2}", "2026-01-01", outcome.out)
        return re.sub(r"in \d+ s", "in 1 s", text)

    return call


def _listing(request: SuiteRequest) -> Listing:
    ids = [each.id for each in RESULTS]
    versions = {"Python": "3.12.1", "torch": "2.9.0", "attnplug": "0.1.0"}
    return Listing(request, "TORCH", "attnplug", "cpu", "cpu", None, ids, {}, versions, "code")


def _run_checks(found, ids, limits, observer, **more) -> None:
    for result in RESULTS:
        observer.finished(result)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_was_looked_at(captured, tmp_path, monkeypatch, name, width):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = captured(COMMANDS[name], width)
    file = CAPTURES / f"{name}-{width}.txt"
    if os.environ.get("WRITE_CAPTURES"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def words(text: str) -> set[str]:
    return {word.rstrip(":") for word in text.split()}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_capture_breaks_a_word_or_is_too_wide(name):
    texts = {width: (CAPTURES / f"{name}-{width}.txt").read_text(encoding="utf-8") for width in WIDTHS}
    whole = words(texts[120])
    for width, text in texts.items():
        for line in text.splitlines():
            assert line == line.rstrip(), f"a trailing blank at {width} columns: {line!r}"
            # Lines of a run are whole in a file, so that they can be searched.
            assert len(line) <= width or name == "conformance", f"wider than {width} columns: {line!r}"
        # The strip of layers numbers its lines, which depend on the width.
        # A part of a broken word is no word of the widest text, and the whole word is missing. Labels come and go.
        assert not {
            word for word in whole - words(text) if re.search(r"[\d_=<>/]", word) and not word.isdigit()
        }, width
        assert not {
            word for word in words(text) - whole if re.search(r"[\d_=<>/]", word) and not word.isdigit()
        }, width


def test_a_terminal_has_colours_and_a_file_has_none(run, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" not in run("explain", "--device", "h100").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run("explain", "--device", "h100", "--sinks").out
    assert "\x1b[1;32mchosen" in coloured
    assert "\x1b[31mrefused" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in run("explain", "--device", "h100").out


def test_a_terminal_without_a_known_width_has_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    usual = run("explain", "--device", "h100").out
    assert usual.startswith(
        "Assumes every library that such a machine could install.\nFLASH_ATTN_4 on sm90 in prefill\n"
    )
    monkeypatch.setenv("COLUMNS", "0")
    assert run("explain", "--device", "h100").out == usual
