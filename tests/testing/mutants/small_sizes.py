"""Wrong backends that are right for small layers and short steps, for one layer, or for steps of one kind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from plain_attention import KernelImpl

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.core.spec import AttentionType
from mutants.parts import Altered
from mutants.table import Table

table = Table("small_sizes")
_BYTE = 256
kernel = table.on(KernelImpl)
impl = table.on(TorchImpl)
step = table.on(Altered)


def _plain(name: str) -> str:
    return f"correct/{name}-h4x2-d64-float32-b16-NHD"


# Many heads, large heads.


@kernel.one("correct/mixed-h96x4-*", "heads 16-23, 40-47, 64-71, 88-95 of 96")
def groups_of16(right, self, *given):
    """Heads past the 16th of a group have the 16th's answer."""
    group = self.spec.num_heads // self.spec.num_kv_heads
    heads = torch.arange(self.spec.num_heads)
    served = heads // group * group + (heads % group).clamp_max(15)
    out, lse = right(*given)
    return out[served], lse[served]


@kernel.one("correct/mixed-h96x4-*", "heads 64-95 of 96")
def heads64(right, self, *given):
    """Heads past the 64th have the 64th's answer."""
    served = torch.arange(self.spec.num_heads).clamp_max(63)
    out, lse = right(*given)
    return out[served], lse[served]


# fmt: off
# Reads 320 elements of a head.
kernel.one("correct/mixed-h4x2-d512-*", "output error", elements320=lambda right, self, query, keys, *rest: right(query[..., :320], keys[..., :320], *rest))
# fmt: on

# Windows, chunks, caps and scales of models.

# fmt: off
# Keeps the window in 8 bits.
kernel.window(f"{_plain('long-*')}-window1030*", "left side of the window in 8 bits",
    window_in_byte=lambda self, span: span.at[:, None] - span.held <= self.spec.window[0] % _BYTE)
# fmt: on


@kernel.window(f"{_plain('long-decode')}-chunk1031*", "chunks ignored")
def chunk_in_byte(right, self, span):
    """Takes a chunk that 8 bits do not hold for none."""
    seen = right(span)
    return torch.ones_like(seen) if (self.spec.chunk_size or 0) >= _BYTE else seen


# fmt: off
# Leaves out a cap of more than 40, since small logits hardly change.
kernel.logits(f"{_plain('mixed')}-cap50", "soft cap ignored",
    cap_up_to40=lambda right, self, scaled, span: (scaled if (self.spec.logits_soft_cap or 0) > 40 else right(scaled, span)))
# fmt: on


@kernel.one(f"{_plain('mixed')}-scale1", "softmax scale ignored")
def scale_of_one(right, self, query, *rest):
    """Takes a scale of 1 for no scale."""
    usual = self.spec.head_size**-0.5
    return right(query * usual if self.spec.scale == 1.0 else query, *rest)


# Long contexts and many rows.

# fmt: off
# Compares positions in float16, which counts to 2048.
kernel.causal(_plain("long-extend"), "rows 1-2, 5-6, 9-10", positions_in_half=lambda self, span: span.held.half() <= span.at[:, None].half())
# fmt: on


@kernel.causal(_plain("long-extend"), "causal mask ignored")
def splits_without_mask(right, self, span):
    """A verified token sees all keys of the splits after the first."""
    seen = right(span)
    return seen | ((span.held >= 512) & (1 < span.at.shape[0] <= 16))


@kernel.seen(_plain("many-rows"), "only rows from")
def prompt1024(right, self, span):
    """Rows past the 1024th of a prompt see what that one sees."""
    seen = right(span)
    return seen[torch.arange(seen.shape[0]).clamp_max(1023)]


@kernel.one(_plain("many-rows"), "the wrong rows are 0")
def rows2048(right, self, query, keys, values, scales, sinks, span):
    """Writes 2048 rows of a step."""
    out, lse = right(query, keys, values, scales, sinks, span)
    rows = torch.arange(span.rows.start, span.rows.stop)
    return out.masked_fill((rows >= 2048)[:, None], 0.0), lse


@kernel.weigh(f"{_plain('long-decode')}-window1030*", "sinks ignored")
def split_windows_without_sinks(right, self, logits, values, sinks, span):
    """A split decode with a window has no sinks."""
    is_split = span.held.shape[0] > 512 and self.spec.is_windowed
    return right(logits, values, None if is_split else sinks, span)


@kernel.one(f"{_plain('long-decode')}-cap*lse", "LSE before the soft cap")
def split_lse_without_cap(right, self, query, keys, values, scales, sinks, span):
    """The LSE of a split decode is that of the logits before the cap."""
    out, lse = right(query, keys, values, scales, sinks, span)
    if span.held.shape[0] > 512 and self.spec.logits_soft_cap:
        raw = query @ keys.mT * self.spec.scale
        lse = raw.masked_fill(~self.seen(span), -math.inf).logsumexp(2)
    return out, lse


@kernel.one("correct/long-decode-h4x2-d64-float32-fp8-*", "only requests of more than 129 tokens")
def splits_without_scale(right, self, query, keys, values, scales, sinks, span):
    """The splits after the first have no scale of V."""
    late = torch.cat([values[:, :512], values[:, 512:] / scales[1]], dim=1)
    return right(query, keys, late, scales, sinks, span)


@kernel.one("correct/long-decode-h14x2-*", "only requests of more than 129 tokens")
def split_groups(right, self, query, keys, *rest):
    """A split decode with a group of no power of two reads the next KV head."""
    group = self.spec.num_heads // self.spec.num_kv_heads
    odd = keys.shape[1] > 512 and group & (group - 1)
    return right(query, keys.roll(group, 0) if odd else keys, *rest)


