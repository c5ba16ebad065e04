"""The builder of FLASH_MLA: a schedule for each step of dense layers, and the chosen keys of sparse ones."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.backends.flash_mla.library import library
from attnplug.backends.flash_mla.schedules import DenseStep, Schedules
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionCGSupport, CommonAttentionMetadata
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.selected import SelectedMetadata
from attnplug.ops.checks import check_step_tensors

# The scheduler of 16 bits keeps five numbers of each request in 227 KiB of shared memory, that of 8 bits has an array.
_MOST_REQUESTS = {False: 11_000, True: 4095}
# The sparse kernel reads two tiles of 64 chosen keys at once.
_CHOSEN = 128


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChosenStep:
    """The queries of a step of sparse layers.

    Args:
        table: int32 `[T, K]`, chosen latents of each query, which each layer fills.
        counts: int32 `[T]`, how many of them are chosen.
        places: int32, the numbers from 0, as many as K in whole tiles.
    """

    table: torch.Tensor
    counts: torch.Tensor
    places: torch.Tensor


class FlashMLABuilder(MLADecodeBuilder):
    """Builds DenseStep and ChosenStep, and reads nothing back from the device."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    decode_needs_host_seq_lens: ClassVar[bool] = False
    decodes_drafts: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        impls = [self.config.layers[name].impl for name in self.layer_names]
        self._heads = sorted({self.backend.padded_heads(impl.spec.num_heads) for impl in impls})
        # Layers of one group store their latents alike.
        is_8bit = impls[0].spec.has_quantized_kv_cache
        self._most = _MOST_REQUESTS[is_8bit]
        self._schedules = Schedules(library(), is_8bit, self.device, self.config.max_num_seqs)
        self._steps = 0
        self._places = torch.empty(0, dtype=torch.int32, device=self.device)

    def build_decode(self, common: CommonAttentionMetadata) -> DenseStep:
        """The step of the decodes, with its schedule.

        Raises:
            BatchError: more requests than FlashMLA schedules, or queries that are not as many for each request.
        """
        check_step_tensors(common)
        reqs, tokens = common.num_reqs, common.num_actual_tokens
        if reqs > self._most:
            limit = f"are more than the {self._most} that FlashMLA schedules"
            raise BatchError("num_reqs", reqs, limit, "decode fewer requests in a step")
        if tokens % reqs:
            raise BatchError("num_actual_tokens", tokens, f"must be a multiple of the {reqs} requests")
        self._steps += 1
        lens, table = common.seq_lens[:reqs], common.block_table_tensor[:reqs]
        step = DenseStep(tokens // reqs, lens, table, self._steps, self._schedules)
        # Graphs replay the kernels of layers alone, so the schedule is made here.
        for heads in self._heads:
            self._schedules.of(step, heads)
        return step

    def build_selected(self, common: CommonAttentionMetadata, selected: SelectedMetadata) -> ChosenStep:
        """As MLADecodeBuilder.build_selected; the kernel needs no schedule."""
        table = selected.page_table
        count = in_tiles(table.shape[1])
        if self._places.shape[0] != count:
            self._places = torch.arange(count, dtype=torch.int32, device=self.device)
        return ChosenStep(table, selected.counts, self._places)


def in_tiles(keys: int) -> int:
    """The least number of chosen keys that the sparse kernel takes, and that is no less than `keys`."""
    return -(-keys // _CHOSEN) * _CHOSEN
