"""Plugins whose mistakes would otherwise pass unseen: each is refused with a reason, or served as it means."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fake_plugins import CPU, SPEC, backend, plugin, registry

from attnplug import Device, Registry, plan
from attnplug.backends import torch_native
from attnplug.core import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, composite_backend
from attnplug.core.dtypes import DtypeName
from attnplug.errors import PluginError

FLOAT = SPEC.replace(dtype="float32")
HALF = SPEC.replace(dtype="float16")


class Sound:
    ATTNPLUG_API = (1, 1)

    def __init__(self, *backends: type[AttentionBackend]) -> None:
        self.attnplug_backends = vars(plugin(*backends))["attnplug_backends"]


def test_plugins_of_one_default_name_are_all_kept() -> None:
    for made in (Sound, plugin):
        found = Registry([made(backend("A")), made(backend("B")), made(backend("C"))])
        assert list(found.backends()) == ["A", "B", "C"]
        names = [record.name for record in found.records]
        assert len(set(names)) == 3
        assert names[1] == f"{names[0]}-2"
        found.unregister(names[1])
        assert list(found.backends()) == ["A", "C"]
    with pytest.raises(PluginError, match="offers A, which Sound offers already"):
        Registry([Sound(backend("A")), Sound(backend("A"))])
    one = Sound(backend("A"))
    with pytest.raises(PluginError, match="is the same module as Sound"):
        Registry([one, one])


@pytest.mark.parametrize("name", [1, None, "", b"a", True])
def test_a_name_in_a_mapping_is_text(name: Any) -> None:
    with pytest.raises(PluginError, match="must be text, and not empty"):
        Registry({name: plugin(backend("A")), "1": plugin(backend("B"))})


IN_SETS: Mapping[str, Callable[[Any], bool]] = {
    "in torch": lambda dtype: dtype in {torch.float32},
    "not in torch": lambda dtype: dtype not in {torch.float16, torch.bfloat16},
    "in names": lambda dtype: dtype in {"float32"},
    "not in names": lambda dtype: dtype not in {"float16", "bfloat16"},
    "frozenset": lambda dtype: dtype in frozenset({torch.float32, torch.float64}),
    "dict of torch": lambda dtype: {torch.float32: True}.get(dtype, False),
    "dict of torch without default": lambda dtype: {torch.float32: True, torch.float16: False}[dtype],
    "dict of names": lambda dtype: {"float32": True, "float16": False}[dtype],
    "both": lambda dtype: dtype in {torch.float32, "float32"},
    "tuple": lambda dtype: dtype in (torch.float32,),
    "equal": lambda dtype: dtype == torch.float32,
    "attribute": lambda dtype: getattr(torch, dtype) in {torch.float32},
    "cached": functools.lru_cache(lambda dtype: dtype == "float32"),
}


@pytest.mark.parametrize("how", IN_SETS)
def test_a_dtype_is_found_in_a_set_of_names_and_of_torch_dtypes(how: str) -> None:
    found = registry(backend("SETS", supports_dtype=staticmethod(IN_SETS[how])), backend("OTHER", 10))
    for _ in range(2):
        assert found.select(FLOAT, CPU).backend == "SETS"
        chosen = found.select(HALF, CPU)
        assert chosen.backend == "OTHER"
        assert chosen.refused[0].codes == ("dtype",)


def test_without_torch_a_dtype_is_asked_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    fake: dict[str, Any] = {
        "supports_dtype": staticmethod(lambda dtype: asked.append(dtype) or dtype in {"float32"})
    }
    made = backend("SETS", **fake)
    monkeypatch.delitem(sys.modules, "torch")
    assert made.validate_configuration(FLOAT, CPU) == []
    assert asked == [DtypeName("float32")]


GPU = Device("cuda")


def capability(cls: type, capability: Any) -> bool:
    return tuple(capability) >= (8, 0)


def set_later(made: Any) -> None:
    made.supports_compute_capability = classmethod(capability)


def set_flag(made: Any) -> None:
    made.depends_on_capability = True


@pytest.mark.parametrize("change", [set_later, set_flag])
def test_limits_of_a_gpu_count_whenever_they_were_written(change: Callable[[Any], None]) -> None:
    made = backend("LATE")
    assert made.validate_configuration(SPEC, GPU) == []
    change(made)
    child = type("Child", (made,), {"get_name": staticmethod(lambda: "CHILD")})
    for each in (made, child, composite_backend(made, backend("PLAIN"))):
        assert "compute capability not known" in str(each.validate_configuration(SPEC, GPU))
    written = backend("WRITTEN", depends_on_capability=True)
    assert "compute capability not known" in str(written.validate_configuration(SPEC, GPU))


class Impostor:
    """Has the methods and none of the contract."""

    def attend(self, *given: Any, **named: Any) -> None: ...


@pytest.mark.parametrize("part", [dict, object, type, int, Impostor, AttentionMetadataBuilder])
@pytest.mark.parametrize("getter", ["get_impl_cls", "get_builder_cls"])
def test_a_part_that_is_none_is_refused_where_it_is_imported(getter: str, part: type) -> None:
    given = AttentionImpl if getter == "get_builder_cls" and part is AttentionMetadataBuilder else part
    chosen = registry(backend("BAD", 90, **{getter: lambda: given}), backend("GOOD", 10)).select(SPEC, CPU)
    assert chosen.backend == "GOOD"
    (reason,) = chosen.refused[0].reasons
    assert f"{getter} gives " in reason
    assert "subclass Attention" in reason
    pair = registry(backend("BAD", 90, **{getter: lambda: given}), backend("GOOD", 10))
    with pytest.raises(Exception, match=f"{getter} gives "):
        pair.select(SPEC, CPU, backend="GOOD+BAD")


def test_attnplugs_own_module_is_served_from_a_list_and_a_mapping() -> None:
    for given in ([torch_native], {"mine": torch_native}):
        assert Registry(given).select(SPEC, CPU).backend == "TORCH"
    mine = plugin(torch_native.TorchBackend, backend("ACME"))
    found = Registry({"mine": mine})
    assert found.select(SPEC, CPU, backend="TORCH").backend == "TORCH"
    assert found.select(SPEC, CPU, backend="ACME+TORCH").backend == "ACME+TORCH"
    child = type("Child", (torch_native.TorchBackend,), {"get_name": staticmethod(lambda: "CHILD")})
    refused = registry(child).explain(SPEC, CPU).candidates[0]
    assert "has priority 0" in str(refused.reasons[0])


@pytest.mark.parametrize("size", [65_537, 2**31, 2**63, 10**30])
def test_a_block_size_that_no_plan_can_hold_is_refused(size: int) -> None:
    found = registry(
        backend("HUGE", 90, get_preferred_block_size=lambda *given: size),
        backend("GOOD", 10),
    )
    chosen = found.select(SPEC, CPU)
    assert chosen.backend == "GOOD"
    assert "get_preferred_block_size" in str(chosen.refused[0].reasons[0])
    assert plan({"a": SPEC, "b": SPEC.replace(head_size=128)}, CPU, registry=found).decisions


def test_a_plugin_that_is_registered_again_is_imported_again() -> None:
    here = types.SimpleNamespace(missing=True)

    def parts() -> Any:
        if here.missing:
            raise ImportError("no library")
        return torch_native.TorchBackend.get_impl_cls()

    again = plugin(backend("LATER", 90, get_impl_cls=parts))
    found = Registry({"base": plugin(backend("BASE", 10))})
    found.register(again, "mine")
    assert found.select(SPEC, CPU).backend == "BASE"
    here.missing = False
    assert found.select(SPEC, CPU).backend == "BASE"
    found.register(again, "mine")
    assert found.select(SPEC, CPU).backend == "LATER"
    here.missing = True
    found.unregister("mine")
    found.register(again, "mine")
    assert found.select(SPEC, CPU).backend == "BASE"
