"""Each backend that changes the process, keeps memory or mixes up layers fails the check for its mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from catching import Wrong, failures
from wrong_state import RIGHT_STATE, WRONG_STATE

from attnplug.core import AttentionBackend
from attnplug.testing.conformance.builders import layer_state
from attnplug.testing.conformance.check import Check
from attnplug.testing.conformance.numbers import common_prefix
from attnplug.testing.conformance.process import process_memory, process_state
from attnplug.testing.conformance.process.process_settings import read_settings, restore_settings
from attnplug.testing.conformance.serving import runtimes, serving
from attnplug.testing.conformance.target import Target

GROUPS = (process_state, layer_state, process_memory, serving, common_prefix, runtimes)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong caches grow at once, and the right ones are small."""
    monkeypatch.setattr(process_memory, "_STEPS", 100)
    monkeypatch.setattr(process_memory, "_LAYERS", 20)
    monkeypatch.setattr(process_memory, "_MOST_ROUNDS", 3)
    # A busy machine must not try fewer steps or lengths than these.
    monkeypatch.setattr(process_memory, "_SECONDS", 60.0)
    monkeypatch.setattr(process_memory, "_SLOW", 60.0)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Wrong backends change the process outside of the check of settings too."""
    before, softmax = read_settings(), torch.softmax
    yield
    torch.softmax = softmax
    restore_settings(before)


def of(start: str) -> Callable[[Target], Iterator[Check]]:
    def checks(target: Target) -> Iterator[Check]:
        return (check for group in GROUPS for check in group.checks(target) if check.id.startswith(start))

    return checks


_PLAIN_LEAKS = ("grows_history", "keeps_layers")


def sampled(wrong: Wrong) -> object:
    """A test of the backend; the checks of memory run 1,600 steps, so a plain run has one that fails them."""
    is_long = wrong.check.startswith("state/memory") and wrong.name not in _PLAIN_LEAKS
    return pytest.param(wrong, id=wrong.name, marks=[pytest.mark.slow] if is_long else [])


@pytest.mark.parametrize("wrong", [sampled(wrong) for wrong in WRONG_STATE])
def test_a_wrong_backend_is_caught_by_its_check_and_named(wrong: Wrong) -> None:
    check = "state/settings-kept-decode" if wrong.check == "state/settings-kept" else wrong.check
    found = failures(wrong.backend, of(check))
    assert found
    assert [str(problem) for problem in found.values() if wrong.says not in str(problem)] == []


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("state/memory", marks=pytest.mark.slow),
        "state/settings-kept-decode",
        "state/like-layers-decode",
    ],
)
@pytest.mark.parametrize("backend", RIGHT_STATE, ids=lambda backend: backend.get_name())
def test_caches_with_a_bound_and_workspaces_are_right(backend: type[AttentionBackend], start: str) -> None:
    assert failures(backend, of(start)) == {}
