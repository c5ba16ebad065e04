"""Sparse layers of latent attention: each query decodes its chosen keys, by a table of one-token pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.selection import Selection
from attnplug.core.sparse import SparseSpec
from attnplug.ops.selection import query_ends, requests_and_ends, table_of_tokens

# Page tables are int32.
_MOST_PAGES = 1 << 31


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SelectedMetadata:
    """The step of sparse layers, and the table that each layer fills from the selection before it decodes.

    Args:
        common: the step as the engine gave it.
        selection: the chosen keys.
        num_tokens: queries T.
        page_table: int32 `[T, K]`, pages of one token.
        counts: int32 `[T]`, keys of each query.
        ends: int32 `[T]`, keys that each query sees; no layer chooses more, as chosen positions are distinct. A builder
            calls `write_ends` before it reads them.
    """

    common: CommonAttentionMetadata
    selection: Selection
    num_tokens: int
    page_table: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor

    def write_ends(self) -> None:
        """Write `ends` before any layer does; nothing waits for a device."""
        query_ends(self.common.query_start_loc, self.common.seq_lens, self.ends)

    def fill(self, sparse: SparseSpec, block_size: int, steps: tuple[int, int]) -> None:
        """Write table, counts and ends for a layer; nothing waits for a device.

        Args:
            sparse: of the layer.
            block_size: tokens of a page of its cache.
            steps: pages of the table from block to block, and from token to token.

        Raises:
            BatchError: on a CPU, values of the selection that are not given or not allowed.
        """
        common = self.common
        if self.counts.device.type == "cpu":
            _, ends = requests_and_ends(common.query_start_loc, common.seq_lens, self.num_tokens)
            self.selection.check_values(sparse, ends)
        places = common.query_start_loc, common.seq_lens, common.block_table_tensor
        # Steps share this memory, so each layer writes all of it.
        written = self.page_table, self.counts, self.ends
        table_of_tokens(self.selection, sparse, *places, block_size, steps, *written)


class SelectedSteps(NotCopied):
    """Makes the steps of sparse layers; their tables grow with the queries, and keep their memory for graphs.

    Args:
        most: most keys that a query of any layer chooses.
        device: of the tables.
        sizes: expected numbers of queries, ascending; larger steps have room for a power of two.
    """

    def __init__(self, most: int, device: torch.device, sizes: Sequence[int] = ()) -> None:
        self._most = most
        self._device = device
        self._sizes = sizes
        self._buffers = self._allocated(0)
        # Kept alive: graphs captured before the steps grew still write there.
        self._outgrown: list[tuple[torch.Tensor, ...]] = []

    def step(
        self, common: CommonAttentionMetadata, num_tokens: int
    ) -> tuple[SelectedMetadata, CommonAttentionMetadata]:
        """The metadata of sparse layers, and the step of their decode, where every query is a request.

        Raises:
            BatchError: no selection, or one of too few rows.
        """
        selection = common.selection
        if selection is None:
            remedy = (
                "give CommonAttentionMetadata.selection; the model's indexer fills it before the layer runs"
            )
            raise BatchError("selection", None, "is required: the layers are sparse", remedy)
        selection.check_size(num_tokens)
        if num_tokens > self._buffers[0].shape[0]:
            self._outgrown.append(self._buffers)
            # A power of two, so that growing steps allocate a few times only: each outgrown table stays in memory.
            room = (size for size in self._sizes if size >= num_tokens)
            self._buffers = self._allocated(next(room, 1 << (num_tokens - 1).bit_length()))
        table, counts, ends, starts, starts_cpu = self._buffers
        table, counts, ends = table[:num_tokens], counts[:num_tokens], ends[:num_tokens]
        single = dataclasses.replace(
            common,
            query_start_loc=starts[: num_tokens + 1],
            query_start_loc_cpu=starts_cpu[: num_tokens + 1],
            seq_lens=counts,
            num_reqs=num_tokens,
            num_actual_tokens=num_tokens,
            max_query_len=1,
            max_seq_len=self._most,
            block_table_tensor=table,
            selection=None,
            # The host does not know the lengths before a layer runs.
            seq_lens_host=None,
            _seq_lens_cpu=None,
            _num_computed_tokens_cpu=None,
        )
        return SelectedMetadata(common, selection[:num_tokens], num_tokens, table, counts, ends), single

    def _allocated(self, tokens: int) -> tuple[torch.Tensor, ...]:
        table = torch.zeros(tokens, self._most, dtype=torch.int32, device=self._device)
        starts = torch.arange(tokens + 1, dtype=torch.int32, device="cpu")
        return table, table.new_zeros(tokens), table.new_zeros(tokens), starts.to(self._device), starts


def token_pages(pages: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Pages `[num_blocks, block_size, D]` of any block stride as pages of one token, `[n, 1, D]`; shares the storage.

    Returns:
        The pages, and how many of them lie from block to block, and from token to token.

    Raises:
        LayoutError: more pages than an int32 table can name.
    """
    blocks, size, width = pages.shape
    # The stride of a dimension of one element has no meaning.
    outer = [pages.stride(dim) if pages.shape[dim] > 1 else 0 for dim in range(2)]
    # The largest step that divides both, because the numbers of pages must fit int32.
    unit = math.gcd(*outer) or width
    steps = outer[0] // unit, outer[1] // unit
    count = (blocks - 1) * steps[0] + (size - 1) * steps[1] + 1 if blocks else 0
    if count > _MOST_PAGES:
        remedy = "give each layer blocks whose stride is a multiple of a token's"
        raise LayoutError("kv_cache.stride()", pages.stride(), f"has {count} places, past int32", remedy)
    return pages.as_strided((count, 1, width), (unit, width, 1), pages.storage_offset()), steps