# Other kinds of layers.


@kernel.one("correct/many-requests-*-encoder", "of 40 requests")
def encoders_of_five(right, self, query, keys, *rest):
    """Encoders with more than five requests read the keys of later ones one row late."""
    is_late = self.spec.is_encoder and rest[-1].request >= 5
    return right(query, keys.roll(1, 1) if is_late else keys, *rest)


@kernel.seen(f"{_plain('mixed')}-cross", "1 of 6 requests")
def cross_as_self(right, self, span):
    """Takes queries of a cross layer past the number of its keys for padding."""
    seen, (rows, held) = right(span), (span.at.shape[0], span.held.shape[0])
    is_cross = self.spec.attn_type is AttentionType.ENCODER_DECODER
    return seen & ((torch.arange(rows) < held)[:, None] | (not is_cross))


# Layers that share, strides, steps in another form, many calls.


@impl._bind("cache/sharing-window", "sliding window ignored", state={"_windows": {}})
def window_of_target(right, self, spec, layer_name, tensors, target=None, options=None):
    """A layer that shares another's cache has its window too."""
    right(spec, layer_name, tensors, target, options)
    self._windows[layer_name] = spec.window
    if target in self._windows:
        self.spec = spec.replace(window=self._windows[target])


@impl._scales("cache/sharing-fp8", "fp8 scales ignored")
def shares_without_scales(right, self, layer, stored):
    """A layer that shares an fp8 cache reads it without scales."""
    shares = self.kv_sharing_target_layer_name is not None
    return (1.0, 1.0) if shares else right(layer, stored)


@impl.update_kv_cache("tensors/strided-inputs-*", "value strides")
def strides_of_keys(right, self, layer, key, value, kv_cache, slot_mapping):
    """Reads values with the strides of the keys."""
    if value.shape == key.shape and value.stride() != key.stride():
        value = value.flip(1)
    right(layer, key, value, kv_cache, slot_mapping)


@impl._given("builder/several-layers-*", "the layer with other keys")
def keys_of_first_layer(right, self, key, value, metadata):
    """Prompts of equal layers attend the keys that the step's first such layer was given."""
    found = right(key, value, metadata)
    return metadata.plans.setdefault(("given", self.spec), found) if found else None


@impl._attend_call("tensors/same-each-call", "call 127 of one impl", state={"_calls": 0})
def ring_of128(right, self, layer, query, *rest):
    """Wrong in every 128th call but one."""
    self._calls += 1
    right(layer, query * 0.5 if self._calls % 128 == 127 else query, *rest)


@impl.attend("tensors/quantised-output-fp8_e4m3", "with a scalar tensor")
def scale_of_one_element(right, self, *given, **named):
    """Takes the output's scale as a vector only."""
    scale = named.get("output_scale")
    if scale is not None and not scale.ndim:
        raise IndexError("output_scale[0]")
    return right(*given, **named)


@step.altered("builder/max_seq_len-*", "max_seq_len=131072")
def splits_of_bound(self, made, common):
    """Splits by the largest length of the model, and reads one split of short requests."""
    if common.max_seq_len < 1 << 16:
        return made
    return dataclasses.replace(made, seq_lens=made.seq_lens.clip(max=16))


@step.altered("batch/no-spans-*", "after a step with spans", state={"_last": None})
def spans_of_last_step(self, made, common):
    """A step without spans has those of the step before."""
    if made.spans is None:
        return dataclasses.replace(made, spans=self._last)
    self._last = made.spans
    return made


# Latent attention.


class Queries(TorchMLAImpl):
    """Changes the rotated part of absorbed queries."""

    def decode(self, q_nope: Any, q_pe: Any, *rest: Any) -> None:
        super().decode(q_nope, self.rotated(q_pe), *rest)

    def rotated(self, q_pe: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


queries = table.on(Queries)

# fmt: off
# Swaps the halves of the rotated part.
queries.rotated("mla/correct/decode-*", "halves of the query's rotated part swapped",
    rotated_halves=lambda self, q_pe: q_pe.roll(q_pe.shape[2] // 2, 2))
# Orders the rotated part by halves, where keys have pairs.
queries.rotated("mla/correct/decode-*", "pairs of the query's rotated part taken as halves",
    rotated_pairs=lambda self, q_pe: torch.cat((q_pe[..., ::2], q_pe[..., 1::2]), 2))
# fmt: on


class Prefills(TorchMLAImpl):
    """Changes a prefill before or after it."""

    def forward_mha(self, q, kv_c, k_pe, cache, meta, k_scale, output, **named):
        super().forward_mha(q, kv_c, k_pe, cache, self.planned(meta), k_scale, output, **named)
        self.after(output)

    def planned(self, metadata: Any) -> Any:
        return metadata

    def after(self, output: torch.Tensor) -> None:
        """Does nothing."""


prefills = table.on(Prefills)


@prefills.after("mla/correct/*-p24v56-*", "elements 24")
def values_of_key_size(self, output):
    """Cuts expanded values at the size of expanded keys."""
    output[..., self.dims.qk_nope_head_dim :] = 0


@prefills.planned("mla/correct/halves-*rows16", "attended twice in a prefill")
def chunk_twice(self, metadata):
    """Merges the first of several chunks again at the end."""
    prefill = metadata.prefill
    if prefill is None or len(prefill.chunks) < 2:
        return metadata
    twice = dataclasses.replace(prefill, chunks=(*prefill.chunks, prefill.chunks[0]))
    return dataclasses.replace(metadata, prefill=twice)
