"""What the built-in impls share: the tensors of a call are checked, and pages found, in one way."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import torch

from attnplug.backends.checks import check_cache, check_keys, check_rows, refuse_output_scales
from attnplug.backends.storage import compute_dtype, typed_view
from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.impl import AttentionImpl, AttentionLayer
from attnplug.core.metadata import AttentionMetadata
from attnplug.core.spec import AttentionType

__all__ = ["BuiltinImpl"]

_M = TypeVar("_M", bound=AttentionMetadata)


class BuiltinImpl(AttentionImpl[_M]):
    """Checks the tensors of a call against the layer; subclasses attend."""

    _backend: ClassVar[type[AttentionBackend]]
    """Whose caches these are."""

    @abstractmethod
    def _write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """As `attnplug.ops.write_kv_cache`."""

    @torch.no_grad()
    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values; fp8 storage divides by the scales and clamps.

        Raises:
            BatchError: key or value of another shape or dtype, or fewer rows than slots.
            LayoutError: a cache of another shape or dtype.
        """
        key, value = check_keys(key, value, slot_mapping.shape[0], self.spec, self._dtype)
        self._write(key, value, *self._pages(kv_cache), slot_mapping, *self._scales(layer))

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self.spec)

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[num_blocks, block_size, Hkv, D]` of the cache; LayoutError unless it is the layer's."""
        check_cache(kv_cache, self.spec)
        return self._backend.split_kv(typed_view(kv_cache, self.spec), self.spec)

    def _check(
        self,
        query: torch.Tensor,
        tokens: int,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
        **output_scales: torch.Tensor | None,
    ) -> None:
        """BatchError unless queries, outputs and LSE fit the layer and hold `tokens` rows, unscaled."""
        spec = self.spec
        check_rows("query", query, tokens, (spec.num_heads, spec.head_size), self._dtype)
        check_rows("output", output, tokens, (spec.num_heads, spec.head_size_v), self._dtype)
        refuse_output_scales(**output_scales)
        if output_lse is None:
            return
        if not spec.needs_lse:
            remedy = "declare the layer with needs_lse=True"
            raise BatchError("output_lse", tuple(output_lse.shape), "must be None", remedy)
        check_rows("output_lse", output_lse, tokens, (spec.num_heads,), torch.float32)

    def _check_pages(self, kv_cache: torch.Tensor | None) -> None:
        """LayoutError where there are pages and the layer has K and V given, or the other way round."""
        spec = self.spec
        if kv_cache is not None:
            if spec.direct_kv:
                raise LayoutError("kv_cache", tuple(kv_cache.shape), "must be None with direct_kv=True")
            return
        encodes = spec.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        if not (spec.direct_kv or encodes):
            remedy = "declare the layer with direct_kv=True to give K and V with the call"
            raise LayoutError("kv_cache", None, "is required", remedy)

    @property
    def _attends_own_keys(self) -> bool:
        """Whether the keys given with a call are those that the pages then hold."""
        cross = self.spec.attn_type is AttentionType.ENCODER_DECODER
        return not cross and self.kv_sharing_target_layer_name is None

    def _scales(self, layer: AttentionLayer | None) -> tuple[float, float]:
        """Of keys and values: the engine's layer knows them, or the layer's tensors do."""
        if layer is not None and hasattr(layer, "_k_scale_float") and hasattr(layer, "_v_scale_float"):
            return float(layer._k_scale_float), float(layer._v_scale_float)
        return self._own_scales

    @functools.cached_property
    def _own_scales(self) -> tuple[float, float]:
        scales: tuple[Any, Any] = self.tensors.k_scale, self.tensors.v_scale
        return float(scales[0]), float(scales[1])
