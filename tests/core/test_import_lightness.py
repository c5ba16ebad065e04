"""What importing attnplug costs: no torch, no numpy, no kernel library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "triton", "transformers", "flash_attn", "flashinfer")
LIGHT_CORE = [
    *("AttentionBackend", "AttentionType", "BuilderConfig", "Device", "Feature", "FullAttentionSpec"),
    *("KVCacheConfig", "LayerSpec", "MLADims", "MultipleOf", "Phase", "Reason"),
    *("is_quantized_kv_cache", "subclass_attention_backend"),
]


def heavy_modules_after(code: str) -> list[str]:
    """The heavy modules that a fresh interpreter has loaded once it has run `code`."""
    watch = f"import sys\n{code}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_heavy_module_would_be_seen() -> None:
    assert "numpy" in heavy_modules_after("import numpy")


def test_importing_the_packages_loads_nothing_heavy() -> None:
    packages = ["attnplug", "attnplug.core", "attnplug.errors"]
    if importlib.util.find_spec("attnplug.registry"):
        packages.append("attnplug.registry")
    assert heavy_modules_after(f"import {', '.join(packages)}") == []


@pytest.mark.parametrize("name", LIGHT_CORE)
def test_a_declaration_is_light_to_import(name: str) -> None:
    assert heavy_modules_after(f"from attnplug.core import {name}") == []


def test_a_backend_can_judge_a_layer_without_torch() -> None:
    code = """
from attnplug.core import AttentionBackend, Device, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for

class Declared(AttentionBackend):
    get_name = staticmethod(lambda: "DECLARED")

spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, has_sinks=True)
reasons = Declared.validate_configuration(spec, Device.parse("sm90"))
assert reasons == ["sinks not supported"], reasons
assert Declared.get_kv_cache_stride_order(spec=spec) == (0, 1, 2, 3, 4)
assert kv_cache_spec_for(spec, 16).page_size_bytes == 16 * 2 * 128 * 2
"""
    assert heavy_modules_after(code) == []
