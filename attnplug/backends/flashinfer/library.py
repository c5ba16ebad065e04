"""One interface to FlashInfer 0.5 to 0.7: the only module that knows how its versions differ."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from attnplug.backends.flashinfer.modules import (
    PREFILL,
    SINKS,
    LatentModule,
    Module,
    named_sinks,
    own_name,
    sink_arguments,
    sink_keywords,
)
from attnplug.backends.library_imports import import_library
from attnplug.core.errors import BackendUnavailableError

_OLDEST = Version("0.5")
# The first version that `libraries.py` does not serve; its prereleases are not known either.
_UNKNOWN = Version("0.8")
_INSTALL = "pip install 'flashinfer-python>=0.5,<0.8'"
# Before 0.6.13 the argument for the longest query raises UnboundLocalError (seen in 0.6.6).
_NAMES_LONGEST = Version("0.6.13")
_MASKS_INFINITELY = Version("0.7.2")
_PREBUILT = "flashinfer-jit-cache"
_DISABLED = "FLASHINFER_DISABLE_JIT"

_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_PLANNED = {
    "window_left",
    "logits_soft_cap",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
    "non_blocking",
    "seq_lens",
}
_RUN = {"q", "paged_kv_cache", "k_scale", "v_scale", "out", "lse", "return_lse"}
_ASKED: dict[str, dict[str, set[str]]] = {
    _DECODE: {"plan": _PLANNED, "run": _RUN},
    PREFILL: {"plan": _PLANNED | {"causal", "max_token_per_sequence"}, "run": _RUN},
    SINKS: {
        "__init__": {"backend", "q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo", "window_left"}
    },
}
_LATENT = "BatchMLAPagedAttentionWrapper"
_LATENT_ASKED = {
    "__init__": {"use_cuda_graph", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "backend"},
    "plan": {"num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale", "q_data_type"},
    "run": {"q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse", "return_lse"},
}
_LATENT_PRIVATE = ("_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer")
# Private attributes of the wrappers that `planned_wrapper` reads and writes: all versions 0.5 to 0.7 have them.
_PRIVATE = (
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_pin_memory_int_workspace_buffer",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Library:
    """The imported library.

    Args:
        module: `flashinfer`.
        version: its version.
    """

    module: ModuleType
    version: Version

    @property
    def names_longest_query(self) -> bool:
        """Whether the prefill wrapper's `plan` accepts the longest query, and so need not look for it."""
        # Before 0.6.13 the argument raises UnboundLocalError (seen in 0.6.6).
        return self.version >= _NAMES_LONGEST

    @property
    def masks_infinitely(self) -> bool:
        """Whether a masked logit is minus infinity, as in 0.7.2; up to 0.6.13 at least it is -50000."""
        return self.version >= _MASKS_INFINITELY

    def decode_wrapper(
        self, workspace: torch.Tensor, tensor_cores: bool, fixed: Mapping[str, torch.Tensor]
    ) -> Any:
        """A wrapper for decodes of one query; `fixed` has the buffers of a CUDA graph, by name."""
        return self._checked(
            getattr(self.module, _DECODE)(
                workspace,
                "NHD",
                use_cuda_graph=bool(fixed),
                use_tensor_cores=tensor_cores,
                paged_kv_indptr_buffer=fixed.get("kv_indptr"),
                paged_kv_indices_buffer=fixed.get("indices"),
                paged_kv_last_page_len_buffer=fixed.get("last_page_len"),
                # "auto" may choose another library, at each plan.
                backend="fa2" if tensor_cores else "auto",
            )
        )

    def prefill_wrapper(self, workspace: torch.Tensor, template: str) -> Any:
        """A wrapper for requests of any number of queries, on "fa2" or "fa3"."""
        return self._checked(getattr(self.module, PREFILL)(workspace, "NHD", backend=template))

    def sink_wrapper(self, workspace: torch.Tensor, built: Module, fixed: Mapping[str, torch.Tensor]) -> Any:
        """A wrapper for requests of any number of queries, with sinks."""
        return self._checked(
            named_sinks(self.module)(
                float_workspace_buffer=workspace,
                kv_layout="NHD",
                use_cuda_graph=bool(fixed),
                qo_indptr_buf=fixed.get("qo_indptr"),
                paged_kv_indptr_buf=fixed.get("kv_indptr"),
                paged_kv_indices_buf=fixed.get("indices"),
                paged_kv_last_page_len_buf=fixed.get("last_page_len"),
                **sink_keywords(built),
            )
        )

    def latent_wrapper(
        self, workspace: torch.Tensor, template: str, fixed: Mapping[str, torch.Tensor]
    ) -> Any:
        """A wrapper for decodes on latents; `fixed` has the buffers of a CUDA graph, by name."""
        module = self._import("mla")
        there = hasattr(module, _LATENT)
        lacking = _lacking(_LATENT, getattr(module, _LATENT), _LATENT_ASKED) if there else {_LATENT}
        self._refuse(lacking, "pip install 'flashinfer-python>=0.6.13,<0.7'")
        made = getattr(module, _LATENT)(workspace, use_cuda_graph=bool(fixed), backend=template, **fixed)
        return self._checked(made, _LATENT_PRIVATE)

    def _checked(self, wrapper: Any, private: tuple[str, ...] = _PRIVATE) -> Any:
        missing = [name for name in private if not hasattr(wrapper, name)]
        if missing:
            raise BackendUnavailableError(
                f"flashinfer {self.version} has no {', '.join(missing)} in its wrappers, which attnplug "
                f"reads and writes; {_INSTALL}"
            )
        return wrapper

    def _refuse(self, lacking: set[str], remedy: str) -> None:
        if lacking:
            missing = ", ".join(sorted(lacking))
            raise BackendUnavailableError(f"flashinfer {self.version} has no {missing}; {remedy}")

    def module_name(self, built: Module | LatentModule) -> str:
        """The name under which FlashInfer keeps a compiled module."""
        if isinstance(built, LatentModule):
            return str(self._import("jit.attention").get_batch_mla_uri(*_latent_arguments(built)))
        if built.sinks:
            kind = self._import("jit.utils").filename_safe_dtype_map[built.q_dtype]
            wrapper = f"batch_prefill_attention_sink_{kind}_swa_{built.windowed}_{built.template}"
            return own_name(wrapper, built.kv_dtype, built.head_size, built.head_size)
        attention, arguments = self._import("jit.attention"), _arguments(built)
        if built.template == "cuda-cores":
            return str(attention.get_batch_decode_uri(*arguments))
        name = str(attention.get_batch_prefill_uri(built.template, *arguments, False))
        # Since 0.7 the fa2 template has a module of its own for K and V of equal strides, which caches have.
        of_strides = getattr(self._import("jit.attention.modules"), "_get_batch_prefill_module_uri", None)
        if built.template == "fa2" and of_strides is not None:
            return str(of_strides(name, "fa2", "equal", "full"))
        return name

    def source(self, built: Module | LatentModule) -> Any:
        """FlashInfer's JitSpec of a module, with its sources written; `build_modules` builds it."""
        generate = self._import("jit.attention.modules")
        if isinstance(built, LatentModule):
            return generate.gen_batch_mla_module(*_latent_arguments(built))
        if built.sinks:
            args, keywords = sink_arguments(self.module, built)
            return generate.gen_customize_batch_prefill_module(built.template, *args, **keywords)
        arguments = _arguments(built)
        if built.template == "cuda-cores":
            return generate.gen_batch_decode_module(*arguments)
        primary = getattr(generate, "_gen_batch_prefill_primary_module", generate.gen_batch_prefill_module)
        make = primary if built.template == "fa2" else generate.gen_batch_prefill_module
        return make(built.template, *arguments, False)

    def is_prebuilt(self, name: str) -> bool:
        """Whether a package of prebuilt modules has a module."""
        env = self._import("jit.env")
        if hasattr(env, "get_aot_path"):
            return Path(env.get_aot_path(name)).exists()
        return (Path(env.FLASHINFER_AOT_DIR) / name / f"{name}.so").exists()

    def is_compiled(self, name: str) -> bool:
        """Whether a module was compiled before; at each load ninja checks that it is up to date."""
        return (Path(self._import("jit.env").FLASHINFER_JIT_DIR) / name / f"{name}.so").exists()

    def why_not_compiling(self) -> str | None:
        """Why nothing can be compiled here, with a remedy; None if it can."""
        problem = self.why_not_loading()
        if problem is not None:
            return problem
        try:
            if (Path(self._import("jit.cpp_ext").get_cuda_path()) / "bin" / "nvcc").exists():
                return None
        except RuntimeError:
            pass
        return f"nvcc is not found; install the CUDA toolkit and set CUDA_HOME, or pip install {_PREBUILT}"

    def why_not_loading(self) -> str | None:
        """Why not even compiled modules can be loaded, with a remedy; None if they can."""
        if os.environ.get(_DISABLED):
            return f"{_DISABLED} is set; unset it, or pip install {_PREBUILT}"
        if shutil.which("ninja") is None:
            scripts = sysconfig.get_path("scripts")
            found = (Path(scripts) / "ninja").exists()
            remedy = f"put {scripts} on PATH" if found else "pip install ninja"
            return f"ninja is not on PATH; {remedy}, or pip install {_PREBUILT}"
        return None

    def _import(self, name: str) -> Any:
        return importlib.import_module(f"{self.module.__name__}.{name}")


