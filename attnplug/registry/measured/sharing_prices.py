"""The constants by which a step decides whether its requests read shared prefixes together: built in, or of a tuned table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from attnplug._system.json_files import reading, typed
from attnplug.core.checks import check_positive

if TYPE_CHECKING:
    from attnplug.registry.plugins.installed import BackendVersions


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
            device would wait for the host. A graph takes half of it more, for all its layers.

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

    def to_dict(self) -> dict[str, float]:
        """A JSON object with every field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The prices that `to_dict` wrote, beside fields of others. SpecError for damaged data."""
        with reading("prices of shared prefixes"):
            values = {
                each.name: float(typed(data, each.name, int, float)) for each in dataclasses.fields(cls)
            }
            if not all(map(math.isfinite, values.values())):
                raise ValueError("a price is not finite")
            return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredPrices:
    """The prices of one kind of layer that `attnplug tune` has fitted.

    Args:
        subject: the backend, its version and the versions of its libraries.
        prices: the constants.
        error: the median difference of the steps' times from the fit, relative to their plain time.
        steps: number of steps that were timed plainly and with shared prefixes.
        date: when they were measured, with its offset from UTC.
    """

    subject: BackendVersions
    prices: SharingPrices
    error: float
    steps: int
    date: str


@dataclasses.dataclass(frozen=True, slots=True)
class TablePrices:
    """The prices of a decision's backend that a tuned table has.

    Args:
        prices: the constants.
        source: the table, and the day on which they were measured.
    """

    prices: SharingPrices
    source: str

    def __str__(self) -> str:
        return f"prices of {self.source}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {**self.prices.to_dict(), "source": self.source}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Those that `to_dict` wrote. SpecError for damaged data."""
        with reading("prices of shared prefixes"):
            return cls(SharingPrices.from_dict(data), typed(data, "source", str))


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


def decodes_of(backend: str) -> str:
    """The backend that attends the decodes, which shared prefixes are for: B of a composite "A+B[ranges of steps]"."""
    return backend.partition("[")[0].rpartition("+")[2]


def built_in_prices(device_type: str, device_name: str | None, backend: str) -> SharingPrices | None:
    """The built-in prices of a backend on a device; None if nobody has measured them, so that nothing is shared there."""
    backend = decodes_of(backend)
    if device_type == "cpu":
        return _CPU if backend == "TORCH" else None
    if device_type != "cuda" or backend != "TRITON" or device_name is None:
        return None
    return next((prices for card, prices in _TRITON.items() if card in device_name), None)
