"""Runs a layer on FLASHINFER: writes its pages, then runs the wrappers that were planned for the step."""

from __future__ import annotations

import functools
import math

import torch

from attnplug.backends.flashinfer.groups import PlanGroup, key_of
from attnplug.backends.flashinfer.library import library
from attnplug.backends.flashinfer.metadata import FlashInferMetadata, Work
from attnplug.backends.flashinfer.options import LEAST_SCALE, Options
from attnplug.backends.impl import BuiltinImpl
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.hyperparameters import PerLayerParameters
from attnplug.core.impl import AttentionLayer
from attnplug.ops.checks import check_cache_given, check_queries

# FlashInfer returns LSE in base 2; attnplug's LSE is in base e.
LN_2 = math.log(2.0)
# A sink without weight, for calls with `use_sinks=False`; minus infinity would give NaN in FlashInfer's kernel.
_NO_SINK = -1e30


class FlashInferImpl(BuiltinImpl[FlashInferMetadata]):
    """Attention by FlashInfer's wrappers."""

    can_return_lse_for_decode = True

    @functools.cached_property
    def plan_group(self) -> PlanGroup:
        """The group whose plan serves the layer."""
        spec = self.spec
        options = Options() if self.options is None else self.options
        parameters = PerLayerParameters(spec.window[0], spec.logits_soft_cap, spec.scale, spec.has_sinks)
        return key_of(spec, parameters, options)

    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: FlashInferMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As AttentionImpl.attend; output scales are not supported.

        Raises:
            BatchError: also for a layer that the builder does not know, and for a scale of keys that is too small
                for this FlashInfer.
            LayoutError: also without a cache.
        """
        meta = attn_metadata
        tokens = meta.num_actual_tokens
        plain = output_lse is None and output_scale is None and output_block_scale is None
        plain = plain and self._is_plain(query, output, tokens)
        if not plain:
            scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
            check_queries(query, output, output_lse, tokens, self.spec, **scales)
        if meta.causal is not self.spec.causal:
            self.spec.causal_in(meta.causal)
        if kv_cache is None:
            raise LayoutError("kv_cache", None, "is required: FLASHINFER finds keys in pages")
        if self.spec.direct_kv:
            check_cache_given(kv_cache, self.spec)
        found = self._pages_of(kv_cache)
        pages, kv_scales = (found.k, found.v), None
        if pages[0].dtype.itemsize == 1:
            kv_scales = self._scales(layer, pages[0].dtype)
            self._check_k_scale(kv_scales[0])
        # The kernel reads sinks side by side, and a layer's may be a column of a table.
        sinks = None if self.tensors.sinks is None else self.tensors.sinks.contiguous()
        blind = sinks if use_sinks else None
        if not use_sinks and sinks is not None:
            sinks = self._no_sinks
        work = meta.planned(self.plan_group)
        # The fast path gives FlashInfer the tensors as they are, without a slice or a copy.
        if plain and work.only is not None:
            work.only.run(query, pages, output, None, kv_scales, sinks)
        else:
            _attend(work, tokens, query, pages, output, output_lse, kv_scales, sinks, blind)
        return output

    def _is_plain(self, query: torch.Tensor, output: torch.Tensor, tokens: int) -> bool:
        """Whether FlashInfer can use both directly."""
        # Each tensor operation costs the host as much as FlashInfer's call, so none is made without need.
        shape, dtype = (tokens, self.spec.num_heads, self.spec.head_size), self._dtype
        return (
            query.shape == shape
            and output.shape == shape
            and query.dtype is dtype
            and output.dtype is dtype
            and query.stride()[2] == 1
            and output.is_contiguous()
            # Autograd must not record the write.
            and not (query.requires_grad or output.requires_grad)
        )

    def _check_k_scale(self, k_scale: float) -> None:
        """BatchError if `k_scale` makes the scale of the logits too small for FlashInfer's mask."""
        # The scale is known only at the call, because engines load it with the weights.
        spec = self.spec
        scale = spec.scale * k_scale
        if spec.logits_soft_cap is not None or scale >= LEAST_SCALE or library().masks_infinitely:
            return
        version = library().version
        limit = f"makes the scale of logits {scale:g}; below {LEAST_SCALE:g} FlashInfer {version} sees masked keys"
        # A scale from a tensor of float32 has digits that nobody wrote.
        raise BatchError("k_scale", float(f"{k_scale:g}"), limit, "pip install 'flashinfer-python>=0.7.2'")

    @functools.cached_property
    def _no_sinks(self) -> torch.Tensor:
        device = None if self.tensors.sinks is None else self.tensors.sinks.device
        # The kernel reads float32, so torch's default dtype must not decide.
        return torch.full((self.spec.num_heads,), _NO_SINK, dtype=torch.float32, device=device)


@torch.no_grad()
def _attend(
    work: Work,
    tokens: int,
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    scales: tuple[float, float] | None,
    sinks: torch.Tensor | None,
    blind_lse: torch.Tensor | None,
) -> None:
    """Run all parts of a step; `blind_lse [H]` is the LSE of queries that see nothing, None for -inf."""
    seen, found, lse = work.pages.seen, output, output_lse
    if seen is not None:
        query = query[seen]
        found = torch.empty_like(query)
        lse = None if lse is None else lse.new_empty(query.shape[:2])
    for part, wrapper in work.parts:
        # FlashInfer writes dense rows, and LSE in base 2.
        rows = slice(part.first_token, part.first_token + part.num_tokens)
        asked, into = query[rows], found[rows]
        asked = asked if asked.stride(2) == 1 else asked.contiguous()
        dense = _dense(into)
        natural = None if lse is None else lse[rows]
        binary = None if natural is None else _dense(natural)
        wrapper.run(asked, pages, dense, binary, scales, sinks)
        if dense is not into:
            into.copy_(dense)
        if natural is not None and binary is not None:
            torch.mul(binary, LN_2, out=natural)
    if seen is None:
        return
    # FlashInfer's result is undefined for queries that see nothing, so they are not planned.
    output[:tokens] = 0
    output[seen] = found
    if output_lse is not None and lse is not None:
        output_lse[:tokens] = -torch.inf if blind_lse is None else blind_lse
        output_lse[seen] = lse


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, or a new tensor to write in their place if they are not contiguous."""
    return rows if rows.is_contiguous() else torch.empty_like(rows, memory_format=torch.contiguous_format)
