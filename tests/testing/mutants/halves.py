"""Backends of two code paths, as prefill and decode kernels, that disagree: variants of TORCH."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from mutants.parts import Altered
from mutants.table import Table

table = Table("halves")
step = table.on(Altered)
impl = table.on(TorchImpl)


class Halves(TorchImpl):
    """Serves decodes with a layer of another spec or tensors."""

    def is_decode(self, metadata: TorchMetadata) -> np.ndarray[Any, Any]:
        return metadata.query_lens == 1

    def changed(self) -> dict[str, Any]:
        """Fields of the spec that the decoding path does not read."""
        return {}

    def attend(self, *given: Any, output_lse: Any = None, **asked: Any) -> torch.Tensor:
        output = super().attend(*given, output_lse=output_lse, **asked)
        meta, own = given[5], self.spec
        scratch, lse = torch.empty_like(given[6]), None if output_lse is None else output_lse.clone()
        self.spec = own.replace(**self.changed())
        try:
            super().attend(*given[:6], scratch, output_lse=lse, **self.asked(asked))
        finally:
            self.spec = own
        for request in np.flatnonzero(self.is_decode(meta)).tolist():
            start, stop = meta.query_starts[request : request + 2].tolist()
            output[start:stop] = scratch[start:stop]
            if output_lse is not None:
                output_lse[start:stop] = self.lse(lse)[start:stop]
        return output

    def asked(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    def lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse


halves = table.on(Halves)


# fmt: off
# The decoding kernel has no sinks.
halves.asked("builder/common-prefix-sinks", "requests with [1, 1, 1, 1] new tokens",
    no_sinks_in_decode=lambda self, asked: {**asked, "use_sinks": False})
# The decoding kernel has no cap.
halves.changed("builder/several-layers-full", "the layer with a soft cap", no_cap_in_decode=lambda self: {"logits_soft_cap": None})
# fmt: on


@table.part("batch/pieces-window", "prefilling 53 tokens in pieces")
class NoWindowInExtend(Halves):
    """The kernel for queries after a context has no window."""

    def is_decode(self, metadata: TorchMetadata) -> np.ndarray[Any, Any]:
        return (metadata.query_lens > 1) & (metadata.seq_lens > metadata.query_lens)

    def changed(self) -> dict[str, Any]:
        return {"window": (-1, -1)} if self.spec.causal else {}


# fmt: off
# The decoding kernel writes no LSE.
halves.lse("builder/common-prefix-lse", "requests with [1, 1, 1, 1] new tokens: lse", no_lse_in_decode=lambda self, lse: torch.zeros_like(lse))
# fmt: on


@table.part("merge/context-and-new", "part 2 alone: lse")
class LseBaseTwoInPrefill(Halves):
    """The prefill kernel writes the LSE in base 2."""

    def is_decode(self, metadata: TorchMetadata) -> np.ndarray[Any, Any]:
        return metadata.query_lens == metadata.seq_lens

    def lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse * 1.4426950408889634


@table.part("correct/speculative-*scale*", "softmax scale ignored")
class OwnScaleInSpeculative(Halves):
    """The kernel for two to four queries has its own scale."""

    def is_decode(self, metadata: TorchMetadata) -> np.ndarray[Any, Any]:
        return (metadata.query_lens > 1) & (metadata.query_lens <= 4)

    def changed(self) -> dict[str, Any]:
        return {"scale": self.spec.head_size**-0.5}


@step.altered("builder/order-full", "requests in any order, as reorder_batch_threshold=None promises")
def path_of_first(self, made, common):
    """Takes the path of the step's first request for all: decodes after a prompt see no context."""
    lens = made.query_lens
    if lens.size and lens[0] > 1 and lens[0] == made.seq_lens[0]:
        return dataclasses.replace(made, seq_lens=np.where(lens == 1, lens, made.seq_lens))
    return made


@step.altered("tensors/padding-rows-mixed", "output[")
def longest_is_decode(self, made, common):
    """Chooses the path by max_query_len: in a step with a prompt, extends see no context."""
    if common.max_query_len > 16:
        lens = made.query_lens
        short = (lens > 1) & (lens <= 16)
        return dataclasses.replace(made, seq_lens=np.where(short, lens, made.seq_lens))
    return made


@step.altered(
    "builder/order-full",
    "requests in the order for reorder_batch_threshold=4",
    state={"reorder_batch_threshold": 4},
)
def four_is_decode(self, made, common):
    """Declares that decodes have up to four tokens, and serves them as single ones."""
    lens = made.query_lens
    return dataclasses.replace(made, seq_lens=np.where((lens > 1) & (lens <= 4), lens, made.seq_lens))


@step.altered(
    "builder/order-full",
    "requests in the order for reorder_batch_threshold=1",
    state={"reorder_batch_threshold": 1},
)
def unsorted(self, made, common):
    """Declares a threshold, and splits where the first long query is, one request too late."""
    lens = made.query_lens
    split = int(np.argmax(lens > 1)) if (lens > 1).any() else lens.size
    lengths = made.seq_lens.copy()
    lengths[split : split + 1] = lens[split : split + 1]
    return dataclasses.replace(made, seq_lens=lengths) if split else made


@table.part("builder/common-prefix-full", "of 4 requests with [1, 1, 5, 19] new tokens")
class CascadeAlways(TorchMetadataBuilder):
    """Wants every prefix, and attends it only for requests of one token."""

    def use_cascade_attention(self, *given: Any, **named: Any) -> bool:
        return True

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if common_prefix_len and (made.query_lens > 8).any():
            return dataclasses.replace(
                made,
                common_prefix_len=0,
                seq_lens=np.maximum(made.seq_lens - common_prefix_len, made.query_lens),
            )
        return made


@impl._attend_cascade("builder/common-prefix-lse", "lse: error")
def cascade_without_lse(right, self, *given):
    """Writes the LSE of the rest only, where a prefix is shared."""
    right(*given)
    if given[-1] is not None:
        given[-1].sub_(0.5)


@impl._attend_cascade("builder/common-prefix-sinks", "build(common_prefix_len=16)")
def cascade_sinks_twice(right, self, query, source, rest, meta, reach, scoring, output, lse):
    """Attends a shared prefix with the sinks in both parts."""
    right(query, source, rest, meta, reach, scoring, output, lse)
    if scoring.sinks is not None:
        output.mul_(0.9)
