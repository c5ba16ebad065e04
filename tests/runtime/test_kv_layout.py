"""The default physical order of KV pages, and where it comes from."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
from model_layers import layer

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.core.errors import LayoutError
from attnplug.runtime import get_kv_cache_layout, is_valid_kv_cache_layout, set_kv_cache_layout
from attnplug.runtime.plan.grouping import with_layout

VARIABLE = "ATTNPLUG_KV_CACHE_LAYOUT"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    set_kv_cache_layout(None)
    yield
    set_kv_cache_layout(None)


def test_nhd_where_nobody_says_anything():
    assert get_kv_cache_layout() == "NHD"


def test_what_the_backends_require_where_the_user_says_nothing():
    assert get_kv_cache_layout("HND") == "HND"


def test_the_environment_comes_before_what_the_backends_require(monkeypatch):
    monkeypatch.setenv(VARIABLE, "NHD")
    assert get_kv_cache_layout("HND") == "NHD"


def test_the_override_comes_before_everything(monkeypatch):
    monkeypatch.setenv(VARIABLE, "NHD")
    set_kv_cache_layout("HND")
    assert get_kv_cache_layout("NHD") == "HND"
    set_kv_cache_layout(None)
    assert get_kv_cache_layout("HND") == "NHD"


def test_an_empty_variable_says_nothing(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    assert get_kv_cache_layout("HND") == "HND"


def test_a_wrong_override_is_refused_and_leaves_the_old_one():
    set_kv_cache_layout("HND")
    with pytest.raises(LayoutError, match="layout='hnd' must be NHD or HND"):
        set_kv_cache_layout("hnd")
    assert get_kv_cache_layout() == "HND"


def test_a_wrong_variable_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv(VARIABLE, "DNH")
    with pytest.raises(LayoutError, match=f"{VARIABLE}='DNH' must be NHD or HND"):
        get_kv_cache_layout()


def test_a_wrong_requirement_is_refused_by_its_name():
    with pytest.raises(LayoutError, match="required='NDH' must be NHD or HND"):
        get_kv_cache_layout("NDH")


@pytest.mark.parametrize("value", ["NHD", "HND"])
def test_the_two_layouts_are_valid(value):
    assert is_valid_kv_cache_layout(value)


@pytest.mark.parametrize("value", ["nhd", "", None, 0, ["NHD"]])
def test_nothing_else_is_valid(value):
    assert not is_valid_kv_cache_layout(value)


def in_a_thread(call):
    """What `call` gives in another thread, which starts with a context of its own."""
    seen = []
    # A fresh context stands for a thread's own, whatever a Python version lets threads inherit.
    thread = threading.Thread(target=contextvars.Context().run, args=(lambda: seen.append(call()),))
    thread.start()
    thread.join()
    return seen[0]


def test_another_thread_sees_an_override():
    set_kv_cache_layout("HND")
    assert in_a_thread(get_kv_cache_layout) == "HND"


def test_a_thread_that_runs_already_sees_an_override():
    began, is_set, seen = threading.Event(), threading.Event(), []

    def wait() -> None:
        before = get_kv_cache_layout()
        began.set()
        is_set.wait(10)
        seen.append((before, get_kv_cache_layout()))

    thread = threading.Thread(target=wait)
    thread.start()
    began.wait(10)
    set_kv_cache_layout("HND")
    is_set.set()
    thread.join()
    assert seen == [("NHD", "HND")]


def test_an_override_of_another_thread_outlives_it():
    assert in_a_thread(lambda: set_kv_cache_layout("HND")) is None
    assert get_kv_cache_layout() == "HND"


def test_an_override_outlives_its_context_and_its_task():
    async def override():
        set_kv_cache_layout("HND")

    asyncio.run(override())
    assert get_kv_cache_layout() == "HND"
    contextvars.copy_context().run(set_kv_cache_layout, None)
    assert get_kv_cache_layout() == "NHD"


def test_a_plan_of_another_thread_has_the_override():
    set_kv_cache_layout("HND")
    made = in_a_thread(lambda: attnplug.plan({"0": layer(dtype="float32")}, "cpu"))
    assert made.decisions["0"].kv_cache_layout == "HND"


def test_each_call_gives_the_layout_to_restore():
    assert set_kv_cache_layout("HND") is None
    assert set_kv_cache_layout("NHD") == "HND"
    assert set_kv_cache_layout("HND") == "NHD"
    assert set_kv_cache_layout(None) == "HND"
    assert set_kv_cache_layout(None) is None


def test_an_override_is_restored_around_an_error():
    set_kv_cache_layout("HND")
    with pytest.raises(LayoutError):  # noqa: PT012
        former = set_kv_cache_layout("NHD")
        try:
            set_kv_cache_layout("nhd")
        finally:
            set_kv_cache_layout(former)
    assert get_kv_cache_layout() == "HND"


def test_a_layout_set_while_a_plan_is_made_does_not_split_it(monkeypatch):
    specs = {str(i): layer(dtype="float32") for i in range(4)}
    asked = TorchBackend.supported_kv_cache_layouts

    def switching(cls):
        # Stands for another thread that sets a layout between two layers.
        set_kv_cache_layout("HND" if get_kv_cache_layout() == "NHD" else "NHD")
        return asked()

    set_kv_cache_layout("HND")
    monkeypatch.setattr(TorchBackend, "supported_kv_cache_layouts", classmethod(switching))
    made = with_layout(attnplug.plan(specs, "cpu").decisions)
    assert len({decision.kv_cache_layout for decision in made.values()}) == 1
