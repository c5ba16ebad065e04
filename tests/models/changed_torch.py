"""TORCH changed: with the mistakes that kernels make, with large pages, without sinks."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attnplug import AttentionBackend, Feature, LayerSpec, hookimpl
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import LayerTensors
from attnplug.registry import Registry, default

__all__ = ["MISTAKES", "NAME", "offered", "with_large_pages", "without_sinks", "wrong_backend"]

NAME = "CHANGED"
Change = Callable[[LayerSpec], LayerSpec]


def _by_keys(count: int) -> Change:
    def change(spec: LayerSpec) -> LayerSpec:
        return spec.replace(window=(spec.window[0] + count, 0)) if spec.is_windowed else spec

    return change


def _without_window(spec: LayerSpec) -> LayerSpec:
    return spec.replace(window=(-1, -1))


MISTAKES: dict[str, Change] = {
    "no window": _without_window,
    "no window in decodes": _without_window,
    "a key too many": _by_keys(1),
    "a key too few": _by_keys(-1),
    "no cap": lambda spec: spec.replace(logits_soft_cap=None),
    "no sinks": lambda spec: spec.replace(has_sinks=False),
    "a larger scale": lambda spec: spec.replace(scale=1.25 * spec.scale),
}
"""What each makes of a layer's spec."""


def wrong_backend(mistake: str) -> type[AttentionBackend]:
    """TORCH under another name, with one of MISTAKES."""
    change, only_decodes = MISTAKES[mistake], mistake.endswith("decodes")

    class WrongImpl(TorchImpl):
        def _bind(
            self,
            spec: LayerSpec,
            layer_name: str,
            tensors: LayerTensors,
            kv_sharing_target_layer_name: str | None = None,
            options: Any = None,
        ) -> None:
            self.wrong = change(spec)
            sinks = tensors.sinks if self.wrong.has_sinks else None
            kept = dataclasses.replace(tensors, sinks=sinks)
            super()._bind(spec, layer_name, kept, kv_sharing_target_layer_name, options)

        def attend(self, *given: Any, **named: Any) -> Any:
            metadata = given[5]
            right, is_decode = self.spec, bool((metadata.query_lens <= 1).all())
            self.spec = self.wrong if is_decode or not only_decodes else right
            try:
                return super().attend(*given, **named)
            finally:
                self.spec = right

    return _changed(get_impl_cls=classmethod(lambda cls: WrongImpl))


def with_large_pages(block_size: int) -> type[AttentionBackend]:
    """TORCH under another name, which reads pages of this size alone."""
    return _changed(get_supported_kernel_block_sizes=classmethod(lambda cls, *asked: (block_size,)))


def without_sinks() -> type[AttentionBackend]:
    """TORCH under another name, which refuses sinks."""
    return _changed(features=TorchBackend.features & ~Feature.SINKS)


def _changed(**attributes: Any) -> type[AttentionBackend]:
    name = staticmethod(lambda: NAME)
    # The lowest priority is TORCH's alone.
    priority = classmethod(lambda cls, spec, device, phase: 1)
    return type(NAME, (TorchBackend,), {"get_name": name, "get_priority": priority, **attributes})


@contextlib.contextmanager
def offered(backend: type[AttentionBackend]) -> Iterator[None]:
    """The process's registry offers this backend too."""
    plugin = types.ModuleType("changed")

    @hookimpl
    def attnplug_backends() -> list[type[AttentionBackend]]:
        return [backend]

    vars(plugin).update(ATTNPLUG_API=(1, 1), attnplug_backends=attnplug_backends)
    registry = Registry()
    registry.register(plugin, "changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "_registry", registry)
        yield
