"""Captured steps of FLASHINFER that run again on a CPU as a graph runs them: no plan is made on the way."""

from __future__ import annotations

import dataclasses

from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.backends.flashinfer.metadata import FlashInferMetadata, Work
from attnplug.core.metadata import CommonAttentionMetadata


@dataclasses.dataclass(eq=False, slots=True)
class ReplayedMetadata(FlashInferMetadata):
    """The metadata of a capture: its layers run the wrappers as they were last planned.

    A graph replays kernels alone, so only the builder can have planned the step whose lengths they read.
    """

    def planned(self, group: PlanGroup) -> Work:
        """The wrappers of the capture, which are planned at the first call alone."""
        work = self._work.get(group)
        return FlashInferMetadata.planned(self, group) if work is None else work


class ReplayedBuilder(FlashInferMetadataBuilder):
    """FLASHINFER's builder, whose captured metadata is replayed."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> ReplayedMetadata:
        """As FlashInferMetadataBuilder."""
        made = super().build_for_cudagraph_capture(common_attn_metadata)
        given = {each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.init}
        return ReplayedMetadata(**given)
