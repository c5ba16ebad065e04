"""Plugins given in code: held to the same checks, replaced by name, and allowed to rank."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from fake_plugins import CPU, SPEC, backend, plugin, raises, registry

import attnplug
from attnplug import Registry
from attnplug.errors import PluginError, PolicyError
from attnplug.registry import PluginStatus, default

See = Callable[..., None]


def test_plugins_are_given_by_name_or_in_order() -> None:
    by_name = Registry({"mine": plugin(backend("A")), "yours": plugin(backend("B"))})
    assert [record.name for record in by_name.records] == ["mine", "yours"]
    first, second = plugin(backend("A")), plugin(backend("B"))
    first.__name__, second.__name__ = "first", "second"
    in_order = Registry(iter([first, second]))
    assert [record.name for record in in_order.records] == ["first", "second"]
    assert set(in_order.backends()) == set(by_name.backends()) == {"A", "B"}


def test_an_object_is_named_by_its_class() -> None:
    class Hooks(types.SimpleNamespace):
        ATTNPLUG_API = (1, 1)

    hooks = Hooks(attnplug_backends=plugin(backend("A")).attnplug_backends)
    record = Registry([]).register(hooks)
    assert (record.name, record.distribution, record.version) == ("Hooks", None, None)
    assert (record.status, record.backends, record.reason) == (PluginStatus.LOADED, ("A",), None)
    assert record.answers_to("hooks")


def test_the_view_of_backends_cannot_be_written() -> None:
    view: Any = registry(backend("A")).backends()
    with pytest.raises(TypeError):
        view["B"] = None


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (object(), "mine does not say which interface it is for; add ATTNPLUG_API = (1, 1)"),
        (plugin(backend("A"), ATTNPLUG_API=(2, 2)), "mine is for plugin interface 2 to 2"),
        (plugin(backend("TRITON")), "mine offers TRITON, a name reserved for attnplug's own backend"),
        (plugin(attnplug_backends=raises(RuntimeError())), "mine has no hook attnplug_backends"),
    ],
)
def test_what_does_not_follow_the_interface_is_refused_and_leaves_no_trace(bad: object, words: str) -> None:
    found = registry(backend("BASE"))
    with pytest.raises(PluginError) as error:
        found.register(bad, "mine")
    assert str(error.value).startswith(words)
    assert [record.name for record in found.records] == ["fakes"]
    assert found.select(SPEC, CPU).backend == "BASE"
    with pytest.raises(PluginError):
        Registry({"mine": bad})


def test_the_same_name_replaces_the_plugin_before() -> None:
    found = registry(backend("OLD"))
    assert found.select(SPEC, CPU).backend == "OLD"
    found.register(plugin(backend("NEW"), backend("OLD", 1)), "fakes")
    assert found.select(SPEC, CPU).backend == "NEW"
    assert [record.backends for record in found.records] == [("NEW", "OLD")]


def test_the_same_module_may_be_registered_again_after_a_change() -> None:
    offered = [backend("OLD")]
    module = plugin()

    @attnplug.hookimpl
    def attnplug_backends() -> Any:
        return list(offered)

    vars(module)["attnplug_backends"] = attnplug_backends
    found = Registry({"mine": module})
    offered[:] = [backend("NEW")]
    assert found.register(module, "mine").backends == ("NEW",)
    assert set(found.backends()) == {"NEW"}


@pytest.mark.parametrize("bad", [object(), plugin(backend("TAKEN"))])
def test_a_replacement_that_is_refused_leaves_the_one_before(bad: object) -> None:
    found = Registry(
        {"mine": plugin(backend("A"), rank=lambda names: names), "other": plugin(backend("TAKEN"))}
    )
    with pytest.raises(PluginError):
        found.register(bad, "mine")
    decision = found.select(SPEC, CPU)
    assert (decision.backend, decision.ranked_by) == ("A", ("mine",))
    assert found.register(plugin(backend("B")), "mine").backends == ("B",)


def test_a_backend_name_that_is_taken_is_refused() -> None:
    found = registry(backend("A"))
    with pytest.raises(PluginError, match="again offers A, which fakes offers already"):
        found.register(plugin(backend("A")), "again")
    assert found.register(plugin(backend("B")), "again").backends == ("B",)


def test_one_object_under_two_names_is_refused() -> None:
    module = plugin(backend("A"))
    found = Registry({"one": module})
    with pytest.raises(PluginError, match="two is the same module as one, which is loaded"):
        found.register(module, "two")


def test_the_name_of_an_installed_plugin_is_refused() -> None:
    with pytest.raises(PluginError, match="attnplug:torch is the name of an installed plugin; give another"):
        Registry().register(plugin(backend("A")), "attnplug:torch")


def test_an_installed_backends_name_cannot_be_taken_in_code(see_plugins: See) -> None:
    see_plugins("attnplug-acme-decode")
    with pytest.raises(PluginError, match="mine offers ACME_DECODE, which attnplug-acme-decode:acme-decode"):
        Registry().register(plugin(backend("ACME_DECODE")), "mine")


def test_a_registered_plugin_may_rank() -> None:
    found = registry(backend("A", 90), backend("B"), backend("C"), rank=lambda candidates: ("C", "B", "C"))
    decision = found.select(SPEC, CPU)
    assert [candidate.name for candidate in decision.candidates] == ["C", "B", "A"]
    assert (decision.chosen_by, decision.ranked_by) == ("rank", ("fakes",))


def test_a_ranker_is_shown_who_passed_and_has_no_say_where_somebody_was_asked_for() -> None:
    shown = []

    def rank(candidates: Any) -> list[str]:
        shown.append(candidates)
        return ["B"]

    found = registry(backend("A", 90), backend("B"), backend("C", device_types=("cuda",)), rank=rank)
    assert found.select(SPEC, CPU, backend="A").backend == "A"
    assert shown == []
    assert found.select(SPEC, CPU).backend == "B"
    assert shown == [("A", "B")]


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (["B", "C"], "fakes ranks C, no candidate here; ignored"),
        (["NOBODY"], "fakes ranks NOBODY, no candidate here; ignored"),
        ({"B"}, "fakes ranks {'B'}, no candidate here; ignored"),
        (7, "fakes ranks 7, no candidate here; ignored"),
    ],
)
def test_a_ranker_can_neither_add_nor_bring_back(answer: object, note: str) -> None:
    found = registry(
        backend("A", 90), backend("B"), backend("C", device_types=("cuda",)), rank=lambda names: answer
    )
    decision = found.select(SPEC, CPU)
    assert (decision.backend, decision.chosen_by, decision.ranked_by) == ("A", "priority", ())
    assert decision.notes == (note,)


def test_a_ranker_that_raises_is_noted_and_ignored() -> None:
    decision = registry(backend("A"), rank=raises(SystemExit("no"))).select(SPEC, CPU)
    assert (decision.backend, decision.ranked_by) == ("A", ())
    assert decision.notes == ("fakes raised SystemExit: no in attnplug_rank; ignored",)


def test_a_ranker_without_an_opinion_changes_nothing() -> None:
    decision = registry(backend("A"), backend("B", 90), rank=lambda names: None).select(SPEC, CPU)
    assert (decision.backend, decision.chosen_by, decision.notes) == ("B", "priority", ())


def test_rankers_follow_each_other() -> None:
    found = Registry(
        {
            "backends": plugin(backend("A", 30), backend("B", 20), backend("C", 10)),
            "first": plugin(backend("D", 5), rank=lambda names: ["C"]),
            "second": plugin(backend("E", 4), rank=lambda names: "B"),
        }
    )
    decision = found.select(SPEC, CPU)
    assert [candidate.name for candidate in decision.candidates] == ["B", "C", "A", "D", "E"]
    assert decision.ranked_by == ("first", "second")


def test_a_ranker_that_replaces_another_ranks_last() -> None:
    found = registry(backend("LOW", 10), backend("HIGH", 20))
    prefers = {name: plugin(rank=lambda candidates, name=name: [name]) for name in ("LOW", "HIGH")}
    found.register(plugin(), "replaced")
    found.register(prefers["LOW"], "other")
    found.register(prefers["HIGH"], "replaced")
    assert [record.name for record in found.records][-2:] == ["other", "replaced"]
    decision = found.select(SPEC, CPU)
    assert decision.backend == "HIGH"
    assert decision.ranked_by == ("other", "replaced")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose registry was not built yet."""
    monkeypatch.setattr(default, "_registry", None)


