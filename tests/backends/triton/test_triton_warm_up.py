"""After a warm-up no step of an engine compiles anything: on a GPU, and by the kernels' keys without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from real_steps import run_steps, runtime_on

from attnplug.backends.triton import TritonBackend

SCRIPT = Path(__file__).with_name("real_steps.py")


OF_DECODES = {"share_decode_kernel", "merge_shares_kernel", "plan_shares_kernel"}


def test_the_warm_up_asks_for_every_kernel_that_steps_need():
    found = subprocess.run(
        [sys.executable, SCRIPT],
        env=dict(os.environ, TRITON_INTERPRET="0"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["steps"] >= 10
    assert said["after"] == []
    names = {entry.partition("(")[0] for entry in said["warmed"]}
    assert names == OF_DECODES | {"prefill_kernel", "open_pages_kernel", "kv_write_kernel"}
    assert any("HAS_LEFT=True" in entry and "HAS_SINKS=True" in entry for entry in said["warmed"])


@pytest.mark.gpu
def test_steps_compile_nothing_after_a_warm_up_on_a_gpu():
    runtime = runtime_on("cuda")
    with TritonBackend.watch_compiling() as warmed:
        report = runtime.warm_up()
    assert list(report.compiled) == warmed
    with TritonBackend.watch_compiling() as compiled:
        run_steps(runtime)
    assert compiled == []


@pytest.mark.gpu
def test_a_second_warm_up_compiles_nothing():
    runtime = runtime_on("cuda")
    runtime.warm_up()
    assert runtime.warm_up().compiled == ()
