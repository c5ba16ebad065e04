"""A layer of vLLM on a backend of attnplug."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

from attnplug.core.dtypes import is_quantized_kv_cache, output_quant_key
from attnplug.core.errors import BatchError, SpecError
from attnplug.core.impl import AttentionImpl as Inner
from attnplug.core.impl import LayerTensors
from attnplug.core.interface.impl_and_builder import make_impl
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import LayerSpec
from attnplug.integrations.engine_layers import by_phase
from attnplug.integrations.vllm.names import AUTOMATIC
from attnplug.integrations.vllm.rank_layers import RankImpl, make_rank_impl
from attnplug.integrations.vllm.ranks import check_ranks, gathered_spec, new_tokens_of, ranks_of
from attnplug.integrations.vllm.steps import asked_head_scales, asked_invariance, drafts_of
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.registry.default import select
from attnplug.registry.selection.decision import Decision

# Whether backends give the shape of caches (up to vLLM 0.28), or get views [blocks, heads, tokens, 2 * size].
HAS_CACHE_SHAPE = hasattr(AttentionBackend, "get_kv_cache_shape")
KINDS = {"decoder": False, "encoder_decoder": False, "encoder": True, "encoder_only": True}
"""vLLM's kinds of layers, and whether their keys come with the call."""


def logical(kv_cache: torch.Tensor, head_size: int, kv_cache_dtype: str) -> torch.Tensor:
    """`kv_cache` in attnplug's logical order (blocks, 2, tokens, heads, size) and its stored dtype, without a copy."""
    if kv_cache.ndim == 4:
        kv_cache = kv_cache.view(*kv_cache.shape[:-1], 2, head_size).permute(0, 3, 2, 1, 4)
    # vLLM's pages of 16 bits come in their dtype, and "auto" is not a type of its own.
    stored = STORAGE_DTYPES.get(kv_cache_dtype) if is_quantized_kv_cache(kv_cache_dtype) else None
    return kv_cache if stored is None or kv_cache.dtype == stored else kv_cache.view(stored)


def pages_refusal(kv_cache_dtype: str) -> str | None:
    """Why vLLM's pages hold no such values: a format with scales beside its data has bytes of its own; None if they do."""
    if kv_cache_dtype == "auto" or not kv_format(kv_cache_dtype).planes:
        return None
    return "is not served in vLLM, whose pages of that name have other bytes than attnplug's"


def latent_pages_refusal(kv_cache_dtype: str) -> str | None:
    """As `pages_refusal`, of pages of latents."""
    if kv_cache_dtype == "fp8_ds_mla":
        limit = (
            "is not served in vLLM: its tokens have 656 bytes, of which 16 are scales and 128 are not rounded"
        )
        return f"{limit}; use --kv-cache-dtype fp8 or bfloat16"
    return pages_refusal(kv_cache_dtype)


