"""Mistakes that once ended in a raw error of Python, far from their cause, name the plugin or the argument."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import CPU, SPEC, backend, plugin, registry

import attnplug
from attnplug import Registry, plan, use
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, composite_backend
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder, make_impl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.errors import BackendFaultError, BatchError, PluginError, PolicyError, SpecError
from attnplug.registry.selection.evidence import read_evidence

IMPL: Any = TorchBackend.get_impl_cls()
BUILDER: Any = TorchBackend.get_builder_cls()
DEVICE = torch.device("cpu")


class TorchChild(TorchBackend):
    """Can be found by other processes."""

    @staticmethod
    def get_name() -> str:
        return "CHILD"

    @classmethod
    def get_priority(cls, spec: Any, device: Any, phase: Any) -> int:
        return 9


def raising(error: BaseException) -> Any:
    def fail(self: Any, *given: Any, **named: Any) -> None:
        raise error

    return fail


def impl_of(namespace: dict[str, Any]) -> Any:
    made = backend("BAD", get_impl_cls=lambda: type("Impl", (IMPL,), namespace))
    return make_impl(made, SPEC, layer_name="layers.7")


def builder_of(namespace: dict[str, Any]) -> Any:
    made = backend("BAD", get_builder_cls=lambda: type("Builder", (BUILDER,), namespace))
    cache: Any = kv_cache_spec_for(SPEC, 16)
    return make_builder(made, cache, ["layers.7"], BuilderConfig(), DEVICE)


ERRORS = [
    KeyError("x"),
    ValueError("odd"),
    SystemExit(3),
    RuntimeError("no"),
    AssertionError(),
    OSError("gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("make", [impl_of, builder_of])
def test_what_a_constructor_raises_names_backend_and_layer(make: Any, error: BaseException) -> None:
    with pytest.raises(PluginError) as found:
        make({"__init__": raising(error)})
    assert "BAD" in str(found.value)
    assert "layers.7" in str(found.value)
    assert type(error).__name__ in str(found.value)


@pytest.mark.parametrize(
    "error",
    [SpecError("a", 1, "is wrong"), BatchError("b", 1, "is wrong"), KeyboardInterrupt(), MemoryError()],
)
@pytest.mark.parametrize("make", [impl_of, builder_of])
def test_errors_that_say_enough_stay_as_they_are(make: Any, error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        make({"__init__": raising(error)})
    assert found.value is error


@pytest.mark.parametrize("value", [None, 3, object(), IMPL])
def test_a_from_spec_or_constructor_that_gives_something_else_is_named(value: Any) -> None:
    with pytest.raises(PluginError, match=r"BAD cannot run layer .*layers.7.* is no AttentionImpl"):
        impl_of({"from_spec": classmethod(lambda cls, spec, **given: value)})
    with pytest.raises(PluginError, match=r"BAD cannot build metadata.* is no AttentionMetadataBuilder"):
        builder_of({"__new__": lambda cls, *given, **named: value})


@pytest.mark.parametrize("made", [None, 3, {}, (), "metadata", dict])
def test_what_is_no_metadata_is_a_fault_of_the_backend(made: Any) -> None:
    with pytest.raises(BackendFaultError, match=r"BAD: build of its builder returned .* is no metadata"):
        checked_metadata(backend("BAD"), "build", made)


def test_a_decision_and_a_plan_with_a_composite_can_be_pickled() -> None:
    found = Registry({"child": plugin(TorchChild), "base": plugin(TorchBackend)})
    chosen = found.select(SPEC, CPU, backend="CHILD+TORCH")
    read = pickle.loads(pickle.dumps(chosen))
    assert read == chosen
    assert read.backend_cls is composite_backend(TorchChild, TorchBackend)
    made = plan({"a": SPEC}, CPU, registry=found, backend="CHILD+TORCH")
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made
    assert copy.deepcopy(chosen).backend_cls is chosen.backend_cls
    single = pickle.loads(pickle.dumps(found.select(SPEC, CPU)))
    assert single.backend_cls is TorchChild


def test_a_class_that_no_process_finds_is_left_out_as_in_json() -> None:
    chosen = registry(backend("HERE"), backend("THERE")).select(SPEC, CPU, backend="HERE+THERE")
    read = pickle.loads(pickle.dumps(chosen))
    assert read == chosen
    with pytest.raises(PluginError, match="knows the name HERE"):
        read.get_backend_cls()
    assert copy.copy(chosen).get_backend_cls() is chosen.get_backend_cls()


def test_a_use_block_begins_once() -> None:
    block = use("TORCH")
    with block:
        with (
            pytest.raises(PolicyError, match=r"has begun before; call attnplug.use anew for each block"),
            block,
        ):
            pass
        assert attnplug.select(SPEC, CPU).backend == "TORCH"
    with pytest.raises(PolicyError, match="has begun before"), block:
        pass

    @use("TORCH")
    def chosen() -> str | None:
        return attnplug.select(SPEC, CPU).chosen_by

    assert chosen() == chosen() == "attnplug.use"


@pytest.mark.parametrize("order", [[], ()])
def test_a_plugin_that_names_no_backend_did_not_rank(order: Any) -> None:
    chosen = registry(backend("A", 60), backend("B", 50), rank=lambda candidates: order).select(SPEC, CPU)
    assert (chosen.ranked_by, chosen.chosen_by) == ((), "priority")
    changed = registry(backend("A", 60), backend("B", 50), rank=lambda candidates: ["B"]).select(SPEC, CPU)
    assert (changed.backend, changed.chosen_by) == ("B", "rank")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("path", ["/dev/null", "/etc/passwd", "/proc/self/status", "/usr/bin/env"])
def test_nobody_is_told_to_delete_a_file_of_the_system(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", path)
    error = str(read_evidence().read_error)
    assert "delete" not in error
    assert "name another file in ATTNPLUG_EVIDENCE" in error


def test_a_damaged_file_of_the_user_may_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text("{")
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path / "mine.json"))
    assert "delete it and verify again" in str(read_evidence().read_error)
