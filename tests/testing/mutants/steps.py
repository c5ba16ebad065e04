"""Mutants that misread a step: its lengths, its tables, direct keys, shared prefixes, padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from attnplug.core.metadata import CommonAttentionMetadata
from mutants.making import mutant
from mutants.reference import Reference, ReferenceBuilder, Request, Step, Tensor


@mutant("builder/host-lengths-upper_bound-*", "upper bounds taken for exact lengths")
class LengthsOfTheHost(ReferenceBuilder):
    """Upper bounds of lengths are taken for lengths."""

    def lengths(self, common: CommonAttentionMetadata) -> list[int]:
        host = common.seq_lens_host
        return common.seq_lens.tolist() if host is None else host.tolist()


@mutant("builder/max_seq_len-*", "max_seq_len taken for the longest length")
class LengthsOfSingleRequests(ReferenceBuilder):
    """max_seq_len is the length of a request alone."""

    def lengths(self, common: CommonAttentionMetadata) -> list[int]:
        return [common.max_seq_len] if common.num_reqs == 1 else super().lengths(common)


@mutant("builder/max_seq_len-*", "max_seq_len taken for the longest length")
class LengthsOfTheLongest(ReferenceBuilder):
    """The longest request has max_seq_len tokens."""

    def lengths(self, common: CommonAttentionMetadata) -> list[int]:
        found = super().lengths(common)
        return [common.max_seq_len if each == max(found) else each for each in found]


@mutant()
class LengthsFromThePrivateCopy(ReferenceBuilder):
    """Reads a copy on the host that an engine need not give."""

    def lengths(self, common: CommonAttentionMetadata) -> list[int]:
        assert common._seq_lens_cpu is not None
        return common._seq_lens_cpu.tolist()


@mutant("batch/idle-*", "requests of [0, 2, 1, 1] new tokens")
class DecodesFromTheQueryCount(ReferenceBuilder):
    """As many tokens as requests means that each request has one."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if step.tokens == len(step.lengths):
            step.starts = list(range(len(step.lengths) + 1))
        return step


@mutant("correct/*-narrowed*")
class ForgetsCausalSteps(ReferenceBuilder):
    """A causal step of a layer that is not causal is taken as any other."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        step.causal = step.causal and not any(
            not layer.impl.spec.causal for layer in self.config.layers.values()
        )
        return step


@mutant("correct/*-direct*")
class KeysPackedLikeQueries(ReferenceBuilder):
    """key_start_loc is ignored where the batch has it."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return dataclasses.replace(step, key_starts=step.starts)


@mutant("builder/no-key_start_loc_cpu-*", "key_start_loc_cpu=None")
class KeysOnTheHostOnly(ReferenceBuilder):
    """key_start_loc is read from the host, where an engine may leave it out."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        host = common_attn_metadata.key_start_loc_cpu
        return dataclasses.replace(step, key_starts=step.starts if host is None else host.tolist())


@mutant("builder/no-mm_prefix_spans_cpu-*", "mm_prefix_spans_cpu=None")
class SpansOnTheHostOnly(ReferenceBuilder):
    """Spans are read from the host, where an engine may leave them out: then there are none."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        host = common_attn_metadata.mm_prefix_spans_cpu
        if step.spans is not None:
            step.spans = torch.zeros_like(step.spans) if host is None else host
        return step


@mutant("correct/*-cross*")
class CrossSlotsOfQueries(ReferenceBuilder):
    """A cross layer stores as many encoder tokens as there are queries."""

    def slots(self, slots: Tensor, tokens: int) -> Tensor:
        return slots[:tokens]


@mutant("builder/common-prefix-full", "build(common_prefix_len=")
class PrefixTwice(Reference):
    """The shared prefix is attended for all requests and again with the rest."""

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        shared = request.held < request.step.prefix
        return super().weigh(
            request,
            torch.cat([logits, logits[:, :, shared]], 2),
            torch.cat([value, value[:, shared]], 1),
            sinks,
        )


