"""Composites pass the conformance kit: two backends of one phase each, and two that order their steps otherwise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from catching import failures, variant
from plain_attention import PlainImpl

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionCGSupport, Device, Phase, composite_backend
from attnplug.testing import parametrize_with_checks
from attnplug.testing.conformance.check import Check
from attnplug.testing.conformance.declared import options
from attnplug.testing.conformance.listing import GROUPS
from attnplug.testing.conformance.numbers import correctness, requests
from attnplug.testing.conformance.serving import gpu
from attnplug.testing.conformance.target import Target


class DecodesFirst(TorchMetadataBuilder):
    """Asks for decodes first, as vendors' builders do, and declares that steps of one length are captured."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


PREFILLS = variant("PREFILLS", supported_phases=(Phase.PREFILL,))
DECODES = variant("DECODES", builder=DecodesFirst, supported_phases=(Phase.DECODE,))
PLAIN = variant("PLAIN", impl=PlainImpl, supported_kv_cache_layouts=lambda cls: ("HND",))


@parametrize_with_checks(composite_backend(PREFILLS, DECODES), device="cpu")
def test_of_two_that_serve_one_phase_each(check: Check) -> None:
    check()


@pytest.mark.parametrize("pair", [(PLAIN, DECODES), (PREFILLS, PLAIN)], ids=["prefills", "decodes"])
def test_of_two_implementations_that_share_no_code(pair) -> None:
    # The plain one takes any batch for what it says it is.
    assert set(failures(composite_backend(*pair), requests.checks)) <= {
        "batch/widened-decode",
        "batch/widened-mixed",
    }


class IgnoresWindows(TorchImpl):
    def _bind(self, spec, *args, **kwargs):
        super()._bind(spec.replace(window=(-1, -1)) if spec.causal else spec, *args, **kwargs)


WRONG = variant("WRONG", impl=IgnoresWindows)


@pytest.mark.parametrize(
    "pair", [(WRONG, DECODES), (PREFILLS, WRONG)], ids=["in the prefilling half", "in the decoding half"]
)
def test_what_one_half_ignores_is_caught_and_named(pair) -> None:
    def windowed(target: Target):
        return (check for check in correctness.checks(target) if check.id.endswith("NHD-window6.0"))

    problems = failures(composite_backend(*pair), windowed)
    assert problems
    assert all("a known mistake: sliding window ignored" in str(problem) for problem in problems.values())


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["TRITON+TORCH", "TORCH+TRITON"])
def test_of_triton_and_torch_under_the_interpreter(name: str, tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(
        '[known_failures]\n"*runtime/threads" = "the interpreter keeps the program in its modules"\n'
    )
    # In another process: triton reads the variable when it is imported.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "attnplug", "conformance", name, "--device", "cpu"),
            *("--timeout", "600", "--known-failures", str(known)),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert name in done.stdout


def test_every_group_of_checks_asks_composites_something() -> None:
    target = Target(composite_backend(PREFILLS, DECODES), Device("cpu"))
    silent = [group for group in GROUPS if not list(group(target))]
    assert silent == [options.checks, gpu.capture_checks, gpu.checks, gpu.graph_checks]
