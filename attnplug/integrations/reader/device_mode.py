"""Runs a model whose weights have no data, on inputs whose integers have values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MAKERS = frozenset(
    {torch.arange, torch.eye, torch.full, torch.hann_window, torch.linspace, torch.logspace, torch.ones}
    | {torch.range, torch.tensor, torch.as_tensor, torch.zeros}
)
# Positions, lengths and grids are smaller.
_LARGEST = 1 << 20
"""Elements of the largest tensor that gets values."""

# Bytes of the largest mask in a buffer: 4,096 positions, one byte for each pair.
_LARGEST_SQUARE = 1 << 24


class ValuesWithoutWeights(TorchFunctionMode):
    """Small tensors that a forward makes itself are real; all that it computes from weights stays on meta.

    Models read lengths, grids and positions with `item()` or `tolist()`, which meta tensors do not have. An
    operation on tensors of both kinds runs on the meta device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MAKERS:
            return _make(func, args, kwargs)
        if func is torch.Tensor.cpu:
            return args[0]
        if func is torch.Tensor.to:
            return _convert(*args, **kwargs)
        tensors = [*tensors_in((*args, *kwargs.values()))]
        if len({tensor.is_meta for tensor in tensors}) < 2 and not _is_large(tensors):
            return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            # An index of truth values needs its values, also where the indexed tensor has none.
            return func(*args) if args[0].is_meta else func(_to_meta(args[0]), args[1])
        if func is torch.Tensor.__setitem__:
            return None
        if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
            return _repeat(*args, **kwargs)
        return func(*_to_meta(args), **_to_meta(kwargs))


class SquaresOfOnes(TorchFunctionMode):
    """Squares of ones that a model makes while it is built are real: some keep their causal mask in a buffer."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not torch.ones or "device" in (kwargs or {}):
            return made
        is_square = made.dim() > 1 and made.shape[-1] == made.shape[-2]
        is_mask = is_square and 1 < made.nbytes <= _LARGEST_SQUARE
        return func(*args, **(kwargs or {}), device="cpu") if is_mask else made


def _make(func: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if any(tensor.is_meta for tensor in tensors_in((*args, *kwargs.values()))):
        return func(*args, **kwargs)
    if func in (torch.tensor, torch.as_tensor):
        return func(*args, **{**kwargs, "device": "cpu"})
    # Its meta form tells the size of a tensor before any memory is taken.
    shape = func(*args, **{**kwargs, "device": "meta"})
    return shape if shape.numel() > _LARGEST else func(*args, **{**kwargs, "device": "cpu"})


def _repeat(tensor: torch.Tensor, repeats: Any = None, dim: int | None = None, **_: Any) -> torch.Tensor:
    if not isinstance(repeats, torch.Tensor) or repeats.is_meta:
        return torch.repeat_interleave(_to_meta(tensor), repeats, dim=dim)
    count = int(repeats.sum()) if repeats.numel() > 1 else int(repeats) * tensor.shape[dim or 0]
    return torch.repeat_interleave(tensor, _to_meta(repeats), dim=dim, output_size=count)


def _is_large(tensors: list[torch.Tensor]) -> bool:
    """Whether an operation on `tensors` with data may give a tensor too large to compute."""
    if len(tensors) < 2 or tensors[0].is_meta:
        return False
    dims = max(tensor.dim() for tensor in tensors)
    shapes = [(1,) * (dims - tensor.dim()) + tuple(tensor.shape) for tensor in tensors]
    elements: int = math.prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return elements > _LARGEST


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, and in their tuples and lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def each_changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of a value, or of each one in a tuple, a list or a dictionary."""
    if type(value) in (tuple, list):
        return type(value)(each_changed(item, change) for item in value)
    if type(value) is dict:
        return {name: each_changed(item, change) for name, item in value.items()}
    return change(value)


def _to_meta(value: Any) -> Any:
    def moved(each: Any) -> Any:
        return each.to("meta") if isinstance(each, torch.Tensor) and not each.is_meta else each

    return each_changed(value, moved)


def _convert(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`tensor.to(...)` without the device."""
    # A tensor stays where its data is.
    given = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in (*args, kwargs.get("other"))]
    dtypes = [arg for arg in (*given, kwargs.get("dtype")) if isinstance(arg, torch.dtype)]
    return torch.Tensor.to(tensor, dtypes[0]) if dtypes else tensor
