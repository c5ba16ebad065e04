"""The host's time in an eager layer on FlashAttention or FlashInfer, over that of calling the library directly.

Run as `python benchmarks/library_host.py [NAME ...] [--json FILE]`, by default for FLASH_ATTN_2, FLASH_ATTN_4 and
FLASHINFER; what is not installed is left out, and says so. "library" is the call of `peers.py`, all its arguments at
hand; "write" the bare launch that stores new keys and values, which an engine has to make either way. `impl.forward` of
new requests attends the keys given, as an engine calls it, where the library reads its pages. Without a GPU libraries and
launches do nothing: what is left is attnplug's own Python, which no goal is set for. Figures are medians of rounds, all in turn. FlashInfer's
prefill is FLASHINFER_PREFILL, fa2 if unset, on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attention import GEMMA_2, LLAMA_8B, THROUGH, TOLERANCE
from host_time import ON_GPU, device_name, kernels, launched, microseconds, replay, write_report
from installed import versions
from library_stand_ins import stand_ins
from paged_layers import Cell, PagedLayer
from peers import PEERS

import attnplug
from attnplug.core import BuilderConfig
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.registry import Decision
from attnplug.runtime.steps.runtime_layer import RuntimeLayer

GOAL, CONTEXT, DECODES, PREFILLS = 10.0, 97, (1, 16, 256), (512,) * 4
DISTRIBUTIONS = ("flash-attn", "flash-attn-4", "flashinfer-python")
SHAPES: dict[str, tuple[tuple[int, int, int], dict[str, Any], tuple[str, ...]]] = {
    "Llama-3-8B": (LLAMA_8B, {}, ("FLASH_ATTN_2", "FLASH_ATTN_4", "FLASHINFER")),
    # A cap is a function there, made and hashed in each call.
    "Gemma-2-9B": (GEMMA_2, {"logits_soft_cap": 50.0}, ("FLASH_ATTN_4",)),
}
"""Heads, what else the layer asks for, and on whom it is measured."""


@dataclasses.dataclass
class Figure:
    """One row of the table, in microseconds of the host."""

    backend: str
    shape: str
    batch: str
    what: str
    measured: float
    library: float
    write: float
    goal: float = GOAL

    @property
    def over(self) -> float:
        return self.measured - self.library - self.write


class Layer:
    """One layer of a runtime on a backend, with the metadata of one step, and the same layer called directly."""

    def __init__(self, cell: Cell, decision: Decision) -> None:
        paged = self.paged = PagedLayer(cell, "cuda" if ON_GPU else "cpu", copies=1)
        self.layer = RuntimeLayer("layer", decision, paged.tensors, paged.device)
        config = BuilderConfig(layers={"layer": self.layer}, max_num_seqs=len(cell.seq_lens))
        builder_cls = decision.get_backend_cls().get_builder_cls()
        cache_spec: Any = kv_cache_spec_for(paged.spec, cell.page)
        builder = builder_cls(cache_spec, ["layer"], config, paged.device)
        self.metadata = builder.build(0, paged.common)
        self.cache = paged.cache(0)
        new = torch.randn(
            2, paged.query.shape[0], *self.cache.shape[-2:], device=paged.device, dtype=paged.query.dtype
        )
        self.key, self.value = new
        direct = PEERS[THROUGH[str(decision.backend)]](paged)
        if direct is None:
            raise SystemExit(f"benchmarks/peers.py does not call {decision.backend} for {cell.name}")
        self._direct = direct

    def attend(self) -> torch.Tensor:
        paged = self.paged
        found: torch.Tensor = self.layer.impl.attend(
            self.layer, paged.query, None, None, self.cache, self.metadata, paged.output
        )
        return found

    def forward(self) -> None:
        paged = self.paged
        self.layer.impl.forward(
            self.layer, paged.query, self.key, self.value, self.cache, self.metadata, paged.output
        )

    def write(self) -> None:
        slots = self.paged.common.slot_mapping
        self.layer.impl.update_kv_cache(self.layer, self.key, self.value, self.cache, slots)

    def library(self) -> torch.Tensor:
        return self._direct(0)

    def check(self) -> None:
        """Both must be right before they are timed."""
        for who, call in (("attnplug", self.attend), ("the library", self.library)):
            self.paged.output.fill_(torch.nan)
            error = self.paged.error(call())
            if not error < TOLERANCE["bfloat16"]:
                raise SystemExit(f"{self.paged.cell.name}: {who} is wrong by {error:.3g}")


def decide(cell: Cell, name: str) -> Decision:
    options: Any = None
    if name == "FLASHINFER":
        template = os.environ.get("FLASHINFER_PREFILL", "fa2")
        options = {name: {"prefill_backend": template}}
    if ON_GPU:
        return attnplug.explain(cell.spec, backend=name, options=options)
    return attnplug.explain(cell.spec, "sm90", backend=name, options=options, assume_installed="all")


def cells(name: str) -> Iterator[tuple[str, Cell]]:
    page = 256 if name == "FLASH_ATTN_2" else 16
    for shape, (heads, fields, backends) in SHAPES.items():
        if name not in backends:
            continue
        for size in DECODES:
            lens = (1,) * size, (CONTEXT,) * size
            yield shape, Cell(f"decode, {size}", "decode", heads, *lens, tuple(fields.items()), page)
        title = f"prefill, {len(PREFILLS)} x {PREFILLS[0]}"
        yield shape, Cell(title, "prefill", heads, PREFILLS, PREFILLS, tuple(fields.items()), page)


def measure(name: str, rounds: int) -> Iterator[Figure]:
    for shape, cell in cells(name):
        decision = decide(cell, name)
        if not decision:
            print(f"{name}: {decision.explanation()}", file=sys.stderr)
            return
        layer = Layer(cell, decision)
        layer.forward()  # binds, and on a GPU compiles
        if ON_GPU:
            layer.check()
        write = replay(launched(layer.write))
        attend, forward, library, bare = microseconds(
            [layer.attend, layer.forward, layer.library, write], rounds
        )
        yield Figure(name, shape, cell.name, "attend", attend, library, 0.0)
        yield Figure(name, shape, cell.name, "impl.forward", forward, library, bare)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="backends: " + ", ".join(THROUGH))
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(THROUGH)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(THROUGH)}")
    installed = ", ".join(f"{name} {version}" for name, version in versions(*DISTRIBUTIONS).items())
    print(f"{device_name()}, torch {torch.__version__}, {installed or 'no library installed'}")
    print(f"goal: calls at most {GOAL:.0f} us over the library's, and the write's bare launch")
    columns = f"{'us':>8} {'library':>8} {'write':>6} {'over':>7} {'goal':>5}"
    print(f"{'':13}{'':12}{'batch':18}{'':14}{columns}")
    with contextlib.ExitStack() as stack:
        if not ON_GPU:
            stack.enter_context(kernels(lambda *_: None))
            stack.enter_context(stand_ins())
            torch.set_num_threads(1)  # copies are done here, and are not to wait for another core
        figures = show(chosen.names or list(THROUGH), chosen.rounds)
    if chosen.json:
        kept = [{**dataclasses.asdict(figure), "over": figure.over} for figure in figures]
        write_report(chosen.json, kept, *DISTRIBUTIONS)


def show(names: Sequence[str], rounds: int) -> list[Figure]:
    figures = []
    for name in names:
        for figure in measure(name, rounds):
            figures.append(figure)
            missed = "  missed" if ON_GPU and figure.over > figure.goal else ""
            print(
                f"{name:13}{figure.shape:12}{figure.batch:18}{figure.what:14}{figure.measured:8.1f} "
                f"{figure.library:8.1f} {figure.write:6.1f} {figure.over:7.1f} {figure.goal:5.0f}{missed}"
            )
    return figures


if __name__ == "__main__":
    main()
