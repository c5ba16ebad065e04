"""The state layers that a backend is checked with, and inputs that show a wrong state."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch

from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors
from attnplug.core.spec import LayerSpec
from attnplug.core.state.dims import DECAYS, StateDims
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.target import Target
from attnplug.testing.state_oracle import StateInputs

_HEADS = ((4, 2), (3, 3), (6, 2), (4, 1))
"""Value heads and key heads."""
_CHANNELS = (24, 64, 37, 2050)
_CONVOLUTIONS = ((4, "silu"), (3, None), (2, "silu"))
BLOCK_SIZE = 16
"""The distance of checkpoints, if the backend keeps them at such a distance."""


def state_layers(target: Target) -> dict[str, LayerSpec]:
    """Layers of each rule that the backend declares and serves, by words for ids: all dtypes, and several sizes."""
    found: dict[str, LayerSpec] = {}
    for rule in target.backend.supported_state_rules:
        served = list(_served(target, rule))
        # The plainest layer has all dtypes; others show sizes, in the first dtype alone.
        chosen = served if target.level is Level.FULL else _few(served)
        found.update({_words(spec): spec for spec in chosen})
    return found


def _few(specs: list[LayerSpec]) -> list[LayerSpec]:
    """All sizes of each kind of decay or width in the first dtypes, and one layer of each other pair of dtypes."""
    pairs: dict[Any, dict[Any, list[LayerSpec]]] = {}
    for spec in specs:
        kinds = pairs.setdefault((spec.dtype, spec.kv_cache_dtype), {})
        kinds.setdefault(spec.state, []).append(spec)
    found = []
    for number, kinds in enumerate(pairs.values()):
        own = list(kinds.values())
        # The kinds take turns, so each is tried in several dtypes.
        found += own[number % len(own)][:1] if number else [spec for alike in own for spec in alike]
    return found


def _served(target: Target, rule: str) -> Iterator[LayerSpec]:
    drafts = 3 if Feature.STATE_DRAFTS in target.backend.features else 0
    keeps = Feature.STATE_CHECKPOINTS in target.backend.features
    dims: list[StateDims] = []
    if rule == "conv":
        dims = [StateDims(rule="conv", width=w, activation=a, drafts=drafts) for w, a in _CONVOLUTIONS]
    else:
        dims = [StateDims(rule=rule, decay=decay, drafts=drafts) for decay in DECAYS]
    stored = [name for name in target.kv_cache_dtypes if name in ("auto", "float32", "bfloat16", "float16")]
    for dtype, state_dtype, each, sizes in itertools.product(
        target.dtypes, stored, dims, _sizes(target, rule)
    ):
        fields: dict[str, Any] = {**sizes, "dtype": dtype, "kv_cache_dtype": state_dtype, "state": each}
        for block_size in (BLOCK_SIZE, 64, 128, 256) if keeps else (None,):
            with contextlib.suppress(SpecError):
                spec = LayerSpec(**fields, block_size=block_size)
                if not target.reasons(spec):
                    yield spec
                    break


def _sizes(target: Target, rule: str) -> Iterator[dict[str, Any]]:
    if rule == "conv":
        yield from ({"num_heads": size, "num_kv_heads": size, "head_size": 1} for size in _CHANNELS)
        return
    keys = [size for size in target.head_sizes if size <= 256][:3] or [64]
    # Mamba has values of one element.
    values = dict.fromkeys([None, *keys[1:], 24, 1])
    for (heads, key_heads), value, scale in zip(
        itertools.cycle(_HEADS), values, itertools.cycle((None, 1.0, 0.37)), strict=False
    ):
        sizes = {"num_heads": heads, "num_kv_heads": key_heads, "head_size": keys[0]}
        yield {**sizes, "head_size_v": value, "scale": scale}
    yield {"num_heads": 4, "num_kv_heads": 2, "head_size": keys[-1], "head_size_v": keys[0], "scale": 1.0}
    # Falcon-H1 has keys of 256 elements that many heads share; others have more heads, or larger values.
    most = max((size for size in target.head_sizes if size <= 256), default=256)
    yield {"num_heads": 16, "num_kv_heads": 1, "head_size": most, "head_size_v": keys[0], "scale": 1.0}
    yield {"num_heads": 40, "num_kv_heads": 40, "head_size": keys[0], "head_size_v": 16, "scale": 1.0}
    yield {"num_heads": 2, "num_kv_heads": 2, "head_size": keys[0], "head_size_v": 192, "scale": 1.0}


def _words(spec: LayerSpec) -> str:
    dims = spec.state
    kind = ""
    if dims is not None:
        kind = dims.rule if dims.decay is None else f"{dims.rule}-{dims.decay}"
        kind += f"{dims.width}" if dims.width else ""
    sizes = f"h{spec.num_heads}x{spec.num_kv_heads}-d{spec.head_size}x{spec.head_size_v}"
    stored = "" if spec.kv_cache_dtype == "auto" else f"-{spec.kv_cache_dtype}"
    scale = f"-s{spec.scale:.2g}" if "scale" not in spec.derived else ""
    return f"{kind}-{spec.dtype}{stored}-{sizes}{scale}"


def state_weights(spec: LayerSpec, device: str) -> LayerTensors:
    """The weights of a convolution; those of a width of 3 have no bias. Other layers have none."""
    dims = spec.state
    if dims is None or dims.width is None:
        return LayerTensors()
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(torch, spec.dtype)
    weight = torch.randn(spec.num_heads, dims.width, generator=generator).to(device, dtype)
    bias = torch.randn(spec.num_heads, generator=generator).to(device, dtype)
    return LayerTensors(conv_weight=weight, conv_bias=None if dims.width == 3 else bias)


Decays: TypeAlias = Literal["weak", "strong", "resets"]
"""How much of a state its tokens keep."""


def draw_inputs(spec: LayerSpec, tokens: int, seed: int, *, decays: Decays = "weak") -> StateInputs:
    """Inputs of a layer on the host, in its dtype.

    Decays are near 1: half of a state is left after about 200 tokens, so a wrong state shows in all later outputs. Values
    have a mean, so a state grows to many times what a token adds. With "strong" each token leaves less than 1e-20 of it,
    where quotients of exponentials overflow. With "resets" each seventh token leaves nothing of it, and the others nearly
    all, which differences of sums lose.
    """
    dims, generator = spec.state, torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = state_weights(spec, "cpu")
    if dims is None or dims.rule == "conv":
        weights = {"weight": tensors.conv_weight, "bias": tensors.conv_bias}
        return StateInputs(normal(tokens, spec.num_heads).to(dtype), **weights)
    heads, keys, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    rows = (size,) if dims.decay == "row" else ()
    # Each head, and each row of a state, has a half life of its own.
    places = torch.linspace(0.5, 1.5, heads * max(size if rows else 1, 1)).view(heads, *rows)
    decay = (
        -(55.0 if decays == "strong" else 0.0035)
        * places
        * (0.5 + torch.rand(tokens, heads, *rows, generator=generator))
    )
    if decays == "resets":
        decay[4::7] = -1e4 * places
    query, key = normal(tokens, keys, size), normal(tokens, keys, size) + 0.3
    value = 0.5 * normal(tokens, heads, spec.head_size_v) + 1.0
    beta = None
    if dims.rule == "delta":
        query, key = (each / each.norm(dim=-1, keepdim=True) for each in (query, key))
        # Up to 2, which some models have: a state may then change its sign.
        beta = (0.5 + 1.4 * torch.rand(tokens, heads, generator=generator)).to(dtype)
    return StateInputs(query.to(dtype), key.to(dtype), value.to(dtype), decay, beta)
