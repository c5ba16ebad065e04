"""The mask of one step as the pattern it is, in the shape of the tensor that models pass along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch._guards import TracingContext

from attnplug.core.errors import BatchError
from attnplug.integrations.attention.packing import Packing, pack_all, pack_real
from attnplug.integrations.reader.mask_pattern import MaskPattern

__all__ = ["PatternMask", "StepMask"]


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class StepMask:
    """Which keys the queries of one step see; what is made of it is kept for the step's other layers.

    Query j stands at `q_offset + j`, key i at `kv_offset + i`, counted with padding. `padding` is bool
    `[B, at least q_offset + q_length]`, False where there is no token, or None where all are real.
    """

    pattern: MaskPattern
    batch: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    padding: torch.Tensor | None
    left_padding: torch.Tensor | None = None
    metadata: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    packings: dict[Hashable, Packing] = dataclasses.field(default_factory=dict)

    def packing(self, device: torch.device, *, is_cross: bool) -> Packing:
        """How rows are packed on `device`; made once.

        With `is_cross` the mask is about keys alone, and every query is taken as real.

        Raises:
            BatchError: padding between tokens under a window, chunks or a mask that cannot be placed.
        """
        key = (device, is_cross)
        if key not in self.packings:
            self.packings[key] = self._pack(device, is_cross)
        return self.packings[key]

    def _pack(self, device: torch.device, is_cross: bool) -> Packing:
        padding = None if self.padding is None else self.padding.cpu().numpy()
        if is_cross:
            return pack_all(self.batch, self.q_length, self.kv_length, self.kv_offset, padding, device)
        left = None if self.left_padding is None else self.left_padding.cpu().numpy()
        return pack_real(
            self.pattern,
            self.batch,
            range(self.q_offset, self.q_offset + self.q_length),
            range(self.kv_offset, self.kv_offset + self.kv_length),
            padding,
            left,
            device,
        )


class PatternMask(torch.Tensor):
    """Looks like a bool mask `[B, 1, Lq, Lk]`, holds no values, and carries a StepMask in `.step`.

    For a mask that is no pattern `.step` is the sentence why; it is refused by the layer that is given
    it, as models make masks that no layer uses. A model may pass a mask on, move it or take all of it.
    Whatever would read or alter its values raises BatchError: the result would no longer say what the
    pattern says.
    """

    step: StepMask | str

    @classmethod
    def of(cls, step: StepMask | str, shape: tuple[int, int, int, int], device: torch.device) -> PatternMask:
        """The mask that stands for `step`; takes no memory."""
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
        """Answers questions about the shape, gives itself where nothing changes, refuses the rest."""
        name = getattr(func, "__name__", str(func))
        if name in _SAME and isinstance(args[0], cls):
            return args[0]
        if name == "__getitem__" and isinstance(args[0], cls) and _takes_all(args[0].shape, args[1]):
            return args[0]
        asked = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if asked in _ABOUT or (name == "__get__" and asked.startswith("is_")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if TracingContext.try_get() is not None:
            limit = "cannot be carried through torch.compile: a pattern is no tensor that it could trace"
            remedy = "run the model as it is; with generate(), pass disable_compile=True"
            raise BatchError("attention_mask", cls.__name__, limit, remedy)
        limit = "must reach attention as transformers made it: a mask that the model alters or reads is no pattern"
        raise BatchError("attention_mask", f"changed by {name}", limit, "use attn_implementation='eager'")


_SAME = frozenset({"to", "contiguous", "detach", "clone", "bool", "cpu", "cuda", "requires_grad_"})
_ABOUT = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point"}
    | {"is_complex", "__len__", "get_device", "element_size", "storage_offset", "is_pinned", "is_inference"}
    | {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "itemsize", "nbytes", "_version"}
    | {"grad_fn"}
)


def _takes_all(shape: torch.Size, index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return len(parts) <= len(shape) and all(
        isinstance(part, slice) and part.indices(size) == (0, size, 1)
        for part, size in zip(parts, shape, strict=False)
    )
