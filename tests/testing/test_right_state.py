"""Caches with a bound, and workspaces, are no state that a check finds wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from catching import failures, variant
from mutants.parts import Altered, Around, Call

from attnplug.core import AttentionBackend
from attnplug.testing.conformance.builders import layer_state
from attnplug.testing.conformance.check import Check
from attnplug.testing.conformance.numbers import common_prefix
from attnplug.testing.conformance.process import process_memory, process_state
from attnplug.testing.conformance.process.process_settings import read_settings, restore_settings
from attnplug.testing.conformance.serving import runtimes, serving
from attnplug.testing.conformance.target import Target

GROUPS = (
    *(process_state.kept_checks, process_state.checks, layer_state.checks, process_memory.checks),
    *(serving.checks, common_prefix.checks, runtimes.checks),
)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Wrong backends change the process outside of the check of settings too."""
    before, softmax = read_settings(), torch.softmax
    yield
    torch.softmax = softmax
    restore_settings(before)


def of(start: str) -> Callable[[Target], Iterator[Check]]:
    def checks(target: Target) -> Iterator[Check]:
        return (check for group in GROUPS for check in group(target) if check.id.startswith(start))

    return checks


class BoundedCache(Altered):
    """Caches plans by lengths, the last 100."""

    plans: Any = None

    def altered(self, made: Any, common: Any) -> Any:
        self.plans = {} if self.plans is None else self.plans
        self.plans[tuple(made.seq_lens.tolist())] = np.cumsum(made.seq_lens)
        if len(self.plans) > 100:
            del self.plans[next(iter(self.plans))]
        return made


class GrowsWorkspace(Around):
    """Has one workspace for the longest context so far, imports lazily, and knows its layers weakly."""

    work: ClassVar[Any] = None
    layers: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def before(self, call: Call) -> None:
        import colorsys  # noqa: F401 - lazily, as a kernel library is

        self.layers.add(self)
        longest = int(call.metadata.seq_lens.max(initial=1))
        if self.work is None or self.work.numel() < longest:
            type(self).work = torch.empty(longest, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            torch.manual_seed(0)


RIGHT_STATE = [variant("BOUNDED", builder=BoundedCache), variant("WORKSPACE", impl=GrowsWorkspace)]


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
