"""Checks of the operations' arguments, for their torch and Triton versions.

Checks of an impl's call: each refusal names the argument, its value, the limit and a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attnplug.core.arguments import Shape, listed
from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.impl import AttentionLayer, LayerTensors
from attnplug.core.kv_format import KVFormat, kv_format
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.ops.shared_memory import overlaps_itself, share_memory
from attnplug.ops.storage import compute_dtype, rounding_to, typed_view

__all__ = [
    "check_cache",
    "check_cache_given",
    "check_indices",
    "check_keys",
    "check_queries",
    "check_rows",
    "check_spans",
    "check_spans_given",
    "check_step_tensors",
    "head_scales",
    "kv_scales",
    "pages_of",
    "refuse_output_scales",
]


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


def check_written(name: str, written: torch.Tensor, *, records: bool = True, owner: str = "") -> None:
    """BatchError for a tensor that torch would not let an operation write: of inference mode, or with a gradient.

    Without `records` the writer runs under `no_grad`, which makes gradients no hindrance. `owner`, such as
    "of layer x ", is put before the limit.
    """
    if written.is_inference() and not torch.is_inference_mode_enabled():
        limit = f"{owner}was made in inference mode, and can be written there alone"
        raise BatchError(name, tuple(written.shape), limit, "call under torch.inference_mode()")
    if records and written.requires_grad and torch.is_grad_enabled():
        limit = f"{owner}must not require a gradient: there is no backward pass"
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
    row: KVFormat | None = None,
) -> None:
    """The arguments of `write_kv_cache`; `row` is the format of pages with planes.

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
        if row is None and not pages.is_floating_point() and rounding_to(pages.dtype) is None:
            remedy = "view raw bytes as their 8-bit float"
            raise LayoutError(f"{name}.dtype", pages.dtype, "must be a float type", remedy)
    if k_cache.dtype != v_cache.dtype:
        raise LayoutError("v_cache.dtype", v_cache.dtype, f"must be that of k_cache, {k_cache.dtype}")
    k_pages, v_pages = k_cache.shape, v_cache.shape
    if len(k_pages) != 4 or k_pages[:3] != v_pages[:3] or len(v_pages) != 4:
        limit = "must be [num_blocks, block_size, num_kv_heads, head_size], alike but for the head size"
        raise LayoutError("k_cache, v_cache", (tuple(k_pages), tuple(v_pages)), limit)
    for name, rows, page in (("key", key.shape, k_pages), ("value", value.shape, v_pages)):
        fits = len(rows) == 3 and (rows[1], rows[2] if row is None else row.width(rows[2])) == page[2:]
        if not fits:
            size = page[3] if row is None else f"head_size of {page[3]} bytes in {row.name}"
            raise BatchError(name, tuple(rows), f"must be of shape (tokens, {page[2]}, {size})")
        if rows[0] < slots[0]:
            raise BatchError(name, tuple(rows), f"must have a row for each of {slots[0]} slots")
    for name, pages, others in (
        ("k_cache", k_cache, {"key": key, "value": value, "v_cache": v_cache, "slot_mapping": slot_mapping}),
        ("v_cache", v_cache, {"key": key, "value": value, "slot_mapping": slot_mapping}),
    ):
        # The write runs under `no_grad`, so pages that require a gradient are written too.
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


