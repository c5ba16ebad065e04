"""One step's metadata for FLASHINFER: its pages, and the plans that its layers run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.backends.flashinfer.planned_wrapper import PlannedWrapper
from attnplug.backends.flashinfer.step import PageIndices, Part, StepPages
from attnplug.backends.flashinfer.wrappers import Wrappers
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionMetadata


@dataclasses.dataclass(eq=False, slots=True)
class Work:
    """The plans that one group's layers run in a step.

    Args:
        pages: the step as these layers see it.
        indices: the buffer of its page indices.
        parts: each part of the step with its wrapper.
        only: the wrapper that runs all tokens of the batch; None if there are several.
        generation: `Wrappers.generation` when this was made.
    """

    pages: StepPages
    indices: PageIndices
    parts: Sequence[tuple[Part, PlannedWrapper]]
    only: PlannedWrapper | None
    generation: int


@dataclasses.dataclass(eq=False, slots=True)
class FlashInferMetadata(AttentionMetadata):
    """One step for FLASHINFER.

    A wrapper holds one plan. If another step was planned since, `planned` plans this one again.

    Args:
        slot_mapping: int64, where the new K and V go.
        num_actual_tokens: query rows of the batch.
        causal: whether all layers are causal in this step, or none.
        pages: the step over the block table, by chunk size; None is the key without chunks.
        indices: the buffers of page indices, by chunk size.
        wrappers: of the builder.
        captured: the batch size of the graph whose wrapper runs the decodes; 0 without.
    """

    slot_mapping: torch.Tensor
    num_actual_tokens: int
    causal: bool
    pages: dict[int | None, StepPages]
    indices: Mapping[int | None, PageIndices]
    wrappers: Wrappers
    captured: int

    _work: dict[PlanGroup, Work] = dataclasses.field(init=False, repr=False, default_factory=dict)

    def planned(self, group: PlanGroup) -> Work:
        """The plans of a group's layers for this step.

        Raises:
            BatchError: a group that the builder does not have.
            PluginError: FlashInfer has to compile, and cannot.
        """
        work = self._work.get(group)
        if work is None or work.generation != self.wrappers.generation:
            work = self._work[group] = self._work_of(group)
        # Another step may have been planned since, so each call makes sure of pages and plans.
        buffer = work.indices.hold(work.pages)
        for part, wrapper in work.parts:
            wrapper.ensure(part, buffer, self.causal)
        return work

    def _work_of(self, group: PlanGroup) -> Work:
        pages = self.pages.get(group.chunk_size)
        if pages is None:
            raise BatchError(
                "layer", str(group), "was not planned for", "name the layer in BuilderConfig.layers"
            )
        indices, host = self.indices[group.chunk_size], pages.host
        parts = []
        if host.decode is not None:
            if self.captured:
                decode = self.wrappers.captured(group, self.captured, indices.hold(pages))
            else:
                decode = self.wrappers.of(group, "decode")
            parts.append((host.decode, decode))
        if host.prefill is not None:
            parts.append((host.prefill, self.wrappers.of(group, "prefill")))
        alone = len(parts) == 1 and host.seen is None and host.num_tokens == self.num_actual_tokens
        only = parts[0][1] if alone else None
        return Work(pages, indices, parts, only, self.wrappers.generation)
