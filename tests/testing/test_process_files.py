"""The kit's watch tells variables that a backend sets again, and not those that torch's compiler does."""

from __future__ import annotations

import os

import pytest

from attnplug.testing.conformance.process.process_files import SET_BY_TORCH, watched_files


@pytest.mark.parametrize("name", [*SET_BY_TORCH, "ACME_TILES"])
def test_a_variable_set_to_its_own_value_is_the_backends_unless_torch_sets_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "16")
    with watched_files() as watch:
        os.environ[name] = "16"
        found = watch.found(False)
    told = [f"sets environment variable {name} to the value that it has"]
    assert found == ([] if name in SET_BY_TORCH else told)
