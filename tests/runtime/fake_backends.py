"""Backends that run on TORCH's parts and declare what a test needs, and registries that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from fake_plugins import backend as fake
from fake_plugins import plugin

from attnplug import AttentionBackend, Registry
from attnplug.backends.torch_native import TorchBackend
from attnplug.core.features import Feature
from attnplug.core.impl import AttentionImpl
from attnplug.registry import default

__all__ = ["backend", "layouts", "no", "offered", "plugin", "reads", "with_impl"]


def backend(name: str, priority: int = 50, **attributes: Any) -> type[AttentionBackend]:
    """A backend that does what TORCH does; functions among its attributes are called without the class."""
    return fake(name, priority, base=TorchBackend, **attributes)


def no(*features: Feature) -> Feature:
    """What TORCH declares, without these."""
    left = TorchBackend.features
    for feature in features:
        left &= ~feature
    return left


def reads(*sizes: Any) -> Callable[..., Any]:
    """A `get_supported_kernel_block_sizes` of these sizes."""
    return lambda spec=None, device=None: sizes


def layouts(*names: str) -> Callable[[], Sequence[str]]:
    """A `supported_kv_cache_layouts` of these."""
    return lambda: names


def with_impl(impl: type[AttentionImpl[Any]]) -> dict[str, Any]:
    """The door to another impl, as an attribute of `backend`."""
    return {"get_impl_cls": lambda: impl}


@contextmanager
def offered(*backends: type[AttentionBackend]) -> Iterator[Registry]:
    """The process's registry is one with these backends too."""
    with pytest.MonkeyPatch.context() as patch:
        registry = Registry()
        registry.register(plugin(*backends), "fakes")
        patch.setattr(default, "_registry", registry)
        yield registry
