"""Mutants that are right for common sizes and wrong beyond a limit, at an edge, or for one kind of step."""

from __future__ import annotations

import torch

from mutants.making import breaks, on
from mutants.reference import Reference

reference = on(Reference)

# fmt: off
# Requests of one length or one kind of query.
breaks("one-token-in-all", lambda impl, r: r.length == 1)
breaks("decodes-over-128-keys", lambda impl, r: r.new == 1 and r.length == 128)
breaks("decodes-over-multiples-of-256", lambda impl, r: r.new == 1 and r.length % 256 == 0)
breaks("decodes-over-512-keys", lambda impl, r: r.new == 1 and r.length > 512)
breaks("decodes-over-1024-keys", lambda impl, r: r.new == 1 and r.length > 1024)
breaks("decodes-over-4096-keys", lambda impl, r: r.new == 1 and r.length > 4096)
breaks("contexts-over-640-keys", lambda impl, r: r.length > 640 and r.new > 1)
breaks("prompts-over-256-tokens", lambda impl, r: r.new == r.length > 256)
breaks("prompts-over-512-tokens", lambda impl, r: r.new == r.length > 512)
breaks("prompts-of-whole-tiles", lambda impl, r: r.new == r.length and r.new % 64 == 0)
breaks("two-new-tokens", lambda impl, r: r.new == 2 and r.length > 2)
breaks("five-to-eight-new-tokens", lambda impl, r: 5 <= r.new <= 8 and r.length > r.new)
breaks("extends-longer-than-contexts", lambda impl, r: r.new < r.length < 2 * r.new)
breaks("full-last-pages", lambda impl, r: r.new == 1 and r.length % 16 == 0)
breaks("more-than-64-pages", lambda impl, r: r.length > 64 * (impl.spec.block_size or 16))
breaks("more-than-16-requests", lambda impl, r: r.index >= 16)
breaks("more-than-32-requests", lambda impl, r: r.index >= 32)
breaks("more-than-1024-requests", lambda impl, r: r.index >= 1024, "correct/crowd-*")
breaks("long-encoders-with-windows", lambda impl, r: impl.spec.is_encoder and r.new > 320 and impl.spec.window[0] >= 0, "correct/long-prompt-*")
breaks("windows-of-512", lambda impl, r: 200 < impl.spec.window[0] < 1000 and r.length > 1000, "correct/long-extend-*")
breaks("odd-numbers-of-requests", lambda impl, r: r.index == len(r.step.lengths) - 1 and r.index % 2 == 0 < r.index)
breaks("rows-past-512", lambda impl, r: r.rows.start > 512)
breaks("after-requests-without-tokens", lambda impl, r: r.index and r.step.lengths[r.index - 1] == 0)
breaks("after-idle-requests", lambda impl, r: r.index and r.step.starts[r.index - 1] == r.step.starts[r.index])
breaks("decodes-after-prefills", lambda impl, r: r.new == 1 and r.rows.start > r.index)
breaks("prefills-after-decodes", lambda impl, r: r.new > 1 and r.index and r.step.starts[1] == 1)
breaks("prefills-alone", lambda impl, r: len(r.step.lengths) == 1 and r.new == r.length > 1)
breaks("decodes-alone", lambda impl, r: len(r.step.lengths) == 1 and r.new == 1)
# fmt: on

