"""A quantized checkpoint's storage of keys and values is that of its layers, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config

LLAMA = Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def stored(folder: Path, quantization: Any, field: str = "quantization_config", **asked: Any) -> set[str]:
    """The storage of the layers of a Llama with a quantization."""
    (folder / "config.json").write_text(json.dumps(json.loads(LLAMA.read_text()) | {field: quantization}))
    return {spec.kv_cache_dtype for spec in read_config(folder, **asked).layers.values()}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, "fp8_e4m3"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "type": "int"}}, "int8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "auto"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quant_method": "fp8"}, "auto"),
        (None, "auto"),
    ],
)
def test_layers_have_the_storage_that_the_checkpoint_names(
    tmp_path: Path, quantization: Any, dtype: str
) -> None:
    assert stored(tmp_path, quantization) == {dtype}


def test_the_older_name_of_the_field(tmp_path: Path) -> None:
    assert stored(tmp_path, {"kv_cache_scheme": SCHEME}, "compression_config") == {"fp8_e4m3"}


def test_what_the_caller_asks_for_comes_first(tmp_path: Path) -> None:
    named = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
    assert stored(tmp_path, named, kv_cache_dtype="bfloat16") == {"bfloat16"}
    assert stored(tmp_path, named, client="transformers") == {"auto"}, "it keeps them in caches of its own"


def test_a_configuration_in_memory(small: Any) -> None:
    config = small("Llama", quantization_config={"quant_method": "modelopt", "kv_cache_scheme": SCHEME})
    assert {spec.kv_cache_dtype for spec in read_config(config).layers.values()} == {"fp8_e4m3"}


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "must be 8 bits of type float or int; give"),
        ({"kv_cache_scheme": {"num_bits": True, "type": "float"}}, "kv_cache_scheme="),
        ({"kv_cache_scheme": "fp3"}, "quantization_config.kv_cache_scheme='fp3'"),
        ({"kv_cache_quant_algo": "FP3"}, "kv_cache_quant_algo='FP3': must be one of FP8, INT8, NVFP4"),
        ({"kv_cache_quant_algo": 8}, "kv_cache_quant_algo=8"),
    ],
)
def test_a_storage_that_no_dtype_is_needs_another_word(tmp_path: Path, part: Any, says: str) -> None:
    with pytest.raises(ModelConfigError) as raised:
        stored(tmp_path, {"quant_method": "modelopt", **part})
    assert says in str(raised.value)
    assert stored(tmp_path, {"quant_method": "modelopt", **part}, kv_cache_dtype="fp8") == {"fp8"}
