"""The ceilings of a device, copy and matmul, and the share of them that a measured time reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from attnplug.core.spec import LayerSpec
    from attnplug.registry.measured.step_shapes import StepShape

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
    import torch

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
