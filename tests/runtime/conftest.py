"""Hypothesis without a deadline, since no test here depends on time; errors for waits on a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

# pytest would try to collect a folder .hypothesis in the root.
set_hypothesis_home_dir(Path(__file__).parents[2] / ".pytest_cache" / "hypothesis")
settings.register_profile("attnplug", deadline=None, print_blob=True)
settings.load_profile("attnplug")


@pytest.fixture
def sync_errors() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with sync_errors():` torch raises where the host would wait for the GPU."""

    @contextlib.contextmanager
    def errors() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it may not notice every wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return errors
