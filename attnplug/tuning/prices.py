"""The prices of shared prefixes of a layer on this device: fitted to steps that run plainly, and with all that can be shared."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.planning import plan
from attnplug.registry.measured.sharing_prices import SharingPrices
from attnplug.runtime.attention_runtime import AttentionRuntime
from attnplug.runtime.batch.forest_prices import LayerPrices
from attnplug.testing.drawn_values import layer_tensors
from attnplug.tuning.timers import least_bytes, synchronize

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec
    from attnplug.runtime.plan.model_plan import ModelPlan
    from attnplug.tuning.timers import Timer


@dataclasses.dataclass(frozen=True, slots=True)
class PriceStep:
    """A step of decodes that is timed for the fit.

    Args:
        prompts: prefixes that requests share.
        keys: tokens of each.
        readers: requests of each.
        own: further tokens of each request.
    """

    prompts: int
    keys: int
    readers: int
    own: int

    @property
    def requests(self) -> int:
        """All requests of the step."""
        return self.prompts * self.readers

    @property
    def read(self) -> int:
        """Keys that a plain step reads."""
        return self.requests * (self.keys + self.own)


@dataclasses.dataclass(frozen=True, slots=True)
class PriceTimes:
    """Seconds of a layer in a step."""

    plain: float
    shared: float


# With many and few readers, and long and short prefixes, so that the constants can be told apart. There are two prompts at
# least, because a builder may attend one prefix of all requests by a kernel of its own.
_OF_GPU = (
    PriceStep(8, 4096, 16, 128),
    PriceStep(2, 8192, 32, 128),
    PriceStep(16, 2048, 8, 128),
    PriceStep(2, 8192, 4, 128),
    PriceStep(4, 1024, 32, 128),
    PriceStep(4, 2048, 4, 256),
    PriceStep(2, 512, 16, 64),
    PriceStep(2, 512, 4, 64),
)
_OF_CPU = (
    PriceStep(2, 1024, 6, 16),
    PriceStep(2, 512, 12, 16),
    PriceStep(4, 512, 4, 16),
    PriceStep(2, 1536, 3, 16),
    PriceStep(2, 128, 12, 16),
    PriceStep(2, 64, 2, 16),
)
_ROUNDS = 5
_LEAST_MARGIN = 0.02
_MOST_LAYERS = 8
_NEVER = 1e-18
"""Seconds of an operation that no device is as fast as."""


def steps_for(device: Device) -> tuple[PriceStep, ...]:
    """The steps that are timed on a device."""
    return _OF_CPU if device.type == "cpu" else _OF_GPU


def measured_prices(
    spec: LayerSpec, backend: str, device: Device, timer: Timer, steps: Sequence[PriceStep] = ()
) -> tuple[SharingPrices, float, int]:
    """The prices of one backend, the relative error of the fit, and the number of steps.

    Windows and chunks are left out, because few of the steps could share then; the kernels read keys at the same rates.

    Args:
        spec: the layer.
        backend: its name.
        device: of this machine.
        timer: gives the time of calls, without that of the host on a GPU.
        steps: to be timed; by default those of the device.

    Raises:
        AttnplugError: the backend shares no prefix of the layer, or refuses a step.
    """
    steps = steps or steps_for(device)
    where = torch.device("cpu" if device.type == "cpu" else "cuda")
    spec = spec.replace(window=(-1, -1), chunk_size=None)
    bench = _Bench(spec, backend, where, steps)
    times = [bench.times(step, timer) for step in steps]
    host = 0.0 if where.type == "cpu" else bench.host(min(steps, key=lambda step: step.read))
    prices, error = fitted(steps, times, spec, bench.block_size, host)
    return prices, error, len(steps)


def fitted(
    steps: Sequence[PriceStep],
    times: Sequence[PriceTimes],
    spec: LayerSpec,
    block_size: int,
    host: float = 0.0,
) -> tuple[SharingPrices, float]:
    """The prices by which `LayerPrices` comes nearest to the times, and its median error relative to plain times.

    Plain steps give the time of a key that several requests read. The differences give the rest: reads of pieces are no
    faster than that, and no cost is negative.
    """
    cache = kv_cache_spec_for(spec, block_size)
    if cache is None:
        raise ValueError(f"a layer of {spec.attn_type} has no pages")
    plain, shared = (np.array([getattr(each, name) for each in times]) for name in ("plain", "shared"))
    read = np.array([float(step.read) for step in steps])
    whole = np.array([float(step.prompts * step.keys) for step in steps])
    rows = np.array([float(step.requests) for step in steps])
    seen = rows * np.array([float(step.keys) for step in steps])
    # A plain step has a cost without any key too, which no sharing saves.
    _, of_reader = _least_squares(np.stack([np.ones_like(read), read]).T, plain, 1 / plain)
    of_reader = max(of_reader, float(np.min(plain / read)) / 4)
    # A merge is written and read at the rate of keys: `LayerPrices` says how many bytes it is.
    unit = LayerPrices.of(SharingPrices(1.0, 1.0, 1.0, 0.0), spec.num_heads, cache)
    of_merge = unit.merge / cache.bytes_per_token
    apart = 1.1 * whole + rows * of_merge
    extra = of_reader * seen - (plain - shared) - of_reader * apart
    slower, of_product, calls = _least_squares(
        np.stack([apart, seen, np.ones_like(seen)]).T, extra, 1 / plain
    )
    key_read = of_reader + slower
    prices = SharingPrices(
        bandwidth=cache.bytes_per_token / key_read,
        reread=min(of_reader / key_read, 1.0),
        products=unit.key_product / max(of_product, unit.key_product * _NEVER),
        calls=calls,
        host=host,
    )
    priced = LayerPrices.of(prices, spec.num_heads, cache)
    found = [step.prompts * priced.saved(step.readers, step.readers, step.keys) - calls for step in steps]
    error = statistics.median(abs((plain - shared - np.array(found)) / plain).tolist())
    return dataclasses.replace(prices, margin=max(error, _LEAST_MARGIN)), error


def _least_squares(columns: Any, wanted: Any, weights: Any) -> list[float]:
    """The solution without negative numbers; there are few columns, so each choice of them is tried."""
    best, least = [0.0] * columns.shape[1], float(np.sum((wanted * weights) ** 2))
    for count in range(1, columns.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(columns.shape[1]), count)):
            part = columns[:, chosen] * weights[:, None]
            # Columns of unlike units are scaled, so that none is lost to rounding.
            scale = np.linalg.norm(part, axis=0)
            found = np.linalg.lstsq(part / scale, wanted * weights, rcond=None)[0] / scale
            lost = float(np.sum((part @ found - wanted * weights) ** 2))
            if (found >= 0).all() and lost < least:
                best, least = [0.0] * columns.shape[1], lost
                for at, value in zip(chosen, found.tolist(), strict=True):
                    best[at] = value
    return best


class _Bench:
    """Equal layers over random pages, by a runtime that shares nothing and one that shares all that it can."""

    def __init__(
        self, spec: LayerSpec, backend: str, device: torch.device, steps: Sequence[PriceStep]
    ) -> None:
        self.device = device
        self.spec, self._backend = spec, backend
        first = self._planned(1, 2)
        ((group, *_),) = (first.kv_cache_config.kv_cache_groups,)
        self.block_size = group.kv_cache_spec.block_size
        # Each layer has pages of its own, so that no cache of the device has those of the next.
        least = min(step.prompts * step.keys + step.requests * step.own for step in steps)
        some = -(-least_bytes(device) // (least * group.kv_cache_spec.bytes_per_token))
        layers = max(1, min(some, _MOST_LAYERS))
        size = self.block_size
        blocks = (
            step.prompts * (step.keys // size) + step.requests * ((step.keys % size + step.own) // size + 1)
            for step in steps
        )
        self.plan = self._planned(layers, 1 + max(blocks))
        self.names = list(self.plan.specs)
        requests = max(step.requests for step in steps)
        self.longest = max(step.keys + step.own for step in steps) + 1
        config = BuilderConfig(
            max_num_seqs=requests, max_num_batched_tokens=max(requests, 64), max_model_len=self.longest
        )
        drawn = layer_tensors(spec, seed=0, device=str(device))
        given: dict[str, Any] = {"config": config, "debug": False}
        tensors = dict.fromkeys(self.names, drawn)
        plain = AttentionRuntime(self.plan, tensors, prefix_sharing=False, **given)
        for cache in plain.kv_caches.values():
            if cache.dtype.is_floating_point:
                cache.copy_(torch.randn(cache.shape, device=device, dtype=torch.bfloat16).to(cache.dtype))
        pages = dict(plain.kv_caches)
        free = SharingPrices.free()
        self.runtimes = (
            plain,
            AttentionRuntime(self.plan, tensors, prefix_sharing=free, kv_caches=pages, **given),
        )
        kv_heads = spec.num_kv_heads
        sizes = (spec.num_heads, spec.head_size), (kv_heads, spec.head_size), (kv_heads, spec.head_size_v)
        kind = getattr(torch, spec.dtype)
        self.inputs = [torch.randn(requests, *each, device=device, dtype=kind) for each in sizes]

    def _planned(self, layers: int, blocks: int) -> ModelPlan:
        specs = {f"layer.{at}": self.spec for at in range(layers)}
        return plan(specs, self.device, num_blocks=blocks, backend=self._backend, tuned=False)

    def begin(self, step: PriceStep) -> list[Callable[[], None]]:
        """Functions that begin the step, plainly and shared."""
        begins = list[Callable[[], None]]()
        for runtime in self.runtimes:
            builder, size = runtime.step_batch_builder(self.longest), self.block_size
            count, blocks = 1, list[int]()

            def take(number: int) -> list[int]:
                nonlocal count
                count += number
                return list(range(count - number, count))

            for prompt in range(step.prompts):
                blocks = take(step.keys // size)
                for reader in range(step.readers):
                    computed = step.keys + step.own
                    held = [*blocks, *take(computed // size + 1 - len(blocks))]
                    builder.add_request(f"{prompt}.{reader}", [held], computed)

            def begin(runtime: AttentionRuntime = runtime, builder: Any = builder) -> None:
                runtime.begin_step(builder.step(1))

            begins.append(begin)
        return begins

    def times(self, step: PriceStep, timer: Timer) -> PriceTimes:
        """Seconds of a layer: both kinds take turns, and the least of the rounds counts."""
        rounds = []
        inputs = [each[: step.requests] for each in self.inputs]
        for runtime, begin in zip(self.runtimes, self.begin(step), strict=True):
            begin()

            @torch.inference_mode()
            def call(index: int, runtime: AttentionRuntime = runtime) -> None:
                runtime.forward(self.names[index % len(self.names)], *inputs)

            call(0)
            rounds.append(timer.prepare(call, len(self.names), graph=False))
        found = [[run() for run in rounds] for _ in range(_ROUNDS)]
        plain, shared = (min(each) / 1e6 for each in zip(*found, strict=True))
        return PriceTimes(plain, shared)

    @torch.inference_mode()
    def host(self, step: PriceStep) -> float:
        """Seconds of the host for a layer of a shared step, doubled: an engine's other operations take as long."""
        begin, inputs = self.begin(step)[1], [each[: step.requests] for each in self.inputs]
        taken = []
        for _ in range(2 * _ROUNDS):
            synchronize(self.device)
            start = time.perf_counter()
            begin()
            for name in self.names:
                self.runtimes[1].forward(name, *inputs)
            taken.append((time.perf_counter() - start) / len(self.names))
        return 2 * statistics.median(taken)
