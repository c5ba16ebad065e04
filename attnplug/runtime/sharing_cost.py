"""A model of the time of decodes whose tokens ranks share: from where sharing pays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

from attnplug.core.checks import check_size
from attnplug.core.context_parallel import MOST_SENT_BYTES
from attnplug.core.device import Device
from attnplug.core.dtypes import element_size
from attnplug.core.errors import SpecError
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.spec import LayerSpec

REQUESTS = (1, 8, 64)
"""The numbers of requests that a plan gives a length for."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRates:
    """Measured rates of a device and of the link between devices of one host.

    Args:
        kv_bytes: bytes of keys and values that a decode reads in a microsecond.
        flops: floating-point operations of a decode in a microsecond.
        link_bytes: bytes that a rank receives in a microsecond.
        collective_us: microseconds of a collective without data, inside a graph.
        merge_us: microseconds of the merge of partial results.
    """

    kv_bytes: float
    flops: float
    link_bytes: float
    collective_us: float
    merge_us: float

    @classmethod
    def of(cls, device: Device) -> Self | None:
        """The rates of H200 for devices of its compute capability; None for others, which were not measured."""
        if device.type != "cuda" or device.capability != (9, 0):
            return None
        return cls(4.3e6, 6e8, 1.7e5, 8.0, 4.0)


@dataclasses.dataclass(frozen=True, slots=True)
class SharingCost:
    """The times of the sharded layers of a model in one decode step, in microseconds.

    Args:
        ranks: that share the tokens.
        specs: of the sharded layers.
        rates: of the devices.
    """

    ranks: int
    specs: tuple[LayerSpec, ...]
    rates: DeviceRates

    @classmethod
    def of(cls, ranks: int, specs: Iterable[LayerSpec], device: Device) -> Self | None:
        """The cost for a device; None without sharded layers, or for a device that was not measured."""
        ranks = check_size("ranks", ranks)
        if not isinstance(device, Device):
            raise SpecError("device", device, "must be a Device")
        try:
            layers = tuple(specs)
        except Exception:  # noqa: BLE001  (`__iter__` is code of the caller)
            raise SpecError("specs", specs, "must be LayerSpecs") from None
        if not all(isinstance(each, LayerSpec) for each in layers):
            raise SpecError("specs", specs, "must be LayerSpecs")
        rates = DeviceRates.of(device)
        return cls(ranks, layers, rates) if rates is not None and layers else None

    def attention_us(self, tokens: int) -> float:
        """The layers of one rank that has all keys: `tokens` of all requests together."""
        return tokens * sum(map(self._token_us, self.specs))

    def exchange_us(self, requests: int) -> float:
        """The exchange of partial results and their merge, of all layers."""
        return sum(self._exchange_us(spec, requests) for spec in self.specs)

    def shared_us(self, requests: int, tokens: int) -> float:
        """The layers of ranks that share `tokens` of all requests."""
        return self.attention_us(tokens) / self.ranks + self.exchange_us(requests)

    def pays_from(self, requests: int) -> int:
        """The computed tokens of each of so many requests from which ranks are faster than one GPU."""
        gain = self.attention_us(requests) * (1 - 1 / self.ranks)
        return math.ceil(self.exchange_us(requests) / gain)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object: rates, and the lengths by number of requests."""
        lengths = {str(requests): self.pays_from(requests) for requests in REQUESTS}
        return {"rates": dataclasses.asdict(self.rates), "pays_from": lengths}

    def __str__(self) -> str:
        one, *more = ((requests, self.pays_from(requests)) for requests in REQUESTS)
        others = " and ".join(f"{tokens:,} of each of {requests}" for requests, tokens in more)
        return (
            f"sharing tokens makes decodes faster from {one[1]:,} tokens of one request, {others}, "
            f"by a model of times measured on two H200"
        )

    def _token_us(self, spec: LayerSpec) -> float:
        """A decode is bound by the bytes of its keys, or with many heads on one latent by its products."""
        pages = kv_cache_spec_for(spec, block := spec.block_size or 16)
        stored = 0.0 if pages is None else pages.page_size_bytes / block
        key, value = spec.head_size, spec.head_size_v if spec.mla is None else spec.mla.kv_lora_rank
        flops = 2 * spec.num_heads * (key + value)
        return max(stored / self.rates.kv_bytes, flops / self.rates.flops)

    def _exchange_us(self, spec: LayerSpec, requests: int) -> float:
        rows, rates, others = requests * spec.num_heads, self.rates, self.ranks - 1
        outputs = rows * spec.output_size * element_size(spec.dtype)
        if outputs <= MOST_SENT_BYTES:
            received, collectives = float(others * (outputs + 4 * rows)), 1
        else:
            received, collectives = others * 4 * rows + 2 * others / self.ranks * outputs, 2
        return collectives * rates.collective_us + received / rates.link_bytes + rates.merge_us
