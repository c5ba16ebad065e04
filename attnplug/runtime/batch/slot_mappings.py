"""The slots that a step's tokens are written to, in each KV group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attnplug._system.one_commit import NotCopied
from attnplug.core.batch.context_parallel import local_offsets
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.kv_groups import KVGroups


class SlotMappings(NotCopied):
    """Computes slots from the host block tables of all requests.

    Args:
        tables: int32 `[G, max_num_seqs, max_blocks]`, read at each call.
        groups: the KV groups.
    """

    def __init__(self, tables: npt.NDArray[np.int32], groups: KVGroups) -> None:
        self._tables, self._groups = tables, groups
        self._flat_tables = tables.reshape(tables.shape[0], -1)
        # Groups with one block size share page and offset, so one look-up serves all of them.
        self._is_uniform = not groups.cross and not groups.sharded and len(set(groups.block_sizes)) == 1

    def fill(self, slots: Ints, rows: Ints, positions: Ints, has_null_pages: bool) -> None:
        """Fill the slots of a step's tokens in the groups of decoder tokens.

        Args:
            slots: int64 `[G, at least T]`, to be filled.
            rows: the request of each token, `[T]`.
            positions: of each token in its sequence, `[T]`.
            has_null_pages: whether any token may be in a null page, which no request may write: its slot is -1.
        """
        tokens = positions.size
        if not self._is_uniform:
            for group in self._groups.decoder:
                self._put(slots[group, :tokens], group, rows, positions, has_null_pages)
            return
        size = self._groups.block_sizes[0]
        page, offset = _divided(positions, size)
        page += rows * self._tables.shape[2]
        # Block numbers are int32, but their slots may exceed it.
        np.multiply(self._flat_tables.take(page, axis=1), size, out=slots, dtype=np.int64)
        slots += offset
        if has_null_pages:
            slots[slots < size] = PAD_SLOT_ID

    def fill_encoder(self, slots: Ints, rows: Ints, positions: Ints, has_null_pages: bool) -> None:
        """Like `fill`, of encoder tokens in the cross groups."""
        for group in self._groups.cross:
            self._put(slots[group, : positions.size], group, rows, positions, has_null_pages)

    def _put(self, out: Ints, group: int, rows: Ints, positions: Ints, has_null_pages: bool) -> None:
        size, place = self._groups.block_sizes[group], self._groups.place
        page, offset = _divided(positions, self._groups.tokens_per_block[group])
        np.multiply(self._tables[group, rows, page], size, out=out, dtype=np.int64)
        if group in self._groups.sharded and place is not None:
            offset = local_offsets(positions, page, size, place)
            # Another rank has the token, and writes it.
            out[offset < 0] = PAD_SLOT_ID
            offset = np.maximum(offset, 0)
        out += offset
        if has_null_pages:
            # These slots lie in block 0, the null block.
            out[out < size] = PAD_SLOT_ID


def _divided(positions: Ints, size: int) -> tuple[Ints, Ints]:
    """The page of each position, and the place in it."""
    # numpy divides as slowly by powers of two as by other numbers, so these are shifted.
    if size & (size - 1):
        return np.divmod(positions, size)
    return positions >> (size.bit_length() - 1), positions & (size - 1)
