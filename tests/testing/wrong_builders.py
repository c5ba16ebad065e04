"""Backends with one mistake in builders, partial results or runtimes: variants of TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from catching import wrong

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import AttentionCGSupport, CommonAttentionMetadata
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import SlidingWindowSpec

_UNIFORM = AttentionCGSupport.UNIFORM_BATCH


class Altered(TorchMetadataBuilder):
    """Changes the metadata of TORCH's builder."""

    fast = False
    """Whether the current build is a fast one."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.fast = fast_build
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self.altered(made, common_attn_metadata)

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        raise NotImplementedError


class KeepsSlots(TorchMetadataBuilder):
    """Swaps the table and forgets the slots."""

    def update_block_table(self, metadata: TorchMetadata, blk_table: Any, slot_mapping: Any) -> TorchMetadata:
        return super().update_block_table(metadata, blk_table, metadata.slot_mapping)


class KeepsTable(TorchMetadataBuilder):
    """Swaps the slots and forgets the table."""

    def update_block_table(self, metadata: TorchMetadata, blk_table: Any, slot_mapping: Any) -> TorchMetadata:
        return super().update_block_table(metadata, metadata.block_table, slot_mapping)


class UpdatesInPlace(TorchMetadataBuilder):
    """Overwrites the metadata of the first group with another's."""

    def update_block_table(self, metadata: TorchMetadata, blk_table: Any, slot_mapping: Any) -> TorchMetadata:
        made = super().update_block_table(metadata, blk_table, slot_mapping)
        vars(metadata).update(vars(made))
        return metadata


class UpdatesUndeclared(TorchMetadataBuilder):
    """Declares no table swap, and returns the given metadata."""

    supports_update_block_table = False

    def update_block_table(self, metadata: TorchMetadata, blk_table: Any, slot_mapping: Any) -> TorchMetadata:
        return metadata


class ShortDrafts(TorchMetadataBuilder):
    """Leaves the drafted token out of the lengths."""

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> TorchMetadata:
        made = super().build_for_drafting(common_attn_metadata, draft_index)
        return dataclasses.replace(made, seq_lens=np.maximum(made.seq_lens - 1, 0))


class StaleFast(Altered):
    """Keeps the lengths of the last build in a fast build."""

    lengths: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        last, self.lengths = self.lengths, made.seq_lens
        if self.fast and last is not None and last.size == made.seq_lens.size:
            made = dataclasses.replace(made, seq_lens=last)
        return made


class StaleTable(Altered):
    """Copies the block table again only where the number of requests has changed."""

    table: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if self.table is None or self.table.shape[0] != made.block_table.shape[0]:
            self.table = made.block_table.clone()
        return dataclasses.replace(made, block_table=self.table)


class SharedBuffer(Altered):
    """Keeps lengths in one buffer for all builders of the process."""

    lengths: ClassVar[dict[int, Any]] = {}

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        buffer = self.lengths.setdefault(made.seq_lens.size, made.seq_lens.copy())
        buffer[:] = made.seq_lens
        return dataclasses.replace(made, seq_lens=buffer)


class Published(Altered):
    """Publishes the last step for its impl, by layer, to the whole process."""

    steps: ClassVar[dict[str, TorchMetadata]] = {}

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        self.steps.update(dict.fromkeys(self.layer_names, made))
        return made


class ReadsPublished(TorchImpl):
    """Reads the step that any builder built last."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        layer, query, key, value, cache, metadata, *rest = given
        step = Published.steps[self.layer_name]
        same = step.num_actual_tokens == metadata.num_actual_tokens
        return super().attend(layer, query, key, value, cache, step if same else metadata, *rest, **asked)


class FirstLayersScale(TorchImpl):
    """Scales as the step's first layer does: it is kept with the metadata."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        spec = given[5].plans.setdefault("spec", self.spec)
        own, self.spec = self.spec, self.spec.replace(scale=spec.scale)
        try:
            return super().attend(*given, **asked)
        finally:
            self.spec = own


class ChangesCommon(Altered):
    """Counts lengths down in the tensor it was given."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        common.seq_lens.sub_(1)
        return made


class TrustsBounds(TorchMetadataBuilder):
    """Reads all host lengths as exact."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        exact = common_attn_metadata.seq_lens_host is not None
        common = dataclasses.replace(common_attn_metadata, seq_lens_host_exact=exact)
        return super().build(common_prefix_len, common, fast_build)


class NeedsHost(TorchMetadataBuilder):
    """Needs host lengths, and declares that it needs none."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        assert len(common_attn_metadata.seq_lens_host)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class RefusesUndeclared(TorchMetadataBuilder):
    """Refuses batches without host lengths, and declares that it needs none."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if common_attn_metadata.seq_lens_host is None:
            raise BatchError("seq_lens_host", None, "is required")
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class NeedsSomething(TorchMetadataBuilder):
    """Declares a need that does not exist."""

    needs_host_seq_lens: Any = "sometimes"


