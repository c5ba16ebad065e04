"""A layer of latent attention (MLA) of vLLM on a backend of attnplug, and its builder."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from attnplug.core.errors import BatchError, SpecError
from attnplug.core.impl import LayerTensors
from attnplug.core.interface.impl_and_builder import make_impl
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import LayerSpec
from attnplug.integrations.vllm.builder import Builder, Step
from attnplug.integrations.vllm.impl import Bound, latent_pages_refusal, logical
from attnplug.integrations.vllm.rank_layers import make_rank_impl
from attnplug.integrations.vllm.ranks import check_ranks, gathered_spec, new_tokens_of, ranks_of
from attnplug.integrations.vllm.steps import asked_invariance, drafts_of
from attnplug.registry.default import select
from attnplug.registry.selection.decision import Decision


class LatentLayer(MLAAttentionImpl):  # type: ignore[misc]
    """The impl that vLLM constructs for each layer of latent attention; `backend` is as in Layer.

    The step says to vLLM that all requests are prefills, so vLLM passes all tokens to `forward_mha`.
    """

    # attnplug's impls absorb, expand and split a step themselves.

    backend: str | None = None
    supports_quant_query_input = False
    can_return_lse_for_decode = supports_dcp = True
    decision: Decision | None = None
    owner: Any = None
    """vLLM's layer, which has the weights and the scales; the builder sets it."""
    sparse: SparseSpec | None = None
    """How many keys an indexer picks for each query, where one does."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int = 1,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        **unknown: Any,
    ) -> None:
        given = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **unknown,
        }
        # A later vLLM may ask for more by a new argument, which must be refused and not ignored.
        for name, value in given.items():
            if value is not None and value is not False:
                limit = "is not served with latent attention in vLLM, and may change the result"
                raise SpecError(name, type(value).__name__, limit)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype, self.v_head_dim = num_kv_heads, kv_cache_dtype, v_head_dim
        if refusal := latent_pages_refusal(kv_cache_dtype):
            raise SpecError("kv_cache_dtype", kv_cache_dtype, refusal)
        config = get_current_vllm_config()
        self.spec = LayerSpec(
            num_heads=num_heads,
            num_kv_heads=1,
            head_size=head_size,
            scale=self.scale,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=str(getattr(attn_type, "value", attn_type)),
            dtype=config.model_config.dtype,
            invariance=asked_invariance(),
            mla=MLADims(
                q_lora_rank=q_lora_rank,
                kv_lora_rank=kv_lora_rank,
                qk_nope_head_dim=qk_nope_head_dim,
                qk_rope_head_dim=qk_rope_head_dim,
                v_head_dim=v_head_dim,
            ),
            sparse=self.sparse,
        )
        self.ranks = ranks_of(config)
        if self.ranks:
            check_ranks(self.ranks, self.spec, drafts=drafts_of(config) > 0)
        self.decide(None)

    @property
    def picked(self) -> torch.Tensor | None:
        """The buffer of the keys that an indexer picks; None for dense layers."""
        return None

    def decide(self, block_size: int | None) -> Decision:
        """The backend for the layer in pages of `block_size` tokens; if ranks share them, for the keys of one rank.

        NoBackendError, BackendUnavailableError: with each candidate's reasons.
        """
        spec = self.spec if block_size is None else self.spec.replace(block_size=block_size)
        if self.ranks:
            spec = gathered_spec(spec, self.ranks.place.size)
        return select(spec, None, None, backend=self.backend)

    def bound(self, block_size: int, device: torch.device, causal: bool = True) -> Bound:
        """The impl of the layer in such pages, with the weights that vLLM has made of its projection."""
        if not causal:
            raise BatchError("causal", False, "cannot be served by layers of latent attention")
        return self._bound(block_size, device)

    @functools.cache  # noqa: B019 - as many entries as block sizes, and layers live as long as the process
    def _bound(self, block_size: int, device: torch.device) -> Bound:
        decision = self.decision = self.decide(block_size)
        if not hasattr(self.owner, "W_UK_T"):
            limit = "is stored in 4 or 8 bits, which attnplug does not read"
            remedy = "set VLLM_ROCM_USE_AITER_FP8BMM=0 and VLLM_ROCM_USE_AITER_FP4BMM=0"
            raise SpecError("kv_b_proj", type(self.owner).__name__, limit, remedy)
        tensors = LayerTensors(w_uk=self.owner.W_UK_T, w_uv=self.owner.W_UV)
        inner: Any
        if self.ranks:
            spec = self.spec.replace(block_size=block_size)
            new = select(new_tokens_of(spec), None, None, backend=self.backend)
            inner = make_rank_impl(self.ranks, spec, decision, new, tensors, self.backend or "ATTNPLUG")
        else:
            inner = make_impl(
                decision.get_backend_cls(),
                decision.spec,
                layer_name=self.backend or "ATTNPLUG",
                tensors=tensors,
                options=decision.get_options(),
            )
        inner.process_weights_after_loading(getattr(torch, decision.spec.dtype))
        bound = Bound(decision, inner, tensors, self.picked)
        bound.weights = self.owner.W_UK_T
        return bound

    def _take_weights(self, bound: Bound) -> None:
        """Copy weights that vLLM has made again, as versions about 0.25 do."""
        # Graphs read the memory of the first ones.
        owner, used = self.owner, bound.tensors
        if bound.weights is not owner.W_UK_T and used.w_uk is not None and used.w_uv is not None:
            used.w_uk.copy_(owner.W_UK_T)
            used.w_uv.copy_(owner.W_UV)
            bound.weights = owner.W_UK_T

    def _read(self, attn_metadata: Any) -> tuple[Any, Bound]:
        """The layer's metadata and impl in a step."""
        found: tuple[Any, Bound] = attn_metadata.of(self)
        return found

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> None:
        """Write new latents `[T, L]` and their parts with positions `[T, 1, R]` to their slots."""
        if not kv_cache.numel():
            return  # vLLM measures memory
        cache, slots = self.view_of(kv_cache), slot_mapping.flatten()
        latent = _latent(kv_c_normed, k_pe)[: slots.shape[0]]
        inner = self.bound(cache.shape[1], cache.device).inner
        inner.update_kv_cache(self.owner, latent, latent, cache, slots[: latent.shape[0]])

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend all tokens of the step, `q [T, H, nope + rope]`, and write `output [T, H * v_head_dim]`."""
        if output_scale is not None:
            raise BatchError("output_scale", "a tensor", "is not served: outputs of 8 bits")
        metadata, bound = self._read(attn_metadata)
        self._take_weights(bound)
        cache = self.view_of(kv_c_and_k_pe_cache)
        rows = output.view(-1, self.num_heads, self.v_head_dim)
        bound.inner.attend(self.owner, q, _latent(kv_c_normed, k_pe), None, cache, metadata, rows)

    def forward_mqa(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Never called for dense layers, because a step has no decodes for vLLM."""
        raise BatchError("num_decode_tokens", "more than 0", "is not what attnplug's builder gave")

    def view_of(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The pages `kv_cache` as `[blocks, tokens, L + R]`, in their stored dtype."""
        cache = kv_cache.squeeze(1) if kv_cache.ndim == 4 else kv_cache
        return logical(cache, self.head_size, self.kv_cache_dtype)


def _latent(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """`[T, 1, L + R]`."""
    return torch.cat((kv_c, k_pe.view(kv_c.shape[0], -1)), dim=1)[:, None]


class LatentStep(Step):
    """A step as vLLM's layer of latent attention reads it: prefills alone."""

    num_decodes = num_decode_tokens = 0
    decode = prefill = None

    @property
    def num_prefills(self) -> int:
        """All requests."""
        return self.batch.common.num_reqs

    @property
    def num_actual_tokens(self) -> int:
        """Tokens of the step."""
        return self.batch.common.num_actual_tokens


class LatentBuilder(Builder):
    """The builder that vLLM constructs for each group of layers with latent attention."""

    layer_class = LatentLayer
    step_class = LatentStep

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        known = vllm_config.compilation_config.static_forward_context
        for layer in (known.get(name) for name in layer_names):
            if isinstance(getattr(layer, "impl", None), LatentLayer):
                layer.impl.owner = layer
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
