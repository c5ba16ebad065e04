"""Conformance kits that are slow tests: only a run of slow tests lists their checks, which takes seconds each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

__all__ = ["has_checks", "list_checks", "share_of", "slow_kit"]

_APART = 4
"""A kit has checks in every fourth share, so that the runs of the others need not list them."""


def slow_kit(backend: type[AttentionBackend], **options: Any) -> pytest.MarkDecorator:
    """As `parametrize_with_checks`, on a test that is marked slow or in the list of slow tests."""
    return pytest.mark.slow_kit(backend, options)


def list_checks(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test of `slow_kit`; where the run has none of its checks, with one case that the run leaves out."""
    plain, share = metafunc.config.getoption("markexpr") == "not slow", metafunc.config.getoption("share")
    for marker in metafunc.definition.iter_markers("slow_kit"):
        backend, options = marker.args
        if plain or (share and not has_checks(metafunc.definition.nodeid, *map(int, share.split("/")))):
            metafunc.parametrize("check", [pytest.param(None, id="unlisted")])
        else:
            from attnplug.testing import parametrize_with_checks

            given = parametrize_with_checks(backend, **options)
            metafunc.parametrize(*given.args, **given.kwargs)


def share_of(nodeid: str, shares: int, *, of_kit: bool = False) -> int | None:
    """The share of a test, from 0, by its name, so that other tests that come or go do not move it; None if it has none."""
    number = crc32(nodeid.encode())
    if not of_kit or shares % _APART:
        return number % shares
    if nodeid.endswith("[unlisted]"):
        return None
    return number % (shares // _APART) * _APART + _kit_number(nodeid)


def has_checks(kit: str, number: int, shares: int) -> bool:
    """Whether the share `number` of `shares`, from 1, has checks of a kit."""
    return shares % _APART > 0 or (number - 1) % _APART == _kit_number(kit)


def _kit_number(nodeid: str) -> int:
    return crc32(nodeid.partition("[")[0].encode()) % _APART
