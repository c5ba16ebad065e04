"""The layers of a hybrid model that keep a state, on attnplug's runtime: transformers' functions, and pages of states."""

from __future__ import annotations

import functools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from attnplug.core import LayerSpec, LayerTensors
from attnplug.runtime import AttentionRuntime, StateStep, StepBatch

KEPT = 64
"""States that are kept for other requests with the same prefix, beside those of requests."""


def unit(rows: torch.Tensor) -> torch.Tensor:
    """The L2 norm of delta layers, whose epsilon is added to the squared sum."""
    return rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def convolution(module: Any, inputs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of `causal_conv1d_fn`: `[1, C, T]`."""
    return module.paged_conv(inputs[0].T).T[None]


def delta_rule(
    module: Any, query: Any, key: Any, value: Any, g: Any, beta: Any, *_: Any, **call: Any
) -> tuple[torch.Tensor, None]:
    """In place of the functions of gated delta nets: `[1, T, H, ...]`, with a copy of each key head per value head."""
    copies = value.shape[2] // module.state_spec.num_kv_heads
    query, key = (each[0, :, ::copies] for each in (query, key))
    if call.get("use_qk_l2norm_in_kernel"):
        query, key = unit(query.float()).to(query), unit(key.float()).to(key)
    dtype = query.dtype
    out = module.paged_state(query, key, value[0].to(dtype), decay=g[0].float(), beta=beta[0].to(dtype))
    return out[None], None


def chunk_scan(module: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, *_: Any, **call: Any) -> torch.Tensor:  # noqa: N803
    """In place of `mamba2_chunk_scan`: x `[1, T, H, P]`, B and C `[1, T, G, N]`."""
    dt = softplus(dt + call["dt_bias"]).clamp(*call["dt_limit"])[0].float()
    value = (x[0] * dt[..., None]).to(x)
    out = module.paged_state(C[0].to(x), B[0].to(x), value, decay=A.float() * dt)
    return (out + call["D"][:, None] * x[0]).to(x)[None]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": chunk_scan,
}
_running: list[Any] = []


def _replaced(original: Any, ours: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(_running[-1], *args, **kwargs) if _running else original(*args, **kwargs)

    call.original = original  # type: ignore[attr-defined]
    return call


def page_states(model: PreTrainedModel, runtime: AttentionRuntime) -> None:
    """Let the modules of layers with a state call the runtime in place of transformers' functions."""
    for name, layer in runtime.state_layers.items():
        is_conv = layer.spec.kinds == ("conv",)
        module = model.get_submodule(name.rpartition(".")[0] if is_conv else name)
        forward = functools.partial(runtime.forward, name)
        module.paged_conv = forward if is_conv else getattr(module, "paged_conv", None)
        if not is_conv:
            module.paged_state, module.state_spec = forward, layer.spec
        # A module has one forward for both of its layers.
        if not hasattr(module, "paged_hooks"):
            before = module.register_forward_pre_hook(lambda own, _: _running.append(own))
            after = module.register_forward_hook(lambda *_: _running.pop() and None, always_call=True)
            module.paged_hooks = before, after
        names = vars(sys.modules[type(module).__module__])
        for function, ours in FUNCTIONS.items():
            if function in names and not hasattr(names[function], "original"):
                names[function] = _replaced(names[function], ours)


def weights_of(model: PreTrainedModel, layers: Mapping[str, LayerSpec]) -> dict[str, LayerTensors]:
    """The weights of the convolutions."""
    found = {}
    for name, spec in layers.items():
        if spec.kinds == ("conv",):
            module: Any = model.get_submodule(name)
            bias = None if module.bias is None else module.bias.data
            found[name] = LayerTensors(conv_weight=module.weight.data[:, 0], conv_bias=bias)
    return found


def number_of_states(max_num_seqs: int, drafts: int) -> int:
    """Pages for a step: of each request the page that it starts from, one per draft, two more, and those kept."""
    return max_num_seqs * (3 + drafts) + KEPT + 1


class StatePages:
    """The states of requests, and those kept at borders of pages of tokens, found by the keys of these."""

    def __init__(self, runtime: AttentionRuntime, size: int) -> None:
        """`size` is the number of tokens of a page."""
        # Two pages, because a step whose model raises is run again.
        self.table, self.pool = runtime.state_table(in_place=False), runtime.state_pool
        self.size, self.found = size, 0
        self._kept: OrderedDict[bytes, int] = OrderedDict()

    def longest(self, keys: Sequence[bytes]) -> int:
        """The most of these leading pages after which a state is kept."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._kept), 0)

    def add(self, name: str, keys: Sequence[bytes]) -> None:
        """Start a request from the state after these pages, or from zeros without any."""
        page = self._kept[keys[-1]] if keys else None
        self.table.add_request(name, len(keys) * self.size, page)
        self.found += bool(keys)

    def remove(self, name: str) -> None:
        """Give the states of a request back."""
        self.table.remove_request(name)

    def step(
        self, batch: StepBatch, drafts: Mapping[str, int], ends: Mapping[str, tuple[int, int]]
    ) -> StateStep:
        """The states of a step; `ends` has the tokens of each request before and after it."""
        borders = {name: end // self.size * self.size for name, (_, end) in ends.items()}
        keep = {name: [at] * (at > ends[name][0]) for name, at in borders.items()}
        while self._kept and self.pool.num_free < sum(3 + drafts.get(name, 0) for name in batch.req_ids):
            self.pool.free([self._kept.popitem(last=False)[1]])
        return self.table.step(batch, drafts, {**dict.fromkeys(batch.req_ids, ()), **keep})

    def finish(self, accepted: Mapping[str, int]) -> None:
        """Count the accepted tokens of each request."""
        self.table.finish_step(accepted)

    def store(self, name: str, keys: Sequence[bytes]) -> None:
        """Let the states at the borders of a request be found, by the keys of its pages."""
        for tokens, page in self.table.checkpoints(name).items():
            key = keys[tokens // self.size - 1]
            if key not in self._kept:
                self._kept[key] = page
                self.pool.share([page])
        self.table.release_checkpoints(name)


def page_size(layers: Mapping[str, LayerSpec], plan: Callable[..., Any]) -> int:
    """The tokens of a page of the attention layers, which states are kept at the borders of."""
    attention = {name: spec for name, spec in layers.items() if spec.state is None}
    return math.lcm(*plan(attention).tokens_per_block)
