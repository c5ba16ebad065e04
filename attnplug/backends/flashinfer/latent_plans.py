"""Plans of FlashInfer's wrapper for latent attention: one per step, sent to the device without waiting.

Memory for the host arrays of steps, many from one allocation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import numpy as np
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.backends.flashinfer.compiling import announced
from attnplug.backends.flashinfer.library import Library
from attnplug.backends.flashinfer.modules import LatentModule
from attnplug.backends.flashinfer.planned_wrapper import PlanCost, PlanSpace
from attnplug.backends.flashinfer.step import Ints, Part
from attnplug.core.errors import BatchError
from attnplug.ops.gather import gather_page_indices

_TILE = 64
_MOST_TILES = 16384
"""Tiles that the planner's work list has room for, with the parts of split ones."""
_SLACK = 1 << 20


@dataclasses.dataclass(eq=False, slots=True)
class LatentStep:
    """The decodes of a step, without queries that see nothing.

    Args:
        part: their arrays on the host.
        seq_lens: int32 `[R]` on the device, of all requests.
        block_table: int32 `[R, max_blocks]`.
        indices: `block_table` as one row, if the plan reads it in place; None if pages are gathered.
        rows: int32, the requests in `part`, on the device; None if all are, or if pages are read in place.
        seen: int64, the queries that see a key, on the device; None if all do.
        captured: requests and queries of each, if graphs read the plan; None for other steps.
        plans: makes the plan.
    """

    part: Part
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    indices: torch.Tensor | None
    rows: torch.Tensor | None
    seen: torch.Tensor | None
    captured: tuple[int, int] | None
    plans: LatentPlans