@functools.cache
def library() -> Library:
    """The library, imported and checked.

    Raises:
        BackendUnavailableError: it is missing, too old, built for another CUDA, or lacks a name that is called
            here; its import raises; or it must compile, cannot, and nothing is prebuilt. The text has the remedy.
    """
    module = import_library("FLASHINFER")
    found = Library(module, _version(module))
    if found.version < _OLDEST:
        raise BackendUnavailableError(
            f"flashinfer {found.version} is imported, older than {_OLDEST}; {_INSTALL}"
        )
    if found.version.release >= _UNKNOWN.release:
        raise BackendUnavailableError(
            f"flashinfer {found.version} is imported, and versions from {_UNKNOWN} on are not known; {_INSTALL}"
        )
    _check_interface(found)
    _check_cuda()
    why = found.why_not_compiling()
    if why is not None and _installed(_PREBUILT) is None:
        raise BackendUnavailableError(
            f"flashinfer compiles its kernels when they are first used, and cannot: {why}"
        )
    return found


def _version(module: ModuleType) -> Version:
    text = str(getattr(module, "__version__", ""))
    try:
        return Version(text)
    except InvalidVersion:
        raise BackendUnavailableError(
            f"flashinfer's version {text!r} is not a valid version; {_INSTALL}"
        ) from None