class ShufflesSlots(TorchMetadataBuilder):
    """Writes new keys to the slots of other tokens."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return dataclasses.replace(made, slot_mapping=made.slot_mapping.roll(1))


class CannotUpdate(TorchMetadataBuilder):
    """Refuses to swap tables with an unexpected error."""

    supports_update_block_table = False

    def update_block_table(self, metadata: TorchMetadata, blk_table: Any, slot_mapping: Any) -> TorchMetadata:
        raise NotImplementedError("no")


class DropsPrefix(TorchMetadataBuilder):
    """Attends a shared prefix never, where it should do so once."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(0, common_attn_metadata, fast_build)
        first = common_prefix_len // self.kv_cache_spec.block_size
        lengths, table = made.seq_lens - common_prefix_len, made.block_table[:, first:]
        return dataclasses.replace(made, seq_lens=lengths, block_table=table)


class RepeatsPrefix(TorchImpl):
    """Attends the shared prefix once, and again with the rest."""

    def _attend_cascade(self, query: Any, source: Any, rest: Any, *given: Any) -> None:
        super()._attend_cascade(query, source, source, *given)


class CannotAnswer(TorchMetadataBuilder):
    """Takes the arguments of another engine."""

    def use_cascade_attention(self, prefix: int, batch_size: int) -> bool:  # type: ignore[override]
        return False


class AnswersNothing(TorchMetadataBuilder):
    """Forgets to answer."""

    def use_cascade_attention(self, *given: Any, **named: Any) -> Any:
        return None


class NoLevel(TorchMetadataBuilder):
    """Declares a number."""

    cudagraph_support: Any = 2


class TrustsLongest(Altered):
    """Reads max_seq_len as the length of the longest request."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        lengths = made.seq_lens.copy()
        lengths[lengths == lengths.max()] = common.max_seq_len
        return dataclasses.replace(made, seq_lens=lengths)


class DecodesFirst(Altered):
    """Serves decodes only in front of other requests, and does not ask for that order."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        is_decode = made.query_lens == 1
        late = is_decode & (np.arange(is_decode.size) >= np.logical_and.accumulate(is_decode).sum())
        return dataclasses.replace(made, seq_lens=np.where(late, made.query_lens, made.seq_lens))


class AlwaysCausal(Altered):
    """Takes each step of decoders for a causal one, as a builder of an engine with causal models only."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        return dataclasses.replace(made, causal=True)


class OneTable(Altered):
    """Keeps the table of a step's first KV group for all of them."""

    supports_update_block_table = False
    tables: ClassVar[dict[int, torch.Tensor]] = {}

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if isinstance(self.kv_cache_spec, SlidingWindowSpec):
            return dataclasses.replace(
                made, block_table=self.tables.get(made.seq_lens.size, made.block_table)
            )
        self.tables[made.seq_lens.size] = made.block_table
        return made


