"""Decodes over latents (MLA) on a GPU: TRITON beside FlashInfer's fa3 kernel, where that is installed.

    python benchmarks/mla.py --json mla.json
    python benchmarks/mla.py --smoke      # without a GPU and without times: small cells on TORCH are right

Ceilings first (copy, matrix product on random data), then every cell: correctness against float32, then the times of
all contenders in turn, by graph replay and over more latents than the L2 holds. Only the decode is timed, without the
products with W_UK and W_UV.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention import measure_ceilings
from paged_layers import interleaved_us

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.triton.backend import TritonBackend
from attnplug.core import AttentionBackend, BuilderConfig, CommonAttentionMetadata, LayerSpec, LayerTensors
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.mla import MLADims
from attnplug.core.parts import make_builder, make_impl

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
PAGE = 64
TOLERANCE = 1e-2
_MORE_THAN_L2 = 200_000_000


@dataclasses.dataclass(frozen=True)
class Cell:
    """A batch of `requests` of `length` tokens with `queries` new ones each, and the heads of a rank."""

    requests: int
    length: int
    heads: int
    queries: int = 1

    @property
    def name(self) -> str:
        more = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.requests} x {self.length}, {self.heads} heads{more}"

    @property
    def bytes(self) -> int:
        return self.requests * self.length * (DIMS.kv_lora_rank + DIMS.qk_rope_head_dim) * 2

    @property
    def flops(self) -> int:
        per_key = 2 * (2 * DIMS.kv_lora_rank + DIMS.qk_rope_head_dim)
        return self.requests * self.length * self.heads * self.queries * per_key


CELLS = [
    *(Cell(64, 8192, heads) for heads in (16, 32, 64, 128)),
    *(Cell(8, 32768, heads) for heads in (16, 128)),
    Cell(64, 8192, 16, 4),
    *(Cell(1, 8192, heads) for heads in (16, 128)),
]
SMOKE_CELLS = [Cell(2, 256, 16), Cell(1, 128, 20), Cell(3, 128, 4, 4)]


class Latents:
    """The tensors of a cell: absorbed queries, and as many caches as the L2 cannot hold."""

    def __init__(self, cell: Cell, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.cell, size = cell, DIMS.kv_lora_rank + DIMS.qk_rope_head_dim
        blocks = cell.requests * cell.length // PAGE
        copies = min(max(1, -(-_MORE_THAN_L2 // cell.bytes)), 8 if device == "cuda" else 1)
        shape = blocks + 1, PAGE, size
        self.caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        self.table = (torch.randperm(blocks).int() + 1).view(cell.requests, -1).to(device)
        tokens = cell.requests * cell.queries
        query = torch.randn(tokens, cell.heads, size, device=device, dtype=torch.bfloat16)
        self.q_nope, self.q_pe = (
            part.contiguous() for part in query.tensor_split((DIMS.kv_lora_rank,), dim=2)
        )
        self.output, self.scale = torch.empty_like(self.q_nope), 192**-0.5
        starts = torch.arange(cell.requests + 1, dtype=torch.int32) * cell.queries
        lens = np.full(cell.requests, cell.length, dtype=np.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lens).to(device),
            num_reqs=cell.requests,
            num_actual_tokens=tokens,
            max_query_len=cell.queries,
            max_seq_len=cell.length,
            block_table_tensor=self.table,
            slot_mapping=torch.full((tokens,), -1, device=device),
            seq_lens_host=lens,
        )

    def error(self, output: torch.Tensor) -> float:
        """The relative error of the first request."""
        cell, rank = self.cell, DIMS.kv_lora_rank
        rows = self.caches[0][self.table[0].long()].flatten(0, 1).float()
        query = torch.cat((self.q_nope, self.q_pe), 2)[: cell.queries].float()
        logits = torch.einsum("qhd,kd->qhk", query, rows) * self.scale
        places = torch.arange(cell.length, device=self.device)
        logits.masked_fill_(places > places[cell.length - cell.queries :, None, None], -torch.inf)
        expected = torch.einsum("qhk,kd->qhd", logits.softmax(2), rows[:, :rank])
        return float((output[: cell.queries].float() - expected).norm() / expected.norm())


def triton(latents: Latents) -> Callable[[int], torch.Tensor]:
    return decode_of(TritonBackend, latents)


def torch_native(latents: Latents) -> Callable[[int], torch.Tensor]:
    return decode_of(TorchBackend, latents)


def decode_of(of: type[AttentionBackend], latents: Latents) -> Callable[[int], torch.Tensor]:
    cell = latents.cell
    spec = LayerSpec(
        num_heads=cell.heads, num_kv_heads=1, head_size=576, dtype="bfloat16", mla=DIMS, block_size=PAGE
    )
    backend = of.for_layer(spec)
    weights = torch.zeros(cell.heads, 128, DIMS.kv_lora_rank, device=latents.device, dtype=torch.bfloat16)
    tensors = LayerTensors(w_uk=weights, w_uv=weights.mT.contiguous())
    impl: Any = make_impl(backend, spec, layer_name="layer", tensors=tensors)
    impl.softmax_scale = latents.scale
    config = BuilderConfig(max_num_seqs=cell.requests, layers={"layer": types.SimpleNamespace(impl=impl)})
    pages: Any = kv_cache_spec_for(spec, PAGE)
    builder = make_builder(backend, pages, ["layer"], config, latents.device)
    step = builder.build(0, latents.common).decode

    def run(index: int) -> torch.Tensor:
        cache = latents.caches[index % len(latents.caches)]
        impl.decode(latents.q_nope, latents.q_pe, cache, step, latents.output, None)
        return latents.output

    return run


def flashinfer(latents: Latents) -> Callable[[int], torch.Tensor]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    cell, rank = latents.cell, DIMS.kv_lora_rank
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa3"
    )
    pages = torch.arange(cell.requests + 1, dtype=torch.int32) * (cell.length // PAGE)
    sizes = cell.heads, rank, DIMS.qk_rope_head_dim, PAGE
    lens = latents.common.seq_lens.cpu()
    starts = latents.common.query_start_loc_cpu
    causal = cell.queries > 1
    wrapper.plan(
        starts, pages, latents.table.flatten(), lens, *sizes, causal, latents.scale, *(torch.bfloat16,) * 2
    )
    output = torch.empty_like(latents.q_nope)

    def run(index: int) -> torch.Tensor:
        cache = latents.caches[index % len(latents.caches)]
        parts = cache[..., :rank], cache[..., rank:]
        found: torch.Tensor = wrapper.run(latents.q_nope, latents.q_pe, *parts, out=output)
        return found

    return run


CONTENDERS: dict[str, Callable[[Latents], Callable[[int], torch.Tensor]]] = {
    "TRITON": triton,
    "FlashInfer fa3": flashinfer,
}


def measure(cell: Cell, ceilings: dict[str, float], names: Sequence[str]) -> dict[str, Any]:
    latents = Latents(cell)
    calls: dict[str, Callable[[int], object]] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            call = CONTENDERS[name](latents)
            error = latents.error(call(0))
        except Exception as problem:  # noqa: BLE001 - a peer that is absent or refuses
            errors[name] = f"{type(problem).__name__}: {problem}"
            continue
        if error > TOLERANCE:
            errors[name] = f"wrong: {error:.2g}"
            continue
        calls[name] = call
    times = interleaved_us(calls, 5)
    floor = max(cell.bytes / ceilings["copy_tbps"], cell.flops / ceilings["matmul_tflops"]) / 1e6
    print(f"{cell.name}: floor {floor:.1f} us")
    for name, us in times.items():
        share = cell.bytes / us / 1e6 / ceilings["copy_tbps"]
        print(f"    {name:16}{us:8.1f} us{share:8.0%} of copy{cell.flops / us / 1e6:8.0f} TFLOP/s")
    for name, text in errors.items():
        print(f"    {name:16}{text[:90]}")
    return {**dataclasses.asdict(cell), "floor_us": floor, "us": times, "errors": errors}


def smoke() -> int:
    """Check small cells on TORCH; 1 if one is wrong."""
    wrong = 0
    for cell in SMOKE_CELLS:
        latents = Latents(cell, "cpu")
        error = latents.error(torch_native(latents)(0))
        wrong += error > TOLERANCE
        print(
            f"{cell.name}: TORCH has a relative error of {error:.1e}, {'wrong' if error > TOLERANCE else 'right'}"
        )
    return int(wrong > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--smoke", action="store_true", help="check small cells on a CPU, and time nothing")
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        return smoke()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; --smoke needs none")
    ceilings = measure_ceilings()
    print(f"copy {ceilings['copy_tbps']:.2f} TB/s   matmul {ceilings['matmul_tflops']:.0f} TFLOP/s")
    cells = [measure(cell, ceilings, chosen.only) for cell in CELLS]
    if chosen.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **ceilings}
        chosen.json.write_text(json.dumps({**facts, "cells": cells}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
