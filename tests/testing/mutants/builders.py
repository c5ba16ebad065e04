"""Backends with one mistake in builders, partial results or runtimes: variants of TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import AttentionCGSupport, CommonAttentionMetadata
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import SlidingWindowSpec
from mutants.parts import Altered, Respecified
from mutants.table import Table

table = Table("builders")
_BETWEEN = "state shared between two runtimes"
builder = table.on(TorchMetadataBuilder)
step = table.on(Altered)
layer_rows = table.on(Respecified)
impl = table.on(TorchImpl)


_UNIFORM = AttentionCGSupport.UNIFORM_BATCH


# fmt: off
# Swaps the table and forgets the slots.
builder.update_block_table("builder/update_block_table", "is not the step's own",
    keeps_slots=lambda right, self, metadata, blk_table, slot_mapping: right(metadata, blk_table, metadata.slot_mapping))
# Swaps the slots and forgets the table.
builder.update_block_table("builder/update_block_table", "another step's block table",
    keeps_table=lambda right, self, metadata, blk_table, slot_mapping: right(metadata, metadata.block_table, slot_mapping))
# fmt: on


@builder.update_block_table("builder/update_block_table", "must stay as it was")
def updates_in_place(right, self, metadata, blk_table, slot_mapping):
    """Overwrites the metadata of the first group with another's."""
    made = right(metadata, blk_table, slot_mapping)
    vars(metadata).update(vars(made))
    return metadata


# fmt: off
# Declares no table swap, and returns the given metadata.
builder.update_block_table("builder/update_block_table", "must raise TypeError", state={"supports_update_block_table": False},
    updates_undeclared=lambda self, metadata, blk_table, slot_mapping: metadata)
# fmt: on


@builder.build_for_drafting("builder/build_for_drafting", "the last token dropped")
def short_drafts(right, self, common_attn_metadata, draft_index):
    """Leaves the drafted token out of the lengths."""
    made = right(common_attn_metadata, draft_index)
    return dataclasses.replace(made, seq_lens=np.maximum(made.seq_lens - 1, 0))


@step.altered("builder/fast_build", "another step's lengths", state={"lengths": None})
def stale_fast(self, made, common):
    """Keeps the lengths of the last build in a fast build."""
    last, self.lengths = self.lengths, made.seq_lens
    if self.fast and last is not None and last.size == made.seq_lens.size:
        made = dataclasses.replace(made, seq_lens=last)
    return made


@step.altered("builder/build-", "another step's block table", state={"table": None})
def stale_table(self, made, common):
    """Copies the block table again only where the number of requests has changed."""
    if self.table is None or self.table.shape[0] != made.block_table.shape[0]:
        self.table = made.block_table.clone()
    return dataclasses.replace(made, block_table=self.table)


@step.altered("builder/two-builders", "another step's lengths", state={"lengths": {}})
def shared_buffer(self, made, common):
    """Keeps lengths in one buffer for all builders of the process."""
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


# fmt: off
# Scales as the step's first layer does: it is kept with the metadata.
layer_rows.fields("builder/several-layers", "the first layer's scale",
    first_layers_scale=lambda self, *given: {"scale": given[5].plans.setdefault("spec", self.spec).scale})
# fmt: on


@step.altered("builder/common-unmodified", "changed common.seq_lens")
def changes_common(self, made, common):
    """Counts lengths down in the tensor it was given."""
    common.seq_lens.sub_(1)
    return made


