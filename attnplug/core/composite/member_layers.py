"""An engine's layers for the builder of one member: with impls of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class MemberLayers(Mapping[str, Any]):
    """The engine's layers, with one member's impls, for that member's builder."""

    def __init__(self, layers: Mapping[str, Any], place: str) -> None:
        self._layers, self._place = layers, place

    def __getitem__(self, name: str) -> Any:
        return _MemberLayer(self._layers[name], self._place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


class _MemberLayer:
    """A layer with one member's impl; all other attributes are the layer's own."""

    def __init__(self, layer: Any, place: str) -> None:
        self._layer = layer
        impl = layer.impl
        # The mapping has layers of other backends too.
        self.impl = getattr(impl, "members", {}).get(place, impl)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
