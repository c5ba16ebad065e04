"""A step of some layers as ordinary calls whose rows are merged: with shared prefixes, or trees of drafts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.metadata import AttentionMetadata
from attnplug.ops.checks import pages_of
from attnplug.ops.merging import rows_into
from attnplug.ops.paths import paths_into
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.forest import Forest
from attnplug.runtime.steps.forest_parts import ARRAYS_OF_ROWS, CutTable, Paths, Rows, merge_lists, to_device
from attnplug.runtime.steps.runtime_layer import RuntimeLayer
from attnplug.runtime.steps.step_checks import refuse_output_scales
from attnplug.runtime.steps.twin_layers import Twins


class CallPart(NamedTuple):
    """One ordinary call: the twins, their metadata, and the step's rows."""

    twins: Twins
    metadata: AttentionMetadata
    rows: torch.Tensor | None
    """int64 `[n]`; None for the first rows of the step in their order."""
    num_rows: int
    batch: Rows
    sent: list[torch.Tensor]
    """`batch.arrays()` on the device."""

    def attend(
        self, layer: RuntimeLayer, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Attend the part's rows."""
        impl = self.twins.impls[layer.name]
        impl.attend(layer, query, None, None, layer.kv_cache, self.metadata, output, output_lse=lse)


class PathPart(NamedTuple):
    """The nodes of trees, which attend the slots of their paths."""

    rows: torch.Tensor | None
    """As those of a CallPart."""
    num_rows: int
    starts: torch.Tensor
    slots: torch.Tensor

    def attend(
        self, layer: RuntimeLayer, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Attend the part's rows, with the layer's sinks."""
        if layer.kv_cache is None:
            return
        spec, pages = layer.spec, pages_of(layer.impl.backend, layer.kv_cache, layer.spec)
        scales: tuple[Any, Any] = layer._k_scale_float, layer._v_scale_float
        if spec.head_scales:
            scales = layer._k_scale, layer._v_scale
        form = spec.scale, spec.logits_soft_cap, layer.impl.tensors.sinks, scales
        paths_into(query, pages, self.starts, self.slots, output, lse, *form)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SharedStep:
    """A step of some layers as parts, and the lists that merge their rows.

    Args:
        parts: the calls.
        slots: int64, where the step's new keys are written.
        starts: int32 `[T + 1]`, see `attnplug.ops.merge_rows`.
        entries: int32, likewise.
    """

    parts: tuple[CallPart | PathPart, ...]
    slots: torch.Tensor
    starts: torch.Tensor
    entries: torch.Tensor

    def refuse_scales(self, layer_name: str, scales: Mapping[str, object]) -> None:
        """BatchError for the quantisation of an output, which no merge of parts does."""
        refuse_output_scales(layer_name, scales, "a step with trees merges")

    def forward(
        self,
        layer: RuntimeLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Write the new K and V, attend all parts, and merge them. Arguments as `AttentionRuntime.forward`."""
        cache = layer.kv_cache
        if key is not None and value is not None and cache is not None and layer.target is None:
            layer.impl.update_kv_cache(layer, key, value, cache, self.slots)
        count = sum(part.num_rows for part in self.parts)
        outs = output.new_empty((count, *output.shape[1:]))
        lses = torch.empty((count, outs.shape[1]), dtype=torch.float32, device=outs.device)
        begin = 0
        for part in self.parts:
            end = begin + part.num_rows
            own = query[: part.num_rows] if part.rows is None else query.index_select(0, part.rows)
            part.attend(layer, own, outs[begin:end], lses[begin:end])
            begin = end
        if output.stride(-1) == 1:
            rows_into(outs, lses, self.starts, self.entries, output, output_lse)
            return
        whole = torch.empty_like(output, memory_format=torch.contiguous_format)
        rows_into(outs, lses, self.starts, self.entries, whole, output_lse)
        tokens = self.starts.shape[0] - 1
        output[:tokens] = whole[:tokens]


@dataclasses.dataclass(slots=True, eq=False)
class Held(NotCopied):
    """What the graph of a shared step reads, in memory that stays.

    Args:
        numbers: uint8, of all lists and lengths.
        cut: the table of the rest.
        decodes: those that the memory has; None for trees, or for none yet.
    """

    numbers: torch.Tensor
    cut: CutTable
    decodes: HeldDecodes | None = None

    def clear(self) -> None:
        """Let the next step fill all of the memory."""
        self.decodes = None
        self.cut.forget()


class HeldDecodes(NamedTuple):
    """Decodes in the memory of a graph. While the same requests share the same blocks, only lengths and blocks of the rest change.

    Args:
        forest: what the requests share; None for nothing.
        step: as it was filled first.
        rest: the call of the rest of all requests, in order.
        pieces: the call of shared blocks.
        builds: those of the twins of the pieces, up to the one for this step.
    """

    forest: Forest | None
    step: SharedStep
    rest: CallPart
    pieces: CallPart
    builds: int

    @classmethod
    def of(cls, forest: Forest | None, step: SharedStep) -> HeldDecodes:
        """Decodes that were just built, of a rest and pieces."""
        rest, pieces = (part for part in step.parts if isinstance(part, CallPart))
        return cls(forest, step, rest, pieces, pieces.twins.builds)

    def grown(
        self, computed: Ints, seq_lens: torch.Tensor, table: torch.Tensor, size: int, cut: CutTable
    ) -> HeldDecodes:
        """The next decodes of the same requests, in the same memory.

        Args:
            computed: int64, the computed tokens of the requests; those of padding come after them and have none.
            seq_lens: int32 `[R]`, the tokens of all on the device.
            table: as that of `shared_step`.
            size: tokens of a block.
            cut: of the graph.
        """
        (rest, pieces), sent = (self.rest, self.pieces), self.rest.sent
        lengths, reqs = np.ones_like(rest.batch.lengths), computed.size
        lengths[:reqs] += computed - rest.batch.table[:reqs, 1] * size
        _, lens, places, _ = sent
        torch.sub(seq_lens, places[:, 1], alpha=size, out=lens)
        batch = rest.batch._replace(lengths=lengths)
        rest = rest._replace(metadata=rest.twins.build(batch, sent, table, cut))
        if pieces.twins.builds != self.builds:
            # Another step has used the builder's memory since.
            metadata = pieces.twins.build(pieces.batch, pieces.sent, table)
            pieces = pieces._replace(metadata=metadata)
        return self._replace(rest=rest, pieces=pieces, builds=pieces.twins.builds)

    def shared_step(self) -> SharedStep:
        """The step of these decodes."""
        return dataclasses.replace(self.step, parts=(self.rest, self.pieces))


def shared_step(
    calls: Sequence[tuple[Twins, Rows]],
    paths: Paths | None,
    table: torch.Tensor,
    slots: torch.Tensor,
    tokens: int,
    held: Held | None = None,
    longest: int | None = None,
) -> SharedStep:
    """The step of these ordinary batches and paths, whose numbers go to the device by one copy.

    Args:
        calls: the twins that attend each batch.
        paths: of the nodes of trees; None without.
        table: int32 `[R, max_blocks]`, of the step on the device.
        slots: int64, where the step's new keys are written.
        tokens: of the step.
        held: of a graph, whose steps have arrays of the same shapes; None for a step without.
        longest: tokens of the longest request that a graph serves, for its capture; None for a step.
    """
    sent = iter(
        to_device(arrays_of(calls, paths, tokens), table.device, None if held is None else held.numbers)
    )
    starts, entries = next(sent), next(sent)
    last: tuple[PathPart, ...] = ()
    if paths is not None:
        rows_of, *lists = (next(sent) for _ in paths)
        last = (PathPart(_unless_first(paths.rows, rows_of), paths.rows.size, *lists),)
    parts = list[CallPart | PathPart]()
    for twins, rows in calls:
        given = list(itertools.islice(sent, ARRAYS_OF_ROWS))
        metadata = twins.build(rows, given, table, None if held is None else held.cut, longest)
        at = _unless_first(rows.rows, given[-1])
        parts.append(CallPart(twins, metadata, at, rows.rows.size, rows, given))
    return SharedStep((*parts, *last), slots, starts, entries)


def arrays_of(
    calls: Sequence[tuple[Twins, Rows]], paths: Paths | None, tokens: int
) -> list[npt.NDArray[Any]]:
    """What the device needs of a step: the lists of the merge, the paths, and each batch."""
    owned = [rows.rows for _, rows in calls] + ([] if paths is None else [paths.rows])
    found = [*merge_lists(owned, tokens), *([] if paths is None else paths)]
    for _, rows in calls:
        found += rows.arrays()
    return found


def _unless_first(rows: Ints, on_device: torch.Tensor) -> torch.Tensor | None:
    """The rows, unless they are the first of the step in their order: these need no copy of the queries."""
    return None if rows.size and (rows == np.arange(rows.size)).all() else on_device
