"""Compiles the kernels that cells launch, for GPUs that are not here: claims become compiled, or refused with the reason.

The kernels of a cell are those that its layer launches in dummy steps, recorded on a GPU that is only pretended.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

import attnplug
from attnplug.backends.triton.ahead.chips import Chip, chip_of
from attnplug.backends.triton.ahead.compiling import compile_all
from attnplug.backends.triton.ahead.pretended import pretended
from attnplug.backends.triton.bindings import BoundLayer
from attnplug.core.compiled import CompiledKernel
from attnplug.core.config import BuilderConfig
from attnplug.core.features import Feature
from attnplug.core.interface.guarded import describe, guarded_call
from attnplug.core.spec import LayerSpec, Phase
from attnplug.matrix.axes import phase_of, spec_of
from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status
from attnplug.runtime import AttentionRuntime
from attnplug.runtime.kernels_ahead import zeros_for
from attnplug.runtime.steps.dummy_steps import DummyShape
from attnplug.runtime.steps.warm_up import distinct_layers, run_step

if TYPE_CHECKING:
    from attnplug.backends.triton.ahead.forms import Form
    from attnplug.core.device import Device

Known = Mapping[tuple[str, str], CompiledKernel]
"""Kernels that were compiled before, by device and key."""

_CONFIG = BuilderConfig(
    max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048, num_speculative_tokens=3
)
_MANY_HEADS = 64
"""Heads of models with latents, which share a tile: the 4 of a cell have other kernels."""
# Decodes of 4 tokens have speculation. Prompts of 32 tokens have few rows, and others fill the largest tiles.
_SHAPES = {
    Phase.DECODE: (
        DummyShape(1, 1, 1, Phase.DECODE),
        DummyShape(64, 1, 1, Phase.DECODE),
        DummyShape(1, 4, 1, Phase.DECODE),
    ),
    Phase.PREFILL: (
        DummyShape(1, 32, 0, Phase.PREFILL),
        DummyShape(1, 1024, 0, Phase.PREFILL),
        DummyShape(1, 32, 1, Phase.PREFILL),
        DummyShape(1, 1024, 1, Phase.PREFILL),
    ),
}
_COMMON = 128
"""K of most models with states: layers of other rules are compiled beside those of the cells with it."""
_CHANNELS = 1024
_BLOCKS = 4
"""Dummy steps read the null block alone."""


def launches(
    spec: LayerSpec, phase: Phase | None, device: Device, layout: str | None = None
) -> dict[Form, None]:
    """The forms of all kernels that a layer on TRITON launches; none with another `layout` than it has in a plan.

    Args:
        spec: the layer.
        phase: decode or prefill; None for both.
        device: for which there is a chip.
        layout: of its pages; None for any.
    """
    chip = chip_of(device)
    found: dict[Form, None] = {}
    if spec.mla is not None and spec.num_heads < _MANY_HEADS:
        found |= launches(dataclasses.replace(spec, num_heads=_MANY_HEADS), phase, device, layout)
    if spec.state == Feature.STATE.ask.values[0] and spec.head_size == _COMMON:
        for other in _other_rules(spec):
            found |= launches(other, phase, device, layout)
    pool: dict[str, Any] = {"num_blocks": _BLOCKS} if spec.state is None else {"num_states": _BLOCKS}
    plan = attnplug.plan({"layer": spec}, device, backend={"layer": "TRITON"}, per_phase=False, **pool)
    if layout not in (None, str(plan.decisions["layer"].kv_cache_layout)):
        return {}
    with pretended(chip) as forms:
        runtime = AttentionRuntime(plan, {"layer": zeros_for(spec)}, config=_CONFIG)
        for layer, backend, _ in distinct_layers(runtime):
            for shape in _shapes(runtime, phase):
                run_step(runtime, layer, backend, shape)
            # Extends divide their keys in steps of so few tokens, and do not in larger ones.
            with mock.patch.object(BoundLayer, "fills_gpu", return_value=True):
                for shape in _shapes(runtime, phase):
                    if shape.phase is Phase.PREFILL and shape.computed:
                        run_step(runtime, layer, backend, shape)
    return found | forms


def _other_rules(spec: LayerSpec) -> Iterator[LayerSpec]:
    """Layers with the other rules of states, which no cell names."""
    for state in Feature.STATE.ask.values[1:]:
        if state.rule == "conv":
            sizes: dict[str, Any] = {"num_heads": _CHANNELS, "num_kv_heads": _CHANNELS, "head_size": 1}
            yield LayerSpec(**sizes, dtype=spec.dtype, block_size=spec.block_size, state=state)
        else:
            yield dataclasses.replace(spec, state=state)


def _shapes(runtime: AttentionRuntime, phase: Phase | None) -> Iterator[DummyShape]:
    paged = bool(runtime.kv_caches or runtime.state_layers)
    for each in Phase if phase is None else (phase,):
        for shape in _SHAPES[each]:
            if paged or (each is Phase.PREFILL and not shape.computed):
                yield shape


class Compilation:
    """The claimed cells of some runs, compiled for their devices.

    Args:
        runs: declared, of TRITON.
        devices: those of `runs`.
        known: kernels that are not compiled again.
    """

    def __init__(self, runs: Sequence[Run], devices: Sequence[Device], known: Known) -> None:
        self._runs = runs
        self._cells: list[dict[Cell, list[str]]] = []
        self._why_not: dict[tuple[str, Cell], str] = {}
        self._work: dict[tuple[str, str], tuple[Form, Chip]] = {}
        self.kernels: dict[tuple[str, str], CompiledKernel] = {}
        """The results by device and key, with those known before."""
        for run, device in zip(runs, devices, strict=True):
            self._cells.append({cell: self._record(run, device, cell) for cell in _claimed(run)})
        self.kernels = {at: known[at] for at in self._work if at in known}
        for at in self.kernels:
            del self._work[at]

    @property
    def remaining(self) -> int:
        """The number of kernels to compile."""
        return len(self._work) - sum(at in self.kernels for at in self._work)

    def _record(self, run: Run, device: Device, cell: Cell) -> list[str]:
        keys = []
        forms, problem = guarded_call(launches, spec_of(cell), phase_of(cell), device, cell.layout)
        if problem is not None:
            self._why_not[run.device, cell] = f"its launch raises {describe(problem)}"
        for form in forms or ():
            keys.append(form.key)
            self._work[run.device, form.key] = form, chip_of(device)
        return keys

    @property
    def failures(self) -> list[str]:
        """A sentence for each cell whose launch raises."""
        return [f"{cell.id} on {device}: {why}" for (device, cell), why in self._why_not.items()]

    def compile(self, jobs: int) -> Iterator[tuple[str, CompiledKernel]]:
        """Compile what is not known yet, in `jobs` processes, and give each device and kernel."""
        # Kernels that take long come first, so that no process ends with one of them.
        order = sorted(self._work, key=lambda at: _weight(self._work[at][0].name), reverse=True)
        for at, made in zip(order, compile_all([self._work[at] for at in order], jobs), strict=True):
            self.kernels[at] = made
            yield at[0], made

    def outcome(self) -> Matrix:
        """The runs with what was compiled so far; a cell of which a kernel is missing stays declared."""
        return Matrix(tuple(map(self._outcome, self._runs, self._cells)))

    def _outcome(self, run: Run, cells: Mapping[Cell, Sequence[str]]) -> Run:
        findings = tuple(self._finding(run, each, cells.get(each.cell)) for each in run.findings)
        used = dict.fromkeys(key for keys in cells.values() for key in keys)
        kernels = tuple(self.kernels[run.device, key] for key in used if (run.device, key) in self.kernels)
        return dataclasses.replace(
            run,
            findings=findings,
            kernels=kernels,
            versions={"triton": metadata.version("triton")},
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        )

    def _finding(self, run: Run, declared: Finding, keys: Sequence[str] | None) -> Finding:
        if why := self._why_not.get((run.device, declared.cell)):
            return Finding(declared.cell, Status.REFUSED, (why,))
        found = [self.kernels.get((run.device, key)) for key in keys or ()]
        made = [each for each in found if each is not None]
        if not made or len(made) < len(found):
            return declared
        if refused := tuple(dict.fromkeys(str(each) for each in made if each.refused)):
            return Finding(declared.cell, Status.REFUSED, refused)
        spilled = dict.fromkeys(str(each) for each in made if each.spilled)
        return Finding(declared.cell, Status.COMPILED, tuple(spilled))


def known_kernels(runs: Iterable[Run]) -> dict[tuple[str, str], CompiledKernel]:
    """The kernels of runs that this version of Triton compiled."""
    here = metadata.version("triton")
    return {
        (run.device, each.key): each
        for run in runs
        if run.versions.get("triton") == here
        for each in run.kernels
    }


def _claimed(run: Run) -> list[Cell]:
    return [each.cell for each in run.findings if each.status is Status.DECLARED]


def _weight(kernel: str) -> int:
    return next(
        (3 - place for place, word in enumerate(("prefill", "decode", "latent")) if word in kernel), 0
    )
