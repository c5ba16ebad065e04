"""Runs a state layer on TORCH."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnplug.backends.torch_native.state.builder import TorchStateMetadata
from attnplug.backends.torch_native.state.convolution import convolve
from attnplug.backends.torch_native.state.recurrence import many_tokens, one_token
from attnplug.core.errors import BatchError
from attnplug.core.precision import without_autocast
from attnplug.core.state.impl import StateImpl
from attnplug.core.state.runs import StateRun


class _Inputs(NamedTuple):
    """The rows of a call that some tokens have, in the dtype of the computation."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    decay: torch.Tensor | None
    beta: torch.Tensor | None

    def rows(self, where: slice | torch.Tensor, dtype: torch.dtype) -> _Inputs:
        rest = (None if each is None else each[where].to(dtype) for each in self[1:])
        return _Inputs(self.query[where].to(dtype), *rest)


class TorchStateImpl(StateImpl[TorchStateMetadata]):
    """A recurrence or a convolution in plain PyTorch, computed in float32, or in float64 for float64 inputs."""

    @torch.no_grad()
    def advance(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        states: torch.Tensor,
        attn_metadata: TorchStateMetadata,
        output: torch.Tensor,
        *,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> None:
        """As StateImpl.advance. All states that the step starts from are read before one is stored."""
        given = _Inputs(query, key, value, decay, beta)
        dtype = torch.promote_types(query.dtype, torch.float32)
        singles, longer = attn_metadata.singles, attn_metadata.longer
        with without_autocast(query.device):
            first = _read(states, [*singles, *longer], dtype)
            if singles:
                self._run_singles(given, singles, first[: len(singles)], states, output)
            for run, state in zip(longer, first[len(singles) :], strict=True):
                self._run_longer(given, run, state, states, output)

    def _run_singles(
        self,
        given: _Inputs,
        runs: list[StateRun],
        first: torch.Tensor,
        states: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        rows = torch.tensor([run.begin for run in runs], device=states.device)
        parts = given.rows(rows, first.dtype)
        if parts.key is None:
            out, last = self._convolve(parts.query[:, None], first)
            out = out[:, 0]
        else:
            out, last = one_token(*self._heads(parts), first)
        output[rows] = out.to(output.dtype)
        stored = [(index, page) for index, run in enumerate(runs) for _, page in run.stores]
        if stored:
            where, pages = (torch.tensor(each, device=states.device) for each in zip(*stored, strict=True))
            states[pages] = last[where].to(states.dtype)

    def _run_longer(
        self, given: _Inputs, run: StateRun, state: torch.Tensor, states: torch.Tensor, output: torch.Tensor
    ) -> None:
        for begin, end, page in run.chunks():
            parts = given.rows(slice(begin, end), state.dtype)
            if parts.key is None:
                out, last = self._convolve(parts.query[None], state[None])
                out, state = out[0], last[0]
            else:
                out, state = many_tokens(*self._heads(parts), state)
            output[begin:end] = out.to(output.dtype)
            if page >= 0:
                states[page] = state.to(states.dtype)

    def _convolve(self, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, dims = self.tensors, self.spec.state
        if tensors.conv_weight is None or dims is None:
            raise BatchError("conv_weight", None, f"of layer {self.layer_name} is required")
        weight = tensors.conv_weight.to(inputs)
        bias = None if tensors.conv_bias is None else tensors.conv_bias.to(inputs)
        return convolve(inputs, weight, bias, state, dims.activation)

    def _heads(
        self, parts: _Inputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The arguments of a recurrence, with a key head for each value head, and the scale in the query."""
        query, key, value, decay, beta = parts
        if key is None or value is None or decay is None:
            raise BatchError("key", None, f"of layer {self.layer_name} is required, like value and decay")
        shared = self.spec.num_heads // self.spec.num_kv_heads
        query, key = (each.repeat_interleave(shared, dim=1) for each in (query * self.spec.scale, key))
        return query, key, value, decay if decay.ndim == 3 else decay[..., None], beta


def _read(states: torch.Tensor, runs: list[StateRun], dtype: torch.dtype) -> torch.Tensor:
    """The states before the runs, in new memory; zeros where a run starts anew, whatever a page has there."""
    pages = torch.tensor([max(run.read, 0) for run in runs], dtype=torch.long, device=states.device)
    found = states[pages].to(dtype)
    fresh = torch.tensor([run.read < 0 for run in runs], dtype=torch.bool, device=states.device)
    found[fresh] = 0.0
    return found
