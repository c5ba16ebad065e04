"""Wrong backends as ported kernels get wrong by accident: state between layers, ranks, and latent attention."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from plain_attention import KernelImpl

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core.spec import AttentionType
from mutants.parts import Altered
from mutants.table import NAN_ROWS, Table

table = Table("accidents")
kernel = table.on(KernelImpl)
impl = table.on(TorchImpl)
step = table.on(Altered)
latent_rows = table.on(TorchMLAImpl)


# State between layers, steps and threads.


@impl._scoring(
    "layers/own-sinks",
    "the layer with another of the same spec, among layers with one, another of the same spec",
    state={"_kept": {}},
)
def sinks_by_heads(right, self, *given):
    """Sinks in the kernel's form are kept by the number of heads."""
    made = right(*given)
    if made.sinks is None:
        return made
    return dataclasses.replace(made, sinks=self._kept.setdefault(self.spec.num_heads, made.sinks))


@impl._attend("builder/several-layers-full", "the first layer's scale, cap, sinks or slopes")
def planned_cap(right, self, query, source, given, metadata, reach, scoring, *rest):
    """The metadata keeps the soft cap and scale of the first layer."""
    planned = metadata.plans.setdefault("scoring", scoring)
    scoring = dataclasses.replace(scoring, scale=planned.scale, soft_cap=planned.soft_cap)
    right(query, source, given, metadata, reach, scoring, *rest)


@impl._attend("builder/several-layers-spans", "the first layer's scale, cap, sinks or slopes")
def reach_of_first_layer(right, self, query, source, given, metadata, reach, *rest):
    """The metadata keeps the reach of the first layer, chunks aside."""
    first = metadata.plans.setdefault(("reach", reach.chunk), reach)
    right(query, source, given, metadata, first, *rest)


@impl.forward(
    "cache/sharing-writes-none",
    "forward of a layer with kv_sharing_target_layer_name wrote K of row 0 of block 1",
)
def sharing_writes(right, self, layer, query, key, value, kv_cache, attn_metadata, output=None, **rest):
    """A layer that shares another's cache writes its keys too."""
    target, self.kv_sharing_target_layer_name = self.kv_sharing_target_layer_name, None
    try:
        return right(layer, query, key, value, kv_cache, attn_metadata, output, **rest)
    finally:
        self.kv_sharing_target_layer_name = target


@table.part("cache/sharing-writes-none", "only requests with prefill")
class SharingAttendsOwn(TorchImpl):
    """A sharing layer's prompts attend the keys of the call."""

    @property
    def _attends_own_keys(self) -> bool:
        return self.spec.attn_type is not AttentionType.ENCODER_DECODER


@impl._attend_call("runtime/threads", "state shared between two runtimes", state={"_scratch": None})
def class_scratch(right, self, layer, query, *rest):
    """All layers and threads share one scratch for queries."""
    cls = type(self)
    if cls._scratch is None or cls._scratch.shape != query.shape or cls._scratch.dtype != query.dtype:
        cls._scratch = torch.empty_like(query)
    scratch = cls._scratch
    scratch.copy_(query)
    right(layer, scratch, *rest)


@impl.update_kv_cache("state/refilled-buffers-full", NAN_ROWS, state={"_written": None})
def writes_once(right, self, layer, key, value, kv_cache, slot_mapping):
    """Keys at an address that was written are not written again."""
    form = key.data_ptr(), kv_cache.data_ptr(), slot_mapping.data_ptr(), slot_mapping.shape
    if form != self._written:
        right(layer, key, value, kv_cache, slot_mapping)
    self._written = form


# fmt: off
# Slots are cut to the query tokens, also for cross layers.
step.altered("batch/cross-steps", NAN_ROWS,
    cross_slots=lambda self, made, common: dataclasses.replace(made, slot_mapping=made.slot_mapping[: made.num_actual_tokens]))
# fmt: on


# Context parallelism.


@impl._attend_call("context_parallel/extend-2-ranks-runs-of-1-sinks", "sink counted twice in a merge")
def sinks_of_rank_zero(right, self, *given):
    """In a group of context parallelism the sinks are counted on rank 0, whatever the caller says."""
    if self.dcp_world_size > 1:
        given = (*given[:8], self.dcp_rank == 0)
    right(*given)


@kernel.weigh("context_parallel/decode-2-ranks-runs-of-1", "LSE of rows that see nothing is 0, not -inf")
def empty_rank(right, self, logits, values, sinks, span):
    """A decode over no keys of this rank gives its queries' LSE 0."""
    out, lse = right(logits, values, sinks, span)
    return (out, torch.zeros_like(lse)) if logits.shape[2] == 0 and sinks is None else (out, lse)