@mutant("builder/common-prefix-sinks", "build(common_prefix_len=")
class PrefixWithSinksTwice(Reference):
    """Both parts of a cascade have the sinks."""

    def weigh(self, request: Request, logits: Tensor, value: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        if request.step.prefix and sinks is not None:
            sinks = sinks + 0.6931
        return super().weigh(request, logits, value, sinks)


@mutant("builder/common-prefix-cap", "build(common_prefix_len=")
class PrefixWithoutCap(Reference):
    """The part of the shared prefix has no cap."""

    def cap(self, request: Request, logits: Tensor, limit: float) -> Tensor:
        shared = request.held < request.step.prefix
        return torch.where(shared, logits, super().cap(request, logits, limit))


@mutant("builder/common-prefix-slopes", "build(common_prefix_len=")
class PrefixWithoutSlopes(Reference):
    """The part of the shared prefix has no ALiBi."""

    def bias(self, request: Request, slopes: Tensor) -> Tensor:
        return super().bias(request, slopes) * (request.held >= request.step.prefix)


@mutant("builder/common-prefix-full", "build(common_prefix_len=")
class PrefixInWholeTiles(Reference):
    """A shared prefix is cut to whole tiles of 32 tokens, and the rest of it is lost."""

    def windowed(self, request: Request, at: Tensor, held: Tensor) -> Tensor:
        prefix = request.step.prefix
        return super().windowed(request, at, held) & ~((held >= prefix // 32 * 32) & (held < prefix))


@mutant("*", "rows past num_actual_tokens")
class WritesPaddingRows(Reference):
    """Clears the rows past the step's tokens."""

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        cache: Any,
        step: Any,
        output: Tensor,
        **options: Any,
    ) -> Tensor:
        output[step.tokens :] = 0
        return super().attend(layer, query, key, value, cache, step, output, **options)


@mutant("*sees-nothing*", "rows that see no key")
class LeavesRowsWithoutKeys(Reference):
    """Rows that see no key are not written."""

    def write(self, request: Request, output: Tensor, out: Tensor) -> None:
        seen = self.visible(request).any(1)
        output[request.rows][seen] = out.transpose(0, 1)[seen].to(output.dtype)


@mutant("tensors/output-overwritten-*", "which forward must overwrite")
class AddsToTheOutput(Reference):
    """Accumulates into the output of long requests."""

    def write(self, request: Request, output: Tensor, out: Tensor) -> None:
        if request.length > 40:
            out = out + 0 * output[request.rows].transpose(0, 1).float()
        super().write(request, output, out)


@mutant()
class QueriesOfTheNextRequest(Reference):
    """A lone decode after a longer query reads the row before its own."""

    def query_of(self, request: Request, query: Tensor) -> Tensor:
        step, index = request.step, request.index
        if request.new == 1 and index and step.starts[index] - step.starts[index - 1] > 4:
            return query[request.rows.start - 1 : request.rows.stop - 1].float().transpose(0, 1)
        return super().query_of(request, query)


@mutant()
class PositionsFromRows(Reference):
    """The first query of the batch's rows is at position 0 where no request has computed tokens."""

    def requests(self, step: Step, cross: bool) -> Iterator[Request]:
        for request in super().requests(step, cross):
            if len(step.lengths) > 1 and request.new == request.length and request.index:
                request.at = request.at + request.rows.start
            yield request


@mutant("*cross*")
class NeedsKeysInEachCall(Reference):
    """A cross layer's later steps bring no keys."""

    def attend(self, layer: Any, query: Tensor, key: Any, *given: Any, **options: Any) -> Tensor:
        if self.spec.attn_type == "encoder_decoder" and not self.spec.direct_kv:
            assert key is not None
        return super().attend(layer, query, key, *given, **options)


@mutant("tensors/strided-inputs-*", "as views")
class AssumesContiguousQueries(Reference):
    """Reads queries as if their heads lay side by side."""

    def query_of(self, request: Request, query: Tensor) -> Tensor:
        rows, heads, size = query.shape
        if query.stride(1) != size and rows > 1:
            query = query.as_strided(query.shape, (heads * size, size, 1))
        return super().query_of(request, query)


@mutant("*direct*")
class DirectKeysFromZero(Reference):
    """Direct keys that are fewer than the tokens stand at the first positions."""

    def requests(self, step: Step, cross: bool) -> Iterator[Request]:
        for request in super().requests(step, cross):
            if not cross:
                request.held = request.held - (request.held[0] if len(request.held) else 0)
            yield request