class LatentPlans(NotCopied):
    """The wrappers of one builder, which share memory for the plan of one step at a time.

    Args:
        library: FlashInfer.
        module: the module to run.
        heads: query heads that a call has.
        page_size: tokens of a page.
        device: where the wrappers run.
        max_num_seqs: requests that the host buffers have room for at first.
        layers: their names, for the log.
    """

    def __init__(
        self,
        library: Library,
        module: LatentModule,
        heads: int,
        page_size: int,
        device: torch.device,
        max_num_seqs: int,
        layers: str,
    ) -> None:
        self._library, self._module, self._layers = library, module, layers
        self._heads, self._page_size, self._device = heads, page_size, device
        self._space = PlanSpace(device, max_num_seqs)
        self._wrappers: dict[tuple[int, int] | None, Any] = {}
        self._indices: dict[tuple[int, int] | None, torch.Tensor] = {}
        self._workspace: torch.Tensor | None = None
        self._planned: LatentStep | None = None

    @property
    def cost(self) -> PlanCost:
        """Plans, and host seconds of planning, so far."""
        return self._space.cost

    def capture(self, key: tuple[int, int], pages: int) -> None:
        """Allocate the buffer of a captured step of this size, with room for `pages`, unless there is one."""
        if key not in self._indices:
            self._indices[key] = self._ints(pages)

    def is_captured(self, key: tuple[int, int]) -> bool:
        """Whether graphs may read the plans of steps of this size."""
        return key in self._indices

    def in_place(self, table: torch.Tensor) -> torch.Tensor | None:
        """A block table as one row of page indices, which kernels can read; None for a table that they cannot."""
        # Its requests start at their rows. So no pages are gathered, which takes a launch.
        rows, width = table.shape
        # The kernels count tokens from the first index, in 32 bits.
        if rows * width * self._page_size >= 1 << 31 or table.dtype != torch.int32:
            return None
        return table.view(-1) if table.is_contiguous() else None

    def ensure(self, step: LatentStep) -> Any:
        """The wrapper of a step; it is planned unless its plan is the latest.

        Raises:
            BatchError: more pages than a graph was captured for, or more tiles than FlashInfer can plan.
            PluginError: FlashInfer has to compile, and cannot.
        """
        if self._planned is not step:
            # Forget the old plan first: planning may raise halfway.
            self._planned = None
            self._plan(step)
            self._planned = step
        return self._wrappers[step.captured]

    def _plan(self, step: LatentStep) -> None:
        part = step.part
        tiles = part.num_tokens * self._heads // _TILE + len(part.seq_lens)
        if tiles > _MOST_TILES // 2:
            # That is a bound; the number takes longer.
            tiles = int((-(-np.diff(part.qo_indptr).astype(np.int64) * self._heads // _TILE)).sum())
        if tiles > _MOST_TILES // 2:
            limit = f"queries are {tiles} tiles of FlashInfer's work list, more than {_MOST_TILES // 2}"
            raise BatchError("num_actual_tokens", part.num_tokens, limit, "decode fewer requests in a step")
        indices = self._gathered(step) if step.indices is None else step.indices
        wrapper = self._wrappers.get(step.captured)
        loading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if wrapper is None:
            wrapper = self._made(step.captured)
            if len(self._wrappers) == 1:
                why = f"decode of layers {self._layers}"
                loading = announced(self._library, self._module, why)
        slot = self._space.ring.acquire()
        arrays = slot.filled(part)
        # A private attribute of 0.6.13: the planner writes its work list there and copies it without waiting.
        wrapper._pin_memory_int_workspace_buffer = slot.schedule
        began = time.perf_counter()
        with loading:
            wrapper.plan(
                arrays["qo_indptr"],
                arrays["kv_indptr"],
                indices,
                arrays["seq_lens"],
                self._heads,
                *self._module.sizes,
                self._page_size,
                part.max_query_len > 1,
                1.0,
                self._module.dtype,
                self._module.dtype,
            )
        self._space.cost.seconds += time.perf_counter() - began
        self._space.cost.plans += 1
        self._space.ring.release()

    def _gathered(self, step: LatentStep) -> torch.Tensor:
        captured, count = step.captured, step.part.num_pages
        indices = self._indices.get(captured)
        if indices is None or (captured is None and count > indices.shape[0]):
            # A power of two, so that growing contexts do not allocate in every step.
            indices = self._indices[captured] = self._ints(1 << (max(count, 1) - 1).bit_length())
        if count > indices.shape[0]:
            limit = f"are more than the {indices.shape[0]} that graphs were captured for"
            raise BatchError("pages", count, limit, "capture with a longer max_model_len")
        gather_page_indices(step.block_table, step.seq_lens, self._page_size, step.rows, indices, count)
        return indices[:count]

    def _made(self, captured: tuple[int, int] | None) -> Any:
        if self._workspace is None:
            count = 1
            if self._device.type == "cuda":
                count = torch.cuda.get_device_properties(self._device).multi_processor_count
            # Outputs of 2 bytes and LSEs of 4, for two tiles of each multiprocessor.
            size = 2 * count * _TILE * (2 * self._module.sizes[0] + 4) + _SLACK
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)
        fixed = {}
        if captured is not None:
            reqs = captured[0]
            fixed = {"qo_indptr": self._ints(reqs + 1), "kv_indptr": self._ints(reqs + 1)}
            fixed |= {"kv_indices": self._indices[captured], "kv_len_arr": self._ints(reqs)}
        wrapper = self._library.latent_wrapper(self._workspace, self._module.template, fixed)
        self._space.adopt(wrapper)
        self._wrappers[captured] = wrapper
        return wrapper

    def _ints(self, count: int) -> torch.Tensor:
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.zeros(count, dtype=torch.int32, device=self._device)


# malloc reuses blocks of 64 KiB. FlashInfer's planner frees about a thousand
# small chunks per plan, and the next larger allocation would merge them.
_BLOCK = 1 << 14
"""Elements of a block."""


class HostArrays(NotCopied):
    """Gives new int32 arrays, which stay the caller's: many share a block, and the last one frees it.

    FlashInfer's planner of latents frees a thousand small chunks in each call. glibc merges them all when the process
    next allocates a KiB or more, such as 256 lengths: 9 us and more, which the planner's own next call pays otherwise.
    """

    def __init__(self) -> None:
        self._block: Ints = np.empty(_BLOCK, dtype=np.int32)
        self._used = 0

    def empty(self, count: int) -> Ints:
        """An array of `count` elements, without values."""
        if self._used + count > self._block.size:
            self._block, self._used = np.empty(max(_BLOCK, 4 * count), dtype=np.int32), 0
        begin = self._used
        self._used += count
        return self._block[begin : self._used]

    def copy(self, values: Ints) -> Ints:
        """An array with these values."""
        made = self.empty(values.size)
        made[:] = values
        return made
