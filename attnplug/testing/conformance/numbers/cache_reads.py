"""Reads of the KV cache: the keys of each request, and nothing next to them.

A KV cache between two guard margins, so that a check sees every byte that a backend writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.features import Feature
from attnplug.core.spec import AttentionType
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    mixed_lengths,
    paged_scenarios,
    scenario_factory,
    scenario_layer,
    step_factory,
)
from attnplug.testing.conformance.check import Check, CheckSkipped, CheckTable, ConformanceError
from attnplug.testing.conformance.harness import Harness, raw_bytes
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.target import Target
from attnplug.testing.pages import row_bytes
from attnplug.testing.views import between

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GuardedCache:
    """A batch whose cache lies in a 1-D buffer between two pages of NaN, and the buffer as it was before."""

    backend: type[AttentionBackend]
    batch: Batch
    buffer: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(cls, backend: type[AttentionBackend], batch: Batch) -> GuardedCache:
        """The batch's cache, copied between margins."""
        cache = cache_of(batch)
        margin = cache.numel() // cache.shape[0]
        moved = between(cache, margin)
        length = moved.untyped_storage().nbytes() // moved.itemsize
        buffer = moved.as_strided((length,), (1,), 0)
        return cls(backend, dataclasses.replace(batch, kv_cache=moved), buffer, buffer.clone())

    def expect_only_written(self, slots: torch.Tensor, what: str) -> None:
        """Raise ConformanceError, which begins with `what`, if anything but `slots` of the buffer was written."""
        cache = cache_of(self.batch)
        margin = cache.storage_offset()
        for side, edge in (("in front of", slice(0, margin)), ("behind", slice(-margin, None))):
            if not torch.equal(_bits(self.buffer[edge]), _bits(self.before[edge])):
                raise ConformanceError(f"{what} wrote to memory {side} the cache")
        old = self.before.as_strided(cache.shape, cache.stride(), margin)
        parts = (self.backend.split_kv(each, self.batch.spec) for each in (cache, old))
        named = slots[slots >= 0]
        for name, now, then in zip("KV", *parts, strict=True):
            changed = (row_bytes(now, self.batch.spec) != row_bytes(then, self.batch.spec)).any(-1)
            size = now.shape[1]
            changed[named // size, named % size] = False
            if bool(changed.any()):
                block, row = changed.nonzero()[0].tolist()
                null = ", the null block" if block == 0 else ""
                raise ConformanceError(
                    f"{what} wrote {name} of row {row} of block {block}{null}: no slot names it"
                )


def slots_of(batch: Batch) -> torch.Tensor:
    """The slots of the batch's own tokens; a cross layer stores all tokens of the encoder."""
    is_cross = batch.spec.attn_type is AttentionType.ENCODER_DECODER
    own = sum(batch.seq_lens) if is_cross else batch.common.num_actual_tokens
    return batch.common.slot_mapping[:own]


def pages_of(backend: type[AttentionBackend], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pages of the batch's cache."""
    return backend.split_kv(cache_of(batch), batch.spec)


def fill_blocks(batch: Batch, blocks: int | slice, value: float) -> None:
    """Set whole blocks of the cache to `value`."""
    cache = cache_of(batch)
    filled = torch.full_like(cache[blocks], value, dtype=torch.float32).to(cache.dtype)
    _bits(cache)[blocks] = _bits(filled)


def fill_unused(batch: Batch, value: float) -> None:
    """Set the unused rows of the cache, which are NaN, to `value`."""
    cache = cache_of(batch)
    unused = cache.float().isnan()
    cache.copy_(torch.where(unused, value, cache.float()).to(cache.dtype))


def cache_of(batch: Batch) -> torch.Tensor:
    """The batch's cache; never called for a batch without pages."""
    assert batch.kv_cache is not None  # noqa: S101 - called only for batches over pages
    return batch.kv_cache


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers."""
    # So NaN equals NaN, and 8-bit floats can be indexed.
    return tensor.view(_BITS[tensor.dtype.itemsize])


_HUGE = (2**31 - 1, -(2**31), -1, 2**30)
_LARGEST = {torch.float16: 6e4, torch.float8_e4m3fn: 448.0}


def checks(target: Target) -> Iterator[Check]:
    """The checks of reads, in each scenario over pages."""
    for scenario in paged_scenarios(target):
        for name, (run, summary) in _CHECKS.items():
            if name != "null-block" or Feature.SLIDING_WINDOW in target.backend.features:
                yield Check.of(f"cache/{name}-{scenario}", summary, run, target, scenario)


def _check_write_then_attend(target: Target, scenario: str) -> None:
    make = scenario_factory(target, scenario)
    whole = make()
    Harness.of(target, whole).forward(whole)
    for with_keys in (True, False):
        batch = make()
        harness = Harness.of(target, batch)
        harness.write(batch)
        found = harness.attend(batch, with_keys=with_keys)
        given = "with" if with_keys else "without"
        expect_correct(batch, found, f"update_kv_cache, then attend {given} key and value")
        for name, one, other in zip(
            "KV", pages_of(target.backend, batch), pages_of(target.backend, whole), strict=True
        ):
            if not torch.equal(raw_bytes(one), raw_bytes(other)):
                raise ConformanceError(f"update_kv_cache leaves other {name} in the cache than forward does")


def _check_unused(target: Target, scenario: str) -> None:
    make = scenario_factory(target, scenario)
    for what in ("NaN", "infinity", "large values"):
        batch = make()
        k, _ = pages_of(target.backend, batch)
        fills = {"NaN": torch.nan, "infinity": torch.inf, "large values": _LARGEST.get(k.dtype, 1e5)}
        fill_unused(batch, fills[what])
        found = Harness.of(target, batch).forward(batch)
        expect_correct(batch, found, f"with {what} in the rows of pages that hold no token")


def _check_tails(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    table, counts = batch.common.block_table_tensor, _pages_held(target, batch)
    used = {0, *(block for row, count in zip(table.tolist(), counts, strict=True) for block in row[:count])}
    blocks = pages_of(target.backend, batch)[0].shape[0]
    free = next(block for block in range(blocks) if block not in used)
    fill_blocks(batch, free, torch.nan)
    _run_with_tails(target, batch, [free], f"block {free}, which is not the request's and holds NaN")


def _check_huge_tails(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    _run_with_tails(target, batch, list(_HUGE), f"numbers that are no blocks, such as {_HUGE[0]}")


def _run_with_tails(target: Target, batch: Batch, tails: list[int], what: str) -> None:
    """Run forward with a wider table; the entries past a request's pages are `tails` in turn."""
    table, counts = batch.common.block_table_tensor, _pages_held(target, batch)
    wide = max(table.shape[1], max(counts) + 9)
    entries = torch.tensor(tails, dtype=torch.int32).repeat(wide)[:wide].to(table.device)
    batch.common.block_table_tensor = entries.repeat(table.shape[0], 1)
    for row, count in enumerate(counts):
        batch.common.block_table_tensor[row, :count] = table[row, :count]
    where = f"with table entries past a request's pages that name {what}"
    expect_correct(batch, Harness.of(target, batch).forward(batch, what=where), where)


def _pages_held(target: Target, batch: Batch) -> list[int]:
    size = pages_of(target.backend, batch)[0].shape[1]
    return [-(-length // size) for length in batch.seq_lens]


def _check_null_block(target: Target, scenario: str) -> None:
    spec = scenario_layer(target, scenario, window=(6, 0))
    # Over small pages, too, requests are longer than the window.
    lengths = (decode_lengths if scenario == "decode" else mixed_lengths)(max(target.block_size(spec), 8))
    make = step_factory(target, spec, lengths)
    for value in (0.0, 100.0):
        batch = make()
        if not bool((batch.common.block_table_tensor == 0).any()):  # pragma: no cover - lengths of the kit
            raise CheckSkipped("the window of no request has passed a page")
        fill_blocks(batch, 0, value)
        found = Harness.of(target, batch).forward(batch)
        expect_correct(
            batch, found, f"with {value:g} in the null block, which replaces pages freed by the window"
        )


_CHECKS: CheckTable = {
    "written-then-attended": (
        _check_write_then_attend,
        "update_kv_cache and then attend give the result of forward",
    ),
    "unused-rows": (_check_unused, "unused rows of pages do not affect the output"),
    "table-tails": (_check_tails, "table entries past a request's pages are not followed"),
    "table-tails-huge": (_check_huge_tails, "they are not followed if they are no block numbers"),
    "null-block": (_check_null_block, "the null block, which replaces freed pages, is not attended"),
}
