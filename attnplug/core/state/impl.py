"""The contract of an impl of a state layer: it reads the state of each request, advances it, and stores it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import torch

from attnplug.core.errors import BatchError, SpecError
from attnplug.core.impl import AttentionImpl, AttentionLayer
from attnplug.core.metadata import AttentionMetadata

_M = TypeVar("_M", bound=AttentionMetadata)


class StateImpl(AttentionImpl[_M], Generic[_M]):
    """Runs a state layer; a backend writes `advance` alone.

    The builder's metadata say where each request starts and which page gets the state after each token: see
    `attnplug.core.state.runs`.
    """

    @abstractmethod
    def advance(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        states: torch.Tensor,
        attn_metadata: _M,
        output: torch.Tensor,
        *,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Advance the states by the tokens of the step, and write the output of each token, which sees itself.

        Args:
            query: `[T, Hk, K]`; of a convolution the one input, `[T, C]`. Rows past the step's tokens are not read.
            key: `[T, Hk, K]`; None for a convolution.
            value: `[T, Hv, V]`; None for a convolution. Value head h has the key head `h // (Hv // Hk)`.
            states: `[num_states, *StateCacheSpec.shape]`. The content of a page is the backend's own. Page 0 is
                scratch: no request has it.
            attn_metadata: the step's metadata from this backend's builder.
            output: `[T, Hv, V]`, or `[T, C]`; rows past the step's tokens are not written.
            decay: g in natural log, at most 0: float32 `[T, Hv]`, or `[T, Hv, K]` with a decay per row.
            beta: `[T, Hv]`, for rule "delta".

        Returns:
            None; or, in place of `output`, a tensor of the kernel's own with the output of the step's tokens. It is copied
            if the caller gave an output, and handed on if not.
        """

    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Nothing: a state layer has no keys and values to write, and `attend` stores its states."""

    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: _M,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`advance`, once the arguments were checked: see there. A state layer has no LSE and no quantised outputs.

        Raises:
            BatchError: an argument that the layer's rule needs is missing, or one that it does not have is given.
        """
        made = self._advanced(
            *(query, key, value, kv_cache, attn_metadata, output, decay, beta),
            output_lse=output_lse,
            output_scale=output_scale,
            output_block_scale=output_block_scale,
        )
        if made is not output:
            output[: made.shape[0]] = made
        return output

    def forward(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: _M,
        output: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attend`, into a new output if none is given; then a tensor of the kernel's own is not copied."""
        into = torch.empty_like(query if value is None else value) if output is None else output
        others: dict[str, Any] = {
            "output_lse": output_lse,
            "output_scale": output_scale,
            "output_block_scale": output_block_scale,
        }
        # An impl may have an `attend` of its own, whose result is in the output that it gets.
        if output is not None or type(self).attend is not StateImpl.attend:
            call = layer, query, key, value, kv_cache, attn_metadata, into
            return self.attend(*call, **others, decay=decay, beta=beta)
        made = self._advanced(query, key, value, kv_cache, attn_metadata, into, decay, beta, **others)
        if (made.shape, made.dtype) == (into.shape, into.dtype):
            return made
        into[: made.shape[0]] = made
        return into

    def _advanced(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: _M,
        output: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
        **others: object,
    ) -> torch.Tensor:
        """Where the output is, once the call has the arguments of the layer's rule alone: `output`, or the kernel's own."""
        refuse_of_attention(self.layer_name, **others)
        if kv_cache is None:
            raise BatchError("kv_cache", None, "is required: the pages of states")
        self._check_rule({"key": key, "value": value, "decay": decay, "beta": beta})
        made = self.advance(query, key, value, kv_cache, attn_metadata, output, decay=decay, beta=beta)
        return output if made is None else made

    def _check_rule(self, given: dict[str, torch.Tensor | None]) -> None:
        dims = self.spec.state
        if dims is None:
            raise SpecError("state", None, f"is required: {type(self).__name__} runs state layers alone")
        needed = {"linear": ("key", "value", "decay"), "delta": tuple(given), "conv": ()}[dims.rule]
        for name, tensor in given.items():
            if (tensor is None) is (name in needed):
                limit = "is required" if tensor is None else "must be None"
                raise BatchError(
                    name, None if tensor is None else tuple(tensor.shape), f"{limit} with rule {dims.rule}"
                )


def refuse_of_attention(layer_name: str, **given: object) -> None:
    """BatchError if an argument of attention alone is given in the call of a layer that keeps a state."""
    for name, value in given.items():
        if value is not None:
            raise BatchError(name, "given", f"must be None: layer {layer_name} keeps a state")
