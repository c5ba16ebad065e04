"""A layer of SGLang on a backend of attnplug: its decision, its impl and its pages."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.core.errors import LayoutError
from attnplug.core.impl import LayerTensors
from attnplug.core.interface.impl_and_builder import make_impl
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.binding import EngineLayer
from attnplug.integrations.engine_layers import by_phase
from attnplug.integrations.sglang.caches import OTHER, LayerPool, logical, pool_of
from attnplug.integrations.sglang.layers import Facts, look, scales_of, spec_of
from attnplug.integrations.sglang.steps import CROSS, DIRECT, FULL, WINDOW
from attnplug.registry.default import select
from attnplug.registry.selection.decision import Decision


class Choice:
    """How SGLang's option chooses.

    Args:
        backend: attnplug's name of the one backend, or None to select for each layer and phase.
        has_drafts: whether requests verify drafts; one backend then serves both phases.
    """

    def __init__(self, backend: str | None, *, has_drafts: bool) -> None:
        self.backend, self.has_drafts = backend, has_drafts

    def decide(self, spec: LayerSpec, name: str) -> Decision:
        """The backend for a layer.

        NoBackendError, BackendUnavailableError: with each candidate's reasons.
        """
        if self.backend is None and not self.has_drafts:
            return by_phase(spec, name, name)
        return select(spec, None, None, layer_name=name, backend=self.backend)


class Bound:
    """One layer, bound to the impl of the backend that was decided for it.

    Args:
        layer: a RadixAttention.
        name: its path in the model.
        sinks: of its call, `[num_heads]` in any float dtype, or None.
        pool: SGLang's KV pool.
        facts: of its runner.
        choice: how to decide.
        device: of the runner.

    Raises:
        SpecError: the layer asks for what is not served in SGLang.
        NoBackendError, BackendUnavailableError: no backend serves it.
        LayoutError: the backend does not read the pool's layout.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        sinks: torch.Tensor | None,
        *,
        pool: Any,
        facts: Facts,
        choice: Choice,
        device: torch.device,
    ) -> None:
        self.layer, self.name, self.pool = layer, name, pool
        self.seen = look(layer)
        """The values that it was bound with."""
        self.decision, of_layer = decide(layer, name, pool, facts, choice, has_sinks=sinks is not None)
        self.spec = spec = self.decision.spec
        self.place = _place(spec, of_layer)
        backend = self.decision.get_backend_cls()
        self.kind = backend, spec, self.decision.options, self.place
        """Layers of one kind share a builder and its metadata."""
        self._sinks = self._own(sinks, device)
        k_scale, v_scale = scales_of(layer, spec)
        tensors = LayerTensors(sinks=self._sinks, k_scale=k_scale, v_scale=v_scale)
        self.impl = make_impl(
            backend, spec, layer_name=name, tensors=tensors, options=self.decision.get_options()
        )
        self.impl.process_weights_after_loading(getattr(torch, spec.dtype))
        self.engine_layer = EngineLayer(self.impl, device)
        """The layer as builders see it; they read no scales."""
        self._pages: tuple[tuple[int, int], torch.Tensor] | None = None

    def _own(self, sinks: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        if sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()):
            return None if sinks is None else sinks.detach().view(-1)
        with torch.inference_mode(False):  # else no call outside of inference mode could write to them
            own = torch.empty(sinks.numel(), dtype=torch.float32, device=device)
        return own.copy_(sinks.detach().reshape(-1))

    def read_sinks(self, sinks: torch.Tensor | None) -> None:
        """Take the sinks of a call, which an update of weights may have written."""
        own = self._sinks
        # In a graph this copy is recorded, so replays read the newest weights too.
        if own is not None and sinks is not None and own.data_ptr() != sinks.data_ptr():
            own.copy_(sinks.detach().reshape(-1))

    def pages(self) -> torch.Tensor | None:
        """The layer's cache in attnplug's logical order; None if its keys come with the call."""
        if self.place == DIRECT:
            return None
        # SGLang's pool waits here for a layer whose pages it loads from the host.
        key, value = self.pool.get_kv_buffer(self.layer.layer_id)
        where = key.data_ptr(), value.data_ptr()
        if self._pages is None or self._pages[0] != where:
            self._pages = where, logical(key, value, self.spec.block_size or 1)
        return self._pages[1]


def decide(
    layer: Any, name: str, pool: Any, facts: Facts, choice: Choice, *, has_sinks: bool
) -> tuple[Decision, LayerPool]:
    """The decision for a layer, and the pool with its pages; errors as `Bound`."""
    of_layer = pool_of(pool, layer.layer_id)
    stored = of_layer.kv_cache_dtype(facts.dtype)
    decision = choice.decide(spec_of(layer, facts, kv_cache_dtype=stored, has_sinks=has_sinks), name)
    if not decision.spec.direct_kv:
        layouts = list(decision.get_backend_cls().supported_kv_cache_layouts())
        if of_layer.layout not in layouts:
            limit = f"is not read by {decision.backend}, which reads {', '.join(layouts)}"
            raise LayoutError("kv_cache_layout", of_layer.layout, limit, OTHER)
    return decision, of_layer


def _place(spec: LayerSpec, of_layer: LayerPool) -> str:
    if spec.direct_kv:
        return DIRECT
    if spec.attn_type is AttentionType.ENCODER_DECODER:
        return CROSS
    return WINDOW if of_layer.windowed else FULL
