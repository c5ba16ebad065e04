"""The mask of one step as a pattern, inside a tensor that models can pass to attention."""

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
from attnplug.integrations.reader.mask_pattern import MaskPattern


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

        Raises:
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
_TRACED = frozenset({"grad", "_base", "_is_view", "is_conj", "is_neg", "untyped_storage"})
"""Read by torch.compile when a graph takes the mask as an input, seen in torch 2.13."""


def _takes_all(shape: torch.Size, index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return len(parts) <= len(shape) and all(
        isinstance(part, slice) and part.indices(size) == (0, size, 1)
        for part, size in zip(parts, shape, strict=False)
    )
