"""Decodes over latents for benchmarks/mla.py: attnplug's backends, FlashInfer called directly, and vLLM's kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mla_latents import DIMS, TOLERANCE, Call, Cell, Latents, parts_of
from paged_layers import interleaved_us
from vllm_triton_mla import vllm_triton

from attnplug.backends.flash_mla.backend import FlashMLABackend
from attnplug.backends.flashinfer.backend import FlashInferBackend
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.triton.backend import TritonBackend
from attnplug.core import AttentionBackend, Phase
from attnplug.registry.devices import resolve_device

__all__ = ["CELLS", "CONTENDERS", "PEERS", "measured_decodes", "through"]

CELLS = [
    *(Cell(64, 8192, heads) for heads in (16, 32, 64, 128)),
    *(Cell(8, 32768, heads) for heads in (16, 32, 64, 128)),
    Cell(64, 8192, 16, 4),
    *(Cell(*size, 16, stored="fp8") for size in ((64, 8192), (8, 32768))),
    *(Cell(64, 8192, heads, stored="fp8") for heads in (32, 64)),
    *(Cell(1, 8192, heads) for heads in (16, 32, 128)),
    Cell(128, 2048, 128),
    *(Cell(64, 8192, heads, page=1) for heads in (16, 128)),
    Cell(64, 8192, 128, stored="fp8"),
    Cell(8, 32768, 16, 4),
    Cell(64, 8192, 20),
]


def through(backend: type[AttentionBackend]) -> Callable[[Latents], Call]:
    """The decode of a backend's own impl, on a step of its own builder."""

    def made(latents: Latents) -> Call:
        serving, cell = backend.for_layer(latents.spec), latents.cell
        device = resolve_device(latents.device.type)
        for reason in serving.validate_configuration(latents.spec, device, Phase.DECODE):
            raise ValueError(str(reason))
        several = {"num_speculative_tokens": cell.queries - 1, "max_num_seqs": cell.requests}
        impl, builder = parts_of(serving, latents.spec, latents.device, **several)
        step = builder.build(0, latents.common).decode
        heads = serving.padded_heads(cell.heads)  # type: ignore[attr-defined]
        more = (0, 0, 0, heads - cell.heads)
        q_nope, q_pe = (torch.nn.functional.pad(each, more) for each in (latents.q_nope, latents.q_pe))
        if serving.query_layout == "packed":  # type: ignore[attr-defined]
            packed = torch.cat((q_nope, q_pe), dim=2)
            q_nope, q_pe = packed.tensor_split((DIMS.kv_lora_rank,), dim=2)

        def run(index: int) -> torch.Tensor:
            output, _ = impl.decoded(q_nope, q_pe, latents.cache(index), step, False)
            return output[:, : cell.heads]

        return run

    return made


def flashinfer(latents: Latents) -> Call:
    if latents.spec.has_quantized_kv_cache:
        raise ValueError("FlashInfer 0.6 has no fp8 latents")
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    cell, rank = latents.cell, DIMS.kv_lora_rank
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa3"
    )
    pages = torch.arange(cell.requests + 1, dtype=torch.int32) * (cell.length // cell.page)
    sizes = cell.heads, rank, DIMS.qk_rope_head_dim, cell.page
    lens = latents.common.seq_lens.cpu()
    starts = latents.common.query_start_loc_cpu
    dtypes = latents.query.dtype, latents.caches[0].dtype
    causal = cell.queries > 1
    wrapper.plan(starts, pages, latents.table.flatten(), lens, *sizes, causal, latents.scale, *dtypes)
    output = torch.empty_like(latents.q_nope)

    def run(index: int) -> torch.Tensor:
        cache = latents.cache(index)
        parts = cache[..., :rank], cache[..., rank:]
        found: torch.Tensor = wrapper.run(latents.q_nope, latents.q_pe, *parts, out=output)
        return found

    return run


def flash_mla(latents: Latents) -> Call:
    if latents.spec.has_quantized_kv_cache:
        raise ValueError("FlashMLA takes 8-bit queries there, which FLASH_MLA makes in each call")
    import flash_mla

    cell, lens = latents.cell, latents.common.seq_lens
    query = torch.cat((latents.q_nope, latents.q_pe), dim=2).unflatten(0, (cell.requests, cell.queries))
    # The first call divides the requests, before the graph is captured.
    schedule, _ = flash_mla.get_mla_metadata()
    given = {"softmax_scale": latents.scale, "causal": cell.queries > 1, "use_legacy": True}

    def run(index: int) -> torch.Tensor:
        pages = latents.cache(index)[:, :, None]
        out, _ = flash_mla.flash_mla_with_kvcache(
            query, pages, latents.table, lens, DIMS.kv_lora_rank, schedule, **given
        )
        return out.flatten(0, 1)  # type: ignore[no-any-return]

    return run


PEERS: dict[str, Callable[[Latents], Call]] = {
    "FlashInfer fa3": flashinfer,
    "FlashMLA": flash_mla,
    "vLLM Triton": vllm_triton,
}
CONTENDERS: dict[str, Callable[[Latents], Call]] = {
    "TRITON": through(TritonBackend),
    "FLASHINFER": through(FlashInferBackend),
    "FLASH_MLA": through(FlashMLABackend),
    "TORCH": through(TorchBackend),
    **PEERS,
}


def measured_decodes(
    cells: Sequence[Cell], names: Sequence[str], ceilings: Mapping[str, float], device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Each cell with the error of every contender, and on a GPU the microseconds of those that are right."""
    for cell in cells:
        latents = Latents(cell, device)
        calls, errors, refused = _right_calls(latents, names)
        times = interleaved_us(calls, max(5, len(latents.caches))) if device == "cuda" else {}
        row = {**dataclasses.asdict(cell), "cell": cell.name, "bytes": cell.bytes, "flops": cell.flops}
        print(cell.name)
        if times:
            ceiling = cell.bytes / ceilings["copy_tbps"], cell.flops / ceilings["matmul_tflops"]
            row["floor_us"] = max(ceiling) / 1e6
            print(f"    {'floor':16}{row['floor_us']:8.1f} us")
        for name, error in errors.items():
            print(f"    {name:16}{_speed(cell, times.get(name), ceilings)}relative error {error:.1e}")
        for name, why in refused.items():
            print(f"    {name:16}{why[:100]}", flush=True)
        yield {**row, "us": times, "relative_errors": errors, "errors": refused}


def _right_calls(
    latents: Latents, names: Sequence[str]
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """The contenders that are right, the errors of all that ran, and why the others are not measured."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            call = CONTENDERS[name](latents)
            error = latents.error(call(0))
        except Exception as problem:  # noqa: BLE001 - a peer that is absent or refuses
            refused[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            continue
        errors[name] = error
        # NaN is not less.
        if error < TOLERANCE:
            calls[name] = call
        else:
            refused[name] = f"wrong: {error:.2g}"
    return calls, errors, refused


def _speed(cell: Cell, us: float | None, ceilings: Mapping[str, float]) -> str:
    if us is None:
        return ""
    share = cell.bytes / us / 1e6 / ceilings["copy_tbps"]
    return f"{us:8.1f} us{share:8.0%} of copy{cell.flops / us / 1e6:8.0f} TFLOP/s   "
