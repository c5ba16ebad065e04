"""Timers: microseconds of a call on a CPU, and on a GPU by graph replay or behind a sleeping device.

The ceilings of a device, copy and matmul, and the share of them that a measured time reaches.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from attnplug.testing.captures import captured
from attnplug.tuning.rounds import DeviceState

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec
    from attnplug.registry.measured.step_shapes import StepShape


Call: TypeAlias = Callable[[int], object]
"""One forward on the copy of the cache with this number."""

# A round lasts at least this long, because a short one measures the clock.
_ROUND_US = 10_000.0
_MOST_CALLS = 200
# Cycles for which the GPU waits until the host has issued all calls: a millisecond, then more where it was too short.
_SLEEPS = (2_000_000, 8_000_000, 32_000_000)

_MUCH = 1 << 30
"""Bytes that are more than a process needs between two jobs."""


class Timer(Protocol):
    """Makes the rounds of a candidate."""

    has_graphs: bool
    """Whether it replays graphs."""

    def prepare(self, call: Call, copies: int, *, graph: bool) -> Callable[[], float]:
        """A function that runs one round and gives microseconds of one call.

        Args:
            call: the forward; its argument chooses one of the copies of the cache in turn.
            copies: the number of copies.
            graph: time the replay of a graph, if this device has graphs; else calls, with the time that the host
                takes where it is slower than the device.
        """
        ...

    def moment(self) -> DeviceState:
        """The state of the device now."""
        ...

    def us(self, run: Callable[[], object]) -> float:
        """Microseconds of one call."""
        ...


@dataclasses.dataclass
class HostTimer:
    """Times calls on the host's clock: for CPUs, whose calls return when they are done.

    Args:
        clock: gives seconds.
        round_us: least microseconds of a round.
    """

    clock: Callable[[], float] = time.perf_counter
    round_us: float = _ROUND_US
    has_graphs: bool = False

    def prepare(self, call: Call, copies: int, *, graph: bool) -> Callable[[], float]:
        """As `Timer.prepare`; a CPU has no graphs."""
        call(0)
        count = _count(self._us(call, 1), self.round_us)
        return lambda: self._us(call, count)

    def moment(self) -> DeviceState:
        """As `Timer.moment`, with a matmul of a tenth of a millisecond."""
        factor, product = _factors("cpu", 256, torch.float32)
        return DeviceState(min(self.us(lambda: torch.mm(factor, factor, out=product)) for _ in range(3)))

    def us(self, run: Callable[[], object]) -> float:
        """As `Timer.us`."""
        return self._us(lambda _: run(), 1)

    def _us(self, call: Call, count: int) -> float:
        begin = self.clock()
        for index in range(count):
            call(index)
        return 1e6 * (self.clock() - begin) / count


@dataclasses.dataclass
class GpuTimer:
    """Times a GPU by events.

    Args:
        sleeps: cycles for which the GPU waits until the host has issued a round; empty to count the host's time too.
    """

    sleeps: Sequence[int] = _SLEEPS
    has_graphs: bool = True

    def prepare(self, call: Call, copies: int, *, graph: bool) -> Callable[[], float]:
        """As `Timer.prepare`. A prefill is timed while the GPU sleeps, because its host runs ahead in a model too.

        Raises what the capture of a graph raises.
        """
        for index in range(2):
            call(index)
        torch.cuda.synchronize()
        count = _count(1e3 * timed_ms(lambda: call(0)), _ROUND_US)
        if graph:
            # A multiple of the copies, so that each is read once before it is read again.
            some = copies * max(1, min(-(-16 // copies), -(-count // copies)))
            run = captured(functools.partial(_call_all, call, some))
        else:
            # Few calls at once: the host must issue all of them while the GPU sleeps.
            some = max(1, min(count, 4 * copies, 16))
            run = functools.partial(_call_all, call, some)
        repeats = max(1, min(-(-count // some), 16))
        return lambda: statistics.median(1e3 * timed_ms(run, self.sleeps) / some for _ in range(repeats))

    def moment(self) -> DeviceState:
        """As `Timer.moment`, with matmuls of half a millisecond, and the memory that is not of this process."""
        factor, product = _factors("cuda", 4096, torch.bfloat16)

        def run() -> None:
            for _ in range(3):
                torch.mm(factor, factor, out=product)

        return DeviceState(min(self.us(run) for _ in range(3)), others_bytes())

    def us(self, run: Callable[[], object]) -> float:
        """As `Timer.us`."""
        return 1e3 * timed_ms(run, _SLEEPS)


@functools.cache
def _factors(device: str, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # Random numbers, because a GPU multiplies zeros at a higher clock.
    factor = torch.randn(size, size, device=device, dtype=dtype)
    return factor, torch.empty_like(factor)


def others_bytes() -> int:
    """Bytes of the current GPU's memory that are not in this process's pool: other processes', and its own context."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def _call_all(call: Call, count: int) -> None:
    for index in range(count):
        call(index)


def _count(us: float, round_us: float) -> int:
    return max(1, min(int(round_us / max(us, 1e-3)) + 1, _MOST_CALLS))


