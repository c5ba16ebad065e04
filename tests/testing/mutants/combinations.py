"""Backends that are wrong only where two rare things meet, or after other steps: variants of TORCH."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import LayerSpec
from mutants.table import Table

table = Table("combinations")
impl = table.on(TorchImpl)


class Changed(TorchImpl):
    """Alters a step before the layer runs, or its answer."""

    def _attend_call(self, *given: Any) -> None:
        layer, query, key, value, cache, metadata, output, lse, use_sinks = given
        metadata = self.before(metadata, cache)
        super()._attend_call(layer, query, key, value, cache, metadata, output, lse, use_sinks)
        self.after(metadata, cache, output, lse)

    def before(self, metadata: Any, cache: Any) -> Any:
        return metadata

    def after(self, metadata: Any, cache: Any, output: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Nothing is altered."""


changed = table.on(Changed)


def scaled_where(applies: Callable[[LayerSpec, Any, int], bool]) -> dict[str, Any]:
    """Answers off by a tenth for the layers and steps that `applies` says, from the spec, the step and the block size."""

    class Scaled(Changed):
        def after(self, metadata: Any, cache: Any, output: torch.Tensor, lse: torch.Tensor | None) -> None:
            size = 0 if cache is None else TorchBackend.split_kv(cache, self.spec)[0].shape[1]
            if applies(self.spec, metadata, size):
                output[: metadata.num_actual_tokens].mul_(1.1)

    return {"impl": Scaled}


def scaled_requests(applies: Callable[[LayerSpec, int, int, int], bool]) -> dict[str, Any]:
    """Requests off by a tenth: `applies` gets the spec, the new and all tokens of one, and the block size."""

    class Scaled(Changed):
        def after(self, metadata: Any, cache: Any, output: torch.Tensor, lse: torch.Tensor | None) -> None:
            size = 0 if cache is None else TorchBackend.split_kv(cache, self.spec)[0].shape[1]
            starts = metadata.query_starts
            for index, new in enumerate(metadata.query_lens):
                if size and applies(self.spec, int(new), int(metadata.seq_lens[index]), size):
                    output[starts[index] : starts[index + 1]].mul_(1.1)

    return {"impl": Scaled}


def is_decode(metadata: Any) -> bool:
    return bool((metadata.query_lens <= 1).all())


@changed.before("correct/long-decode-h4x2-d64-float32-b1-NHD", "is not")
def few_pages(self, metadata, cache):
    """Copies the first 512 entries of a block table."""
    table = metadata.block_table
    if cache is None or table.shape[1] <= 512:
        return metadata
    return dataclasses.replace(
        metadata,
        block_table=torch.cat([table[:, :512], table[:, :1].expand(-1, table.shape[1] - 512)], 1),
        plans={},
    )


@changed.after("builder/build-full", "step 7 of one builder", state={"most": 0})
def first_size(self, metadata, cache, output, lse):
    """Has buffers for four times the requests of its first step, and loses those past them."""
    self.most = self.most or 4 * metadata.seq_lens.size
    output[metadata.query_starts[min(self.most, metadata.seq_lens.size)] : metadata.num_actual_tokens] = 0


@changed.before("batch/chain-full", "a prompt in pieces", state={"most": 0})
def first_length(self, metadata, cache):
    """Reads four times the keys of its first step at most."""
    self.most = self.most or 4 * int(metadata.seq_lens.max(initial=0))
    return dataclasses.replace(metadata, seq_lens=np.minimum(metadata.seq_lens, self.most), plans={})


@impl.attend("merge/use_sinks", "use_sinks=False ignored")
def sinks_beside_cap(right, self, *given, **asked):
    """Ignores use_sinks=False in layers with a soft cap."""
    if self.spec.logits_soft_cap:
        asked["use_sinks"] = True
    return right(*given, **asked)


@impl.attend("merge/use_sinks", "use_sinks=False ignored", state={"last": True})
def sinks_of_call_before(right, self, *given, **asked):
    """Takes use_sinks of the call before."""
    now = asked.get("use_sinks", True)
    asked["use_sinks"], self.last = self.last, now
    return right(*given, **asked)


@changed.after("correct/", "LSE rows past num_actual_tokens")
def padding_of_decodes(self, metadata, cache, output, lse):
    """Writes the LSE of padding rows, in decodes alone."""
    if lse is not None and is_decode(metadata):
        lse[metadata.num_actual_tokens :] = 0.0


