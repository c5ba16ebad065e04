"""Builds a step's metadata for FLASHINFER: page-table arrays per KV group, and a plan per `PlanGroup`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.flashinfer.groups import groups_of
from attnplug.backends.flashinfer.impl import FlashInferImpl
from attnplug.backends.flashinfer.library import library
from attnplug.backends.flashinfer.metadata import FlashInferMetadata
from attnplug.backends.flashinfer.planned_wrapper import PlanCost
from attnplug.backends.flashinfer.step import HostStep, Ints, PageIndices, StepPages, trimmed
from attnplug.backends.flashinfer.wrappers import Wrappers
from attnplug.backends.impl import own_slots
from attnplug.core.batch import make_local_attention_virtual_batches
from attnplug.core.batch.host import exact_seq_lens, known_seq_lens, query_spans, to_device
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.spec import Phase


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Plans each `PlanGroup` once per step from exact host lengths; the host never waits.

    Decodes are requests of one query. `config.layers` has the layers, with their impls.

    Raises:
        BatchError: a layer that `config.layers` lacks, or that runs on another backend.
        PolicyError: an option that cannot be honoured here, such as too small a workspace.
        BackendUnavailableError: FlashInfer cannot be used here.
    """

    supports_update_block_table: ClassVar[bool] = True
    needs_host_seq_lens: ClassVar[Literal["none", "upper_bound", "exact"]] = "exact"
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self._init_reorder_batch_threshold(1)
        self._groups = groups_of(config.layers, self.layer_names, FlashInferImpl)
        self._page_size = self.kv_cache_spec.block_size
        sizes = config.cudagraph_batch_sizes
        self._wrappers = Wrappers(
            library(), self._groups, self._page_size, self.device, config.max_num_seqs, sizes
        )
        self._chunks = dict.fromkeys(group.chunk_size for group in self._groups)
        self._indices: dict[int | None, PageIndices] = {}
        for chunk in self._chunks:
            longest = config.max_model_len or 0 if chunk is None else chunk
            room = config.max_num_seqs * -(-longest // self._page_size)
            self._indices[chunk] = PageIndices(self.device, self._page_size, room)
        # Graphs read these buffers, so eager steps use other ones.
        self._captured_indices: dict[int | None, PageIndices] = {}
        self._captured: set[int] = set()

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the float workspace must have; all builders of a device share one."""
        return self._wrappers.workspace_bytes

    def get_workspace_buffer(self) -> torch.Tensor:
        """The float workspace, allocated at the first call."""
        return self._wrappers.workspace

    def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
        """Use another builder's workspace; BatchError if it is too small."""
        self._wrappers.workspace = buffer

    @property
    def plan_costs(self) -> dict[str, PlanCost]:
        """Plans, skips and host seconds of planning, by phase and group of layers."""
        return self._wrappers.costs

    def warm_up(self, phase: Phase | None = None) -> None:
        """Load the modules of a phase (None: of both), and compile them if needed; else the first plan does.

        Raises:
            PluginError: a module that is not built, and cannot be compiled here.
        """
        self._wrappers.warm_up(phase)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        """The metadata of one step, every group planned.

        Raises:
            BatchError: lengths that the host does not know exactly, or that are ragged or too short.
            BatchError: a table without room, a non-causal batch for causal layers, or keys outside of pages.
            PluginError: FlashInfer has to compile, and cannot.
        """
        return self._planned(self._metadata(common_attn_metadata, self._captured))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashInferMetadata:
        """The metadata of a uniform batch of decodes, over buffers whose addresses stay.

        Host lengths may be bounds. Later steps of as many requests, all decodes, use the same buffers.

        Raises:
            BatchError: requests of more than one query, and as `build`.
        """
        common = dataclasses.replace(common_attn_metadata, seq_lens_host_exact=True)
        reqs = common.num_reqs
        if common.max_query_len != 1 or common.num_actual_tokens != reqs:
            raise BatchError("max_query_len", common.max_query_len, "must be 1 in a captured step")
        pages = -(-max(common.max_seq_len, 1) // self._page_size)
        most = max((reqs, *self.config.cudagraph_batch_sizes))
        for chunk in self._chunks:
            room = most * (pages if chunk is None else chunk // self._page_size)
            self._fix_indices(chunk, room)
        metadata = self._metadata(common, {reqs})
        self._captured.add(reqs)
        return self._planned(metadata)

    def update_block_table(
        self, metadata: FlashInferMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashInferMetadata:
        """`metadata` with another KV group's table and slots; the plans stay.

        Raises:
            BatchError: a table without room.
        """
        pages = {}
        for chunk, step in metadata.pages.items():
            table = blk_table if step.table_of is None else step.table_of(blk_table)
            pages[chunk] = StepPages(step.host, step.seq_lens, table, step.table_of, step.seen)
        reqs = metadata.captured
        if reqs and reqs not in self._captured:
            # A captured step is built for one KV group and updated for the others.
            for chunk, theirs in metadata.indices.items():
                self._fix_indices(chunk, theirs.buffer.shape[0])
            self._captured.add(reqs)
        updated = dataclasses.replace(
            metadata,
            slot_mapping=own_slots(self.kv_cache_spec, slot_mapping, metadata.num_actual_tokens),
            pages=pages,
            indices=self._captured_indices if reqs else self._indices,
            # A captured graph reads the buffers of its own builder's plans.
            wrappers=self._wrappers if reqs else metadata.wrappers,
            captured=reqs,
        )
        for step in pages.values():
            step.check()
        if reqs:
            return self._planned(updated)
        for chunk, step in pages.items():
            self._indices[chunk].hold(step)
        return updated

    def _fix_indices(self, chunk: int | None, room: int) -> None:
        """Allocate the buffer that captured steps read, unless there is one."""
        if chunk not in self._captured_indices:
            self._captured_indices[chunk] = PageIndices(self.device, self._page_size, room, fixed=True)

    def _metadata(self, common: CommonAttentionMetadata, captured: set[int]) -> FlashInferMetadata:
        if common.key_start_loc is not None:
            limit = "must be None: FLASHINFER finds keys in pages"
            raise BatchError("key_start_loc", tuple(common.key_start_loc.shape), limit)
        common = self.for_own_layers(common)
        if common.causal is None:
            remedy = "make a builder for each kind, as init_attn_backend does"
            raise BatchError("causal", None, "is not one answer: only some of the layers are causal", remedy)
        pages = {}
        reqs, tokens, only_decodes = common.num_reqs, common.num_actual_tokens, True
        for chunk in self._chunks:
            step = pages[chunk] = self._pages(common, chunk)
            step.check()
            host = step.host
            only_decodes &= host.prefill is None and host.rows is None and host.num_tokens == reqs
        size = reqs if reqs in captured and only_decodes else 0
        return FlashInferMetadata(
            slot_mapping=own_slots(self.kv_cache_spec, common.slot_mapping, tokens),
            num_actual_tokens=tokens,
            causal=common.causal,
            pages=pages,
            indices=self._captured_indices if size else self._indices,
            wrappers=self._wrappers,
            captured=size,
        )

    def _pages(self, common: CommonAttentionMetadata, chunk: int | None) -> StepPages:
        starts, query_lens = query_spans(common)
        # Cross layers and padding requests may have fewer keys than queries.
        lengths = known_seq_lens(common)
        if lengths is None:
            remedy = "give the batch exact seq_lens_host"
            raise BatchError("seq_lens_host", None, "must be exact: plans are made on the host", remedy)
        if chunk is None:
            host = HostStep.of(starts, query_lens, lengths, self._page_size, bool(common.causal))
            return StepPages(host, common.seq_lens, common.block_table_tensor, None, self._sent(host.seen))
        seen, rows = None, None
        if (lengths < query_lens).any():
            common, rows, seen = self._without_blind(common, starts, query_lens, lengths)
        pieces, pieces_of = make_local_attention_virtual_batches(chunk, common, self._page_size)
        starts, query_lens = query_spans(pieces)
        lengths = exact_seq_lens(pieces, query_lens)
        host = HostStep.of(starts, query_lens, lengths, self._page_size, True)
        host = host if seen is None else dataclasses.replace(host, seen=seen)
        table_of = pieces_of if rows is None else lambda table: pieces_of(table[rows])
        return StepPages(host, pieces.seq_lens, pieces.block_table_tensor, table_of, self._sent(seen))

    def _without_blind(
        self, common: CommonAttentionMetadata, starts: Ints, query_lens: Ints, lengths: Ints
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, npt.NDArray[np.int64] | None]:
        """The batch without queries that see nothing, and the table rows and queries that it keeps."""
        rows, seen, packed, _, kept = trimmed(starts, query_lens, lengths, True)
        sent = to_device(rows, self.device)
        cut = dataclasses.replace(
            common,
            query_start_loc=to_device(packed, self.device),
            query_start_loc_cpu=torch.from_numpy(packed),
            seq_lens=to_device(kept, self.device),
            seq_lens_host=kept,
            num_reqs=len(rows),
            num_actual_tokens=int(packed[-1]),
            block_table_tensor=common.block_table_tensor[sent],
            _seq_lens_cpu=None,
            _num_computed_tokens_cpu=None,
        )
        return cut, sent, seen

    def _sent(self, seen: npt.NDArray[np.int64] | None) -> torch.Tensor | None:
        return None if seen is None else to_device(seen, self.device)

    def _planned(self, metadata: FlashInferMetadata) -> FlashInferMetadata:
        for group in self._groups:
            metadata.planned(group)
        return metadata
