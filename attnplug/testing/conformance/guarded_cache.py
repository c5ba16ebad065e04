"""A KV cache between two guard margins, so that a check sees every byte that a backend writes."""

from __future__ import annotations

import dataclasses

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.spec import AttentionType
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import ConformanceError

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
        filled = torch.full((cache.numel() + 2 * margin,), torch.nan, device=cache.device)
        buffer = filled.to(cache.dtype)
        moved = buffer.as_strided(cache.shape, cache.stride(), margin)
        moved.copy_(cache)
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
            changed = (_bits(now) != _bits(then)).flatten(2).any(-1)
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
    """The same elements as integers: so NaN equals NaN, and 8-bit floats can be indexed."""
    return tensor.view(_BITS[tensor.dtype.itemsize])