def _check_interface(found: Library) -> None:
    """Check every name and argument that is used here."""
    # A later version may have moved them.
    for name, methods in _ASKED.items():
        wrapper: Any = getattr(found.module, name, None)
        lacking = {name} if wrapper is None else _lacking(name, wrapper, methods)
        found._refuse(lacking, _INSTALL)


def _lacking(name: str, wrapper: Any, methods: Mapping[str, set[str]]) -> set[str]:
    return {
        f"{name}.{method}({each})"
        for method, arguments in methods.items()
        for each in arguments - _parameters(wrapper, method)
    }


def _parameters(wrapper: Any, method: str) -> set[str]:
    known = set(inspect.signature(getattr(wrapper, method)).parameters)
    # Since 0.7 the decode wrapper's plan passes its keywords to _plan_impl.
    inner = getattr(wrapper, "_plan_impl", None) if "kwargs" in known else None
    return known | (set(inspect.signature(inner).parameters) if inner is not None else set())


def _check_cuda() -> None:
    """Refuse prebuilt kernels of another CUDA version than torch's."""
    version, ours = _installed(_PREBUILT), torch.version.cuda
    local = Version(version).local if version else None
    if local is None or ours is None or not local.startswith("cu"):
        return
    if local[2:4] != ours.split(".")[0]:
        raise BackendUnavailableError(
            f"{_PREBUILT} {version} is built for CUDA {local[2:4]}, and torch for CUDA {ours}; "
            f"pip install the {_PREBUILT} of cu{ours.replace('.', '')}, or uninstall it"
        )


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _arguments(built: Module) -> tuple[Any, ...]:
    """The arguments that name a plain module: dtypes, head sizes, no position encoding, window, cap."""
    dtypes = (built.q_dtype, built.kv_dtype, built.q_dtype, torch.int32)
    return (*dtypes, built.head_size, built.head_size, 0, built.windowed, built.capped)


def _latent_arguments(built: LatentModule) -> tuple[Any, ...]:
    """The arguments that name a module for latents: template, dtypes, sizes, no profiler."""
    return (built.template, *[built.dtype] * 3, torch.int32, *built.sizes, False)
