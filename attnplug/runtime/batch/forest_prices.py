"""What a shared prefix saves and costs: a model of one layer, with constants of a device."""

from __future__ import annotations

import dataclasses

import torch

from attnplug.core.checks import check_positive
from attnplug.core.kv_cache_spec import KVCacheSpec


@dataclasses.dataclass(frozen=True, slots=True)
class SharingPrices:
    """The constants of a backend on a device, by which a step decides whether its requests read their prefixes together.

    Args:
        bandwidth: bytes of keys and values that attention reads in a second.
        reread: the part of a read that each reader of the same block costs, because caches have it. At most 1.
        products: operations in a second of the call that attends the prefixes.
        calls: seconds that a layer's two further calls and its merge take in any case.
        margin: the part of a step's plain time that must be saved at least.
        safety: the times by which savings must exceed `calls` and `margin`; 0 shares each block that two requests read.
        host: seconds that the host takes for a layer whose prefixes are shared. Where a plain layer takes the device less, the
            device would wait for the host. A graph takes four times as long for all its layers.

    Raises:
        SpecError: a number that is not positive; `margin`, `calls`, `safety` and `host` may be 0.
    """

    bandwidth: float
    reread: float
    products: float
    calls: float
    margin: float = 0.02
    safety: float = 2.0
    host: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # 0 is allowed where a cost may be left out.
            if field.name in ("bandwidth", "reread", "products") or value != 0:
                check_positive(field.name, value)

    @classmethod
    def free(cls) -> SharingPrices:
        """Prices by which each block that two requests read is shared, such as for tests."""
        return cls(bandwidth=1.0, reread=1.0, products=1.0, calls=0.0, margin=0.0, safety=0.0)


# Fitted to ten cells of TORCH on one core of a CPU (8 heads over 2 of 64 elements, float32): 1.6 to 28 ms of plain time.
_CPU = SharingPrices(bandwidth=3.5e9, reread=1.0, products=5e10, calls=3e-3)


# The host's time is that of an engine without graphs, which waits for it in each layer.
# Fitted to 52 cells of TRITON on an H200 and of a sketch on an H100 (benchmarks/prefix_forests.py), by the device's name.
_TRITON = {
    "H200": SharingPrices(bandwidth=4.58e12, reread=0.74, products=7e14, calls=2.5e-5, margin=0.1, host=1e-3),
    "H100": SharingPrices(
        bandwidth=2.7e12, reread=0.45, products=3.2e14, calls=2.5e-5, margin=0.1, host=1e-3
    ),
}


def prices_of(device: torch.device, backend: str) -> SharingPrices | None:
    """The prices of a backend on a device; None if nobody has measured them, so that nothing is shared there."""
    # Of a composite, "A+B[ranges of steps]", B attends the decodes, which shared prefixes are for.
    backend = backend.partition("[")[0].rpartition("+")[2]
    if device.type == "cpu":
        return _CPU if backend == "TORCH" else None
    if device.type != "cuda" or backend != "TRITON":
        return None
    name = torch.cuda.get_device_name(device)
    return next((prices for card, prices in _TRITON.items() if card in name), None)


_HOST_OF_GRAPH = 4
"""The layers outside of a graph whose host time a graph takes for all its layers."""


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

    def waits(self, plain: float, graph_layers: int = 0) -> bool:
        """Whether the device would wait for the host: `plain` is a plain layer's time, `graph_layers` those of a graph."""
        host = self.host * min(_HOST_OF_GRAPH / graph_layers, 1.0) if graph_layers else self.host
        return plain < host

    def pays(self, saved: float, plain: float) -> bool:
        """Whether the savings of all nodes are worth the further calls of a step."""
        return saved > 0 and saved >= self.safety * max(self.calls, self.margin * plain)
