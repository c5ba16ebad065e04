"""A right backend of state layers, token by token and in small methods, of which mutants replace one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.functional import silu

from attnplug.backends.torch_native.backend import TorchStateBackend
from attnplug.backends.torch_native.state.builder import TorchStateBuilder, TorchStateMetadata
from attnplug.core.state.impl import StateImpl
from attnplug.core.state.runs import StateRun, state_runs


class PlainMetadata(TorchStateMetadata):
    """The runs in order of rows, and the batch."""

    runs: list[StateRun]
    common: Any


class PlainBuilder(TorchStateBuilder):
    """Keeps the runs of a step."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PlainMetadata:
        made = PlainMetadata(slot_mapping=common_attn_metadata.slot_mapping, singles=[], longer=[])
        made.runs, made.common = self.runs(common_attn_metadata), common_attn_metadata
        return made

    def runs(self, common: Any) -> list[StateRun]:
        return state_runs(common)


class PlainImpl(StateImpl[PlainMetadata]):
    """Computes in float32, token by token."""

    @torch.no_grad()
    def advance(
        self,
        query: torch.Tensor,
        key: Any,
        value: Any,
        states: torch.Tensor,
        attn_metadata: PlainMetadata,
        output: torch.Tensor,
        *,
        decay: Any = None,
        beta: Any = None,
    ) -> None:
        self.metadata, self.states, self.output = attn_metadata, states, output
        runs = attn_metadata.runs
        first = [self.first(place, run, runs) for place, run in enumerate(runs)]
        for place, run in enumerate(runs):
            state = first[place]
            for row in range(run.begin, run.end):
                if key is None:
                    out, state = self.convolve(query[row].float(), state, row - run.begin)
                else:
                    q, k = self.shared(query[row].float() * self.scale_of(), key[row].float())
                    b = None if beta is None else self.beta(beta[row].float())
                    out, state = self.token(q, k, value[row].float(), self.gate(decay, row, run), b, state)
                output[row] = out.to(output.dtype)
                page = self.page_of(row, run, place, runs)
                if page >= 0:
                    self.store(page, state)
        self.end(runs)

    def first(self, place: int, run: StateRun, runs: list[StateRun]) -> torch.Tensor:
        """The state that a run starts from, in new memory."""
        if run.read < 0:
            return torch.zeros(self.states.shape[1:], dtype=torch.float32)
        return self.loaded(run.read)

    def loaded(self, page: int) -> torch.Tensor:
        return self.states[page].float().clone()

    def store(self, page: int, state: torch.Tensor) -> None:
        self.states[page] = state.to(self.states.dtype)

    def page_of(self, row: int, run: StateRun, place: int, runs: list[StateRun]) -> int:
        return dict(run.stores).get(row + 1, -1)

    def scale_of(self) -> float:
        return self.spec.scale

    def shared(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        times = self.spec.num_heads // self.spec.num_kv_heads
        return q.repeat_interleave(times, 0), k.repeat_interleave(times, 0)

    def gate(self, decay: torch.Tensor, row: int, run: StateRun) -> torch.Tensor:
        """g, `[H, 1]` or `[H, K]`."""
        return decay[row] if decay.ndim == 3 else decay[row][:, None]

    def beta(self, b: torch.Tensor) -> torch.Tensor:
        return b

    def token(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: Any, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.decayed(state, g)
        state = state + k[:, :, None] * self.update(k, v, b, state)[:, None]
        return self.answer(q, state), state

    def decayed(self, state: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return state * g.exp()[..., None]

    def update(self, k: torch.Tensor, v: torch.Tensor, b: Any, state: torch.Tensor) -> torch.Tensor:
        return v if b is None else b[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))

    def answer(self, q: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hk,hkv->hv", q, state)

    def convolve(self, x: torch.Tensor, state: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat([state, x[:, None]], 1)
        return self.activated((window * self.weight()).sum(1) + self.bias()), window[:, 1:]

    def weight(self) -> torch.Tensor:
        assert self.tensors.conv_weight is not None
        return self.tensors.conv_weight.float()

    def bias(self) -> Any:
        return 0.0 if self.tensors.conv_bias is None else self.tensors.conv_bias.float()

    def activated(self, y: torch.Tensor) -> torch.Tensor:
        assert self.spec.state is not None
        return silu(y) if self.spec.state.activation == "silu" else y

    def end(self, runs: list[StateRun]) -> None:
        """After all tokens."""


class PlainStates(TorchStateBackend):
    """The backend of both."""

    impl: ClassVar[type] = PlainImpl
    builder: ClassVar[type] = PlainBuilder

    @staticmethod
    def get_name() -> str:
        return "PLAIN_STATES"

    @classmethod
    def get_supported_head_sizes(cls) -> tuple[int, ...]:
        # Small ones, because mutants run token by token.
        return (16, 8, 24, 1)

    @classmethod
    def get_impl_cls(cls) -> Any:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> Any:
        return cls.builder


def changed(impl: dict[str, Any] | None = None, builder: dict[str, Any] | None = None) -> type[PlainStates]:
    """The backend with other methods of its impl or its builder."""
    parts = {
        "impl": type("Impl", (PlainImpl,), impl or {}),
        "builder": type("Builder", (PlainBuilder,), builder or {}),
    }
    return type("Changed", (PlainStates,), parts)