# Layers of one size.
breaks("head-sizes-past-256", lambda impl, r: impl.spec.head_size > 256)
breaks("odd-head-sizes", lambda impl, r: impl.spec.head_size % 8)
breaks("head-sizes-of-no-power-of-two", lambda impl, r: impl.spec.head_size & (impl.spec.head_size - 1))
breaks("small-head-sizes", lambda impl, r: impl.spec.head_size < 32)
breaks("three-kv-heads", lambda impl, r: impl.spec.num_kv_heads == 3)
breaks("more-than-8-kv-heads", lambda impl, r: impl.spec.num_kv_heads > 8)
breaks("groups-of-three", lambda impl, r: impl.spec.num_heads == 3 * impl.spec.num_kv_heads)
breaks("groups-of-seven", lambda impl, r: impl.spec.num_heads == 7 * impl.spec.num_kv_heads)
breaks("groups-of-sixteen", lambda impl, r: impl.spec.num_heads >= 16 * impl.spec.num_kv_heads)
breaks("one-head-in-all", lambda impl, r: impl.spec.num_heads == 1)
breaks("multi-head-attention", lambda impl, r: impl.spec.num_heads == impl.spec.num_kv_heads > 2)
breaks("float16-with-windows", lambda impl, r: impl.spec.dtype == "float16" and impl.spec.is_windowed)
breaks("bfloat16-with-sinks", lambda impl, r: impl.spec.dtype == "bfloat16" and impl.spec.has_sinks)


def few(size: int) -> int:
    """The power of two at or above a size."""
    return 1 << (size - 1).bit_length()


@reference.heads()
def rounds_groups_up(self):
    """Finds the KV head by a group of a power of two."""
    group = self.spec.num_heads // self.spec.num_kv_heads
    return torch.arange(self.spec.num_heads) // few(group)


@reference.gather()
def masks_offsets(self, request, pages, scale):
    """Finds the row of a page by bits, which is right for pages of a power of two."""
    size, held = pages.shape[1], request.held
    rows = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    found = rows[
        self.blocks(request, size),
        (held % size) & (few(size) - 1) if size & (size - 1) == 0 else (held & (few(size) - 1)) % size,
    ]
    return self.decode(found.view(pages.dtype), scale)


@reference.blocks()
def blocks_of16_bits(right, self, request, size):
    """Keeps block numbers in 16 bits."""
    return right(request, size).short().long().clamp(min=0)


@reference.store()
def slots_of16_bits(right, self, pages, tokens, slots, scale):
    """Keeps slots in 16 bits without a sign."""
    right(pages, tokens, torch.where(slots >= 0, slots & 0xFFFF, slots), scale)


@reference.windowed()
def reads_only256_keys(right, self, request, at, held):
    """Sees no more than a buffer of 256 keys."""
    return right(request, at, held) & (held - request.held[0] < 256)


@reference.windowed()
def loses_single_keys_of_tiles(right, self, request, at, held):
    """Skips a last tile of one key."""
    return right(request, at, held) & ((held % 128 > 0) | (held < request.length - 1) | (held == 0))


@reference.blocks()
def shares_tables_by_length(self, request, size):
    """Reads the pages of the first request of the same length."""
    first = request.step.lengths.index(request.length)
    return request.step.table.long()[first][request.held // size]


@reference.blocks()
def counts_busy_requests(self, request, size):
    """Counts rows of the table by requests that have queries."""
    busy = sum(request.step.starts[i + 1] > request.step.starts[i] for i in range(request.index))
    return request.step.table.long()[busy][request.held // size].clamp(0, 10**6)


@reference.write()
def drops_the_last_tile_of_rows(self, request, output, out):
    """Launches blocks of 64 rows by the integer quotient where there is one."""
    rows = request.new if request.new < 64 else request.new // 64 * 64
    output[request.rows] = 0
    output[request.rows][:rows] = out.transpose(0, 1)[:rows].to(output.dtype)


@reference.write()
def stops_at_sixteen_heads(self, request, output, out):
    """Writes the first 16 heads."""
    output[request.rows] = 0
    output[request.rows, :16] = out.transpose(0, 1)[:, :16].to(output.dtype)


@reference.requests()
def assumes_uniform_queries(right, self, step, cross):
    """Takes short queries of a step for equally long ones."""
    for request in right(step, cross):
        most = step.common.max_query_len
        if 1 < most <= 8:
            request.at = torch.arange(request.length - most, request.length)[: request.new]
        yield request


@reference.write("correct/many-rows-*")
def stops_at1024_rows(right, self, request, output, out):
    """Writes the first 1024 rows of a step."""
    right(request, output, out)
    output[1024 : request.step.starts[-1]] = 0
