"""The mask of one step as a pattern, inside a tensor that models can pass to attention.

Multimodal spans of a step, read from the values of a mask function that shows blocks of tokens to each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._guards import TracingContext

from attnplug.core.errors import BatchError
from attnplug.integrations.attention.packing import Packing, pack_all, pack_real, pack_segments
from attnplug.integrations.reader.mask_pattern import MaskFunction, MaskPattern, UnknownMaskError


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class StepMask:
    """The keys that the queries of one step see; caches packings and metadata for all layers of the step.

    Positions count padding: query j is at `q_offset + j`, key i at `kv_offset + i`. `padding` is bool
    `[B, at least q_offset + q_length]`, False for padding; None without padding. With `keys_only`, a query may be
    a token even if its key is padding. `segments`, int `[B, q_length]`, numbers the sequences packed in each row. `spans`, int64
    `[B, q_length, 2]`, has the keys that tokens of multimodal blocks see, (0, 0) for text. `positions` are the
    last position_ids that were checked.
    """

    pattern: MaskPattern
    batch: int
    q_length: int
    kv_length: int
    q_offset: int = 0
    kv_offset: int = 0
    padding: torch.Tensor | None = None
    left_padding: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    spans: npt.NDArray[np.int64] | None = None
    keys_only: bool = False
    positions: torch.Tensor | None = None
    metadata: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    packings: dict[Hashable, Packing] = dataclasses.field(default_factory=dict)

    def packing(self, device: torch.device, *, is_cross: bool) -> Packing:
        """The packed rows on `device`, cached. With `is_cross` the mask applies to keys only.

        BatchError: padding between tokens under a window or chunks, or a mask of another size.
        """
        key = (device, is_cross)
        if key in self.packings:
            return self.packings[key]
        # Packed sizes depend on the values, so the host reads them, once for all layers of a step.
        padding = None if self.padding is None else self.padding.cpu().numpy()
        if self.segments is not None:
            segments = self.segments.cpu().numpy()
            packing = pack_segments(self.pattern, segments, device, self.spans)
        elif is_cross:
            packing = pack_all(self.batch, self.q_length, self.kv_length, self.kv_offset, padding, device)
        else:
            queries = range(self.q_offset, self.q_offset + self.q_length)
            keys = range(self.kv_offset, self.kv_offset + self.kv_length)
            left = None if self.left_padding is None else self.left_padding.cpu().numpy()
            packing = pack_real(self.pattern, self.batch, queries, keys, padding, left, device, self.spans)
        self.packings[key] = packing
        return packing


class PatternMask(torch.Tensor):
    """A bool mask `[B, 1, Lq, Lk]` without values, and with a StepMask in `.step`.

    `.step` is a reason if the mask has no known pattern. The layer that receives it then refuses it: models
    also make masks that no layer uses. A model may pass a mask on, move it or slice all of it. Reading or
    changing its values raises BatchError, because the pattern would no longer describe the result.
    """

    step: StepMask | str

    @classmethod
    def of(cls, step: StepMask | str, shape: tuple[int, int, int, int], device: torch.device) -> PatternMask:
        """A mask for `step`; takes no memory."""
        # One element expanded to the shape, so that a long sequence needs no matrix.
        mask = torch.zeros((), dtype=torch.bool, device=device).expand(shape).as_subclass(cls)
        mask.step = step
        return mask

    def __deepcopy__(self, memo: dict[int, Any]) -> PatternMask:
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers questions about the shape, returns itself if nothing changes, and refuses all else."""
        name = getattr(func, "__name__", str(func))
        if name in _UNCHANGED and isinstance(args[0], cls):
            return args[0]
        if name == "__getitem__" and isinstance(args[0], cls) and _takes_all(args[0].shape, args[1]):
            return args[0]
        # Attributes arrive as `__get__` of their descriptor.
        is_attribute = name == "__get__"
        query = getattr(getattr(func, "__self__", None), "__name__", "") if is_attribute else name
        traced = TracingContext.try_get() is not None and query in _TRACED
        if traced or query in _WITHOUT_VALUES or (is_attribute and query.startswith("is_")):
            # Without this, torch would call `__torch_function__` again for the same attribute.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        limit = "must reach attention unchanged: attnplug cannot see what the model makes of a mask's values"
        raise BatchError("attention_mask", f"changed by {name}", limit, "use attn_implementation='eager'")