@pytest.mark.usefixtures("fresh")
def test_the_functions_ask_the_one_registry_of_the_process() -> None:
    made = default.get_registry()
    assert default.get_registry() is made
    record = attnplug.register(plugin(backend("MINE", 999)), "mine")
    assert record in made.records
    assert default.list_backends()["MINE"].get_name() == "MINE"
    assert attnplug.select(SPEC, CPU).backend == "MINE"
    assert attnplug.explain(SPEC, CPU, backend="TORCH").backend == "TORCH"
    assert attnplug.select_layers({"model.0": SPEC}, CPU)["model.0"].backend == "MINE"


@pytest.mark.usefixtures("fresh")
def test_a_variable_that_means_nothing_is_an_error_until_it_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTNPLUG_STRICT", "maybe")
    with pytest.raises(PolicyError, match="ATTNPLUG_STRICT"):
        attnplug.explain(SPEC, CPU)
    monkeypatch.setenv("ATTNPLUG_STRICT", "0")
    assert attnplug.explain(SPEC, CPU)


@pytest.mark.usefixtures("fresh")
def test_a_plugin_that_asks_the_registry_while_it_is_loaded_is_broken(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "asks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: asks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attnplug.backends]\nasks = attnplug_bad_asks\n")
    code = "from attnplug.registry import get_registry\nget_registry()\n"
    (tmp_path / "attnplug_bad_asks.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    (record,) = [each for each in default.get_registry().records if each.distribution == "asks"]
    assert record.status is PluginStatus.BROKEN
    assert "a plugin cannot ask it while it is loaded" in str(record.reason)