def timed_ms(run: Callable[[], object], sleeps: Sequence[int] = _SLEEPS) -> float:
    """Milliseconds of the GPU for `run`; with `sleeps` the host issues all of it while the GPU sleeps, if it can."""
    events: Any = torch.cuda.Event
    begin, end = (events(enable_timing=True) for _ in range(2))
    for cycles in sleeps or (0,):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        was_late = begin.query()
        torch.cuda.synchronize()
        if not was_late:
            break
    return float(begin.elapsed_time(end))


def timer_for(device_type: str, *, host: bool = False) -> Timer:
    """The timer of a kind of device; with `host` it counts the host's time of launches on a GPU too."""
    return HostTimer() if device_type == "cpu" else GpuTimer(() if host else _SLEEPS)


def least_bytes(device: torch.device) -> int:
    """Bytes of KV that calls in turn must read before they read the first again: twice the L2; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    return 2 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give a GPU's memory back that nothing uses: the caches of the next job have other sizes."""
    if device.type == "cpu":
        return
    # Objects that refer to each other, such as FlashInfer's plans and wrappers, keep their workspaces until a collection.
    # That takes a tenth of a second and more, so few jobs wait for one.
    if torch.cuda.memory_allocated() > _MUCH:
        gc.collect()
    torch.cuda.empty_cache()


COPY, MATMUL = "copy GB/s", "matmul TFLOP/s"
"""Keys of a table's environment."""
_REPEATS = 5
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def measured_ceilings(
    device: torch.device, clock_us: Callable[[Callable[[], object]], float]
) -> dict[str, str]:
    """The bandwidth of a copy, reads and writes together, and the rate of a matmul; as text for a table.

    Args:
        device: to measure.
        clock_us: gives the microseconds of a function on the device.
    """
    on_cpu = device.type == "cpu"
    source = torch.ones(1 << (22 if on_cpu else 28), device=device)
    target = torch.empty_like(source)
    size, dtype = (256, torch.float32) if on_cpu else (8192, torch.bfloat16)
    # Random numbers, because a GPU multiplies zeros at a higher clock.
    factor = torch.randn(size, size, device=device, dtype=dtype)
    product = torch.empty_like(factor)

    def best(run: Callable[[], object]) -> float:
        run()
        return min(clock_us(run) for _ in range(_REPEATS))

    copied = 2 * source.nbytes / best(lambda: target.copy_(source))
    multiplied = 2 * size**3 / best(lambda: torch.mm(factor, factor, out=product))
    return {COPY: f"{copied / 1e3:.4g}", MATMUL: f"{multiplied / 1e6:.4g}"}


def share_of_ceiling(
    spec: LayerSpec, shape: StepShape, us: float, environment: Mapping[str, str]
) -> tuple[str, float] | None:
    """The ceiling that bounds the step more, copy or matmul, and the share of it that a time reaches; None without both."""
    try:
        copy, matmul = float(environment[COPY]), float(environment[MATMUL])
    except (KeyError, ValueError):
        return None
    if not (copy > 0 and matmul > 0 and us > 0):
        return None
    shares = {
        "copy": step_bytes(spec, shape) / us / (copy * 1e3),
        "matmul": step_flops(spec, shape) / us / (matmul * 1e6),
    }
    bound = max(shares, key=shares.__getitem__)
    return bound, shares[bound]


def step_bytes(spec: LayerSpec, shape: StepShape) -> int:
    """Bytes that attention must move in a step: the keys and values that any query sees, the queries and the outputs."""
    from attnplug.core.dtypes import is_quantized_kv_cache

    stored = 1 if is_quantized_kv_cache(spec.kv_cache_dtype) else _BYTES.get(spec.resolved_kv_cache_dtype, 2)
    # A latent contains its value.
    row = spec.head_size if spec.mla is not None else spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    keys = sum(
        min(length, _reach(spec, length) + query - 1)
        for length, query in zip(shape.lengths, shape.query_lens, strict=True)
    )
    ends = spec.num_heads * (spec.query_size + spec.output_size) * _BYTES.get(spec.dtype, 2)
    return keys * row * stored + sum(shape.query_lens) * ends


def step_flops(spec: LayerSpec, shape: StepShape) -> int:
    """Floating-point operations of both matmuls of a step."""
    pairs = 0
    for length, query in zip(shape.lengths, shape.query_lens, strict=True):
        if not spec.causal:
            pairs += query * length
            continue
        # Row by row from the first new token: it sees all tokens up to its own, or those that its window reaches.
        first, reach = length - query + 1, _reach(spec, length)
        growing = max(0, min(query, reach - first))
        pairs += growing * (2 * first + growing - 1) // 2 + (query - growing) * min(reach, length)
    return 2 * spec.num_heads * (spec.head_size + spec.head_size_v) * pairs


def _reach(spec: LayerSpec, length: int) -> int:
    """The most keys that a query sees."""
    left = spec.window[0]
    reach = length if left < 0 else min(length, left + 1)
    return reach if spec.chunk_size is None else min(reach, spec.chunk_size)
