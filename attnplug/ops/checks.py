"""Checks of the operations' arguments, for their torch and Triton versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.core.arguments import Shape, listed
from attnplug.core.errors import BatchError, LayoutError
from attnplug.ops.shared_memory import overlaps_itself, share_memory


def check_apart(name: str, written: torch.Tensor, **others: torch.Tensor | None) -> None:
    """BatchError if elements of a tensor that is written share bytes with each other, or with another tensor."""
    if overlaps_itself(written):
        found = f"{tuple(written.shape)} with strides {written.stride()}"
        raise BatchError(
            name, found, "must not overlap itself: each element is written", "pass a tensor of its own"
        )
    for other, tensor in others.items():
        if tensor is not None and share_memory(written, tensor):
            limit = f"must not be in the memory of {other}, which is read or written meanwhile"
            raise BatchError(name, tuple(written.shape), limit, "pass a tensor of its own")


def check_written(name: str, written: torch.Tensor, *, records: bool = True) -> None:
    """BatchError for a tensor that torch would not let an operation write: of inference mode, or with a gradient.

    Without `records` the writer runs under `no_grad`, which makes gradients no hindrance.
    """
    if written.is_inference() and not torch.is_inference_mode_enabled():
        limit = "was made in inference mode, and can be written there alone"
        raise BatchError(name, tuple(written.shape), limit, "call under torch.inference_mode()")
    if records and written.requires_grad and torch.is_grad_enabled():
        limit = "must not require a gradient: there is no backward pass"
        raise BatchError(f"{name}.requires_grad", True, limit, "call under torch.no_grad()")


def check_numbers(name: str, numbers: torch.Tensor, least: int, end: int | None, limit: str = "") -> None:
    """BatchError unless all `numbers`, on a CPU, are at least `least` and below `end`."""
    if not numbers.numel():
        return
    low, high = (int(each) for each in numbers.aminmax())
    if low < least or (end is not None and high >= end):
        raise BatchError(name, low if low < least else high, limit or f"must be at least {least}")


def check_lengths(name: str, starts: torch.Tensor, rows_name: str, rows: int) -> None:
    """BatchError unless start locations `[R + 1]` on a CPU begin at 0, do not decrease, and end at `rows`."""
    check_numbers(name, starts.diff(), 0, None, "is the length of a request; least is 0")
    found = int(starts[0]), int(starts[-1])
    if found != (0, rows):
        raise BatchError(name, found, f"must go from 0 to {rows}, the rows of {rows_name}")


def check_slots(slots: torch.Tensor, pages: torch.Tensor) -> None:
    """BatchError if a slot, on a CPU, is past the last of `pages [num_blocks, block_size, ...]`."""
    capacity = pages.shape[0] * pages.shape[1]
    if slots.numel() and int(slots.max()) >= capacity:
        limit = f"is past the {capacity} slots of {pages.shape[0]} blocks of {pages.shape[1]}"
        raise BatchError("slot_mapping", int(slots.max()), limit)


def check_kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The arguments of `write_kv_cache`.

    Raises:
        BatchError: fewer rows than slots, or rows of another shape than the pages'.
        LayoutError: pages of integers, or K and V pages that do not belong together or share memory.
    """
    known: dict[str, object] = {}
    given = {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    for name, tensor in given.items():
        _WRITE[name].check(name, tensor, known)
    slots = slot_mapping.shape
    if len(slots) != 1:
        raise BatchError("slot_mapping", tuple(slots), "must have one dimension")
    for name, pages in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not pages.is_floating_point():
            remedy = "view raw bytes as their 8-bit float"
            raise LayoutError(f"{name}.dtype", pages.dtype, "must be a float type", remedy)
    if k_cache.dtype != v_cache.dtype:
        raise LayoutError("v_cache.dtype", v_cache.dtype, f"must be that of k_cache, {k_cache.dtype}")
    k_pages, v_pages = k_cache.shape, v_cache.shape
    if len(k_pages) != 4 or k_pages[:3] != v_pages[:3] or len(v_pages) != 4:
        limit = "must be [num_blocks, block_size, num_kv_heads, head_size], alike but for the head size"
        raise LayoutError("k_cache, v_cache", (tuple(k_pages), tuple(v_pages)), limit)
    for name, rows, page in (("key", key.shape, k_pages), ("value", value.shape, v_pages)):
        if len(rows) != 3 or rows[1:] != page[2:]:
            raise BatchError(name, tuple(rows), f"must be of shape (tokens, {page[2]}, {page[3]})")
        if rows[0] < slots[0]:
            raise BatchError(name, tuple(rows), f"must have a row for each of {slots[0]} slots")
    for name, pages, others in (
        ("k_cache", k_cache, {"key": key, "value": value, "v_cache": v_cache, "slot_mapping": slot_mapping}),
        ("v_cache", v_cache, {"key": key, "value": value, "slot_mapping": slot_mapping}),
    ):
        check_written(name, pages, records=False)
        check_apart(name, pages, **others)


_WRITE = {
    "key": Shape("*: stored"),
    "value": Shape("*: stored"),
    "k_cache": Shape("*"),
    "v_cache": Shape("*"),
    "slot_mapping": Shape("*: int64"),
}
_PARTIAL = Shape("*: floats")


def check_merge(
    outputs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
    name: str = "outputs",
) -> torch.Size:
    """The shape `[T, H, Dv]` of the arguments of `merge_attn_states`, the LSEs being `[T, H]`.

    Raises:
        BatchError: no partial, or shapes that do not fit each other.
    """
    known: dict[str, object] = {}
    for field, tensors in ((name, outputs), ("lses", lses)):
        # A tensor is a sequence of its rows.
        if not isinstance(tensors, (Sequence, torch.Tensor)):
            raise BatchError(field, tensors, "must be a sequence of tensors")
        for index, tensor in enumerate(listed(field, tensors, "tensors")):
            _PARTIAL.check(f"{field}[{index}]", tensor, known)
    if not len(outputs) or len(outputs) != len(lses):
        raise BatchError(name, len(outputs), f"must be as many as lses ({len(lses)}), at least one")
    shape = outputs[0].shape
    if len(shape) != 3:
        raise BatchError(f"{name}[0]", tuple(shape), "must be of shape (tokens, num_heads, head_size_v)")
    for index, (out, lse) in enumerate(zip(outputs, lses, strict=True)):
        if out.shape != shape or lse.shape != shape[:-1]:
            found = (tuple(out.shape), tuple(lse.shape))
            limit = f"must have the shapes {tuple(shape)} and {tuple(shape[:-1])}"
            raise BatchError(f"{name}[{index}], lses[{index}]", found, limit)
    given = [("output", output, shape), ("output_lse", output_lse, shape[:-1])]
    written = [(field, tensor, rows) for field, tensor, rows in given if tensor is not None]
    for field, tensor, _ in written:
        _PARTIAL.check(field, tensor, known)
    for field, tensor, rows in written:
        check_written(field, tensor)
        if tensor.shape != rows:
            raise BatchError(field, tuple(tensor.shape), f"must have the shape {tuple(rows)}")
        # A partial itself may be written: each element is read before.
        read = {f"outputs[{i}]": each for i, each in enumerate(outputs) if not is_same(each, tensor)}
        read |= {f"lses[{i}]": each for i, each in enumerate(lses) if not is_same(each, tensor)}
        check_apart(field, tensor, **read, **({"output_lse": output_lse} if tensor is output else {}))
    return shape


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have each element in the same place."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
