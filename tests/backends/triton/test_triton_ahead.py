"""Kernels are compiled for GPUs that are not here: those that a layer launches there, and what they take is judged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from attnplug._system.json_files import parse_json
from attnplug.backends.triton.ahead.chips import CHIPS, chip_of
from attnplug.backends.triton.ahead.forms import Form
from attnplug.core.device import Device
from attnplug.core.errors import SpecError

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("ahead_kernels.py")
FORMATS = ("auto", "fp8_e4m3", "int8_token_head", "nvfp4", "rotated4")
CELLS = (ROOT / "ci" / "compiled_cells.txt").read_text().split()


def child(*arguments: str, **variables: str) -> Any:
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | variables
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return parse_json(done.stdout)


@pytest.mark.parametrize("arch", ["sm80", "sm86", "gfx942"])
def test_a_kernel_that_spills_is_named_and_one_that_does_not_fit_is_refused(arch):
    fits, spills, large = child("planted", arch)
    assert (fits["spilled"], fits["refused"]) == (0, "")
    assert fits["registers"] > 0
    assert (spills["spilled"] > 0) == arch.startswith("sm")
    assert spills["kernel"] == "product_kernel(LONG=256)"
    assert spills["refused"] == ""
    room = CHIPS[arch].shared_memory
    assert (f"{room:,}" in large["refused"]) == (large["shared"] > room)
    assert bool(large["refused"]) == (arch != "sm80")


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_a_launch_finds_what_was_compiled_ahead(arch, tmp_path):
    found = child("found", arch, TRITON_CACHE_DIR=str(tmp_path))
    assert found == {"cached": [False, True], "hits": [True, False]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_e4m3", "int8_token_head", "rotated4"])
def test_a_warm_up_of_one_request_compiles_the_kernel_of_contexts_that_are_not_opened(name):
    assert child("after", "sm90", name, "100000") == []


@pytest.mark.slow
# AMD's compiler keeps queries in registers.
@pytest.mark.parametrize("arch", [arch for arch, chip in CHIPS.items() if chip.is_nvidia])
def test_tiles_of_prefills_fit_each_chip(arch):
    """Rows that are opened as codes have tiles of whole powers of two: heads of 160 took 256 KB of Hopper's 227."""
    sizes = (64, 80, 128, 160, 192, 256, 384, 512)
    found = child("tiles", arch, *(f"{name}/{size}" for name in FORMATS for size in sizes))
    room = CHIPS[arch].shared_memory
    assert {each: taken for each, taken in found.items() if max(taken, default=0) > room} == {}
    assert any(found["int8_token_head/160"]) == (arch != "sm90"), "Hopper reads them as numbers"
    assert any(found["rotated4/160"])


def test_caches_of_a_pretended_gpu_take_no_memory_of_the_host():
    """`attnplug warm` of a model with states took 20 GB, and copies of latents and weights 8.5 GB."""
    found = child("memory", "sm90")
    assert found["pages"] == 12
    assert found["host"] == 50, "host code reads its own numbers"
    assert found["more"] < 100


def kernels_of(folder: str) -> set[str]:
    files = (ROOT / "attnplug" / "backends" / "triton" / "kernels" / folder).glob("*.py")
    found = (
        (file.stem, re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)) for file in files
    )
    return {f"{module}.{name}" for module, names in found for name in names}


@pytest.mark.parametrize("arch", CHIPS)
def test_ci_compiles_each_kernel_that_a_chip_has(arch):
    found = child("launched", arch, *CELLS)
    names = {name for names in found.values() for name in names}
    assert kernels_of("hopper")
    assert len(kernels_of("state")) == 2
    assert kernels_of("state") <= names
    if arch == "sm90":
        assert kernels_of("hopper") <= names
        assert kernels_of("") - names == {"latent.latent_decode_kernel"}
        return
    assert not kernels_of("hopper") & names
    # No layer keeps equal bits there.
    lacking = {"fixed_splits.merge_splits_kernel"} if arch in ("sm100", "gfx942", "gfx950") else set()
    assert kernels_of("") - names == lacking


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_prompts_and_extends_that_divide_no_keys_are_compiled(arch):
    """Dummy steps have few tokens, whose extends are divided: only the kernel of prompts would be compiled."""
    cells = [f"plain/{phase}/d128/bfloat16/auto/b16/NHD" for phase in ("mixed", "prefill")]
    assert child("paged", arch, *cells) == {each: [False, True] for each in cells}


@pytest.mark.parametrize(
    ("tokens", "limits"),
    [
        ("2048", ("sliding_window=4096", "sliding_window=1500")),
        ("8192", ("sliding_window=700", "sliding_window=2048")),
        ("2048", ("chunk_size=8192", "chunk_size=512")),
        ("6000", ("sliding_window=1024", "sliding_window=5000")),
    ],
    ids=str,
)
def test_a_warm_up_has_what_prompts_within_and_past_a_limit_run(tokens, limits):
    """A layer stands for others of its class in a warm-up. Prompts within its limit have a kernel without one."""
    assert child("prompts", "sm90", tokens, *limits) == []


def test_a_chip_is_found_by_its_device():
    assert chip_of(Device.parse("gfx950")) is CHIPS["gfx950"]
    assert chip_of(Device.parse("A40")).shared_memory == 99 << 10
    with pytest.raises(SpecError, match="kernels are compiled ahead for sm80, sm86"):
        chip_of(Device.parse("sm75"))


def test_the_key_of_a_form_is_equal_wherever_triton_is_installed():
    def form(folder: str, warps: int) -> Form:
        source = SimpleNamespace(hash=lambda: "the source")
        options = SimpleNamespace(extern_libs=(("ocml", f"{folder}/ocml.bc"),), num_warps=warps)
        function = SimpleNamespace(ASTSource=lambda *_: source, __name__="kernel")
        return Form.of(function, {}, {}, {}, options)

    assert form("/a/site-packages", 4).key == form("/b/site-packages", 4).key
    assert form("/a/site-packages", 4).key != form("/a/site-packages", 8).key
