"""Runs a layer on FLASHINFER: writes its pages, then its decodes and whatever is longer, as they were planned."""

from __future__ import annotations

import functools
import math

import torch

from attnplug.backends.flashinfer.backend import LEAST_SCALE, FlashInferBackend
from attnplug.backends.flashinfer.builder import FlashInferMetadata
from attnplug.backends.flashinfer.groups import PlanGroup, key_of
from attnplug.backends.flashinfer.library import library
from attnplug.backends.flashinfer.options import Options
from attnplug.backends.flashinfer.planner import Planner
from attnplug.backends.flashinfer.step import Part
from attnplug.backends.impl import BuiltinImpl
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.hyperparameters import PerLayerParameters
from attnplug.core.impl import AttentionLayer
from attnplug.ops import Reach

__all__ = ["FlashInferImpl"]

_LN_2 = math.log(2.0)
_NO_SINK = -1e30
"""A sink that weighs nothing. FlashInfer has a kernel with sinks and one without; infinity would give NaN."""


class FlashInferImpl(BuiltinImpl[FlashInferMetadata]):
    """Attention by FlashInfer's wrappers."""

    can_return_lse_for_decode = True
    _backend = FlashInferBackend

    @functools.cached_property
    def plan_group(self) -> PlanGroup:
        """What the layer's plan fixes."""
        spec = self.spec
        options = Options() if self.options is None else self.options
        parameters = PerLayerParameters(spec.window[0], spec.logits_soft_cap, spec.scale, spec.has_sinks)
        return key_of(spec, parameters, options)

    @torch.no_grad()
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
        """Attend and write `output`, as AttentionImpl.attend says.

        Raises:
            BatchError: tensors that do not fit the spec or the batch, an LSE the spec did not
                declare, a batch that is not causal for a causal layer, an output scale, a layer that the
                builder was not told of, a scale of keys too small for this FlashInfer.
            LayoutError: a cache of another shape, dtype or page size, or none.
        """
        meta = attn_metadata
        tokens = meta.num_actual_tokens
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        self._check(query, tokens, output, output_lse, **scales)
        Reach.of(self.spec, meta.causal)
        k, v = self._paged(kv_cache)
        kv_scales = None
        if k.dtype.itemsize == 1:
            kv_scales = self._scales(layer, k.dtype)
            self._check_k_scale(kv_scales[0])
        sinks = self.tensors.sinks if use_sinks or self.tensors.sinks is None else self._no_sinks
        step, work = meta.planned(self.plan_group)
        rows, out, lse = query[:tokens], output[:tokens], None if output_lse is None else output_lse[:tokens]
        if step.seen is not None:
            rows, out = rows[step.seen], torch.empty_like(out[: step.host.num_tokens])
            lse = None if lse is None else lse.new_empty(step.host.num_tokens, lse.shape[1])
        for part, planner in work:
            _run(part, planner, rows, (k, v), out, lse, kv_scales, sinks)
        if step.seen is not None:
            _scatter(
                step.seen, out, output[:tokens], lse, output_lse, self.tensors.sinks if use_sinks else None
            )
        return output

    def _paged(self, kv_cache: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if kv_cache is None:
            raise LayoutError("kv_cache", None, "is required: FLASHINFER finds keys in pages")
        self._check_pages(kv_cache)
        return self._pages(kv_cache)

    def _check_k_scale(self, k_scale: float) -> None:
        """BatchError where the scale of the layer's logits, of which it is a part, is too small for a mask."""
        spec = self.spec
        if (
            spec.logits_soft_cap is None
            and spec.scale * k_scale < LEAST_SCALE
            and not library().masks_infinitely
        ):
            limit = (
                f"makes the scale of logits {spec.scale * k_scale:g}; below {LEAST_SCALE:g} FlashInfer "
                f"{library().version} sees masked keys"
            )
            raise BatchError("k_scale", k_scale, limit, "pip install 'flashinfer-python>=0.7.2'")

    @functools.cached_property
    def _no_sinks(self) -> torch.Tensor:
        device = None if self.tensors.sinks is None else self.tensors.sinks.device
        # The kernel reads float32 whatever torch's default dtype is.
        return torch.full((self.spec.num_heads,), _NO_SINK, dtype=torch.float32, device=device)


def _run(
    part: Part,
    planner: Planner,
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    lse: torch.Tensor | None,
    scales: tuple[float, float] | None,
    sinks: torch.Tensor | None,
) -> None:
    """One part of a step; FlashInfer writes dense rows, and LSE in base 2."""
    rows = slice(part.first_token, part.first_token + part.num_tokens)
    asked, into = query[rows], output[rows]
    asked = asked if asked.stride(2) == 1 else asked.contiguous()
    dense = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
    natural = None if lse is None else lse[rows]
    binary = natural
    if natural is not None and not natural.is_contiguous():
        binary = torch.empty_like(natural, memory_format=torch.contiguous_format)
    planner.run(asked, pages, dense, binary, scales, sinks)
    if dense is not into:
        into.copy_(dense)
    if natural is not None and binary is not None:
        torch.mul(binary, _LN_2, out=natural) if binary is natural else natural.copy_(binary * _LN_2)


def _scatter(
    seen: torch.Tensor,
    found: torch.Tensor,
    output: torch.Tensor,
    found_lse: torch.Tensor | None,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Rows that see something where they belong; the others are 0, their LSE -inf or the sink's logit."""
    output.zero_()
    output[seen] = found
    if lse is None or found_lse is None:
        return
    lse = lse[: output.shape[0]]
    lse[:] = -torch.inf if sinks is None else sinks
    lse[seen] = found_lse
