"""FLASH_ATTN_3 and the operators that its library registers, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REGISTER = """
import sys, types
import torch
sys.path.insert(0, {here!r})
from flash_attn_fakes import FA3_FWD, FA3_SCHEDULE
import attnplug.backends.flash_attn.fa3 as fa3
fa3.import_library = lambda backend: None
library = torch.library.Library("flash_attn_3", "DEF")
{register}
config = types.ModuleType("flash_attn_config")
config.CONFIG = {{"build_flags": {flags!r}}}
sys.modules["flash_attn_config"] = config
try:
    print("bound", fa3.FlashAttn3Impl.kernels()._fwd)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
BOTH = "library.define(FA3_FWD); library.define(FA3_SCHEDULE)"


def bound(register: str = BOTH, **flags: bool) -> str:
    code = REGISTER.format(here=str(Path(__file__).parent), register=register, flags=flags)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_the_operators_as_the_library_defines_them_are_bound():
    assert bound().startswith("bound flash_attn_3.fwd.default")


@pytest.mark.parametrize(
    "switch", ["PAGEDKV", *(pytest.param(each, marks=pytest.mark.slow) for each in ("LOCAL", "HDIM192"))]
)
def test_a_build_without_something_declared_is_refused(switch):
    told = bound(**{f"FLASHATTENTION_DISABLE_{switch}": True})
    assert f"built with FLASHATTENTION_DISABLE_{switch}; build it without" in told


@pytest.mark.slow
def test_operators_that_are_missing_or_take_less_are_refused():
    assert "registers no operator get_scheduler_metadata" in bound("library.define(FA3_FWD)")
    less = "library.define(FA3_FWD.replace('Tensor? page_table = None, ', '')); library.define(FA3_SCHEDULE)"
    assert "flash_attn_3::fwd does not take page_table" in bound(less)