# Latent attention.


@latent_rows.decode(
    "mla/correct/decode-h4x1-d80-v64-float32-b16-NHD",
    "scale of the latent, not of the query before absorption",
)
def latent_scale(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """The scale is that of the latent's size."""
    kept, self.softmax_scale = self.softmax_scale, self.spec.head_size**-0.5
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)
    self.softmax_scale = kept


@latent_rows.decode("mla/correct/halves-h4x1-d80-v64-float32-fp8-b16-NHD", "only requests with decode")
def latent_own_scale(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """decode reads the layer's scale, not the one with the scale of stored latents."""
    self.softmax_scale = self.spec.scale
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@latent_rows.decode("mla/correct/halves-h4x1-d80-v64-float32-fp8-b16-NHD", "of its row's magnitude")
def latents_off_by_a_percent(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Outputs over fp8 latents are one percent too large."""
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)
    if kv_cache.dtype.itemsize == 1:
        output *= 1.01


@latent_rows.decode("mla/correct/decode-*float32*-lse", "LSE in base 2")
def latent_lse_base_two(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """The LSE of decodes is in base 2."""
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)
    if output_lse is not None:
        output_lse.mul_(math.log2(math.e))


@latent_rows.decode("mla/correct/halves-h4x1-d288-v256-float32-b16-NHD", "rotated part left out")
def latent_rope_of64(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Rotated parts of more or fewer than 64 elements are ignored."""
    if q_pe.shape[2] not in (16, 64, 0):
        q_pe = torch.zeros_like(q_pe)
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@latent_rows.decode("mla/correct/halves-h20x1-d80-v64-float32-b16-NHD", "only requests with decode")
def latent_heads_of16(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Heads beyond a multiple of 16 share the last whole group's queries."""
    heads = q_nope.shape[1]
    whole = heads // 16 * 16
    if whole and whole < heads:
        q_nope = torch.cat([q_nope[:, :whole], q_nope[:, whole - 1 : whole].expand(-1, heads - whole, -1)], 1)
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@latent_rows.decode("mla/correct/draft-*", "causal mask ignored")
def latent_drafts_see_all(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Each of several queries sees the keys of the last."""
    m, lens = metadata, metadata.query_lens
    if lens.size and (lens == lens[0]).all() and 1 < lens[0] <= 2:
        n = int(lens[0])
        rows = torch.arange(lens.size).repeat_interleave(n)
        m = TorchMetadata(
            m.slot_mapping,
            m.block_table[rows],
            m.num_actual_tokens,
            np.arange(lens.size * n + 1),
            m.seq_lens.repeat(n),
            None,
            True,
        )
    right(q_nope, q_pe, kv_cache, m, output, output_lse)


@latent_rows.decode("mla/cache/strided-NHD-decode", NAN_ROWS)
def latent_dense(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Blocks of latents are read as if they lay one behind the other."""
    _, size, latent = kv_cache.shape
    dense = kv_cache.as_strided(kv_cache.shape, (size * latent, latent, 1), kv_cache.storage_offset())
    right(q_nope, q_pe, dense, metadata, output, output_lse)


@latent_rows.decode(
    "mla/correct/long-decode-h4x1-d80-v64-float32-b16-NHD", "only requests of more than 129 tokens"
)
def latent_table_of64(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """At most 64 blocks of a request are read."""
    most = 64 * kv_cache.shape[1]
    if (metadata.seq_lens > most).any():
        keep = np.minimum(metadata.seq_lens, most)
        metadata = dataclasses.replace(metadata, seq_lens=keep, plans={})
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@latent_rows.decode("mla/correct/idle-h4x1-*lse", "only requests with padding")
def latent_empty_rows(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Output rows of requests without keys are left as they were."""
    kept = output.clone()
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)
    for request in np.flatnonzero(metadata.seq_lens <= 0).tolist():
        rows = slice(*metadata.query_starts[request : request + 2].tolist())
        output[rows] = kept[rows]


@latent_rows.decode("mla/correct/halves-h4x1-d80-v64-float32-fp8_e5m2-b16-NHD", "only requests with decode")
def latent_fp8_query(right, self, q_nope, q_pe, kv_cache, metadata, output, output_lse):
    """Absorbed queries over fp8 latents are rounded to fp8."""
    if kv_cache.dtype.itemsize == 1:
        q_nope = q_nope.clamp(-448, 448).to(torch.float8_e4m3fn).to(q_nope.dtype)
    right(q_nope, q_pe, kv_cache, metadata, output, output_lse)
