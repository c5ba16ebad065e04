"""What a shared prefix saves and costs: a model of one layer, with constants of a device."""

from __future__ import annotations

import dataclasses

import torch

from attnplug.core.kv_cache_spec import KVCacheSpec
from attnplug.registry.measured.sharing_prices import SharingPrices as SharingPrices
from attnplug.registry.measured.sharing_prices import built_in_prices


def prices_of(device: torch.device, backend: str) -> SharingPrices | None:
    """The built-in prices of a backend on a device; None if nobody has measured them, so that nothing is shared there."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else None
    return built_in_prices(device.type, name, backend)


_HOST_OF_GRAPH = 0.5
"""What the host takes more for a graph with shared prefixes, for all its layers, over what it takes for a layer without one."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPrices:
    """The seconds of one layer's keys, by `SharingPrices`.

    Args:
        key_read: of reading one token's keys and values.
        reread: the part of it that each reader costs.
        key_product: of one row's products with one token.
        merge: of merging one more partial result of a row.
        calls: of the further calls.
        margin: see SharingPrices.
        safety: see SharingPrices.
        host: see SharingPrices.
    """

    key_read: float
    reread: float
    key_product: float
    merge: float
    calls: float
    margin: float
    safety: float
    host: float

    @classmethod
    def of(cls, prices: SharingPrices, num_heads: int, cache: KVCacheSpec) -> LayerPrices:
        """Those of a layer with `num_heads` query heads over the pages of `cache`."""
        elements = num_heads * cache.head_size_v
        return cls(
            cache.bytes_per_token / prices.bandwidth,
            prices.reread,
            2 * num_heads * (cache.head_size + cache.head_size_v) / prices.products,
            # A partial result is written with its LSE, read again, and merged, at a fourth of the rate (on an H200).
            4 * 2 * (8 * (elements + num_heads) + 2 * elements) / prices.bandwidth,
            prices.calls,
            prices.margin,
            prices.safety,
            prices.host,
        )

    def saved(self, readers: int, rows: int, keys: int, piece_rows: int = 0) -> float:
        """The seconds that a node saves: `keys` tokens that `readers` requests with `rows` new tokens share.

        A graph reads them once for each `piece_rows` new tokens; 0 for a step outside of graphs, which reads them once.
        """
        if self.safety == 0:
            return (readers - 1) * keys * self.key_read
        # A piece by itself takes a tenth longer to read than as a part of a request.
        reads = 1 + self.reread * (-(-rows // piece_rows) - 1) if piece_rows else 1.0
        apart = 1.1 * reads * keys * self.key_read + rows * (keys * self.key_product + self.merge)
        return self.reread * readers * keys * self.key_read - apart

    def plain(self, keys: int) -> float:
        """The seconds of a plain step whose requests read `keys` tokens in all."""
        return self.reread * keys * self.key_read

    def waits(self, plain: float) -> bool:
        """Whether the device would wait for the host outside of graphs: `plain` is a plain layer's time."""
        return plain < self.host

    def of_graph(self, layers: int) -> float:
        """The seconds that the host takes more for each of `layers` in a graph with shared prefixes."""
        return _HOST_OF_GRAPH * self.host / layers

    def pays(self, saved: float, plain: float) -> bool:
        """Whether the savings of all nodes are worth the further calls of a step."""
        return saved > 0 and saved >= self.safety * max(self.calls, self.margin * plain)
