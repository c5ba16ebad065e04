"""Latent attention of FLASHINFER: the decode of a step by one planned wrapper."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.flashinfer.latent_plans import LatentPlans, LatentStep
from attnplug.backends.flashinfer.library import library
from attnplug.backends.flashinfer.modules import LatentModule
from attnplug.backends.flashinfer.planned_wrapper import PlanCost
from attnplug.backends.flashinfer.step import Part, trimmed
from attnplug.core.batch.host import known_seq_lens, query_spans, to_device
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionCGSupport, CommonAttentionMetadata
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl
from attnplug.mla.metadata import MLAMetadata
from attnplug.ops.storage import compute_dtype

# FlashInfer returns LSE in base 2; attnplug's LSE is in base e.
_LN_2 = math.log(2.0)


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
        starts, lens = (each.astype(np.int32, copy=False) for each in query_spans(common))
        given = known_seq_lens(common)
        if given is None:
            raise BatchError("seq_lens_host", None, "must be the exact lengths of the requests")
        known = given.astype(np.int32, copy=False)
        key = common.num_reqs, common.max_query_len
        rows = seen = captured = None
        if int(starts[-1]) == key[0] * key[1] and self._plans.is_captured(key):
            known = _with_padding(lens, known)
            captured = key if (known >= lens).all() else None
        # One query of each request, the most frequent step, needs no comparison of two arrays.
        several, least = starts[-1] != lens.size, np.minimum.reduce
        if lens.size and (least(lens) < 1 or ((known < lens).any() if several else least(known) < 1)):
            # FlashInfer's result for queries that see nothing is undefined.
            rows, seen, starts, lens, known = trimmed(starts, lens, known, True)
        step = LatentStep(
            _part(starts, lens, known, self.kv_cache_spec.block_size),
            common.seq_lens,
            common.block_table_tensor,
            None if rows is None else to_device(rows, self.device),
            None if seen is None else to_device(seen, self.device),
            captured,
            self._plans,
        )
        most, width = -(-step.part.max_seq_len // self.kv_cache_spec.block_size), step.block_table.shape[1]
        if most > width:
            limit = f"has no room for a request of {most} pages"
            raise BatchError("block_table", tuple(step.block_table.shape), limit)
        if len(known):
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
            lse.mul_(_LN_2)
        if seen is not None:
            output[seen] = found
            if output_lse is not None and lse is not None:
                output_lse[seen] = lse


def _with_padding(lens: npt.NDArray[np.int32], known: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The keys of requests, and for the padding at a graph's end, which has one key, as many as queries.

    A graph replays the plan that it captured, with as many tiles, so its padding must not be left out of the plan.
    """
    blind = known < lens
    last = lens.size - int(np.argmin(blind[::-1])) if not blind.all() else 0
    return np.concatenate((known[:last], np.maximum(known[last:], lens[last:])))


def _part(starts: Any, lens: Any, seq_lens: Any, page_size: int) -> Part:
    """The arrays of requests, of which each has queries and keys."""
    pages = (seq_lens + (page_size - 1)) // page_size
    kv_indptr = np.empty(len(seq_lens) + 1, dtype=np.int32)
    kv_indptr[0] = 0
    np.add.accumulate(pages, out=kv_indptr[1:])
    # Faster than the methods of the arrays.
    longest = tuple(int(np.maximum.reduce(each)) if each.size else 0 for each in (lens, seq_lens))
    # The engine may change its arrays while this step can still be planned again.
    own = seq_lens.copy()
    # The planner for latents reads no lengths of last pages.
    return Part(0, int(starts[-1]), longest[0], longest[1], 0, starts.copy(), kv_indptr, own, own, b"")