class Layer(AttentionImpl):  # type: ignore[misc]  # vLLM is not there for type checkers
    """What vLLM constructs for each layer; `backend` is attnplug's name for it, or None to select.

    The decision is made when vLLM's KV pages are known; the constructor already refuses a layer that no backend serves.
    """

    backend: str | None = None
    supports_quant_query_input = False
    # Decode context parallelism: vLLM asks by the one name, and later versions by the other.
    can_return_lse_for_decode = supports_dcp = True
    decision: Decision | None = None
    """That of the layer's first step; drafts that are not causal may have another."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        asked = {name: value for name, value in unknown.items() if value is not None and value is not False}
        if asked:
            name, value = next(iter(asked.items()))
            raise SpecError(
                name, value, "is an argument that attnplug does not know, and may change the result"
            )
        if refusal := pages_refusal(kv_cache_dtype):
            raise SpecError("kv_cache_dtype", kv_cache_dtype, refusal)
        kind = str(getattr(attn_type, "value", attn_type))
        self.direct = direct = KINDS.get(kind, False)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.target = kv_sharing_target_layer_name
        self._bounds: dict[tuple[int, torch.device, bool], Bound] = {}
        self._caches: dict[int, _Cache] = {}
        window: dict[str, Any] = {} if sliding_window is None else {"sliding_window": sliding_window}
        if direct and sliding_window is not None:
            # vLLM counts the window of an encoder on both sides.
            window = {"window": (sliding_window - 1, sliding_window - 1)}
        self._asked: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": head_size,
            "kv_cache_dtype": "auto" if direct else kv_cache_dtype,
            "scale": self.scale,
            "logits_soft_cap": logits_soft_cap or None,
            "attn_type": kind,
            "has_sinks": sinks is not None,
            "has_alibi": alibi_slopes is not None,
            "direct_kv": direct,
            "invariance": asked_invariance(),
            **window,
        }
        self._spec: LayerSpec | None = None
        config = get_current_vllm_config()
        self._asked["head_scales"] = not direct and asked_head_scales(config, kv_cache_dtype)
        self._has_drafts = drafts_of(config) > 0
        model = config.model_config
        # vLLM says so of models, whose decoders all get the ranges of a step.
        self.has_spans = kind == "decoder" and bool(getattr(model, "is_mm_prefix_lm", False))
        self._asked["mm_prefix"] = self.has_spans
        # The keys of encoders come with the call, so each rank has all of them.
        self.ranks = None if direct else ranks_of(config)
        if model is not None:
            self.see(model.dtype)
            self.decide(None)

    @property
    def spec(self) -> LayerSpec:
        """What the layer asks for; where vLLM has no model yet, its first call tells the dtype.

        SpecError: before that.
        """
        if self._spec is None:
            raise SpecError("dtype", None, "is not known before the layer's first call")
        return self._spec

    def see(self, dtype: torch.dtype) -> None:
        """Take the dtype of the layer's first call, if vLLM's configuration had none."""
        if self._spec is None:
            self._spec = LayerSpec(**self._asked, dtype=dtype)
            if self.ranks:
                check_ranks(
                    self.ranks, self._spec, shares_kv=self.target is not None, drafts=self._has_drafts
                )

    def decide(self, block_size: int | None, causal: bool = True) -> Decision:
        """The backend for the layer in pages of `block_size` tokens; drafts of a decoder may be not `causal`.

        Where vLLM is left to select, it is one for each phase; with drafts one for both if a member needs exact lengths.
        If ranks share the tokens, it is for the keys of one rank.

        NoBackendError, BackendUnavailableError: with each candidate's reasons.
        """
        spec = self.spec
        if block_size is not None and not spec.direct_kv:
            spec = spec.replace(block_size=block_size)
        if not causal and spec.causal:
            # vLLM's FLASH_ATTN gives such steps the window on both sides.
            left = spec.window[0]
            spec = spec.replace(causal=False, window=(left, left))
        if self.ranks:
            if not causal:
                limit = "is not served under decode context parallelism"
                raise BatchError("causal", False, limit)
            spec = gathered_spec(spec, self.ranks.place.size)
        if self.backend is None:
            # vLLM does not pass the layer's name. Rules by name match only where they are for all layers.
            decision = by_phase(spec, "", "of vLLM")
            # With drafts the host's lengths are upper bounds.
            builder = decision.get_backend_cls().get_builder_cls()
            if not self._has_drafts or builder.needs_host_seq_lens != "exact":
                return decision
        return select(spec, None, None, backend=self.backend)

    def bound(self, block_size: int, device: torch.device, causal: bool = True) -> Bound:
        """The impl of the layer in such pages; learned tensors are read now, after vLLM has loaded them."""
        key = block_size, device, causal
        if key not in self._bounds:
            decision = self.decide(block_size, causal)
            self.decision = self.decision or decision
            tensors = self._tensors(device)
            self._bounds[key] = self._bound(decision, tensors)
        return self._bounds[key]

    def _bound(self, decision: Decision, tensors: LayerTensors) -> Bound:
        name = self.backend or AUTOMATIC
        inner: Any
        if self.ranks:
            new = select(new_tokens_of(self.spec), None, None, backend=self.backend)
            inner = make_rank_impl(self.ranks, self.spec, decision, new, tensors, name)
        else:
            inner = make_impl(
                decision.get_backend_cls(),
                decision.spec,
                layer_name=name,
                tensors=tensors,
                options=decision.get_options(),
                kv_sharing_target_layer_name=self.target,
            )
        inner.process_weights_after_loading(getattr(torch, decision.spec.dtype))
        return Bound(decision, inner, tensors)

    def _tensors(self, device: torch.device) -> LayerTensors:
        sinks, slopes = self.sinks, self.alibi_slopes
        return LayerTensors(
            sinks=None if sinks is None else sinks.detach().to(device, torch.float32),
            alibi_slopes=None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device),
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether the layer's backend writes outputs of 8-bit floats with one fixed scale, which alone are asked of it."""
        scale = quant_key.scale
        fixed = scale.static and scale.group_shape.is_per_tensor()
        if self._spec is None or not fixed or quant_key.scale2 is not None or not quant_key.symmetric:
            return False
        if self.ranks:
            # Parts of several ranks are merged before they could be rounded.
            return False
        decision = self.decide(None)
        asked = make_impl(
            decision.get_backend_cls(),
            decision.spec,
            layer_name=self.backend or AUTOMATIC,
            tensors=self._tensors(torch.device("cpu")),
            options=decision.get_options(),
        )
        return bool(asked.fused_output_quant_supported(output_quant_key(quant_key.dtype)))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take learned tensors that vLLM has loaded again; graphs read the same memory."""
        for (_, device, _), bound in self._bounds.items():
            used, given = bound.tensors.sinks, self._tensors(device).sinks
            if used is not None and given is not None:
                used.copy_(given)
                bound.inner.process_weights_after_loading(act_dtype)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values `[T, Hkv, D]` to their slots."""
        cache = self._cache(kv_cache)
        if cache.writer is None:
            self.see(key.dtype)
            cache.writer = self.bound(cache.view.shape[2], cache.view.device).inner
        cache.writer.update_kv_cache(layer, key, value, cache.view, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend `query [T, H, D]` and write `output`, of that shape; with a scale of 8-bit floats."""
        if output_block_scale is not None:
            raise BatchError("output_block_scale", "a tensor", "was not offered: only one scale is served")
        if attn_metadata is None:
            if self.ranks:
                self.ranks.reserve_for(query, self.head_size)
            return output.fill_(0)  # vLLM measures memory
        if self._spec is None:
            self.see(query.dtype)
        metadata, bound = attn_metadata.of(self)
        rows = output if output.ndim == 3 else output.view(-1, self.num_heads, self.head_size)
        scaled: dict[str, Any] = {}
        if output_scale is not None:
            if self.ranks or not bound.inner.fused_output_quant_supported(output_quant_key(output.dtype)):
                limit = f"was not offered: {bound.decision.backend} writes no outputs of {output.dtype}"
                raise BatchError("output_scale", "a tensor", limit)
            scaled = {"output_scale": output_scale}
        if self.direct:
            bound.inner.forward(layer, query, key, value, None, metadata, rows, **scaled)
        else:
            # Prompts without computed tokens are attended from the call, which is faster than from their pages.
            cache = self._cache(kv_cache).view
            bound.inner.attend(layer, query, key, value, cache, metadata, rows, **scaled)
        return output

    def view_of(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The layer's pages `kv_cache` as attnplug's backends read them."""
        return self._cache(kv_cache).view

    def _cache(self, kv_cache: torch.Tensor) -> _Cache:
        """The cache as attnplug's backends read it; kept while vLLM keeps this cache."""
        found = self._caches.get(id(kv_cache))
        if found is None:
            forget = functools.partial(_forget, weakref.ref(self), id(kv_cache))
            # A view of the tensor itself would keep it, and nothing would tell that vLLM has dropped it.
            view = logical(kv_cache.data, self.head_size, self.kv_cache_dtype)
            found = self._caches[id(kv_cache)] = _Cache(view, weakref.ref(kv_cache, forget))
        return found


@dataclasses.dataclass(slots=True)
class _Cache:
    """A view of vLLM's cache, and the impl that writes to it."""

    view: torch.Tensor
    of: weakref.ref[torch.Tensor]
    writer: Any = None


def _forget(layer: weakref.ref[Layer], place: int, dead: weakref.ref[torch.Tensor]) -> None:
    """Drop the view of a cache that vLLM has dropped."""
    # The view would keep the memory of all its layers.
    if (alive := layer()) is not None:
        alive._caches.pop(place, None)


class Bound:
    """A layer's decision and its impl; for a sparse layer also vLLM's buffer of the keys that are picked."""

    def __init__(
        self,
        decision: Decision,
        inner: Inner[Any] | RankImpl,
        tensors: LayerTensors,
        picked: torch.Tensor | None = None,
    ) -> None:
        self.decision, self.tensors, self.picked = decision, tensors, picked
        self.inner: Any = inner
        self.backend = decision.get_backend_cls()
        self.spec = inner.spec if isinstance(inner, RankImpl) else decision.spec
        """The layer, also where the decision is for its keys on one rank."""
        # A step's metadata has one selection, so layers that read different buffers differ.
        self.kind = (self.backend, self.spec, decision.options, None if picked is None else id(picked))
        self.weights: Any = None
        """vLLM's tensor that `tensors` were read from, for latent attention."""
