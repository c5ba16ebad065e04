"""Multi-head latent attention on a GPU: decodes, prefills, chunked contexts, selected keys, and builders on the host.

    python benchmarks/mla.py --json mla.json
    python benchmarks/mla.py --parts decode --cells "64 x 8192, 16 heads" --only TRITON "FlashInfer fa3"
    python benchmarks/mla.py --smoke      # without a GPU and without times: small cells are right

Ceilings first (copy, matrix product on random data). Each part checks its cells against float32, then times all contenders
in turn: decodes by graph replay and over more latents than the L2 holds, without the products with W_UK and W_UV;
prefills as calls behind a sleeping GPU. The goals come last. The JSON is written after every cell, and the exit code
is 1 if a part failed.
The contender vLLM Triton needs VLLM_SOURCE, an unpacked sdist of vLLM.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = (
        "1"  # so that kernels take a CPU's tensors; triton reads it when imported
    )

import torch
from attention import measure_ceilings
from installed import versions
from mla_decode import CELLS, CONTENDERS, measured_decodes
from mla_goals import judged
from mla_host import measured_builders
from mla_latents import TOLERANCE, Cell
from mla_prefill import CHUNKED, PREFILLS, Prompts, measured_chunks, measured_prefills
from mla_selection import measured_selections

from attnplug.backends.flashinfer.backend import FlashInferBackend
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.triton.backend import TritonBackend

Part = Callable[[dict[str, float], argparse.Namespace], Iterator[dict[str, Any]]]
PARTS: dict[str, Part] = {
    "decode": lambda ceilings, chosen: measured_decodes(chosen.cells, chosen.only, ceilings),
    "prefill": lambda ceilings, chosen: measured_prefills(PREFILLS),
    "chunked": lambda ceilings, chosen: measured_chunks(CHUNKED),
    "selection": lambda ceilings, chosen: measured_selections(TritonBackend.for_layer(CELLS[0].spec)),
    "host": lambda ceilings, chosen: measured_builders(
        {"FLASHINFER": FlashInferBackend, "TRITON": TritonBackend}
    ),
}
_KEYS = {"decode": "cells"}
"""Where the rows of a part are in the JSON; others have its name."""

_PLAIN = {"stored": "float32", "dtype": "float32"}
_TINY = [
    Cell(2, 128, 16, **_PLAIN),
    Cell(1, 65, 20, page=16, **_PLAIN),
    Cell(2, 48, 4, 4, **_PLAIN),
    Cell(1, 9, 16, page=1, **_PLAIN),
    Cell(1, 64, 16, stored="fp8", dtype="float32"),
]


def smoke(parts: Sequence[str]) -> int:
    """Run the parts on small cells in Triton's interpreter; 1 if a row is wrong."""
    plain = {"dtype": "float32", "stored": "float32"}
    names = ["TRITON", "TORCH"] + (["vLLM Triton"] if os.environ.get("VLLM_SOURCE") else [])
    prompts = [Prompts(2, 24, 4, dtype="float32")], [Prompts(2, 12, 2, 130, dtype="float32")]
    rows = {"chunks of 64 rows": 64, "chunks of 100 rows": 100, "one pass": None}
    small: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "decode": lambda: measured_decodes(_TINY, names, {}, "cpu"),
        "prefill": lambda: measured_prefills(prompts[0], "cpu"),
        "chunked": lambda: measured_chunks(prompts[1], "cpu", rows=rows),
        "selection": lambda: measured_selections(
            TritonBackend, (4,), requests=2, topk=24, contexts=(48, 100), device="cpu", page=16, **plain
        ),
        "host": lambda: measured_builders({"TORCH": TorchBackend}, (4,), device="cpu", rounds=2, **plain),
    }
    wrong = []
    for part in parts:
        for row in small[part]():
            errors = {**row.get("relative_errors", {}), **row.get("from_one_pass", {})}
            right = all(error < TOLERANCE for error in errors.values()) and not row.get(
                "errors", row.get("error")
            )
            wrong += [] if right else [part]
    print("wrong: " + ", ".join(wrong) if wrong else "all right")
    return int(bool(wrong))


def _versions() -> dict[str, str]:
    found = versions("torch", "triton", "flashinfer-python", "sgl-flash-mla", "flash-attn-4")
    return {name.removesuffix("-python"): version for name, version in found.items()}


def measure(chosen: argparse.Namespace, ceilings: dict[str, float], report: dict[str, Any]) -> None:
    """Add the rows of the parts to the report, and write it after each; a part that fails costs only itself."""

    def write() -> None:
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=1) + "\n")

    for part in chosen.parts:
        rows = report[_KEYS.get(part, part)] = []
        try:
            for row in PARTS[part](ceilings, chosen):
                rows.append(row)
                report["goals"] = judged(report)
                torch.cuda.empty_cache()
                write()
        except Exception as problem:  # noqa: BLE001 - of any part, which costs that part
            traceback.print_exc()
            report.setdefault("failed", {})[part] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            write()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    contenders = [name for name in CONTENDERS if name != "TORCH"]
    parser.add_argument("--only", nargs="*", default=contenders, choices=list(CONTENDERS), metavar="CONTENDER",
                        help=f"decode only by some of {', '.join(CONTENDERS)}")  # fmt: skip
    names = {cell.name: cell for cell in CELLS}
    parser.add_argument("--cells", nargs="*", default=list(names), choices=list(names), metavar="CELL",
                        help="decode only these, such as '64 x 8192, 16 heads'")  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="check small cells on a CPU, and time nothing")
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        return smoke(chosen.parts)
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; --smoke needs none")
    chosen.cells = [names[name] for name in chosen.cells]
    ceilings = measure_ceilings()
    print(f"copy {ceilings['copy_tbps']:.2f} TB/s   matmul {ceilings['matmul_tflops']:.0f} TFLOP/s")
    report: dict[str, Any] = {
        "what": "Latent attention, 512 + 64: decodes by graph replay over more than the L2 holds; prefills as calls",
        "device": torch.cuda.get_device_name(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        **_versions(),
        **ceilings,
    }
    measure(chosen, ceilings, report)
    for goal in report.get("goals", ()):
        print(f"{'met' if goal['met'] else 'MISSED':8}{goal['value']:9.3f} {goal['goal']:8} {goal['name']}")
    return int("failed" in report)


if __name__ == "__main__":
    sys.exit(main())
