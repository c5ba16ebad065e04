"""Mutants that misread a step: its lengths, its tables, direct keys, shared prefixes, padding."""

from __future__ import annotations

import dataclasses

import torch

from mutants.making import on
from mutants.reference import Reference, ReferenceBuilder

reference_builder = on(ReferenceBuilder)
reference = on(Reference)


@reference_builder.lengths("builder/host-lengths-upper_bound-*", "upper bounds taken for exact lengths")
def lengths_of_the_host(self, common):
    """Upper bounds of lengths are taken for lengths."""
    host = common.seq_lens_host
    return common.seq_lens.tolist() if host is None else host.tolist()


# fmt: off
# max_seq_len is the length of a request alone.
reference_builder.lengths("builder/max_seq_len-*", "max_seq_len taken for the longest length",
    lengths_of_single_requests=lambda right, self, common: ([common.max_seq_len] if common.num_reqs == 1 else right(common)))
# fmt: on


@reference_builder.lengths("builder/max_seq_len-*", "max_seq_len taken for the longest length")
def lengths_of_the_longest(right, self, common):
    """The longest request has max_seq_len tokens."""
    found = right(common)
    return [common.max_seq_len if each == max(found) else each for each in found]


@reference_builder.lengths()
def lengths_from_the_private_copy(self, common):
    """Reads a copy on the host that an engine need not give."""
    assert common._seq_lens_cpu is not None
    return common._seq_lens_cpu.tolist()


@reference_builder.build("batch/idle-*", "requests of [0, 2, 1, 1] new tokens")
def decodes_from_the_query_count(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """As many tokens as requests means that each request has one."""
    step = right(common_prefix_len, common_attn_metadata, fast_build)
    if step.tokens == len(step.lengths):
        step.starts = list(range(len(step.lengths) + 1))
    return step


@reference_builder.build("correct/*-narrowed*")
def forgets_causal_steps(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """A causal step of a layer that is not causal is taken as any other."""
    step = right(common_prefix_len, common_attn_metadata, fast_build)
    step.causal = step.causal and not any(not layer.impl.spec.causal for layer in self.config.layers.values())
    return step


@reference_builder.build("correct/*-direct*")
def keys_packed_like_queries(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """key_start_loc is ignored where the batch has it."""
    step = right(common_prefix_len, common_attn_metadata, fast_build)
    return dataclasses.replace(step, key_starts=step.starts)


@reference_builder.build("builder/no-key_start_loc_cpu-*", "key_start_loc_cpu=None")
def keys_on_the_host_only(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """key_start_loc is read from the host, where an engine may leave it out."""
    step = right(common_prefix_len, common_attn_metadata, fast_build)
    host = common_attn_metadata.key_start_loc_cpu
    return dataclasses.replace(step, key_starts=step.starts if host is None else host.tolist())


@reference_builder.build("builder/no-mm_prefix_spans_cpu-*", "mm_prefix_spans_cpu=None")
def spans_on_the_host_only(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Spans are read from the host, where an engine may leave them out: then there are none."""
    step = right(common_prefix_len, common_attn_metadata, fast_build)
    host = common_attn_metadata.mm_prefix_spans_cpu
    if step.spans is not None:
        step.spans = torch.zeros_like(step.spans) if host is None else host
    return step


# A cross layer stores as many encoder tokens as there are queries.
reference_builder.slots("correct/*-cross*", cross_slots_of_queries=lambda self, slots, tokens: slots[:tokens])


@reference.weigh("builder/common-prefix-full", "build(common_prefix_len=")
def prefix_twice(right, self, request, logits, value, sinks):
    """The shared prefix is attended for all requests and again with the rest."""
    shared = request.held < request.step.prefix
    return right(
        request,
        torch.cat([logits, logits[:, :, shared]], 2),
        torch.cat([value, value[:, shared]], 1),
        sinks,
    )


@reference.weigh("builder/common-prefix-sinks", "build(common_prefix_len=")
def prefix_with_sinks_twice(right, self, request, logits, value, sinks):
    """Both parts of a cascade have the sinks."""
    if request.step.prefix and sinks is not None:
        sinks = sinks + 0.6931
    return right(request, logits, value, sinks)


@reference.cap("builder/common-prefix-cap", "build(common_prefix_len=")
def prefix_without_cap(right, self, request, logits, limit):
    """The part of the shared prefix has no cap."""
    shared = request.held < request.step.prefix
    return torch.where(shared, logits, right(request, logits, limit))


# fmt: off
# The part of the shared prefix has no ALiBi.
reference.bias("builder/common-prefix-slopes", "build(common_prefix_len=",
    prefix_without_slopes=lambda right, self, request, slopes: (right(request, slopes) * (request.held >= request.step.prefix)))
# fmt: on


@reference.windowed("builder/common-prefix-full", "build(common_prefix_len=")
def prefix_in_whole_tiles(right, self, request, at, held):
    """A shared prefix is cut to whole tiles of 32 tokens, and the rest of it is lost."""
    prefix = request.step.prefix
    return right(request, at, held) & ~((held >= prefix // 32 * 32) & (held < prefix))


@reference.attend("*", "rows past num_actual_tokens")
def writes_padding_rows(right, self, layer, query, key, value, cache, step, output, **options):
    """Clears the rows past the step's tokens."""
    output[step.tokens :] = 0
    return right(layer, query, key, value, cache, step, output, **options)


@reference.write("*sees-nothing*", "rows that see no key")
def leaves_rows_without_keys(self, request, output, out):
    """Rows that see no key are not written."""
    seen = self.visible(request).any(1)
    output[request.rows][seen] = out.transpose(0, 1)[seen].to(output.dtype)


@reference.write("tensors/output-overwritten-*", "which forward must overwrite")
def adds_to_the_output(right, self, request, output, out):
    """Accumulates into the output of long requests."""
    if request.length > 40:
        out = out + 0 * output[request.rows].transpose(0, 1).float()
    right(request, output, out)


@reference.query_of()
def queries_of_the_next_request(right, self, request, query):
    """A lone decode after a longer query reads the row before its own."""
    step, index = request.step, request.index
    if request.new == 1 and index and step.starts[index] - step.starts[index - 1] > 4:
        return query[request.rows.start - 1 : request.rows.stop - 1].float().transpose(0, 1)
    return right(request, query)


@reference.requests()
def positions_from_rows(right, self, step, cross):
    """The first query of the batch's rows is at position 0 where no request has computed tokens."""
    for request in right(step, cross):
        if len(step.lengths) > 1 and request.new == request.length and request.index:
            request.at = request.at + request.rows.start
        yield request


@reference.attend("*cross*")
def needs_keys_in_each_call(right, self, layer, query, key, *given, **options):
    """A cross layer's later steps bring no keys."""
    if self.spec.attn_type == "encoder_decoder" and not self.spec.direct_kv:
        assert key is not None
    return right(layer, query, key, *given, **options)


@reference.query_of("tensors/strided-inputs-*", "as views")
def assumes_contiguous_queries(right, self, request, query):
    """Reads queries as if their heads lay side by side."""
    rows, heads, size = query.shape
    if query.stride(1) != size and rows > 1:
        query = query.as_strided(query.shape, (heads * size, size, 1))
    return right(request, query)


@reference.requests("*direct*")
def direct_keys_from_zero(right, self, step, cross):
    """Direct keys that are fewer than the tokens stand at the first positions."""
    for request in right(step, cross):
        if not cross:
            request.held = request.held - (request.held[0] if len(request.held) else 0)
        yield request