_UNCHANGED = frozenset({"to", "contiguous", "detach", "clone", "bool", "cpu", "cuda", "requires_grad_"})
_WITHOUT_VALUES = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point"}
    | {"is_complex", "__len__", "get_device", "element_size", "storage_offset", "is_pinned", "is_inference"}
    | {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "itemsize", "nbytes", "_version"}
    | {"grad_fn"}
)
# Read by torch.compile when a graph takes the mask as an input, seen in torch 2.13.
_TRACED = frozenset({"grad", "_base", "_is_view", "is_conj", "is_neg", "untyped_storage"})


def _takes_all(shape: torch.Size, index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return len(parts) <= len(shape) and all(
        isinstance(part, slice) and part.indices(size) == (0, size, 1)
        for part, size in zip(parts, shape, strict=False)
    )


_Ints = npt.NDArray[np.int64]

_MOST = 1 << 24
"""Values of a mask that are computed at once."""


def read_spans(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> _Ints | None:
    """The keys that each query sees, int64 `[B, Lq, 2]` as positions `[start, stop)`; (0, 0) for those of `pattern`.

    None if all queries see the keys of `pattern`. A query that sees more has one range, with the keys of `pattern`
    in it: an image's tokens see the image, or the part of it that a window leaves.

    Raises:
        UnknownMaskError: a query sees fewer keys, or keys that are not one range, or ranges are out of order.
    """
    keys = range(keys.start, min(keys.stop, queries.stop))
    if not keys or not queries:
        return None
    step = max(_MOST // (batch * len(keys)), 1)
    starts = range(queries.start, queries.stop, step)
    parts = [
        _ranges(function, pattern, batch, range(start, min(start + step, queries.stop)), keys, device)
        for start in starts
    ]
    seen, plain = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    # Kernels scan a tile of queries from the first key of its first query to the last key of its last one.
    if (np.diff(seen, axis=1) < 0).any():
        raise UnknownMaskError("spans of tokens that see each other are not one after the other")
    differ = (seen != plain).any(axis=2)
    return np.where(differ[:, :, None], seen, 0) if differ.any() else None


def _ranges(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> tuple[_Ints, _Ints]:
    """The range of keys of each query, and the one that `pattern` gives: int64 `[B, n, 2]`."""
    seen, plain = seen_by(function, pattern, batch, queries, keys, device)
    if bool((plain & ~seen).any()):
        raise UnknownMaskError("tokens of a block do not see all that the rest of the mask shows them")
    found, is_one = _range_of(seen, keys.start)
    if not is_one:
        raise UnknownMaskError("a token sees keys that are not one range")
    return found, _range_of(plain, keys.start)[0]


def seen_by(
    function: MaskFunction,
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that each query sees, and those that `pattern` shows it: bool `[B, Lq, Lk]`."""
    query = torch.arange(queries.start, queries.stop, device=device)[None, None, :, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, None, None, :]
    rows = torch.arange(batch, device=device)[:, None, None, None]
    shape = batch, 1, len(queries), len(keys)
    seen = function(rows, torch.zeros_like(rows[:1]), query, key).to(torch.bool)
    return seen.expand(shape)[:, 0], pattern.seen(query, key).expand(shape)[:, 0]


def _range_of(seen: torch.Tensor, start: int) -> tuple[_Ints, bool]:
    """The first seen key and one past the last `[B, n, 2]`, and whether all keys between them are seen."""
    count, size = seen.sum(-1), seen.shape[-1]
    first = seen.int().argmax(-1)
    stop = torch.where(count > 0, size - seen.flip(-1).int().argmax(-1), first)
    is_one = bool((stop - first == count).all())
    return (torch.stack([first, stop], -1) + start).cpu().numpy(), is_one
