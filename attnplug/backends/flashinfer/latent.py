"""Latent attention of FLASHINFER: the decode of a step by one planned wrapper."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch

from attnplug.backends.flashinfer.impl import LN_2
from attnplug.backends.flashinfer.latent_plans import HostArrays, LatentPlans, LatentStep
from attnplug.backends.flashinfer.library import library
from attnplug.backends.flashinfer.modules import LatentModule
from attnplug.backends.flashinfer.planned_wrapper import PlanCost
from attnplug.backends.flashinfer.step import Ints, Part, trimmed
from attnplug.core.batch.host import is_one_each, known_seq_lens, query_spans, to_device
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionCGSupport, CommonAttentionMetadata
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl
from attnplug.mla.metadata import MLAMetadata
from attnplug.ops.storage import compute_dtype


class FlashInferMLABuilder(MLADecodeBuilder):
    """Plans the decodes of a step once for all its layers, from exact host lengths; the host never waits."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    decodes_drafts: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = self.config.layers[self.layer_names[0]].impl.spec
        hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9
        dims = spec.mla
        sizes = dims.kv_lora_rank, dims.qk_rope_head_dim
        self._arrays = HostArrays()
        self._first_places: Ints = np.zeros(2, dtype=np.int32)
        """Where the rows of the last steps' table start, one after another."""
        self._plans = LatentPlans(
            library(),
            LatentModule("fa3" if hopper else "fa2", compute_dtype(spec), sizes),
            self.backend.padded_heads(spec.num_heads),
            self.kv_cache_spec.block_size,
            self.device,
            self.config.max_num_seqs,
            ", ".join(self.layer_names[:3]) + (" ..." if len(self.layer_names) > 3 else ""),
        )

    @property
    def plan_costs(self) -> dict[str, PlanCost]:
        """Plans and host seconds of planning."""
        return {"decode": self._plans.cost}

    def build_decode(self, common: CommonAttentionMetadata) -> LatentStep:
        """The decodes, planned.

        Raises:
            BatchError: a table without room for a request, more pages than a graph was captured for, or more
                decodes than FlashInfer can plan.
            PluginError: FlashInfer has to compile, and cannot.
        """
        starts, lens = query_spans(common)
        given = known_seq_lens(common)
        if given is None:
            raise BatchError("seq_lens_host", None, "must be the exact lengths of the requests")
        # One query of each request, the most frequent step, needs no look at their lengths.
        one = is_one_each(lens)
        if not one:
            starts, lens = starts.astype(np.int32, copy=False), lens.astype(np.int32, copy=False)
        known = given.astype(np.int32, copy=False)
        key = common.num_reqs, common.max_query_len
        rows = seen = captured = None
        if self._plans.is_captured(key) and int(starts[-1]) == key[0] * key[1]:
            known = _with_padding(lens, known)
            captured = key if (known >= lens).all() else None
        # Faster than the methods of the arrays.
        least, largest = np.minimum.reduce, np.maximum.reduce
        if known.size and (least(known) < 1 if one else least(lens) < 1 or (known < lens).any()):
            # FlashInfer's result for queries that see nothing is undefined.
            rows, seen, starts, lens, known = trimmed(starts, lens, known, True)
        most_queries = most_keys = 0
        if known.size:
            most_queries, most_keys = 1 if one else int(largest(lens)), int(largest(known))
        table, page = common.block_table_tensor, self.kv_cache_spec.block_size
        most, width = -(-most_keys // page), table.shape[1]
        if most > width:
            limit = f"has no room for a request of {most} pages"
            raise BatchError("block_table", tuple(table.shape), limit)
        # A graph reads its pages at one address.
        indices = None if captured else self._plans.in_place(table)
        places = self._page_starts(known) if indices is None else self._row_starts(rows, known.size, width)
        # The engine may change its arrays while this step can still be planned again.
        starts, known = self._arrays.copy(starts), self._arrays.copy(known)
        step = LatentStep(
            # The planner for latents reads no lengths of last pages.
            Part(0, int(starts[-1]), most_queries, most_keys, 0, starts, places, known, known, b""),
            common.seq_lens,
            table,
            indices,
            None if rows is None or indices is not None else to_device(rows, self.device),
            None if seen is None else to_device(seen, self.device),
            captured,
            self._plans,
        )
        if known.size:
            self._plans.ensure(step)
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        """The metadata of a uniform batch of decodes, over buffers whose addresses stay; host lengths may be bounds.

        Raises:
            BatchError: queries of several lengths, or longer than those of decodes, and as `build`.
        """
        common = dataclasses.replace(common_attn_metadata, seq_lens_host_exact=True)
        reqs, longest = common.num_reqs, common.max_query_len
        if common.num_actual_tokens != reqs * longest or longest > (self.reorder_batch_threshold or 1):
            limit = f"must be that of every request, and at most {self.reorder_batch_threshold}"
            raise BatchError("max_query_len", longest, f"{limit}, in a captured step")
        pages = -(-max(common.max_seq_len, 1) // self.kv_cache_spec.block_size)
        self._plans.capture((reqs, longest), reqs * pages)
        return self.build(0, common)

    def _page_starts(self, seq_lens: Ints) -> Ints:
        """Where each request's pages start among gathered ones, and the end."""
        page, pages = self.kv_cache_spec.block_size, self._arrays.empty(seq_lens.size)
        np.floor_divide(np.add(seq_lens, page - 1, out=pages), page, out=pages)
        starts = self._arrays.empty(seq_lens.size + 1)
        starts[0] = 0
        np.add.accumulate(pages, out=starts[1:])
        return starts

    def _row_starts(self, rows: Ints | None, count: int, width: int) -> Ints:
        """Where the rows of requests start in a table that is `width` wide, and an end; without `rows`, of all."""
        if rows is not None and rows.size:
            return np.append(rows, rows[-1:] + 1) * np.int32(width)
        if self._first_places.size <= count or self._first_places[1] != width:
            most = max(count, self.config.max_num_seqs)
            self._first_places = np.arange(most + 1, dtype=np.int32) * np.int32(width)
        return self._first_places[: count + 1]


class FlashInferMLAImpl(MLADecodeImpl):
    """Latent attention by FlashInfer's wrapper, whose pages are views of the one cache."""

    can_return_lse_for_decode = True

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: LatentStep,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """As MLADecodeImpl.decode."""
        seen, found, lse = metadata.seen, output, output_lse
        if seen is not None:
            output.zero_()
            if output_lse is not None:
                output_lse.fill_(-torch.inf)
            if not seen.shape[0]:
                return
            q_nope, q_pe = q_nope[seen], q_pe[seen]
            found = torch.empty_like(q_nope)
            lse = None if output_lse is None else output_lse.new_empty(q_nope.shape[:2])
        wrapper, rank = metadata.plans.ensure(metadata), q_nope.shape[2]
        # A private attribute of 0.6.13, because only `plan` sets it, and layers of one plan may differ in it.
        wrapper._sm_scale = self.softmax_scale
        latent, positions = kv_cache[..., :rank], kv_cache[..., rank:]
        wrapper.run(q_nope, q_pe, latent, positions, out=found, lse=lse, return_lse=lse is not None)
        if lse is not None:
            lse.mul_(LN_2)
        if seen is not None:
            output[seen] = found
            if output_lse is not None and lse is not None:
                output_lse[seen] = lse


def _with_padding(lens: Ints, known: Ints) -> Ints:
    """The keys of requests, and for the padding at a graph's end, which has one key, as many as queries."""
    # A graph replays the plan that it captured, with as many tiles, so its padding must not be left out of the plan.
    blind = known < lens
    if not blind.any():
        return known
    last = lens.size - int(np.argmin(blind[::-1])) if not blind.all() else 0
    return np.concatenate((known[:last], np.maximum(known[last:], lens[last:])))
