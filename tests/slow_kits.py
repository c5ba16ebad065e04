"""Conformance kits that are slow tests: only a run of slow tests lists their checks, which takes seconds each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

__all__ = ["list_checks", "slow_kit"]


def slow_kit(backend: type[AttentionBackend], **options: Any) -> pytest.MarkDecorator:
    """As `parametrize_with_checks`, on a test that is marked slow or in the list of slow tests."""
    return pytest.mark.slow_kit(backend, options)


def list_checks(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test of `slow_kit`: a plain run leaves all of it out, and is given one case without a check."""
    for marker in metafunc.definition.iter_markers("slow_kit"):
        backend, options = marker.args
        if metafunc.config.getoption("markexpr") == "not slow":
            metafunc.parametrize("check", [pytest.param(None, marks=pytest.mark.slow)])
        else:
            from attnplug.testing import parametrize_with_checks

            given = parametrize_with_checks(backend, **options)
            metafunc.parametrize(*given.args, **given.kwargs)
