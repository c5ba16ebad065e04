"""The names of `ops` and `runtime`: each is there, and is no module of the same name."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

NAMES = [
    (package, name)
    for package in ("attnplug.ops", "attnplug.runtime")
    for name in importlib.import_module(package).__all__
]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_name_is_the_thing_itself(package, name):
    module = importlib.import_module(package)
    assert not isinstance(getattr(module, name), ModuleType)
    assert name in dir(module)


@pytest.mark.parametrize("package", ["attnplug.ops", "attnplug.runtime"])
def test_there_are_no_other_names(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(module.__dir__())
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(module, "no_such_name")  # noqa: B009
