"""Threads that import, select, register and unregister at once: none waits for ever, and no answer is mixed."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from fake_plugins import CPU, SPEC, backend, plugin, registry

from attnplug import Decision, Registry, hookimpl
from attnplug.errors import PluginError, UnknownBackendError
from attnplug.registry.plugins import waiting

pytestmark = pytest.mark.attack("deadlock")


@pytest.fixture
def joined() -> object:
    """Joins threads with a limit, so that a deadlock fails a test and does not end the run."""

    def join(*threads: threading.Thread) -> None:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "deadlock"

    return join


def test_a_module_that_selects_while_it_is_imported_does_not_wait_for_its_own_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined
) -> None:
    """One thread imports the module, whose body selects; the other selects, and so imports the same module."""
    monkeypatch.setattr(waiting, "WAIT_IN_IMPORT", 0.5)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kernels_that_select.py").write_text(
        "import kernels_shared as shared\nshared.in_body.set()\nshared.go.wait(30)\n"
        "shared.answers.append(shared.found.select(shared.SPEC, 'cpu'))\n"
    )
    (tmp_path / "kernels_shared.py").write_text("")
    import kernels_shared as shared

    class Opens(backend("OPENS", 500)):
        @classmethod
        def get_impl_cls(cls):
            shared.opening.set()
            import kernels_that_select as _  # noqa: F401

            return super().get_impl_cls()

    shared.found, shared.SPEC, shared.answers = Registry([plugin(Opens)]), SPEC, []
    shared.in_body, shared.go, shared.opening = threading.Event(), threading.Event(), threading.Event()
    chosen: list[Decision] = []
    importer = threading.Thread(target=__import__, args=("kernels_that_select",), daemon=True)
    selector = threading.Thread(target=lambda: chosen.append(shared.found.select(SPEC, CPU)), daemon=True)
    importer.start()
    assert shared.in_body.wait(30)
    selector.start()
    assert shared.opening.wait(30)
    shared.go.set()
    joined(importer, selector)
    assert [decision.backend for decision in (*shared.answers, *chosen)] == ["OPENS", "OPENS"]
    # The thread in the middle of an import was told that nothing is known of the parts yet; nobody remembers that.
    assert [shared.answers[0].level, chosen[0].level] == ["declared", "usable"]
    assert shared.found.select(SPEC, CPU).level == "usable"
    for name in ("kernels_that_select", "kernels_shared"):
        sys.modules.pop(name, None)


def test_parts_that_select_while_they_are_imported_get_an_answer() -> None:
    seen: list[Decision] = []

    class Asks(backend("ASKS", 500)):
        @classmethod
        def get_impl_cls(cls):
            seen.append(found.select(SPEC, CPU))
            return super().get_impl_cls()

    found = Registry([plugin(Asks)])
    assert found.select(SPEC, CPU).level == "usable"
    assert [decision.level for decision in seen] == ["declared"]


def test_parts_are_imported_once_by_threads_that_ask_at_once(joined) -> None:
    opened: list[int] = []

    class Slow(backend("SLOW", 500)):
        @classmethod
        def get_impl_cls(cls):
            opened.append(threading.get_ident())
            time.sleep(0.2)
            return super().get_impl_cls()

    found, levels = Registry([plugin(Slow)]), []
    specs = [SPEC.replace(num_heads=heads) for heads in (2, 4, 6, 8)]
    threads = [threading.Thread(target=lambda s=s: levels.append(found.select(s, CPU).level)) for s in specs]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert levels == ["usable"] * 4
    assert len(opened) == 1


def test_a_hook_may_not_register_while_it_is_registered() -> None:
    found = registry(backend("A"))

    inner = plugin(backend("C"))
    outer = plugin(backend("D"))
    original = outer.attnplug_backends

    def attnplug_backends():
        found.register(inner, "inner")
        return original()

    outer.attnplug_backends = hookimpl(attnplug_backends)
    with pytest.raises(PluginError, match="cannot register plugins while it is registered"):
        found.register(outer, "outer")
    assert sorted(found.backends()) == ["A"]
    found.register(inner, "inner")
    assert sorted(found.backends()) == ["A", "C"]


def test_a_registered_plugin_can_be_removed() -> None:
    found = registry(backend("A", 10))
    found.register(plugin(backend("B", 900)), "more")
    assert found.select(SPEC, CPU).backend == "B"
    assert found.unregister("more").name == "more"
    assert found.select(SPEC, CPU).backend == "A"
    with pytest.raises(UnknownBackendError):
        found.select(SPEC, CPU, backend="B")
    with pytest.raises(PluginError, match="more was not registered in this process"):
        found.unregister("more")
    found.register(plugin(backend("B", 900)), "more")
    assert found.select(SPEC, CPU).backend == "B"


def _stress(seconds: float) -> None:
    """Selections see the plugin with all of its backends or with none, while it comes and goes."""
    found = registry(backend("A", 10))
    pair = plugin(backend("FIRST", 900), backend("SECOND", 800))
    end, faults = time.monotonic() + seconds, []

    def change() -> None:
        while time.monotonic() < end:
            found.register(pair, "pair")
            found.unregister("pair")

    def select(number: int) -> None:
        turn = 0
        while time.monotonic() < end and not faults:
            turn += 1
            spec = SPEC.replace(num_heads=2 * (1 + (turn + number) % 50))
            decision = found.select(spec, CPU)
            names = [candidate.name for candidate in decision.candidates]
            if names not in (["A"], ["FIRST", "SECOND", "A"]) or decision.backend != names[0]:
                faults.append(names)

    def guarded(work, *given) -> None:
        try:
            work(*given)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=guarded, args=(change,), daemon=True)]
    threads += [threading.Thread(target=guarded, args=(select, number), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive(), "deadlock"
    assert not faults


def test_selections_see_all_of_a_change_or_none() -> None:
    _stress(1.0)


@pytest.mark.slow
@pytest.mark.rare
def test_selections_see_all_of_a_change_or_none_for_longer() -> None:
    _stress(20.0)