def check_rows(name: str, tensor: torch.Tensor, rows: int, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    """BatchError unless `tensor` is `[at least rows, *tail]` of `dtype`."""
    shape = tensor.shape
    if len(shape) != 1 + len(tail) or shape[0] < rows or shape[1:] != tail:
        expected = ", ".join(map(str, (f"at least {rows}", *tail)))
        raise BatchError(name, tuple(shape), f"must have the shape ({expected})")
    if tensor.dtype != dtype:
        raise BatchError(f"{name}.dtype", tensor.dtype, f"must be {dtype}")


def check_keys(
    key: torch.Tensor | None, value: torch.Tensor | None, rows: int, spec: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value, both given; BatchError unless they are `[at least rows, Hkv, D]` and as many values."""
    if key is None or value is None:
        name = "key" if key is None else "value"
        raise BatchError(name, None, "is required: it is not in a KV cache")
    dtype = compute_dtype(spec)
    check_rows("key", key, rows, (spec.num_kv_heads, spec.head_size), dtype)
    check_rows("value", value, rows, (spec.num_kv_heads, spec.head_size_v), dtype)
    return key, value


def check_queries(
    query: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    rows: int,
    spec: LayerSpec,
    **output_scales: torch.Tensor | None,
) -> None:
    """BatchError unless queries, outputs and LSE fit the layer and hold `rows` rows.

    It refuses an LSE that the layer does not declare, and every output scale.
    """
    dtype = compute_dtype(spec)
    check_rows("query", query, rows, (spec.num_heads, spec.head_size), dtype)
    check_rows("output", output, rows, (spec.num_heads, spec.head_size_v), dtype)
    refuse_output_scales(**output_scales)
    if output_lse is None:
        return
    if not spec.needs_lse:
        remedy = "declare the layer with needs_lse=True"
        raise BatchError("output_lse", tuple(output_lse.shape), "must be None", remedy)
    check_rows("output_lse", output_lse, rows, (spec.num_heads,), torch.float32)


def refuse_output_scales(**scales: torch.Tensor | None) -> None:
    """BatchError if an output scale is given: outputs have the layer's dtype only."""
    for name, scale in scales.items():
        if scale is not None:
            raise BatchError(name, tuple(scale.shape), "must be None", "quantise the output after attention")


def check_indices(name: str, tensor: torch.Tensor) -> None:
    """BatchError unless `tensor` is int32 and the elements of a row are adjacent, as kernels read them."""
    if tensor.dtype != torch.int32:
        raise BatchError(f"{name}.dtype", tensor.dtype, "must be torch.int32")
    # torch gives a dimension of one element any stride.
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        limit = "must be 1: kernels read adjacent elements"
        raise BatchError(f"{name}.stride({tensor.ndim - 1})", tensor.stride(-1), limit)


def check_step_sizes(common: CommonAttentionMetadata) -> None:
    """BatchError unless the tensors of a batch have a row for each request; nothing waits for the device.

    Keys of the call must start where both sides say, and be no more than the tokens of their request.
    """
    reqs, host = common.num_reqs, common.query_start_loc_cpu
    if not isinstance(host, torch.Tensor) or host.device.type != "cpu":
        raise BatchError("query_start_loc_cpu", host, "must be a tensor on the CPU")
    for name, tensor, rows in (
        ("query_start_loc", common.query_start_loc, reqs + 1),
        ("query_start_loc_cpu", host, reqs + 1),
        ("seq_lens", common.seq_lens, reqs),
        ("block_table_tensor", common.block_table_tensor, reqs),
    ):
        if tensor.shape[0] < rows:
            limit = f"must have at least {rows} rows for num_reqs={reqs}"
            raise BatchError(name, tuple(tensor.shape), limit)
    starts, keys = common.key_start_loc, common.key_start_loc_cpu
    # Only the device knows these locations, and the host would wait for it.
    if keys is None:
        return
    if starts is None:
        limit = "is None, and key_start_loc_cpu is given"
        raise BatchError("key_start_loc", None, limit, "give the locations on both sides")
    known = common.seq_lens_host
    if known is not None and common.seq_lens_host_exact:
        lens = np.diff(keys[: reqs + 1].numpy())
        bad = lens > known[:reqs]
        if bad.any():
            worst = int(bad.argmax())
            limit = f"request {worst} has more keys than its {int(known[worst])} tokens"
            raise BatchError("key_start_loc", int(lens[worst]), limit)


def check_table_width(common: CommonAttentionMetadata, block_size: int) -> None:
    """BatchError if the host knows that a request has more tokens than the pages of its row in the table."""
    pages = common.block_table_tensor.shape[1]
    # The bound of the step is enough for most.
    if (
        common.max_seq_len > pages * block_size
        and common.seq_lens_host is not None
        and common.seq_lens_host_exact
    ):
        check_room(int(common.seq_lens_host[: common.num_reqs].max(initial=0)), pages, block_size)


def check_room(longest: int, pages: int, block_size: int) -> None:
    """BatchError unless `pages` of a table have the tokens of the longest request."""
    if longest > pages * block_size:
        limit = f"is past the {pages * block_size} tokens of {pages} pages per request"
        raise BatchError("seq_lens", longest, limit, "widen block_table_tensor")


def check_step_tensors(common: CommonAttentionMetadata) -> None:
    """`check_step_sizes`, and `check_indices` of the tensors that every kernel reads."""
    check_step_sizes(common)
    check_indices("query_start_loc", common.query_start_loc)
    check_indices("seq_lens", common.seq_lens)
    check_indices("block_table_tensor", common.block_table_tensor)


def check_spans(spans: torch.Tensor, tokens: int) -> None:
    """BatchError unless `mm_prefix_spans` is int32 `[at least tokens, 2]`."""
    if spans.ndim != 2 or spans.shape[0] < tokens or spans.shape[1] != 2 or spans.dtype != torch.int32:
        found = f"{spans.dtype} {tuple(spans.shape)}"
        raise BatchError("mm_prefix_spans", found, f"must be torch.int32 of the shape (at least {tokens}, 2)")


def check_spans_given(is_given: bool, spec: LayerSpec) -> None:
    """BatchError if a layer with mm_prefix runs in a step without multimodal spans."""
    if spec.mm_prefix and not is_given:
        remedy = "give the batch int32 [T, 2], zeros for text"
        raise BatchError("mm_prefix_spans", None, "is required: the layer has mm_prefix", remedy)


def check_cache_given(kv_cache: torch.Tensor | None, spec: LayerSpec) -> None:
    """LayoutError if a layer with direct K and V gets a cache, or another layer gets none."""
    if kv_cache is not None:
        if spec.direct_kv:
            raise LayoutError("kv_cache", tuple(kv_cache.shape), "must be None with direct_kv=True")
        return
    encodes = spec.is_encoder
    if not (spec.direct_kv or encodes):
        remedy = "declare the layer with direct_kv=True to give K and V with the call"
        raise LayoutError("kv_cache", None, "is required", remedy)


def check_cache(kv_cache: torch.Tensor, spec: LayerSpec) -> None:
    """LayoutError unless `kv_cache` has the logical shape of the layer's cache."""
    heads, block = spec.num_kv_heads, spec.block_size or "block_size"
    width = kv_format(spec.resolved_kv_cache_dtype).width
    if spec.head_size_v == spec.head_size:
        limits: tuple[int | str, ...] = ("num_blocks", 2, block, heads, width(spec.head_size))
    else:
        limits = ("num_blocks", block, heads, spec.head_size + spec.head_size_v)
    shape = tuple(kv_cache.shape)
    fits = len(shape) == len(limits) and all(
        isinstance(limit, str) or found == limit for found, limit in zip(shape, limits, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, limits))
        remedy = "pass the logical view; the physical order shows only in the strides"
        raise LayoutError("kv_cache", shape, f"must have the shape ({expected})", remedy)


def pages_of(
    backend: type[AttentionBackend], kv_cache: torch.Tensor, spec: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as `backend` splits the layer's cache, checked, in their stored dtype.

    Raises:
        LayoutError: a cache of another shape or element type.
    """
    check_cache(kv_cache, spec)
    return backend.split_kv(typed_view(kv_cache, spec), spec)


def kv_scales(layer: AttentionLayer | None, tensors: LayerTensors) -> tuple[float, float]:
    """The scales of stored keys and values, from the engine's layer or else from the layer's tensors.

    A scale in a device tensor makes the host wait, so a layer should call this once.

    BatchError: the engine's layer has a scale for each head, and attnplug's was not declared with `head_scales`.
    """
    # vLLM's layers have these floats beside their tensors, so that no host waits for a device.
    if layer is not None and hasattr(layer, "_k_scale_float") and hasattr(layer, "_v_scale_float"):
        for name in ("_k_scale", "_v_scale"):
            # The float of such a layer is the largest of its scales.
            tensor = getattr(layer, name, None)
            if tensor is not None and tensor.numel() != 1:
                remedy = "declare the layer with head_scales=True"
                raise BatchError(f"layer.{name}", tuple(tensor.shape), "must have one element", remedy)
        return float(layer._k_scale_float), float(layer._v_scale_float)
    return float(tensors.k_scale), float(tensors.v_scale)


def head_scales(layer: AttentionLayer | None, tensors: LayerTensors, spec: LayerSpec) -> tuple[Any, Any]:
    """The scales of stored keys and values of a layer with `head_scales`, as its engine or its tensors have them.

    Numbers of the host are preferred; vLLM's layers have only a tensor, and as a float the largest scale.

    Raises:
        BatchError: the engine's layer has another number of scales than heads.
    """
    if layer is None or not (hasattr(layer, "_k_scale") and hasattr(layer, "_v_scale")):
        return tensors.k_scale, tensors.v_scale
    on_host: tuple[Any, Any] = getattr(layer, "_k_scale_float", None), getattr(layer, "_v_scale_float", None)
    if isinstance(on_host[0], tuple) and isinstance(on_host[1], tuple):
        for name, each in zip(("_k_scale_float", "_v_scale_float"), on_host, strict=True):
            if len(each) != spec.num_kv_heads:
                limit = f"must have {spec.num_kv_heads} numbers, one for each KV head"
                raise BatchError(f"layer.{name}", each, limit)
        return on_host
    for name in ("_k_scale", "_v_scale"):
        shape = tuple(getattr(layer, name).shape)
        if shape not in ((), (1,), (spec.num_kv_heads,)):
            raise BatchError(f"layer.{name}", shape, f"must have one element, or be ({spec.num_kv_heads},)")
    return layer._k_scale, layer._v_scale
