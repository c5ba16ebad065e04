"""A FlashInfer that cannot be used is refused before the first step, with what to do; first uses are announced."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_flashinfer import make_flashinfer
from flashinfer_signatures import VERSIONS, recorded

import attnplug.backends.flashinfer.library as adapter
from attnplug.backends.flashinfer import FlashInferBackend, compiling
from attnplug.backends.flashinfer.compiling import announced
from attnplug.backends.flashinfer.library import library
from attnplug.backends.flashinfer.modules import Module
from attnplug.errors import BackendUnavailableError, PluginError

BUILT = Module("fa2", torch.bfloat16, torch.bfloat16, 64, True, False, True)
Install = Callable[..., dict[str, types.ModuleType]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a FlashInfer of a version in place, without using it yet; prebuilt kernels are there."""

    def put(version: str, **how: Any) -> dict[str, types.ModuleType]:
        modules = make_flashinfer(version, **how)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(adapter, "import_library", lambda backend: modules["flashinfer"])
        return modules

    library.cache_clear()
    monkeypatch.setattr(adapter, "_installed", lambda distribution: "0.7.2")
    yield put
    library.cache_clear()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_what_is_called(version: str, install: Install) -> None:
    install(version)
    assert str(library().version) == version


def test_the_doors_open_only_where_the_library_is(install: Install) -> None:
    install("0.7.2")
    assert FlashInferBackend.get_impl_cls().__name__ == "FlashInferImpl"
    assert FlashInferBackend.get_builder_cls().__name__ == "FlashInferMetadataBuilder"


def test_a_missing_library_is_named_with_the_remedy() -> None:
    library.cache_clear()
    if _real_version() is not None:
        pytest.skip("FlashInfer is installed")
    with pytest.raises(BackendUnavailableError, match=r"pip install 'flashinfer-python.*>=0\.5"):
        FlashInferBackend.get_impl_cls()


@pytest.mark.parametrize("text", ["0.4.1", "no version", "0.8.0", "0.8.0rc1", "0.10", "1.0"])
def test_an_old_new_or_odd_version_is_refused(text: str, install: Install) -> None:
    install("0.5.3")["flashinfer"].__version__ = text  # type: ignore[attr-defined]
    with pytest.raises(BackendUnavailableError, match=f"{text}.*pip install"):
        library()