class UnsureLevel(TorchMetadataBuilder):
    """Declares another level each time."""

    times: ClassVar[list[int]] = []

    @classmethod
    def get_cudagraph_support(cls, config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        cls.times.append(0)
        return AttentionCGSupport(len(cls.times) % 4)


class CannotCapture(TorchMetadataBuilder):
    """Declares graphs, and needs exact lengths to build for them."""

    cudagraph_support = _UNIFORM

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TorchMetadata:
        if not common_attn_metadata.seq_lens_host_exact:
            raise ValueError("lengths are not exact")
        return super().build_for_cudagraph_capture(common_attn_metadata)


class SinksAlways(TorchImpl):
    """Adds the sink to every partial result."""

    def attend(self, *given: Any, use_sinks: bool = True, **asked: Any) -> torch.Tensor:
        return super().attend(*given, use_sinks=True, **asked)


class ZeroForEmpty(TorchImpl):
    """Writes an LSE of 0 for empty rows."""

    def attend(self, *given: Any, output_lse: torch.Tensor | None = None, **asked: Any) -> torch.Tensor:
        output = super().attend(*given, output_lse=output_lse, **asked)
        if output_lse is not None:
            output_lse.masked_fill_(output_lse == -torch.inf, 0.0)
        return output


class LseWithoutSink(TorchImpl):
    """Leaves the sink out of the LSE."""

    def attend(self, *given: Any, output_lse: torch.Tensor | None = None, **asked: Any) -> torch.Tensor:
        if output_lse is not None and self.spec.has_sinks and asked.get("use_sinks", True):
            scratch = torch.empty_like(given[6])
            super().attend(*given[:6], scratch, output_lse=output_lse, **{**asked, "use_sinks": False})
            return super().attend(*given, **asked)
        return super().attend(*given, output_lse=output_lse, **asked)


_PUBLISHED: dict[str, Any] = {"builder": Published, "impl": ReadsPublished}
_BETWEEN = "state shared between two runtimes"

WRONG = (
    wrong("KEEPS_SLOTS", "builder/update_block_table", "is not the step's own", builder=KeepsSlots),
    wrong("KEEPS_TABLE", "builder/update_block_table", "another step's block table", builder=KeepsTable),
    wrong("UPDATES_IN_PLACE", "builder/update_block_table", "must stay as it was", builder=UpdatesInPlace),
    wrong(
        "UPDATES_UNDECLARED", "builder/update_block_table", "must raise TypeError", builder=UpdatesUndeclared
    ),
    wrong("DROPS_PREFIX", "builder/common-prefix-full", "shared prefix not attended", builder=DropsPrefix),
    wrong("REPEATS_PREFIX", "builder/common-prefix-full", "requests with [1, 1", impl=RepeatsPrefix),
    wrong("CANNOT_ANSWER", "builder/common-prefix", "raised TypeError", builder=CannotAnswer),
    wrong("ANSWERS_NOTHING", "builder/common-prefix", "must give True or False", builder=AnswersNothing),
    wrong("SHORT_DRAFTS", "builder/build_for_drafting", "the last token dropped", builder=ShortDrafts),
    wrong("STALE_FAST", "builder/fast_build", "another step's lengths", builder=StaleFast),
    wrong("STALE_TABLE", "builder/build-", "another step's block table", builder=StaleTable),
    wrong("SHARED_BUFFER", "builder/two-builders", "another step's lengths", builder=SharedBuffer),
    wrong("PUBLISHED", "runtime/threads", _BETWEEN, **_PUBLISHED),
    wrong("PUBLISHED_TOO", "runtime/two-runtimes", _BETWEEN, **_PUBLISHED),
    wrong("FIRST_LAYERS_SCALE", "builder/several-layers", "the first layer's scale", impl=FirstLayersScale),
    wrong("CHANGES_COMMON", "builder/common-unmodified", "changed common.seq_lens", builder=ChangesCommon),
    wrong(
        "TRUSTS_BOUNDS",
        "builder/host-lengths-upper_bound",
        "upper bounds taken for exact lengths",
        builder=TrustsBounds,
    ),
    wrong(
        "NEEDS_HOST",
        "builder/host-lengths-none",
        "with seq_lens_host=None, where needs_host_seq_lens='none': raised TypeError",
        builder=NeedsHost,
    ),
    wrong(
        "TRUSTS_LONGEST",
        "builder/max_seq_len",
        "max_seq_len taken for the longest length",
        builder=TrustsLongest,
    ),
    wrong("DECODES_FIRST", "builder/order", "reorder_batch_threshold=None promises", builder=DecodesFirst),
    wrong("ALWAYS_CAUSAL", "runtime/steps", "layer two-sided of KV group", builder=AlwaysCausal),
    wrong("ONE_TABLE", "runtime/steps", "layer window-reader of KV group", builder=OneTable),
    wrong(
        "REFUSES_UNDECLARED",
        "builder/host-lengths-none",
        "where needs_host_seq_lens='none': raised BatchError",
        builder=RefusesUndeclared,
    ),
    wrong(
        "NEEDS_SOMETHING",
        "builder/host-lengths-upper_bound",
        "needs_host_seq_lens='sometimes' must be one of none, upper_bound, exact",
        builder=NeedsSomething,
    ),
    wrong("SHUFFLES_SLOTS", "builder/build-", "so new keys go astray", builder=ShufflesSlots),
    wrong(
        "CANNOT_UPDATE", "builder/update_block_table", "raised NotImplementedError: no", builder=CannotUpdate
    ),
    wrong(
        "NO_LEVEL", "builder/cudagraph-support", "gave 2, which is not an AttentionCGSupport", builder=NoLevel
    ),
    wrong("ONE_TABLE_TWICE", "runtime/two-runtimes", "alone they are wrong too", builder=OneTable),
    wrong("UNSURE_LEVEL", "builder/cudagraph-support", "get_cudagraph_support gave", builder=UnsureLevel),
    wrong(
        "CANNOT_CAPTURE",
        "builder/cudagraph-support",
        "with UNIFORM_BATCH declared: raised ValueError",
        builder=CannotCapture,
    ),
    wrong("SINKS_ALWAYS", "merge/2-parts-sinks", "sink counted twice in a merge", impl=SinksAlways),
    wrong("SINKS_ALWAYS_TOO", "merge/use_sinks", "use_sinks=False ignored", impl=SinksAlways),
    wrong(
        "ZERO_FOR_EMPTY", "merge/empty-part", "LSE of rows that see nothing is 0, not -inf", impl=ZeroForEmpty
    ),
    wrong("LSE_WITHOUT_SINK", "merge/2-parts-sinks", "part 1 alone: lse", impl=LseWithoutSink),
)
