"""The layers of a runtime that keep a state: their pages, impls and builders, and the forward of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import instance
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BackendFaultError, BatchError, LayoutError, SpecError
from attnplug.core.impl import AttentionImpl, LayerTensors
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder, make_impl
from attnplug.core.kv_cache_spec import KVCacheSpec
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.precision import without_autocast
from attnplug.core.spec import LayerSpec
from attnplug.core.state.caches import StateCacheSpec
from attnplug.core.state.impl import StateImpl
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.batch.step_batch import check_current
from attnplug.runtime.caches.block_pool import BlockPool
from attnplug.runtime.caches.engine_caches import Allocator
from attnplug.runtime.plan.model_plan import ModelPlan
from attnplug.runtime.plan.state_plan import StatePlan
from attnplug.runtime.states.state_step import StateStep

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

_FORWARDED = ("query", "key", "value", "decay", "beta")


class StateLayer:
    """One layer of a runtime that keeps a state, as its impl and builder see it.

    Args:
        name: its name.
        decision: its backend.
        tensors: the weights of a convolution.
        states: its pages.
    """

    def __init__(self, name: str, decision: Decision, tensors: LayerTensors, states: torch.Tensor) -> None:
        self.name, self.spec, self.states = name, decision.spec, states
        self.backend = str(decision.backend)
        self.backend_cls: type[AttentionBackend] = decision.get_backend_cls()
        # They do not scale states; the protocol of engine layers has them.
        self._q_scale = self._k_scale = self._v_scale = self._prob_scale = torch.ones(
            (), device=states.device
        )
        self._q_scale_float = self._k_scale_float = self._v_scale_float = self._prob_scale_float = 1.0
        moved = {
            field: tensor.to(states.device)
            for field in ("conv_weight", "conv_bias")
            if (tensor := getattr(tensors, field)) is not None
        }
        tensors = dataclasses.replace(tensors, **moved)
        options = decision.get_options()
        made = make_impl(self.backend_cls, self.spec, layer_name=name, tensors=tensors, options=options)
        if not isinstance(made, StateImpl):
            given = f"{type(made).__name__} of {self.backend}"
            raise BackendFaultError(f"{given} cannot run layer {name}: it is no StateImpl")
        self.impl: AttentionImpl[Any] = made
        self._impl: StateImpl[Any] = made
        self.impl.process_weights_after_loading(getattr(torch, self.spec.dtype))
        self._shapes = shapes_of(self.spec)

    def check_call(self, tokens: int, given: Mapping[str, torch.Tensor | None], output: object) -> None:
        """BatchError unless the tensors fit the layer and a step of so many tokens."""
        dtype = getattr(torch, self.spec.dtype)
        for name, shapes in self._shapes.items():
            tensor = output if name == "output" else given[name]
            if tensor is None and name == "output":
                continue
            allowed = (torch.float32, dtype) if name == "beta" else (torch.float32,)
            self._check(name, tensor, tokens, shapes, (dtype,) if name not in ("decay", "beta") else allowed)
        for name in _FORWARDED:
            if given[name] is not None and name not in self._shapes:
                limit = f"of layer {self.name} must be None: its rule is {self.spec.state}"
                raise BatchError(name, "given", limit)

    def _check(
        self,
        name: str,
        tensor: object,
        tokens: int,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        of = f"of layer {self.name} "
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(name, tensor, f"{of}must be a torch.Tensor")
        if tuple(tensor.shape[1:]) not in shapes or tensor.shape[0] < tokens:
            wanted = " or ".join(f"(at least {tokens}, {', '.join(map(str, each))})" for each in shapes)
            raise BatchError(name, tuple(tensor.shape), f"{of}must have the shape {wanted} in this step")
        if tensor.dtype not in dtypes:
            found = " or ".join(map(str, dict.fromkeys(dtypes)))
            raise BatchError(f"{name}.dtype", tensor.dtype, f"{of}must be {found}")
        if tensor.device != self.states.device:
            raise BatchError(f"{name}.device", str(tensor.device), f"{of}must be {self.states.device}")

    def run(
        self, metadata: AttentionMetadata, given: Mapping[str, Any], output: torch.Tensor | None
    ) -> torch.Tensor:
        """Call the impl; without `output` it makes one."""
        call = given["query"], given["key"], given["value"], self.states, metadata, output
        with without_autocast(self.states.device):
            return self._impl.forward(self, *call, decay=given["decay"], beta=given["beta"])


def shapes_of(spec: LayerSpec) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The shapes that the tensors of a call may have after their tokens, by name, for those that the rule has."""
    dims = spec.state
    if dims is None:
        raise SpecError("state", None, "is required")
    if dims.rule == "conv":
        return {"query": ((spec.num_heads,),), "output": ((spec.num_heads,),)}
    keys, values = (spec.num_kv_heads, spec.head_size), (spec.num_heads, spec.head_size_v)
    gate: tuple[int, ...] = (spec.num_heads, spec.head_size) if dims.decay == "row" else (spec.num_heads,)
    shapes: dict[str, tuple[tuple[int, ...], ...]]
    shapes = {"query": (keys,), "key": (keys,), "value": (values,), "output": (values,), "decay": (gate,)}
    return {**shapes, "beta": ((spec.num_heads,),)} if dims.rule == "delta" else shapes


class StateGroup(NamedTuple):
    """Layers with a state that share a builder."""

    backend: type[AttentionBackend]
    builder: AttentionMetadataBuilder[Any]
    layer_names: list[str]