def test_an_argument_that_is_gone_is_named(install: Install) -> None:
    wrapper = install("0.6.13")["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    old = wrapper.plan.__signature__
    kept = [each for name, each in old.parameters.items() if name != "causal"]
    wrapper.plan.__signature__ = old.replace(parameters=kept)
    with pytest.raises(BackendUnavailableError, match=r"BatchPrefill.*plan\(causal\)"):
        library()


def test_a_wrapper_that_is_gone_is_named(install: Install) -> None:
    del install("0.6.13")["flashinfer"].BatchAttentionWithAttentionSinkWrapper
    with pytest.raises(BackendUnavailableError, match="no BatchAttentionWithAttentionSinkWrapper"):
        library()


def test_kernels_built_for_another_cuda_are_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("0.7.2")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(adapter, "_installed", lambda distribution: "0.7.2+cu129")
    with pytest.raises(BackendUnavailableError, match=r"CUDA 12, and torch for CUDA 13\.0.*cu130"):
        library()
    monkeypatch.setattr(adapter, "_installed", lambda distribution: "0.7.2+cu130")
    library()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nvcc and ninja, as the only ones there are."""
    for tool in ("cuda/bin/nvcc", "bin/ninja"):
        (tmp_path / tool).parent.mkdir(parents=True)
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    return tmp_path


@pytest.mark.parametrize("lacks", ["bin/ninja", "cuda/bin/nvcc", "FLASHINFER_DISABLE_JIT"])
def test_what_compiling_lacks_is_said_before_anything_is_compiled(
    lacks: str,
    tools: Path,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install("0.7.2", built=False, folder=tools)
    assert library().why_not_compiling() is None
    if lacks in ("bin/ninja", "cuda/bin/nvcc"):
        (tools / lacks).unlink()
    else:
        monkeypatch.setenv(lacks, "1")
    word = lacks.rpartition("/")[2]
    with (
        pytest.raises(PluginError, match=f"head size 64.*{word}.*flashinfer-jit-cache"),
        announced(library(), BUILT, "x"),
    ):
        pytest.fail("was entered")
    # Without anything prebuilt, nothing at all can run.
    monkeypatch.setattr(adapter, "_installed", lambda distribution: None)
    library.cache_clear()
    with pytest.raises(BackendUnavailableError, match=word):
        library()


def test_a_ninja_off_the_path_is_found(
    tools: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("0.7.2", folder=tools)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(adapter.sysconfig, "get_path", lambda name: str(tools / "bin"))
    assert f"put {tools / 'bin'} on PATH" in str(library().why_not_compiling())


def test_a_toolkit_that_flashinfer_does_not_find_is_a_missing_nvcc(tools: Path, install: Install) -> None:
    modules = install("0.7.2", folder=tools)

    def raises() -> str:
        raise RuntimeError("Could not find nvcc")

    modules["flashinfer.jit.cpp_ext"].get_cuda_path = raises  # type: ignore[attr-defined]
    assert "nvcc is not found" in str(library().why_not_compiling())


def test_what_compiles_at_first_use_is_announced_with_its_reason(
    tools: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("0.7.2", built=False, folder=tools)
    caplog.set_level(logging.INFO, "attnplug.backends.flashinfer")
    with announced(library(), BUILT, "decode of layers 0, 2"):
        assert "compiles fa2 for head size 64" in caplog.text
        assert "window, sinks" in caplog.text
        assert "decode of layers 0, 2" in caplog.text
    assert "compiled batch_prefill_attention_sink_bf16_swa_True_fa2_kv_bfloat16_d64_64 in" in caplog.text


def test_what_is_compiled_already_is_not_announced(
    tools: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    modules = install("0.6.13", built=False, folder=tools)
    name = library().module_name(BUILT)
    library_file = tools / "jit" / name / f"{name}.so"
    library_file.parent.mkdir(parents=True)
    library_file.touch()
    del modules["flashinfer.jit.env"].get_aot_path
    with announced(library(), BUILT, "x"):
        pass
    assert caplog.text == ""


@pytest.mark.parametrize("lacks", ["FLASHINFER_DISABLE_JIT", "bin/ninja", "cuda/bin/nvcc"])
def test_what_was_compiled_before_is_loaded_by_ninja_and_only_where_compiling_is_not_switched_off(
    lacks: str, tools: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("0.7.2", built=False, folder=tools)
    name = library().module_name(BUILT)
    library_file = tools / "jit" / name / f"{name}.so"
    library_file.parent.mkdir(parents=True)
    library_file.touch()
    if lacks.isupper():
        monkeypatch.setenv(lacks, "1")
    else:
        (tools / lacks).unlink()
    if lacks.endswith("nvcc"):
        with announced(library(), BUILT, "x"):
            return
    with (
        pytest.raises(PluginError, match="has to load fa2 for head size 64"),
        announced(library(), BUILT, "x"),
    ):
        pytest.fail("was entered")


def test_of_two_threads_that_want_a_module_one_compiles_and_the_other_then_loads_it(
    tools: Path, install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("0.7.2", built=False, folder=tools)
    caplog.set_level(logging.INFO, "attnplug.backends.flashinfer")
    found, asked = library(), threading.Semaphore(0)
    turns = threading.Lock()

    class Turns:
        def __enter__(self) -> None:
            asked.release()
            turns.acquire()

        def __exit__(self, *_: object) -> None:
            turns.release()

    def want() -> None:
        with announced(found, BUILT, "x"):
            name = found.module_name(BUILT)
            made = tools / "jit" / name / f"{name}.so"
            if made.exists():
                return
            # Not done until the other thread wants it too.
            assert asked.acquire(timeout=60)
            assert asked.acquire(timeout=60)
            made.parent.mkdir(parents=True)
            made.touch()

    monkeypatch.setattr(compiling, "_ONE_AT_A_TIME", Turns())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(want) for _ in range(2)]:
            run.result()
    assert caplog.text.count("FlashInfer compiled ") == 1


def test_what_is_compiled_or_loaded_can_be_watched(tools: Path, install: Install) -> None:
    install("0.7.2", built=False, folder=tools)
    with FlashInferBackend.watch_compiling() as outer:
        with FlashInferBackend.watch_compiling() as inner, announced(library(), BUILT, "x"):
            pass
        install("0.7.2")
        with announced(library(), BUILT, "x"):
            pass
    assert inner == [library().module_name(BUILT)]
    assert outer == 2 * inner


def test_watches_that_end_out_of_order_leave_none(tools: Path, install: Install) -> None:
    install("0.7.2")
    first, second = FlashInferBackend.watch_compiling(), FlashInferBackend.watch_compiling()
    found = [each.__enter__() for each in (first, second)]
    first.__exit__(None, None, None)
    with announced(library(), BUILT, "x"):
        pass
    second.__exit__(None, None, None)
    with announced(library(), BUILT, "x"):
        pass
    assert found == [[], [library().module_name(BUILT)]]


def test_plain_modules_go_by_flashinfers_own_names(install: Install) -> None:
    install("0.7.2")
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    prefill = Module("fa3", *dtypes, 128, False, True, False)
    assert (
        library()
        .module_name(prefill)
        .startswith("prefill_fa3_torch.bfloat16_torch.float8_e4m3fn_torch.bfloat16")
    )
    assert library().module_name(prefill).endswith("128_128_0_False_True_False")
    decode = Module("cuda-cores", *dtypes, 128, True, False, False)
    assert library().module_name(decode).startswith("decode_torch.bfloat16")


@pytest.mark.parametrize("version", VERSIONS)
def test_sink_modules_of_two_head_sizes_have_two_names(version: str, install: Install) -> None:
    install(version)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    names = set()
    for size in (64, 128):
        built = Module("fa2", torch.bfloat16, torch.bfloat16, size, True, False, True)
        wrapper = library().sink_wrapper(workspace, built, {})
        assert wrapper._jit_args[0] == library().module_name(built)
        names.add(wrapper._jit_args[0])
    assert len(names) == 2


def test_a_wrapper_without_the_parts_that_planning_rests_on_is_refused(install: Install) -> None:
    install("0.7.2")
    with pytest.raises(BackendUnavailableError, match="_pin_memory_int_workspace_buffer"):
        library()._checked(types.SimpleNamespace(_paged_kv_indices_buf=None))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_recorded_signatures_are_the_real_ones() -> None:
    version = _real_version()
    if version not in VERSIONS:
        pytest.skip(f"no signatures are recorded of {version}, only of {', '.join(VERSIONS)}")
    import flashinfer

    for wrapper, methods in recorded(str(version)).items():
        for method, signature in methods.items():
            real = inspect.signature(getattr(getattr(flashinfer, wrapper), method))
            parameters = [each for name, each in real.parameters.items() if name != "self"]
            assert [(p.kind, p.name) for p in parameters] == [
                (p.kind, p.name) for p in signature.parameters.values()
            ], f"{wrapper}.{method}"


def _real_version() -> str | None:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