@changed.after("correct/alike", "output rows past num_actual_tokens")
def padding_of_drafts(self, metadata, cache, output, lse):
    """Writes padding rows of the output, where all requests have as many new tokens."""
    lens = metadata.query_lens
    if lens.size > 1 and 1 < lens[0] < 8 and bool((lens == lens[0]).all()):
        output[metadata.num_actual_tokens :] = 0.0


@changed.before("correct/idle", "idle")
def idle_rows(self, metadata, cache):
    """Skips requests without new tokens, but not their rows of the block table."""
    busy = np.flatnonzero(metadata.query_lens > 0)
    if cache is None or busy.size == metadata.query_lens.size:
        return metadata
    table = metadata.block_table.clone()
    table[: busy.size] = metadata.block_table[torch.from_numpy(busy)]
    return dataclasses.replace(metadata, block_table=table, plans={})


@impl.update_kv_cache("cache/", "slot")
def last_slot(right, self, layer, key, value, kv_cache, slot_mapping):
    """Takes slot -1 for the last one, as an index does."""
    last = kv_cache.shape[0] * TorchBackend.split_kv(kv_cache, self.spec)[0].shape[1] - 1
    slots = torch.where(slot_mapping < 0, last, slot_mapping)
    right(layer, key, value, kv_cache, slots)


@changed.after("tensors/refilled", "the second of two steps", state={"last": None})
def answer_by_address(self, metadata, cache, output, lse):
    """Returns the last answer where the lengths and the block table's address are those of the step before."""
    key = metadata.seq_lens.tobytes(), metadata.query_starts.tobytes(), metadata.block_table.data_ptr()
    if self.last is not None and self.last[0] == key and self.last[1].shape == output.shape:
        output.copy_(self.last[1])
    self.last = key, output.clone()


@changed.after("correct/", "lse: ")
def lse_of_one_key(self, metadata, cache, output, lse):
    """Has an LSE of 0 for a request of one token."""
    if lse is not None:
        for index in np.flatnonzero((metadata.seq_lens == 1) & (metadata.query_lens == 1)):
            lse[metadata.query_starts[index]] = math.log(1.0)


# fmt: off
table.add("windows_with_slopes | correct/ | ALiBi", **scaled_where(lambda spec, step, size: spec.is_windowed and spec.has_alibi))
table.add("chunks_with_sinks_of_one_kv_head | correct/ | chunks of",
    **scaled_where(lambda spec, step, size: bool(spec.chunk_size) and spec.has_sinks and spec.num_kv_heads == 1))
table.add("large_pages_with_windows | correct/ | window (", **scaled_where(lambda spec, step, size: spec.is_windowed and size >= 128))
table.add("single_slots_with_sinks | correct/ | sinks", **scaled_where(lambda spec, step, size: spec.has_sinks and size == 1))
table.add("cross_with_sinks | correct/ | sinks", **scaled_where(lambda spec, step, size: spec.attn_type == "encoder_decoder" and spec.has_sinks))
table.add("direct_spans_with_sinks | correct/ | mm_prefix",
    **scaled_where(lambda spec, step, size: spec.direct_kv and spec.mm_prefix and spec.has_sinks))
table.add("odd_heads_in_decodes | correct/decode | (decode, 1 new of",
    **scaled_where(lambda spec, step, size: bool(spec.head_size % 16) and is_decode(step)))
table.add("groups_of_16_in_decodes | correct/decode | (decode, 1 new of",
    **scaled_where(lambda spec, step, size: spec.num_heads // spec.num_kv_heads >= 16 and is_decode(step)))
table.add("decodes_of_whole_pages | correct/ | (decode, 1 new of 128 tokens)",
    **scaled_requests(lambda spec, new, total, size: new == 1 and 1 < size < total and total % size == 0))
table.add("extends_of_whole_pages | correct/ | (extend",
    **scaled_requests(lambda spec, new, total, size: 1 < new < total and size > 1 and (total - new) % size == 0))
table.add("windows_as_long_as_requests | correct/ | (decode, 1 new of",
    **scaled_requests(lambda spec, new, total, size: spec.is_windowed and new == 1 and total == spec.window[0] + 1))
table.add("groups_of_6 | correct/mixed-h6x1 | 6 heads over 1 KV heads",
    **scaled_where(lambda spec, step, size: spec.num_heads == 6 * spec.num_kv_heads))
# fmt: on
