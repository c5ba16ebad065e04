"""Finding installed plugins and loading each alone, in this process."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import CPU, SPEC, backend, plugin, raises, registry

from attnplug import AttentionBackend, Registry, hookimpl
from attnplug.errors import PluginError
from attnplug.registry import PluginStatus
from attnplug.registry.plugins.discovery import Host, Installed, installed_plugins
from attnplug.registry.plugins.records import PluginRecord

See = Callable[..., None]
RECORD = PluginRecord("acme:fast", "acme", "1.0", PluginStatus.BLOCKED)


def verdict(module: object, record: PluginRecord = RECORD) -> tuple[PluginStatus, str | None]:
    loaded = Host().check_and_load(record, module).record
    return loaded.status, loaded.reason


def write_distribution(folder: Path, name: str, entry_points: str, metadata: str | None) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text(f"[attnplug.backends]\n{entry_points}\n")
    if metadata is not None:
        (info / "METADATA").write_text(metadata)


def test_plugins_are_found_sorted_and_none_is_run(see_plugins: See) -> None:
    see_plugins("attnplug-bad-hang", "attnplug-acme-decode", "attnplug-bad-exit")
    names = [found.record.name for found in installed_plugins()]
    assert names == sorted(names)
    assert {"attnplug:torch", "attnplug-bad-hang:bad-hang"} <= set(names)
    assert "attnplug_bad_hang" not in sys.modules
    assert {found.record.status for found in installed_plugins()} == {PluginStatus.BLOCKED}


def test_a_plugin_that_cannot_be_imported_is_broken_and_the_others_load(see_plugins: See) -> None:
    see_plugins("attnplug-bad-exit", "attnplug-acme-decode", "attnplug-bad-misspelt")
    registry = Registry()
    status = {record.distribution: record.status for record in registry.records}
    assert status["attnplug-bad-exit"] is PluginStatus.BROKEN
    assert status["attnplug-bad-misspelt"] is PluginStatus.BROKEN
    assert status["attnplug-acme-decode"] is PluginStatus.LOADED
    assert "ACME_DECODE" in registry.backends()


def test_a_distribution_whose_metadata_is_lost_still_gets_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, "lost", "lost = no_such_module", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    (record,) = [each for each in Registry().records if each.name.endswith(":lost")]
    assert record.status is PluginStatus.BROKEN
    assert "ModuleNotFoundError" in str(record.reason)


def test_an_entry_point_that_names_no_module_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, "garbled", "garbled = no way : out", "Name: garbled\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (record,) = [each for each in Registry().records if each.distribution == "garbled"]
    assert record.status is PluginStatus.BROKEN


def test_heavy_imports_are_charged_to_the_plugin_that_does_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, types\nsys.modules.setdefault('jax', types.ModuleType('jax'))\nATTNPLUG_API = (1, 1)\n"
    )
    hooks = "from attnplug import hookimpl\n@hookimpl\ndef attnplug_backends():\n    return []\n"
    (tmp_path / "attnplug_bad_heavy.py").write_text(code + hooks)
    (tmp_path / "attnplug_bad_after.py").write_text("ATTNPLUG_API = (1, 1)\n" + hooks)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    host = Host()

    def load(module: str) -> PluginRecord:
        point = EntryPoint("it", module, "attnplug.backends")
        return host.load(Installed(PluginRecord(module, "acme", None, PluginStatus.BLOCKED), point)).record

    try:
        heavy = "attnplug_bad_heavy imports jax when listed; import that in get_impl_cls or get_builder_cls"
        assert load("attnplug_bad_heavy").reason == heavy
        assert load("attnplug_bad_after").reason is None
    finally:
        for name in ("attnplug_bad_heavy", "attnplug_bad_after", "jax"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("api", "status", "words"),
    [
        (None, PluginStatus.BROKEN, "does not say which interface it is for; add ATTNPLUG_API = (1, 1)"),
        ([1, 1], PluginStatus.BROKEN, r"has ATTNPLUG_API = [1, 1]; it must read ATTNPLUG_API = (1, 1)"),
        ((1,), PluginStatus.BROKEN, "has ATTNPLUG_API = (1,); it must read"),
        ((1, "1"), PluginStatus.BROKEN, "has ATTNPLUG_API = (1, '1'); it must read"),
        ((True, True), PluginStatus.BROKEN, "has ATTNPLUG_API = (True, True); it must read"),
        ((2, 3), PluginStatus.INCOMPATIBLE, "is for plugin interface 2 to 3; this attnplug offers 1"),
        ((0, 0), PluginStatus.INCOMPATIBLE, "is for plugin interface 0 to 0; this attnplug offers 1"),
    ],
)
def test_a_plugin_says_which_interface_it_is_for(api: object, status: PluginStatus, words: str) -> None:
    found, reason = verdict(plugin(backend("A"), ATTNPLUG_API=api))
    assert found is status
    assert str(reason).startswith(f"acme:fast {words}")


@pytest.mark.parametrize("api", [(1, 1), (0, 9)])
def test_a_plugin_for_a_range_with_this_interface_loads(api: object) -> None:
    assert verdict(plugin(backend("A"), ATTNPLUG_API=api)) == (PluginStatus.LOADED, None)


def offering(value: Any) -> types.ModuleType:
    @hookimpl
    def attnplug_backends() -> Any:
        return value() if callable(value) and not isinstance(value, type) else value

    return plugin(attnplug_backends=attnplug_backends)


class Abstract(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "ABSTRACT"


class RaisesInTurn(tuple[Any, ...]):
    __slots__ = ()

    def __iter__(self) -> Any:
        raise RuntimeError("acme: cannot count")


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        (None, "returned None from attnplug_backends; it must be a sequence of backend classes"),
        ("SERVES", "returned 'SERVES' from attnplug_backends"),
        ({backend("A")}, "from attnplug_backends; it must be a sequence"),
        (
            raises(RuntimeError("acme: no licence")),
            "raised RuntimeError: acme: no licence in attnplug_backends",
        ),
        (raises(SystemExit(3)), "raised SystemExit: 3 in attnplug_backends"),
        (
            RaisesInTurn(),
            "from attnplug_backends; it must be a sequence of backend classes: a plain tuple or list",
        ),
        (["A"], "offers 'A', which is not a subclass of AttentionBackend"),
        ([int], "offers <class 'int'>, which is not a subclass of AttentionBackend"),
        ([Abstract], "offers Abstract, which lacks get_builder_cls, get_impl_cls"),
        ([backend("A"), backend("A")], "offers A twice"),
        ([backend("8BIT")], "names a backend '8BIT'; a name has letters, digits and _ . -"),
        ([backend("A,B")], "names a backend 'A,B'"),
        ([backend("A@B")], "names a backend 'A@B'"),
        ([backend("A=B")], "names a backend 'A=B'"),
        ([backend("A", get_name=lambda: 7)], "names a backend 7"),
        ([backend("A", get_name=raises(ValueError("?")))], "raised ValueError: ? in A.get_name"),
        ([backend("A", family=7)], "offers A of family 7, which is not a name"),
        ([backend("A", family="")], "offers A of family '', which is not a name"),
    ],
)
def test_what_a_plugin_offers_is_checked(offered: object, words: str) -> None:
    status, reason = verdict(offering(offered))
    assert status is PluginStatus.BROKEN
    assert str(reason).startswith("acme:fast ")
    assert words in str(reason)


@pytest.mark.parametrize("name", ["TORCH", "FLASH_ATTN", "FLASH_ATTN_3", "FLASHINFER", "Torch", "triton"])
def test_a_builtin_name_is_reserved_in_any_case_as_a_name_and_as_a_family(name: str) -> None:
    words = f"acme:fast offers {name}, a name reserved for attnplug's own backend"
    assert verdict(plugin(backend(name))) == (PluginStatus.CONFLICT, words)
    assert verdict(plugin(backend("MINE", family=name))) == (PluginStatus.CONFLICT, words)


def test_attnplug_itself_may_use_its_names() -> None:
    from attnplug.backends import torch_native

    ours = PluginRecord("attnplug:torch", "attnplug", "1.0", PluginStatus.BLOCKED)
    assert verdict(torch_native, ours)[0] is PluginStatus.LOADED
    # Metadata that says "Name: attnplug" do not make somebody else's backend one of attnplug's.
    assert verdict(plugin(backend("FLASH_ATTN_2", family="FLASH_ATTN")), ours)[0] is PluginStatus.CONFLICT


def test_a_misspelt_hook_and_one_with_unknown_arguments_are_charged_to_their_plugin() -> None:
    @hookimpl
    def attnplug_rank(spec: Any, budget: int) -> None:
        return None

    host = Host()
    misspelt = plugin(backend("A"), attnplug_rang=hookimpl(lambda: None))
    bad = host.check_and_load(RECORD, misspelt).record
    assert bad.status is PluginStatus.BROKEN
    assert "does not follow the hooks: unknown hook 'attnplug_rang'" in str(bad.reason)
    future = host.check_and_load(RECORD, plugin(backend("A"), attnplug_rank=attnplug_rank)).record
    assert "budget" in str(future.reason)
    assert host.check_and_load(RECORD, plugin(backend("A"))).record.reason is None


def test_a_plugin_without_hooks_is_broken() -> None:
    bare = types.ModuleType("bare")
    vars(bare)["ATTNPLUG_API"] = (1, 1)
    assert verdict(bare) == (PluginStatus.BROKEN, "acme:fast has no hook attnplug_backends")


def test_a_plugin_that_offers_nothing_here_is_loaded_and_takes_no_other_along() -> None:
    found = Registry({"none": plugin(), "some": plugin(backend("A"))})
    assert [record.status for record in found.records] == [PluginStatus.LOADED, PluginStatus.LOADED]
    assert found.select(SPEC, CPU).backend == "A"


def test_a_plugin_may_only_rank() -> None:
    ranks = plugin(rank=lambda candidates: sorted(candidates, reverse=True))
    del ranks.attnplug_backends
    found = Registry({"some": plugin(backend("A"), backend("B")), "site": ranks})
    assert found.select(SPEC, CPU).backend == "B"


def test_the_same_module_under_two_entry_points_loads_once() -> None:
    host, module = Host(), plugin(backend("A"))
    assert host.check_and_load(RECORD, module).record.status is PluginStatus.LOADED
    second = host.check_and_load(
        PluginRecord("acme:again", "acme", None, PluginStatus.BLOCKED), module
    ).record
    assert second.status is PluginStatus.BROKEN
    assert second.reason == "acme:again is the same module as acme:fast, which is loaded"
    assert host.has_hook("attnplug_backends", module)


def test_hooks_are_called_on_one_plugin_alone() -> None:
    host, asked = Host(), []
    modules = [plugin(backend(name), rank=asked.append) for name in "AB"]
    for index, module in enumerate(modules):
        host.check_and_load(PluginRecord(str(index), None, None, PluginStatus.BLOCKED), module)
    host.call("attnplug_rank", modules[1], spec=None, device=None, phase=None, candidates=["B"])
    assert asked == [["B"]]
    assert host.call("attnplug_rank", object(), spec=None, device=None, phase=None, candidates=[]) is None
    assert not host.has_hook("attnplug_rank", object())
    assert host.forget(object()) is None


def test_lazy_exports_and_properties_of_a_plugin_are_not_run() -> None:
    class Lazy:
        ATTNPLUG_API = (1, 1)

        @property
        def kernels(self) -> None:
            raise ImportError("acme: this would load the kernels")

        @hookimpl
        def attnplug_backends(self) -> list[type[AttentionBackend]]:
            return [backend("A")]

    module = plugin(backend("B"), __dir__=lambda: ["ATTNPLUG_API", "attnplug_backends", "Heavy"])
    vars(module)["__getattr__"] = raises(ImportError("acme: this would load the kernels"))
    for each in (Lazy(), module):
        assert verdict(each) == (PluginStatus.LOADED, None)


def test_a_module_that_raises_when_it_is_looked_at_is_broken() -> None:
    module = types.ModuleType("raises")
    vars(module)["__getattr__"] = raises(RuntimeError("acme: not now"))
    assert verdict(module) == (
        PluginStatus.BROKEN,
        "acme:fast raised RuntimeError: acme: not now when examined",
    )


def test_an_object_that_cannot_be_hashed_is_a_plugin_like_any_other() -> None:
    hooks = plugin(backend("A"))
    space = types.SimpleNamespace(ATTNPLUG_API=(1, 1), attnplug_backends=hooks.attnplug_backends)
    found = Registry({"space": space, "other": plugin(backend("B"))})
    assert set(found.backends()) == {"A", "B"}


def test_strict_mode_names_every_plugin_that_did_not_load(
    see_plugins: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_plugins("attnplug-bad-exit", "attnplug-acme-decode", "attnplug-bad-misspelt")
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    with pytest.raises(PluginError, match=r"ATTNPLUG_STRICT is set.*bad-exit:bad-exit.*bad-misspelt:bad-mis"):
        Registry()
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", "bad-exit, attnplug_bad_misspelt")
    assert "ACME_DECODE" in Registry().backends()


def test_strict_mode_does_not_mind_good_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    assert registry(backend("A")).select(SPEC, CPU).backend == "A"
