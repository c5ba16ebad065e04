"""Compiles each kernel for GPUs that need not be there; prints, as JSON, the memory instructions of each.

The tests run it in a child: where TRITON_INTERPRET was set when triton was imported, nothing can be compiled.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from attnplug.core import Selection, SparseSpec
from attnplug.ops.triton import (
    compute_slot_mapping,
    kv_write,
    merge_attn_states,
    merging,
    selection,
    write_kv_cache,
)
from attnplug.ops.triton import pages as page_operations

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

WRITES = [("NHD", 128, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)]
WRITES += [("HND", 128, torch.bfloat16), ("NHD", 80, torch.bfloat16)]


@dataclasses.dataclass
class Compiler:
    """Stands in for the driver of a GPU, and for a kernel: a launch compiles and keeps the result."""

    target: GPUTarget
    kernel: object = None
    compiled: object = None

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    @property
    def fn(self) -> object:
        return self.kernel.fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*arguments: object, **options: object) -> None:
            self.compiled = self.kernel.warmup(*arguments, grid=grid, **options)

        return compile_only

    def instructions(
        self, module: object, call: Callable[[], object], name: str = "_KERNEL"
    ) -> dict[str, int]:
        self.kernel = getattr(module, name)
        setattr(module, name, self)
        self.kernel.device_caches.clear()
        # What was bound before launches the kernel of then.
        for each in vars(module).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()
        try:
            call()
        finally:
            setattr(module, name, self.kernel)
        assembly = self.compiled.asm["ptx" if self.target.backend == "cuda" else "amdgcn"]
        found = re.findall(r"\b(?:(?:ld|st)\.global|(?:global|buffer)_(?:load|store))[.\w]*", assembly)
        return collections.Counter(found)


def write(dtype: torch.dtype, head_size: int, layout: str, *, converts: bool = False) -> None:
    fused = torch.zeros(7, (32 + 2 * 8) * head_size, dtype=torch.bfloat16)
    key, value = (
        fused[:, first * head_size :][:, : 8 * head_size].view(7, 8, head_size) for first in (32, 40)
    )
    shape = (3, 2, 16, 8, head_size) if layout == "NHD" else (3, 2, 8, 16, head_size)
    both = (
        torch.zeros(shape, dtype=dtype)
        if layout == "NHD"
        else torch.zeros(shape, dtype=dtype).transpose(2, 3)
    )
    kv_write._format.cache_clear()
    kv_write._converts = lambda dtype, device: converts
    write_kv_cache(key, value, both[:, 0], both[:, 1], torch.arange(7), 0.5, 2.0)


def merge_rows() -> None:
    starts, entries = torch.zeros(6, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    outs, lses = torch.zeros(9, 32, 128, dtype=torch.bfloat16), torch.zeros(9, 32)
    merging.rows_into(outs, lses, starts, entries, outs[:5], lses[:5])


def merge(count: int, dtype: torch.dtype) -> None:
    merge_attn_states([torch.zeros(5, 32, 128, dtype=dtype)] * count, [torch.zeros(5, 32)] * count)


def slot_mapping() -> None:
    table = torch.zeros(4, 9, dtype=torch.int32)
    out = torch.empty(8, dtype=torch.int64)
    loc = torch.arange(5, dtype=torch.int32)
    compute_slot_mapping(
        table, loc, torch.arange(4), 16, out=out, start_idx=torch.zeros(4, dtype=torch.int32)
    )


def pages() -> None:
    table, out = torch.zeros(4, 9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    page_operations._bound_page_indices.cache_clear()
    page_operations.gather_page_indices(table, torch.arange(4), 16, torch.arange(2).int(), out, 9)


def gathered() -> None:
    cache, out = (
        torch.zeros(3, 2, 16, 8, 128, dtype=torch.bfloat16),
        torch.zeros(9, 8, 128, dtype=torch.bfloat16),
    )
    table, starts = torch.zeros(4, 9, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    page_operations._bound_gather.cache_clear()
    page_operations.gather_keys(cache[:, 0], cache[:, 1], table, starts, out, out)


def token_table() -> None:
    chosen = Selection.allocate(6, 2048, "cpu")
    loc, table = torch.arange(7, dtype=torch.int32), torch.zeros(6, 9, dtype=torch.int32)
    out = torch.zeros(6, 2048, dtype=torch.int32)
    sparse = SparseSpec("token_topk", 2048)
    selection._bound.cache_clear()
    selection.table_of_tokens(chosen, sparse, loc, loc[1:], table, 16, (16, 1), out, out[:, 0], out[:, 1])


def ends() -> None:
    loc = torch.arange(7, dtype=torch.int32)
    selection._bound_ends.cache_clear()
    selection.query_ends(loc, loc[1:], torch.zeros(6, dtype=torch.int32))


def main() -> None:
    counts = {}
    for name, target in TARGETS.items():
        compiler = Compiler(target)
        driver.set_active(compiler)
        for layout, head_size, dtype in WRITES:
            case = f"{name} write {layout} {head_size} {str(dtype).removeprefix('torch.')}"
            call = functools.partial(write, dtype, head_size, layout, converts=name == "sm90")
            counts[case] = compiler.instructions(kv_write, call)
        counts[f"{name} merge by rows"] = compiler.instructions(merging, merge_rows, "_ROWS_KERNEL")
        counts[f"{name} merge"] = compiler.instructions(merging, lambda: merge(3, torch.bfloat16))
        counts[f"{name} pages"] = compiler.instructions(page_operations, pages, "_PAGE_INDICES")
        counts[f"{name} gathered"] = compiler.instructions(page_operations, gathered, "_GATHER")
        counts[f"{name} tokens"] = compiler.instructions(selection, token_table)
        counts[f"{name} ends"] = compiler.instructions(selection, ends, "_ENDS")
        counts[f"{name} slots"] = compiler.instructions(page_operations, slot_mapping, "_SLOTS")
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
