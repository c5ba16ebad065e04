"""The arguments that the three functions share, checked and read as a LayerSpec."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.core.errors import BatchError
from attnplug.core.spec import AttentionType, LayerSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a call asks of attention, besides its tensors.

    `window` is (left, right) with -1 for no limit. `single` says that each request has one query, which is its last
    token and sees no later key.
    """

    function: str
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float | None
    slopes: torch.Tensor | None
    with_lse: bool
    single: bool = False

    @property
    def by_position(self) -> bool:
        """Whether the positions of queries and keys change the result."""
        return self.causal or self.window != (-1, -1) or self.slopes is not None

    def spec(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_size: int | None) -> LayerSpec:
        """The layer for `q [..., H, D]`, `k [..., Hkv, D]` and `v [..., Hkv, Dv]`; without a block size K and V are given.

        Raises:
            SpecError: an impossible number, such as a scale below 0 or heads that are no multiple of KV heads.
        """
        kind, causal, window = AttentionType.DECODER, self.causal or self.single, self.window
        if causal:
            window = (window[0], -1)
        elif not self.by_position and block_size is None:
            kind = AttentionType.ENCODER_DECODER
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


def read_request(
    function: str,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    with_lse: bool,
    heads: int,
) -> Request:
    """The shared arguments of a call.

    Raises:
        BatchError: dropout, slopes for each request, or a value of another type.
    """
    if dropout_p:
        limit = f"cannot be served by {function}: attnplug computes inference only"
        raise BatchError("dropout_p", dropout_p, limit, "pass 0.0")
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise BatchError("window_size", window_size, "must be (left, right), two integers; -1 is no limit")
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise BatchError("softcap", softcap, "must be a number; 0.0 is no cap")
    if alibi_slopes is not None:
        check_tensors(function, None, alibi_slopes=alibi_slopes)
        if alibi_slopes.shape != (heads,) or alibi_slopes.dtype != torch.float32:
            found = f"{alibi_slopes.dtype} {tuple(alibi_slopes.shape)}"
            limit = f"must be torch.float32 ({heads},): slopes that differ by request are not served"
            raise BatchError("alibi_slopes", found, limit)
    left, right = (-1 if side < 0 else side for side in sides)
    return Request(
        function=function,
        scale=None if softmax_scale is None else float(softmax_scale),
        causal=bool(causal),
        window=(left, -1 if causal else right),
        softcap=float(softcap) or None,
        slopes=alibi_slopes,
        with_lse=bool(with_lse),
    )


def check_tensors(function: str, dims: int | None, **tensors: torch.Tensor) -> None:
    """Refuse other numbers of dimensions, if that is given, mixed dtypes or devices, and gradients.

    Raises:
        BatchError: it names the arguments.
    """
    names = ", ".join(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(name, type(tensor).__name__, f"must be a tensor in {function}")
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
    """Refuse arguments that are not None.

    Raises:
        BatchError: it names the first such argument.
    """
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
