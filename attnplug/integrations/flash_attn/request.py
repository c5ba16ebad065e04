"""The arguments that the three functions share, checked and read as a LayerSpec."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attnplug.core.arguments import unusual_form
from attnplug.core.checks import MOST_TOKENS
from attnplug.core.errors import BatchError, SpecError
from attnplug.core.spec import AttentionType, LayerSpec

# Sides of windows are ints of C in the library.
_MOST_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The arguments of a call about attention, without its tensors.

    `window` is (left, right) with -1 for no limit. `single` says that each request has one query, which is its last
    token and sees no later key. `given` are the caller's window and shapes of queries, keys and values, by name.
    """

    function: str
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float | None
    slopes: torch.Tensor | None
    with_lse: bool
    given: Mapping[str, tuple[int, ...]]
    single: bool = False

    @property
    def by_position(self) -> bool:
        """Whether the positions of queries and keys change the result."""
        return self.causal or self.window != (-1, -1) or self.slopes is not None

    def spec(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_size: int | None) -> LayerSpec:
        """The layer for `q [..., H, D]`, `k [..., Hkv, D]` and `v [..., Hkv, Dv]`; without a block size K and V are given.

        SpecError: an impossible number, such as heads that are no multiple of KV heads.
        """
        kind, causal, window = AttentionType.DECODER, self.causal or self.single, self.window
        if causal:
            window = (window[0], -1)
        elif not self.by_position and block_size is None:
            kind = AttentionType.ENCODER_DECODER
        try:
            return LayerSpec(
                num_heads=q.shape[-2],
                num_kv_heads=k.shape[-2],
                head_size=q.shape[-1],
                head_size_v=v.shape[-1],
                dtype=q.dtype,
                attn_type=kind,
                causal=causal,
                scale=self.scale,
                window=window,
                logits_soft_cap=self.softcap,
                has_alibi=self.slopes is not None,
                direct_kv=block_size is None,
                block_size=block_size,
                needs_lse=self.with_lse,
            )
        except SpecError as problem:
            # The caller knows its own arguments, not the fields of a LayerSpec.
            places = {"window": 0, "num_kv_heads": 2, "block_size": 2, "head_size_v": 3}
            name = list(self.given)[places.get(problem.field, 1)]
            limit = f"has {problem.field}={problem.value}, which {problem.limit}"
            limit = problem.limit if problem.field == "window" else limit
            raise SpecError(name, self.given[name], limit, problem.remedy) from None


def read_request(
    function: str,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    with_lse: bool,
    batch: int,
    **tensors: torch.Tensor,
) -> Request:
    """The shared arguments of a call of `batch` requests; `tensors` are its queries `[..., H, D]`, keys and values, by name.

    BatchError: dropout, slopes for each request, a number out of its limits, or a value of another type.
    """
    if _number("dropout_p", dropout_p, "must be the number 0.0"):
        limit = f"cannot be served by {function}: attnplug computes inference only"
        raise BatchError("dropout_p", dropout_p, limit, "pass 0.0")
    scale = None
    if softmax_scale is not None:
        limit = "must be a finite number above 0; None is the default"
        scale = _number("softmax_scale", softmax_scale, limit)
        if scale <= 0:
            raise BatchError("softmax_scale", softmax_scale, limit)
    limit = "must be a finite number of at least 0.0; 0.0 is no cap"
    cap = _number("softcap", softcap, limit)
    if cap < 0:
        raise BatchError("softcap", softcap, limit)
    causal = flag("causal", causal)
    left, right = _sides(window_size)
    q, *_ = tensors.values()
    if alibi_slopes is not None:
        check_tensors(function, None, alibi_slopes=alibi_slopes)
        # One row for all requests: of a batch of one, or expanded.
        if alibi_slopes.ndim == 2 and alibi_slopes.shape[0] == batch >= 1:
            alibi_slopes = alibi_slopes[0] if batch == 1 or not alibi_slopes.stride(0) else alibi_slopes
        wanted = (torch.float32, (q.shape[-2],), q.device)
        if (alibi_slopes.dtype, alibi_slopes.shape, alibi_slopes.device) != wanted:
            found = f"{alibi_slopes.dtype} {tuple(alibi_slopes.shape)} on {alibi_slopes.device}"
            limit = f"must be torch.float32 ({q.shape[-2]},) on {q.device}: slopes that differ by request are not served"
            raise BatchError("alibi_slopes", found, limit)
    return Request(
        function=function,
        scale=scale,
        causal=causal,
        window=(left, -1 if causal else right),
        softcap=cap or None,
        slopes=alibi_slopes,
        with_lse=with_lse,
        given={"window_size": (left, right), **{name: tuple(each.shape) for name, each in tensors.items()}},
    )


