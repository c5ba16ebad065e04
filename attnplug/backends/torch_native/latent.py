"""Latent attention of TORCH: absorbed queries over pages whose values are the first part of their keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch

from attnplug.backends.impl import Pages
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.dense import Scoring
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core.impl import AttentionLayer
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl


class TorchMLABuilder(MLADecodeBuilder):
    """Builds the decodes as TorchMetadata."""

    decodes_drafts: ClassVar[bool] = True

    def build_decode(self, common: CommonAttentionMetadata) -> TorchMetadata | Callable[[], TorchMetadata]:
        """As TorchMetadataBuilder.build; for sparse layers later, when a layer has written the lengths."""
        # An indexer fills the selection before a layer runs, so lengths are known only then.
        if self.backend.is_selecting:
            return functools.partial(self._decodes.build, 0, common)
        return self._decodes.build(0, common)

    @functools.cached_property
    def _decodes(self) -> TorchMetadataBuilder:
        return TorchMetadataBuilder(self.kv_cache_spec, self.layer_names, self.config, self.device)


class TorchMLAImpl(MLADecodeImpl):
    """Latent attention in plain PyTorch."""

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TorchMetadata | Callable[[], TorchMetadata],
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """As MLADecodeImpl.decode."""
        query = torch.cat((q_nope, q_pe), dim=2)
        step = metadata() if callable(metadata) else metadata
        self._absorbed.softmax_scale = self.softmax_scale
        self._absorbed.attend(None, query, None, None, kv_cache, step, output, output_lse=output_lse)

    @functools.cached_property
    def _absorbed(self) -> _AbsorbedImpl:
        spec, dims = self.spec, self.dims
        absorbed = LayerSpec(
            num_heads=self.backend.padded_heads(spec.num_heads),
            num_kv_heads=1,
            head_size=dims.latent_size,
            head_size_v=dims.kv_lora_rank,
            dtype=spec.dtype,
            kv_cache_dtype=spec.kv_cache_dtype,
            needs_lse=True,
        )
        return _AbsorbedImpl.from_spec(absorbed, backend=self.backend, layer_name=self.layer_name)


class _AbsorbedImpl(TorchImpl):
    """Attends the pages of latents, whose scale is part of `softmax_scale`."""

    softmax_scale = 1.0

    def _pages_of(self, kv_cache: torch.Tensor) -> Pages:
        pages = self._last_pages
        if pages is None or not pages.are_of(kv_cache):
            latents = kv_cache[:, :, None]
            values = latents[..., : self.spec.head_size_v]
            pages = Pages(kv_cache, latents, values, self._forget_pages)
            self._last_pages = pages
        return pages

    def _scoring(
        self, layer: AttentionLayer | None, device: torch.device, use_sinks: bool, stored: torch.dtype
    ) -> Scoring:
        return Scoring(self.softmax_scale, 1.0, None, None, None)
