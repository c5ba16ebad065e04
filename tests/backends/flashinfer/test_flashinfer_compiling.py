"""Modules are built ahead of their use, as FlashInfer itself would build them."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_flashinfer import make_flashinfer
from flashinfer_signatures import VERSIONS
from packaging.version import Version

from attnplug.backends.flashinfer.compiling import build_modules
from attnplug.backends.flashinfer.library import Library
from attnplug.backends.flashinfer.modules import LatentModule, Module
from attnplug.errors import PluginError

HALF = (torch.float16, torch.float16)
MODULES = [
    Module("fa2", *HALF, 64, False, False, False),
    Module("cuda-cores", *HALF, 64, False, False, False),
    Module("fa3", *HALF, 64, True, False, False),
    Module("fa2", *HALF, 128, True, False, True),
]


@pytest.fixture(params=VERSIONS)
def unbuilt(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Library]:
    """A library of each version, of which nothing is built."""
    modules = make_flashinfer(request.param, built=False, folder=tmp_path)
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    monkeypatch.setattr(Library, "why_not_compiling", lambda self: None)
    return Library(modules["flashinfer"], Version(request.param))


def made(found: Library) -> list[Any]:
    module: types.ModuleType = found._import("jit.attention.modules")
    specs: list[Any] = module.made  # type: ignore[attr-defined]
    return specs


def test_each_module_is_generated_as_its_wrapper_would(unbuilt: Library) -> None:
    for module in MODULES:
        unbuilt.source(module)
    plain = (torch.float16, torch.float16, torch.float16, torch.int32, 64, 64, 0)
    newer = unbuilt.version >= Version("0.7")
    first = "_gen_batch_prefill_primary_module" if newer else "gen_batch_prefill_module"
    assert [spec.asked for spec in made(unbuilt)[:3]] == [
        (first, "fa2", *plain, False, False, False),
        ("gen_batch_decode_module", *plain, False, False),
        ("gen_batch_prefill_module", "fa3", *plain, True, False, False),
    ]
    sinks = made(unbuilt)[3].asked
    assert sinks[:3] == ("gen_customize_batch_prefill_module", "fa2", unbuilt.module_name(MODULES[3]))


def test_modules_for_latents_are_built_with_the_others(unbuilt: Library) -> None:
    latents = LatentModule("fa3", torch.float16, (512, 64))
    assert build_modules(unbuilt, [*MODULES, latents])[0] == latents
    dtypes = (*[torch.float16] * 3, torch.int32)
    assert made(unbuilt)[0].asked == ("gen_batch_mla_module", "fa3", *dtypes, 512, 64, False)
    assert unbuilt.module_name(latents).startswith("mla_fa3")


def test_fa2_modules_since_0_7_go_by_the_name_of_their_strides(unbuilt: Library) -> None:
    name, other = unbuilt.module_name(MODULES[0]), unbuilt.module_name(MODULES[2])
    assert name.endswith("_equal_full") == (unbuilt.version >= Version("0.7"))
    assert not other.endswith("_equal_full")


def test_what_is_not_built_is_built_once_and_the_slowest_first(unbuilt: Library) -> None:
    seen: list[Module | LatentModule] = []
    built = build_modules(unbuilt, MODULES * 2, jobs=8, done=lambda module, seconds: seen.append(module))
    assert built[0] == MODULES[2]
    assert sorted(map(str, built)) == sorted(map(str, seen)) == sorted(map(str, MODULES))
    # Before 0.6 one after another, with all processors.
    jobs = "6" if unbuilt.version >= Version("0.6") else "12"
    assert [spec.built for spec in made(unbuilt)] == [[jobs]] * 4
    assert "MAX_JOBS" not in os.environ


def test_what_is_built_is_left_alone(unbuilt: Library, tmp_path: Path) -> None:
    name = unbuilt.module_name(MODULES[0])
    (tmp_path / "jit" / name).mkdir(parents=True)
    (tmp_path / "jit" / name / f"{name}.so").touch()
    assert build_modules(unbuilt, MODULES[:1]) == []
    assert made(unbuilt) == []


def test_where_nothing_can_be_compiled_that_is_said_at_once(
    unbuilt: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Library, "why_not_compiling", lambda self: "no ninja; install it")
    with pytest.raises(PluginError, match="compile 4 modules, and cannot: no ninja; install it"):
        build_modules(unbuilt, MODULES)
    assert made(unbuilt) == []


def test_the_number_of_jobs_that_was_set_is_set_again(
    unbuilt: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    build_modules(unbuilt, MODULES[:1], jobs=1)
    assert os.environ["MAX_JOBS"] == "3"


def test_threads_that_build_at_once_leave_the_number_of_jobs_as_it_was(
    unbuilt: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    together = threading.Barrier(2)
    make = Library.source

    def source(self: Library, module: Any) -> Any:
        together.wait(timeout=60)
        return make(self, module)

    monkeypatch.setattr(Library, "source", source)
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(build_modules, unbuilt, [each], jobs=place)
            for place, each in enumerate(MODULES[:2], 1)
        ]
        assert [run.result() for run in runs] == [[MODULES[0]], [MODULES[1]]]
    assert sorted(spec.built[0] for spec in made(unbuilt)) == ["2", "3"]
    assert "MAX_JOBS" not in os.environ