def flag(name: str, value: object) -> bool:
    """`value` as a bool; BatchError for anything but True and False, such as the text "False"."""
    if not isinstance(value, (bool, np.bool_)):
        raise BatchError(name, value, "must be True or False")
    return bool(value)


def integer(name: str, value: Any, limit: str, least: int) -> int:
    """`value` as an int of at least `least`; BatchError with `limit` for a bool, a float, text and the like."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # torch raises both for its tensors
        number = None
    if number is None or number < least:
        raise BatchError(name, value, limit)
    return number


def _number(name: str, value: Any, limit: str) -> float:
    """`value` as a finite float; BatchError with `limit` for a bool, text, a tensor and the like."""
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        number = math.inf
    if isinstance(value, bool) or not math.isfinite(number):
        raise BatchError(name, value, limit)
    return number


def _sides(window: Any) -> list[int]:
    limit = "must be (left, right), two integers; -1 is no limit"
    sides = list(window) if isinstance(window, (tuple, list)) else []
    if len(sides) != 2 or any(
        isinstance(side, bool) or not isinstance(side, numbers.Integral) for side in sides
    ):
        raise BatchError("window_size", window, limit)
    if max(sides) > _MOST_INT:
        raise SpecError("window_size", tuple(window), f"must not exceed {_MOST_INT}; -1 means no limit")
    # No request has as many keys as the largest window of a layer.
    return [int(side) if 0 <= side <= MOST_TOKENS else -1 for side in sides]


def check_tensors(function: str, dims: int | None, **tensors: torch.Tensor) -> None:
    """Refuse other numbers of dimensions, if that is given, mixed dtypes or devices, and gradients.

    BatchError: it names the arguments.
    """
    names = ", ".join(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(name, type(tensor).__name__, f"must be a tensor in {function}")
    for name, tensor in tensors.items():
        if (form := unusual_form(tensor)) is not None:
            raise BatchError(name, form, f"must be a strided tensor in {function}")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if dims is not None and any(tensor.ndim != dims for tensor in tensors.values()):
        raise BatchError(names, shapes, f"must have {dims} dimensions each in {function}")
    for what in ("dtype", "device"):
        found = sorted({str(getattr(tensor, what)) for tensor in tensors.values()})
        if len(found) > 1:
            raise BatchError(names, found, f"must have one {what}")
    needing = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if needing and torch.is_grad_enabled():
        limit = f"cannot be served by {function}: attnplug's backends have no backward pass"
        raise BatchError("requires_grad", needing, limit, "call it under torch.no_grad()")


def refuse(function: str, **given: Any) -> None:
    """Refuse arguments that are not None. BatchError: it names the first such argument."""
    for name, value in given.items():
        if value is not None:
            shown = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
            raise BatchError(name, shown, f"is not served by attnplug's {function}", _REMEDIES.get(name))


_ROTATE = "rotate queries and keys before the call, and pass None"
_REMEDIES = {
    "rotary_cos": _ROTATE,
    "rotary_sin": _ROTATE,
    "cache_leftpad": "start each sequence at its first cache row",
}