def build_states(
    groups: Iterable[StateGroup], common: CommonAttentionMetadata, *, for_capture: bool = False
) -> dict[str, AttentionMetadata]:
    """The metadata of a step by layer; with `for_capture` for a graph."""
    found: dict[str, AttentionMetadata] = {}
    for backend, builder, names in groups:
        method = "build_for_cudagraph_capture" if for_capture else "build"
        made: AttentionMetadata
        made = builder.build_for_cudagraph_capture(common) if for_capture else builder.build(0, common)
        made = checked_metadata(backend, method, made)
        found.update(dict.fromkeys(names, made))
    return found


class StateLayers(NotCopied):
    """All layers of a plan that keep a state.

    Args:
        plan: the plan.
        states: its pool.
        tensors: the tensors of each layer.
        config: the engine's settings for builders.
        device: of the pages.
        allocator: gives the bytes of each layer's pages; None for an own allocation.
    """

    def __init__(
        self,
        plan: ModelPlan,
        states: StatePlan,
        tensors: Mapping[str, LayerTensors],
        config: BuilderConfig,
        device: torch.device,
        allocator: Allocator | None = None,
    ) -> None:
        self.plan, self.pool = states, BlockPool(states.num_states)
        self.caches = {
            name: _pages(name, cache, states.num_states, device, allocator)
            for name, cache in states.caches.items()
        }
        self.layers = {
            name: StateLayer(name, plan.decisions[name], tensors[name], cache)
            for name, cache in self.caches.items()
        }
        settings = dataclasses.replace(config, layers=self.layers)
        alike: dict[Any, list[str]] = {}
        for name, layer in self.layers.items():
            alike.setdefault((layer.backend_cls, layer.spec), []).append(name)
        self.groups: list[StateGroup] = []
        for (backend, _), names in alike.items():
            # Builders of state layers get the page of a state where others get pages of tokens.
            page = cast(KVCacheSpec, states.caches[names[0]])
            self.groups.append(
                StateGroup(backend, make_builder(backend, page, names, settings, device), names)
            )
        self._step: StateStep | None = None
        self._metadata: Mapping[str, AttentionMetadata] = {}

    def begin(self, step: StateStep, built: Mapping[str, AttentionMetadata] | None = None) -> None:
        """Build the metadata of a step for all layers, or take what was `built`; if a builder raises, no step is active.

        Raises:
            BatchError: a layer has no metadata in `built`.
        """
        self.end()
        if built is not None and (missing := self.layers.keys() - built.keys()):
            raise BatchError("metadata", min(missing), "has none of this layer, which keeps a state")
        metadata = build_states(self.groups, step.common) if built is None else built
        self._metadata, self._step = metadata, step

    def end(self) -> None:
        """End the active step."""
        self._step, self._metadata = None, {}

    def close(self) -> None:
        """Release the pages."""
        self.end()
        self.caches.clear()
        self.layers.clear()
        self.groups.clear()

    def forward(
        self, name: str, given: Mapping[str, torch.Tensor | None], output: torch.Tensor | None, debug: bool
    ) -> torch.Tensor:
        """Run a layer; its states change.

        Raises:
            BatchError: no step is active, or its pages are those of a later step; tensors do not fit; the layer ran in this
                step and overwrote the states that it started from.
            BackendFaultError: in debug mode, if rows of the output are NaN or were not written.
        """
        layer, step = self.layers[name], self._step
        if step is None:
            remedy = "call begin_step with states, from the runtime's state_table()"
            raise BatchError("layer_name", name, "keeps a state and has no step", remedy)
        check_current("states", step.stamps)
        tokens = int(step.common.query_start_loc_cpu[-1])
        layer.check_call(tokens, given, output)
        if step.overwrites and name in step.ran:
            limit = "ran in this step and overwrote the states that it started from: a second run would add the tokens twice"
            raise BatchError(
                "layer_name", name, limit, "make the state_table() with in_place=False to repeat layers"
            )
        if debug:
            _refuse_nan(name, given, tokens)
            if output is None:
                like = given["query"] if given["value"] is None else given["value"]
                output = torch.empty_like(cast(torch.Tensor, like))
            output[:tokens] = torch.nan
        step.ran.add(name)
        made = layer.run(self._metadata[name], given, output)
        if debug and (rows := _nan_rows(made, tokens)):
            raise BackendFaultError(
                f"{layer.backend} left NaN in {len(rows)} of {tokens} rows of layer {name}, "
                f"the first {rows[0]}"
            )
        return made


def _pages(
    name: str, cache: StateCacheSpec, num_states: int, device: torch.device, allocator: Allocator | None
) -> torch.Tensor:
    shape, dtype = (num_states, *cache.shape), getattr(torch, cache.dtype)
    if allocator is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = num_states * cache.page_size_bytes
    raw = instance(f"allocator({size}, {device})", allocator(size, device), torch.Tensor, LayoutError)
    if raw.numel() * raw.element_size() != math.prod(shape) * dtype.itemsize or raw.dtype not in (
        torch.uint8,
        torch.int8,
    ):
        found = f"{raw.dtype} {tuple(raw.shape)}"
        raise LayoutError("allocator", found, f"must give {size} bytes for the states of layer {name}")
    return raw.view(dtype).view(shape)


def _refuse_nan(name: str, given: Mapping[str, torch.Tensor | None], tokens: int) -> None:
    for field, tensor in given.items():
        if tensor is not None and (rows := _nan_rows(tensor, tokens)):
            limit = f"of layer {name} must not be NaN: the value was passed to the call"
            raise BatchError(f"{field}[{rows[0]}]", float("nan"), limit)


def _nan_rows(tensor: torch.Tensor, rows: int) -> list[int]:
    found: list[int] = tensor[:rows].isnan().flatten(1).any(1).nonzero().flatten().tolist()
    return found
