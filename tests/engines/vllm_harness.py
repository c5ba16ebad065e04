"""A pytest plugin: vLLM's own numeric tests, unchanged, over attnplug's backends instead of vLLM's.

Run in a source tree of vLLM, which needs no compiled parts for these tests:

    ATTNPLUG_HARNESS=ATTNPLUG,ATTNPLUG_TORCH PYTHONPATH=. pytest -p vllm_harness tests/v1/attention/test_attention_backends.py

On a machine without a GPU they run on the CPU. Their models are made-up configurations of the same shapes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from attnplug.core.errors import NoBackendError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

SHARED = {
    "vocab_size": 1024,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
MODELS = {
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "meta-llama/Meta-Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "microsoft/Phi-tiny-MoE-instruct": {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        "hidden_size": 2048,
        "intermediate_size": 448,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "sliding_window": 2047,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
    "deepseek-ai/DeepSeek-R1": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "google/embeddinggemma-300m": {
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
    },
}


COMPILED = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn")
"""Parts of vLLM that its platform for NVIDIA's GPUs imports, and that no test calls with attnplug's backends."""


def pytest_configure(config: pytest.Config) -> None:
    """Say on which platform vLLM is, because its source tree alone does not find that out."""
    if getattr(config.option, "numprocesses", None):
        return  # the tests run in other processes
    import vllm.platforms

    if torch.cuda.is_available():
        stand_in_for_compiled_parts()
        from vllm.platforms.cuda import CudaPlatform

        vllm.platforms._current_platform = CudaPlatform()
    else:
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
    from attnplug.integrations.vllm import register

    register()


def stand_in_for_compiled_parts() -> None:
    """Put empty modules in the place of compiled parts that a source tree does not have."""
    missing = [name for name in COMPILED if not _imports(name)]
    sys.modules.update({name: _Empty(name) for name in missing})
    if missing:
        # vLLM looks at models in a process of its own, which would not have these modules.
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = _as_on_a_cpu


def _as_on_a_cpu(look: Callable[[], Any]) -> Any:
    """What vLLM sees of a model; on a GPU its layers would call compiled parts when they are imported."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    found, vllm.platforms._current_platform = vllm.platforms.current_platform, CpuPlatform()
    try:
        return look()
    finally:
        vllm.platforms._current_platform = found


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


class _Empty(types.ModuleType):
    """A module whose functions cannot be called."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*given: object, **named: object) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is not in a source tree of vLLM")

        return refuse


@functools.cache
def folder(model: str) -> str:
    place = Path(tempfile.mkdtemp()) / model
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(SHARED | MODELS[model]))
    return str(place)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each case's outcome to the file ATTNPLUG_HARNESS_LOG, a line of JSON as soon as it is known."""
    file = os.environ.get("ATTNPLUG_HARNESS_LOG")
    if not file or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    why: Any = report.longrepr if report.skipped else getattr(report.longrepr, "reprcrash", None)
    why = why[2] if isinstance(why, tuple) else getattr(why, "message", None) or report.longreprtext
    case = report.nodeid.rpartition("::")[2]
    line = {"case": case, "outcome": report.outcome, "seconds": round(report.duration, 2), "why": why}
    with Path(file).open("a") as log:
        log.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Put attnplug's names in the lists of backends, and the made-up models in place of names on a hub."""
    for module in {item.module for item in session.items if hasattr(item, "module")}:
        if hasattr(module, "_test_backend_correctness"):
            adapt(module)


def adapt(module: Any) -> None:
    """Make a module of vLLM's tests test attnplug's backends; once."""
    if getattr(module, "of_attnplug", False):
        return
    module.of_attnplug = True
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = [AttentionBackendEnum[name] for name in os.environ["ATTNPLUG_HARNESS"].split(",")]
    lists = [name for name in vars(module) if name.endswith("BACKENDS_TO_TEST")]
    for name in lists:
        getattr(module, name)[:] = chosen
    if not torch.cuda.is_available():
        module.DEVICE_TYPE = "cpu"
    compare, model_config = module._test_backend_correctness, module.ModelConfig

    def compare_ours(spec: Any, model: str, backends: list[Any], *rest: Any, **options: Any) -> None:
        # vLLM runs FlexAttention a second time on larger pages.
        if not backends or any(backend not in chosen for backend in backends):
            return
        dtype = options.get("kv_cache_dtype", "auto")
        unserved = [one.name for one in backends if not one.get_class().supports_kv_cache_dtype(dtype)]
        if unserved:
            # vLLM's comparison would compare nothing.
            pytest.skip(f"refused: {', '.join(unserved)} has no cache of kv_cache_dtype {dtype}")
        try:
            compare(spec, folder(model), backends, *rest, **options)
        except NoBackendError as error:
            if os.environ.get("ATTNPLUG_HARNESS_REFUSED") != "skip":
                raise
            pytest.skip(f"refused: {error}")

    module._test_backend_correctness = compare_ours
    module.ModelConfig = lambda model, **options: model_config(
        model=folder(model) if model in MODELS else model, **options
    )


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """What vLLM's conftest gives its tests; for runs without that file, which imports all of vLLM."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mutant that the tests have to notice: keys and values change places."""
    if os.environ.get("ATTNPLUG_HARNESS_MUTANT") != "swapped":
        return
    from attnplug.integrations.vllm import impl, latent

    right = impl.logical
    impl.logical = latent.logical = lambda *given: right(*given).flip(1)
