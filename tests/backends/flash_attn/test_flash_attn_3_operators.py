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
sys.modules["flash_attn_config"] = config
for switch in {switches!r}:
    config.CONFIG = {{"build_flags": {{f"FLASHATTENTION_DISABLE_{{switch}}": True}} if switch else {{}}}}
    try:
        print("bound", fa3.FlashAttn3Impl.kernels()._fwd)
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}".replace("\\n", " "))
"""
BOTH = "library.define(FA3_FWD); library.define(FA3_SCHEDULE)"


def bound(register: str = BOTH, switches: tuple[str, ...] = ("",)) -> list[str]:
    """What the binding says, in one process, of builds with each of `switches` off."""
    code = REGISTER.format(here=str(Path(__file__).parent), register=register, switches=switches)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


def test_a_build_with_all_that_is_declared_is_bound_and_another_is_refused():
    switches = ("PAGEDKV", "LOCAL", "HDIM192", "")
    *refused, whole = bound(switches=switches)
    for switch, told in zip(switches, refused, strict=False):
        assert f"built with FLASHATTENTION_DISABLE_{switch}; build it without" in told
    assert len(refused) == 3
    assert whole.startswith("bound flash_attn_3.fwd.default")


@pytest.mark.slow
def test_operators_that_are_missing_or_take_less_are_refused():
    assert "registers no operator get_scheduler_metadata" in bound("library.define(FA3_FWD)")[0]
    less = "library.define(FA3_FWD.replace('Tensor? page_table = None, ', '')); library.define(FA3_SCHEDULE)"
    assert "flash_attn_3::fwd does not take page_table" in bound(less)[0]
