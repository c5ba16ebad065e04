"""Runs a state layer on TRITON: one launch for all tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from attnplug.backends.triton.kernels.state.convolution import convolution_kernel
from attnplug.backends.triton.kernels.state.recurrence import recurrence_kernel
from attnplug.backends.triton.state.builder import TritonStateMetadata
from attnplug.core.errors import BatchError, LayoutError, SpecError
from attnplug.core.spec import LayerSpec
from attnplug.core.state.impl import StateImpl
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

TILES = {True: (4096, 4), False: (2048, 1)}
"""Elements of a state that a program has in registers, and its warps: for single tokens, and for more, which need no barriers
between tokens in one warp."""
_LEAST_COLUMNS = 16
"""Columns of the narrowest tile: with fewer, the rows of a float32 state that a program reads have less than 64 bytes."""
_INTERPRETED_TILE = 16384
"""The same where programs are interpreted, and take as long with few elements as with many."""
_CHANNELS, _TOKENS = 256, 16
"""Channels of a program of a convolution, and tokens of one that runs prompts, whose channels are fewer."""
_MOST_FORMS = 8
"""Kinds of calls that a layer keeps bound: with other strides, and for single tokens or more."""
_FAR = 1 << 31


class _Launch(NamedTuple):
    """A kernel with its arguments bound, and the number of its programs for each request."""

    kernel: BoundKernel
    parts: int


class TritonStateImpl(StateImpl[TritonStateMetadata]):
    """A recurrence or a convolution in one kernel, computed in float32."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bound: dict[object, _Launch] = {}

    def advance(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        states: torch.Tensor,
        attn_metadata: TritonStateMetadata,
        output: torch.Tensor,
        *,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> None:
        """As StateImpl.advance. A page is read before it is written only by the request that does both."""
        meta, tensors = attn_metadata, self.tensors
        given: tuple[torch.Tensor, ...]
        bind: Callable[..., _Launch]
        if key is None:
            weight = tensors.conv_weight
            if weight is None:
                raise BatchError("conv_weight", None, f"of layer {self.layer_name} is required")
            bias = query if tensors.conv_bias is None else tensors.conv_bias
            given, bind = (query, weight, bias, states, output), _convolution
        elif value is None or decay is None:
            raise BatchError("value", None, f"of layer {self.layer_name} is required, like decay")
        else:
            given = query, key, value, decay, query if beta is None else beta, states, output
            bind = _recurrence
        # Bound arguments are those of tensors with these strides and dtypes.
        form = meta.is_single, tuple((each.stride(), each.dtype) for each in given)
        bound = self._bound.get(form)
        if bound is None:
            if len(self._bound) >= _MOST_FORMS:
                self._bound.clear()
            has_bias = tensors.conv_bias is not None
            bound = self._bound[form] = bind(self.spec, given, has_bias, meta.is_single)
        if meta.num_reqs:
            with on_device_of(query):
                indices = meta.query_start_loc, meta.state_pages, meta.slot_mapping
                bound.kernel((meta.num_reqs * bound.parts,), *given, *indices)


def _recurrence(spec: LayerSpec, given: tuple[torch.Tensor, ...], _: bool, is_single: bool) -> _Launch:
    dims, heads, keys, values = spec.state, spec.num_heads, spec.head_size, spec.head_size_v
    if dims is None:
        raise SpecError("state", None, "is required")
    query, key, value, decay, beta, states, output = given
    check_near(states)
    rows = power_of_two(keys)
    tile, warps = TILES[is_single] if states.is_cuda else (_INTERPRETED_TILE, 1)
    block, own = max(tile // rows, _LEAST_COLUMNS), power_of_two(values)
    # Heads with few columns share a tile.
    packed = own < block and heads > 1
    block = min(block, power_of_two(heads * values) if packed else own)
    parts = -(-heads * values // block) if packed else heads * -(-values // block)
    constants = {
        "scale": float(spec.scale),
        **strides(query, "qt", "qh", "qk"),
        **strides(key, "kt", "kh", "kk"),
        **strides(value, "vt", "vh", "vv"),
        **strides(decay, "gt", "gh", "gk"),
        **strides(beta, "bt", "bh"),
        "stride_page": states.stride(0),
        "PAGE": states.stride()[1:],
        **strides(output, "ot", "oh", "ov"),
        "HEADS": heads,
        "GROUP": heads // spec.num_kv_heads,
        "K": keys,
        "V": values,
        "BLOCK_K": rows,
        "BLOCK": block,
        "PACKED": packed,
        "PARTS": parts,
        "DELTA": dims.rule == "delta",
        "BY_ROW": dims.decay == "row",
        "SINGLE": is_single,
    }
    return _Launch(BoundKernel(recurrence_kernel, 10, constants, num_warps=warps), parts)


def _convolution(
    spec: LayerSpec, given: tuple[torch.Tensor, ...], has_bias: bool, is_single: bool
) -> _Launch:
    dims, channels = spec.state, spec.num_heads
    if dims is None or dims.width is None:
        raise SpecError("state", dims, "must be a convolution")
    inputs, weight, bias, states, output = given
    check_near(states)
    tokens = 1 if is_single else max(_TOKENS, power_of_two(dims.width - 1))
    block = min(_CHANNELS if is_single else _CHANNELS // 2, power_of_two(channels))
    pages = dict(strides(states, "page", "sc", "sw"))
    if states[0].is_contiguous():
        # A page is the backend's own: with channels side by side, threads read adjacent elements.
        pages |= {"stride_sc": 1, "stride_sw": channels}
    constants = {
        "channels": channels,
        **strides(inputs, "it", "ic"),
        **strides(weight, "wc", "ww"),
        "stride_bias": bias.stride(0),
        **pages,
        **strides(output, "ot", "oc"),
        "WIDTH": dims.width,
        "BLOCK_T": tokens,
        "BLOCK_C": block,
        "BIAS": has_bias,
        "SILU": dims.activation == "silu",
    }
    parts = -(-channels // block)
    return _Launch(BoundKernel(convolution_kernel, 8, constants, num_warps=1 if is_single else 4), parts)


def strides(tensor: torch.Tensor, *names: str) -> Mapping[str, int]:
    """The strides of a tensor's leading dimensions by the names of the kernel's arguments; 0 for those it lacks."""
    found = dict.fromkeys((f"stride_{name}" for name in names), 0)
    return found | dict(zip(found, tensor.stride(), strict=False))


def check_near(states: torch.Tensor) -> None:
    """LayoutError unless 32 bits count the elements within a head of a page; those of a pool may be more."""
    reach = sum((size - 1) * step for size, step in zip(states.shape[-2:], states.stride()[-2:], strict=True))
    if reach >= _FAR:
        limit = f"must have a head within {_FAR:,} elements, and spans {reach:,}"
        raise LayoutError("states.stride()", states.stride(), limit, "give pages of their own")
