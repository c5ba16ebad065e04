"""No thread waits for ever for another that runs code of plugins."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_plugins import SPEC, backend, plugin

from attnplug import Registry
from attnplug.errors import PluginError, PolicyError
from attnplug.registry.plugins import waiting
from attnplug.registry.selection import gates
from attnplug.registry.selection.gates import PartImports


def test_a_thread_that_joins_this_one_is_not_waited_for():
    answers: list[bool] = []

    def waits(other: int) -> None:
        begun = time.monotonic()
        answers.append(waiting.waited(lambda seconds: bool(time.sleep(seconds)), lambda: other))
        assert time.monotonic() - begun < 5

    inner = threading.Thread(target=waits, args=(threading.get_ident(),))
    inner.start()
    inner.join()
    assert answers == [False]


def test_a_wait_ends_after_the_longest_time(monkeypatch):
    monkeypatch.setattr(waiting, "_LONGEST", 0.02)
    assert not waiting.waited(lambda seconds: bool(time.sleep(0.01)), lambda: None)
    asked: list[float] = []
    assert waiting.waited(lambda seconds: bool(asked.append(seconds)) or len(asked) > 1, lambda: None)
    assert asked == [0.05, 0.05]


def test_a_module_that_another_thread_imports_is_free_when_that_has_ended(tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    threading._slow_module_events = (begun, go_on)  # type: ignore[attr-defined]
    (tmp_path / "slow_module_of_a_test.py").write_text(
        "import threading\nbegun, go_on = threading._slow_module_events\nbegun.set()\nassert go_on.wait(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert waiting.module_is_free("slow_module_of_a_test")
    with ThreadPoolExecutor() as pool:
        importing = pool.submit(__import__, "slow_module_of_a_test")
        assert begun.wait(60)
        monkeypatch.setattr(waiting, "_LONGEST", 0.01)
        assert not waiting.module_is_free("slow_module_of_a_test")
        assert not waiting.module_is_free("slow_module_of_a_test.part")
        monkeypatch.setattr(waiting, "_LONGEST", 60.0)
        free = pool.submit(waiting.module_is_free, "slow_module_of_a_test")
        go_on.set()
        importing.result(60)
        assert free.result(60)
    del threading._slow_module_events  # type: ignore[attr-defined]


def test_a_watcher_hears_which_code_of_plugins_runs(monkeypatch):
    monkeypatch.setattr(waiting._Watcher, "hears", None)
    waiting.announce("nobody hears this")
    heard: list[str] = []
    waiting.watch_plugins(heard.append)
    waiting.announce("while it imported the plugin x")
    waiting.announce()
    assert heard == ["while it imported the plugin x", ""]


def test_an_interrupted_import_of_parts_is_tried_again(monkeypatch):
    one, tries = backend("ONE"), []

    def interrupted(asked: object) -> None:
        tries.append(asked)
        if len(tries) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(gates, "import_parts", interrupted)
    imports = PartImports()
    with pytest.raises(KeyboardInterrupt):
        imports.failure(one)
    assert imports.failure(one) is None
    assert imports.failure(one) is None
    assert tries == [one, one]


def test_who_waits_for_an_interrupted_import_hears_that_nothing_is_known(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def interrupted(asked: object) -> None:
        begun.set()
        assert go_on.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(gates, "import_parts", interrupted)
    imports, one = PartImports(), backend("ONE")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(imports.failure, one)
        assert begun.wait(60)
        assert set(imports.under_way()._found) == {one}
        second = pool.submit(imports.failure, one)
        go_on.set()
        with pytest.raises(KeyboardInterrupt):
            first.result(60)
        # The second one waited, or came late and was interrupted itself.
        with contextlib.suppress(KeyboardInterrupt):
            assert second.result(60) == ()


@pytest.mark.parametrize("plugins", ["text", b"bytes", 5])
def test_plugins_are_a_mapping_or_a_sequence(plugins):
    with pytest.raises(PluginError) as caught:
        Registry(plugins)
    assert str(caught.value) == (
        f"plugins={plugins!r} must be a mapping of names to plugins, or a sequence of them"
    )


def test_names_are_text():
    registry = Registry({"mine": plugin(backend("ONE"))})
    with pytest.raises(PluginError, match=r"^name=3 must be text or None$"):
        registry.register(plugin(backend("TWO")), name=3)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"^name=3 must be text$"):
        registry.unregister(3)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"^layer_name=3 must be text or None$"):
        registry.select(SPEC, "cpu", layer_name=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'backends'; settings are "):
        registry.select(SPEC, "cpu", backends="ONE")  # type: ignore[call-arg]
    assert registry.select(SPEC, "cpu").backend == "ONE"


def test_the_wait_for_an_import_sleeps_while_another_thread_imports(monkeypatch):
    asked, slept = iter(range(100)), list[float]()
    monkeypatch.setattr(waiting, "_importer_of", lambda name: 1 if next(asked) < 8 else None)
    monkeypatch.setattr(waiting.time, "sleep", slept.append)
    assert waiting.module_is_free("some.module")
    assert len(slept) == 3
