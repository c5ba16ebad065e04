"""Layers past a few compile keys are neither built nor run: a builder may compile, as a kernel does."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
from catching import failures, variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, LayerSpec
from attnplug.testing.conformance import Level
from attnplug.testing.conformance.declared import acceptance


def key_of(cls: type[AttentionBackend], spec: LayerSpec) -> Hashable:
    return spec.head_size, spec.dtype, spec.resolved_kv_cache_dtype, spec.required_features()


@pytest.mark.parametrize(("level", "most"), [(Level.SMOKE, 3), (Level.FULL, 12)])
def test_few_keys_are_built(level: Level, most: int) -> None:
    built: set[Hashable] = set()
    torch_builder: Any = TorchBackend.get_builder_cls()

    class Compiles(torch_builder):  # type: ignore[misc]
        def build(self, *args: Any, **keywords: Any) -> Any:
            built.update(key_of(backend, layer.impl.spec) for layer in self.config.layers.values())
            return super().build(*args, **keywords)

    backend = variant("COMPILES", builder=Compiles, compile_key=key_of)

    def kept(target: Any) -> Any:
        return (check for check in acceptance.checks(target) if check.id == "refused/never-after-acceptance")

    assert failures(backend, kept, level) == {}
    assert len(built) == most
