"""The default physical order of KV pages, and where it comes from."""

from __future__ import annotations

import contextvars
import threading

import pytest

from attnplug.core.errors import LayoutError
from attnplug.runtime import get_kv_cache_layout, is_valid_kv_cache_layout, set_kv_cache_layout

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


def test_another_thread_does_not_see_an_override():
    seen = []
    set_kv_cache_layout("HND")

    def other() -> None:
        before = get_kv_cache_layout()
        set_kv_cache_layout("NHD")
        seen.append(before)

    # A fresh context stands for a thread's own, whatever a Python version lets threads inherit.
    thread = threading.Thread(target=contextvars.Context().run, args=(other,))
    thread.start()
    thread.join()
    assert seen == ["NHD"]
    assert get_kv_cache_layout() == "HND"


def test_an_override_ends_with_its_context():
    contextvars.copy_context().run(set_kv_cache_layout, "HND")
    assert get_kv_cache_layout() == "NHD"