@builder.build("builder/host-lengths-upper_bound", "upper bounds taken for exact lengths")
def trusts_bounds(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Reads all host lengths as exact."""
    exact = common_attn_metadata.seq_lens_host is not None
    common = dataclasses.replace(common_attn_metadata, seq_lens_host_exact=exact)
    return right(common_prefix_len, common, fast_build)


@builder.build(
    "builder/host-lengths-none", "with seq_lens_host=None, where needs_host_seq_lens='none': raised TypeError"
)
def needs_host(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Needs host lengths, and declares that it needs none."""
    assert len(common_attn_metadata.seq_lens_host)
    return right(common_prefix_len, common_attn_metadata, fast_build)


@builder.build("builder/host-lengths-none", "where needs_host_seq_lens='none': raised BatchError")
def refuses_undeclared(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Refuses batches without host lengths, and declares that it needs none."""
    if common_attn_metadata.seq_lens_host is None:
        raise BatchError("seq_lens_host", None, "is required")
    return right(common_prefix_len, common_attn_metadata, fast_build)


@table.part(
    "builder/host-lengths-upper_bound",
    "needs_host_seq_lens='sometimes' must be one of none, upper_bound, exact",
)
class NeedsSomething(TorchMetadataBuilder):
    """Declares a need that does not exist."""

    needs_host_seq_lens: Any = "sometimes"


# fmt: off
# Writes new keys to the slots of other tokens.
step.altered("builder/build-", "so new keys go astray",
    shuffles_slots=lambda self, made, common: dataclasses.replace(made, slot_mapping=made.slot_mapping.roll(1)))
# fmt: on


@builder.update_block_table(
    "builder/update_block_table",
    "raised NotImplementedError: no",
    state={"supports_update_block_table": False},
)
def cannot_update(self, metadata, blk_table, slot_mapping):
    """Refuses to swap tables with an unexpected error."""
    raise NotImplementedError("no")


@builder.build("builder/common-prefix-full", "shared prefix not attended")
def drops_prefix(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Attends a shared prefix never, where it should do so once."""
    made = right(0, common_attn_metadata, fast_build)
    first = common_prefix_len // self.kv_cache_spec.block_size
    lengths, table = made.seq_lens - common_prefix_len, made.block_table[:, first:]
    return dataclasses.replace(made, seq_lens=lengths, block_table=table)


# fmt: off
# Attends the shared prefix once, and again with the rest.
impl._attend_cascade("builder/common-prefix-full", "requests with [1, 1",
    repeats_prefix=lambda right, self, query, source, rest, *given: right(query, source, source, *given))
# Takes the arguments of another engine.
builder.use_cascade_attention("builder/common-prefix", "raised TypeError", cannot_answer=lambda self, prefix, batch_size: False)
# Forgets to answer.
builder.use_cascade_attention("builder/common-prefix", "must give True or False", answers_nothing=lambda self, *given, **named: None)
# fmt: on


@table.part("builder/cudagraph-support", "gave 2, which is not an AttentionCGSupport")
class NoLevel(TorchMetadataBuilder):
    """Declares a number."""

    cudagraph_support: Any = 2


@step.altered("builder/max_seq_len", "max_seq_len taken for the longest length")
def trusts_longest(self, made, common):
    """Reads max_seq_len as the length of the longest request."""
    lengths = made.seq_lens.copy()
    lengths[lengths == lengths.max()] = common.max_seq_len
    return dataclasses.replace(made, seq_lens=lengths)


@step.altered("builder/order", "reorder_batch_threshold=None promises")
def decodes_first(self, made, common):
    """Serves decodes only in front of other requests, and does not ask for that order."""
    is_decode = made.query_lens == 1
    late = is_decode & (np.arange(is_decode.size) >= np.logical_and.accumulate(is_decode).sum())
    return dataclasses.replace(made, seq_lens=np.where(late, made.query_lens, made.seq_lens))


# fmt: off
# Takes each step of decoders for a causal one, as a builder of an engine with causal models only.
step.altered("runtime/steps", "causal=False) of KV group", always_causal=lambda self, made, common: dataclasses.replace(made, causal=True))
# fmt: on


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


@table.part("builder/cudagraph-support", "get_cudagraph_support gave")
class UnsureLevel(TorchMetadataBuilder):
    """Declares another level each time."""

    times: ClassVar[list[int]] = []

    @classmethod
    def get_cudagraph_support(cls, config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        cls.times.append(0)
        return AttentionCGSupport(len(cls.times) % 4)


@builder.build_for_cudagraph_capture(
    "builder/cudagraph-support",
    "with UNIFORM_BATCH declared: raised ValueError",
    state={"cudagraph_support": _UNIFORM},
)
def cannot_capture(right, self, common_attn_metadata):
    """Declares graphs, and needs exact lengths to build for them."""
    if not common_attn_metadata.seq_lens_host_exact:
        raise ValueError("lengths are not exact")
    return right(common_attn_metadata)


class SinksAlways(TorchImpl):
    """Adds the sink to every partial result."""

    def attend(self, *given: Any, use_sinks: bool = True, **asked: Any) -> torch.Tensor:
        return super().attend(*given, use_sinks=True, **asked)


@impl.attend("merge/empty-part", "LSE of rows that see nothing is 0, not -inf")
def zero_for_empty(right, self, *given, output_lse=None, **asked):
    """Writes an LSE of 0 for empty rows."""
    output = right(*given, output_lse=output_lse, **asked)
    if output_lse is not None:
        output_lse.masked_fill_(output_lse == -torch.inf, 0.0)
    return output


@impl.attend("merge/2-parts-sinks", "part 1 alone: lse")
def lse_without_sink(right, self, *given, output_lse=None, **asked):
    """Leaves the sink out of the LSE."""
    if output_lse is not None and self.spec.has_sinks and asked.get("use_sinks", True):
        scratch = torch.empty_like(given[6])
        right(*given[:6], scratch, output_lse=output_lse, **{**asked, "use_sinks": False})
        return right(*given, **asked)
    return right(*given, output_lse=output_lse, **asked)


@step.altered("builder/build-spans", "another step's spans", state={"kept": None})
def keeps_spans(self, made, common):
    """Keeps the spans of the first step with as many tokens."""
    if self.kept is None or made.spans is None or self.kept.shape != made.spans.shape:
        self.kept = made.spans
    return dataclasses.replace(made, spans=self.kept)


_PUBLISHED: dict[str, Any] = {"builder": Published, "impl": ReadsPublished}

table.add("PUBLISHED | runtime/threads | state shared between two runtimes", **_PUBLISHED)
table.add("PUBLISHED_TOO | runtime/two-runtimes | state shared between two runtimes", **_PUBLISHED)
table.add("ONE_TABLE | runtime/steps | window (19, 0), with the pages of", builder=OneTable)
table.add("ONE_TABLE_TWICE | runtime/two-runtimes | alone they are wrong too", builder=OneTable)
table.add("SINKS_ALWAYS | merge/2-parts-sinks | sink counted twice in a merge", impl=SinksAlways)
table.add("SINKS_ALWAYS_TOO | merge/use_sinks | use_sinks=False ignored", impl=SinksAlways)
