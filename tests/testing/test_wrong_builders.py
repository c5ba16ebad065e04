"""Every wrong builder, merge and runtime is caught by the check that is there for it, which names the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from capturable import Capturable
from catching import Wrong, failures
from wrong_builders import WRONG

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend
from attnplug.testing.conformance import assumptions, builders, merging, runtimes, sharing
from attnplug.testing.conformance.check import Check
from attnplug.testing.conformance.target import Target

GROUPS = (builders.checks, assumptions.checks, sharing.checks, merging.checks, runtimes.checks)


def every(start: str = "") -> Callable[[Target], Iterator[Check]]:
    def checks(target: Target) -> Iterator[Check]:
        return (check for group in GROUPS for check in group(target) if check.id.startswith(start))

    return checks


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_backend_is_caught_by_its_check_and_named(wrong: Wrong) -> None:
    found = failures(wrong.backend, every(wrong.check))
    assert found
    assert [str(problem) for problem in found.values() if wrong.says not in str(problem)] == []


@pytest.mark.parametrize("backend", [TorchBackend, Capturable], ids=lambda backend: backend.get_name())
def test_an_honest_backend_fails_none(backend: type[AttentionBackend]) -> None:
    assert failures(backend, every()) == {}
