"""A sparse layer of latent attention of vLLM (DeepSeek V3.2, GLM-5): its indexer picks the keys of each query."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.attention import backend as theirs

from attnplug.core.errors import BatchError, SpecError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.sparse import SparseSpec
from attnplug.integrations.vllm.impl import Bound
from attnplug.integrations.vllm.latent import LatentBuilder, LatentLayer
from attnplug.integrations.vllm.picked_keys import PickedKeys, check_buffer
from attnplug.mla.impl import MLADecodeImpl

# Versions without the class call `forward_mha` of sparse layers, as they call it of all others.
_SPARSE_IMPL: Any = getattr(theirs, "SparseMLAAttentionImpl", theirs.MLAAttentionImpl)


def indexer_block_sizes() -> list[int]:
    """Tokens of the blocks that vLLM's indexer reads, which shares its block numbers with the layers."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    sizes = DeepseekV32IndexerBackend.get_supported_kernel_block_sizes()
    return [size for size in sizes if isinstance(size, int)]


class SparseLatentLayer(LatentLayer, _SPARSE_IMPL):  # type: ignore[misc]
    """The impl of a sparse layer: vLLM absorbs the queries of all tokens, and passes them to `forward_mqa`.

    Args:
        indexer: vLLM's object whose `topk_indices_buffer` is filled; None for layers that take the keys of an
            earlier one.
        topk_indices_buffer: int32 `[tokens, topk]`, read where there is no indexer.
        given: as for LatentLayer.

    Raises:
        SpecError: no buffer, or one of another form.
    """

    def __init__(
        self, *args: Any, indexer: Any = None, topk_indices_buffer: torch.Tensor | None = None, **given: Any
    ) -> None:
        self._indexer, self._buffer = indexer, topk_indices_buffer
        self.sparse = SparseSpec("token_topk", self.picked.shape[1])
        super().__init__(*args, **given)

    @property
    def picked(self) -> torch.Tensor:
        """The buffer that holds the layer's keys now; vLLM gives the indexers of a draft model that of its target."""
        return check_buffer(self._buffer if self._indexer is None else self._indexer.topk_indices_buffer)

    def bound(self, block_size: int, device: torch.device, causal: bool = True) -> Bound:
        """As LatentLayer.bound; SpecError for an impl that takes no absorbed queries."""
        bound = super().bound(block_size, device, causal)
        if not isinstance(bound.inner, MLADecodeImpl):
            limit = f"is not served by {bound.decision.backend} in vLLM: its impl is no MLADecodeImpl"
            raise SpecError("sparse", str(self.sparse), limit, "choose another backend")
        return bound

    def _read(self, attn_metadata: Any) -> tuple[Any, Bound]:
        metadata, bound = super()._read(attn_metadata)
        if metadata.selected.selection.positions.data_ptr() != self.picked.data_ptr():
            limit = "is another tensor than when the layer's metadata was made"
            raise BatchError("topk_indices_buffer", tuple(self.picked.shape), limit)
        return metadata, bound

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend absorbed queries over their picked keys.

        Args:
            q: `[T, H, L]` and `[T, H, R]`, or both as one tensor.
            kv_c_and_k_pe_cache: the pages of the layer.
            attn_metadata: a LatentStep.
            layer: vLLM's layer, which multiplies the result by W_UV.

        Returns:
            Latents `[T, H, L]`, with zeros for rows that are no query of a request, and no LSE.

        Raises:
            BatchError: the indexer fills another buffer than that of the layer's metadata.
        """
        if self.owner is None:
            self.owner = layer
        metadata, bound = self._read(attn_metadata)
        rank = bound.inner.dims.kv_lora_rank
        nope, rope = (q[..., :rank], q[..., rank:]) if isinstance(q, torch.Tensor) else q
        tokens, rows = nope.shape[0], metadata.num_decode_tokens
        if not rows:
            return torch.zeros_like(nope), None
        cache = self.view_of(kv_c_and_k_pe_cache)
        attended, _ = bound.inner.forward_mqa((nope[:rows], rope[:rows]), cache, metadata, layer)
        if rows < tokens:
            attended = torch.nn.functional.pad(attended, (0, 0, 0, 0, 0, tokens - rows))
        return attended, None


class AnyLatentLayer(LatentLayer):
    """What vLLM constructs for each layer of latent attention: a sparse layer, if it is given a buffer or an indexer."""

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """The layer, of a subclass if it is sparse: vLLM asks one class of a name for both."""
        made: Any = cls
        if any(given.get(name) is not None for name in ("indexer", "topk_indices_buffer")):
            made = _sparse(made)
        return super().__new__(made, *args, **given)


# Cached, because layers of one class must be of one class again.
@functools.cache
def _sparse(cls: Any) -> type[Any]:
    return type(f"Sparse{cls.__name__}", (SparseLatentLayer, cls), {})


class SparseBuilder(LatentBuilder):
    """The builder of a group's layers, with the buffers of those that are sparse."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self._selections: dict[int, PickedKeys] = {}
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def completed(self, common: CommonAttentionMetadata, bound: Bound) -> CommonAttentionMetadata:
        """As Builder.completed: a step of sparse layers has the selection in their buffer."""
        common, picked = super().completed(common, bound), bound.picked
        if picked is None:
            return common
        if id(picked) not in self._selections:
            # Graphs read its counts, so it is made once.
            self._selections[id(picked)] = PickedKeys.of(picked)
        return common.changed(selection=self._selections[id(picked)])
