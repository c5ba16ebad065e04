"""Runs a layer on the members of a composite: one write, then each part of the step into its rows of the output."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnplug.core.composite.agreement import member_options
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.dtypes import output_quant_key
from attnplug.core.errors import BatchError
from attnplug.core.impl import AttentionImpl, AttentionLayer, LayerTensors
from attnplug.core.interface.impl_and_builder import make_impl
from attnplug.core.metadata import AttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec, Phase

if TYPE_CHECKING:
    from attnplug.core.composite.backend import CompositeBackend


@dataclasses.dataclass(eq=False)
class CompositeMetadata(AttentionMetadata):
    """One step for the members of a composite: `num_decodes` requests in front, then the others.

    Args:
        slot_mapping: int64, where the new K and V of the whole step go.
        num_reqs: requests of the step.
        num_actual_tokens: query rows of the step.
        num_decodes: requests of the decoding part.
        num_decode_tokens: their query rows.
        decode: metadata of the decoding part; None if it is empty.
        prefill: metadata of the rest, or of a mixed step that one member serves whole; None if it is empty.
        decode_place: the place of the member that decodes; see `CompositeBackend.members`.
        prefill_place: the place of the member that attends the rest.
    """

    slot_mapping: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: AttentionMetadata | None
    prefill: AttentionMetadata | None
    decode_place: str = Phase.DECODE
    prefill_place: str = Phase.PREFILL


class CompositeImpl(AttentionImpl[CompositeMetadata]):
    """Attends decodes with one impl and the rest with another, each the one that the step's metadata names.

    The decoding half writes the KV cache in every step. So a step of decodes alone, the most frequent one and the
    one that graphs capture, runs on that half only, unless a route gives it to another member.
    """

    backend: type[CompositeBackend]  # pyright: ignore[reportIncompatibleVariableOverride]
    members: Mapping[str, AttentionImpl[Any]]
    """The impl of each place of `CompositeBackend.members`."""

    def _bind(
        self,
        spec: LayerSpec,
        layer_name: str,
        tensors: LayerTensors,
        kv_sharing_target_layer_name: str | None = None,
        options: Any = None,
    ) -> None:
        super()._bind(spec, layer_name, tensors, kv_sharing_target_layer_name, options)
        # Given only where there are ranks, because a member's own from_spec may not take groups.
        groups: dict[str, Any] = {}
        if self.total_cp_world_size > 1:
            groups["dcp"] = ContextParallel(self.dcp_world_size, self.dcp_rank)
            groups["pcp"] = ContextParallel(self.pcp_world_size, self.pcp_rank)
        self.members = {
            place: make_impl(
                member,
                spec,
                layer_name=layer_name,
                tensors=tensors,
                kv_sharing_target_layer_name=kv_sharing_target_layer_name,
                options=member_options(options, place, member),
                **groups,
            )
            for place, member in self.backend.members().items()
        }
        self._is_cross = spec.attn_type is AttentionType.ENCODER_DECODER

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Call it on all members."""
        for member in self.members.values():
            member.process_weights_after_loading(act_dtype)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether all members can write such outputs."""
        return all(member.fused_output_quant_supported(quant_key) for member in self.members.values())

    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the whole step's keys and values, by the decoding half."""
        self.members[Phase.DECODE].update_kv_cache(layer, key, value, kv_cache, slot_mapping)

    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: CompositeMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As AttentionImpl.attend, for each part.

        Raises:
            BatchError: an output scale that a member does not support, fewer rows than the step has tokens, or a
                member's refusal.
        """
        # By keyword only if given, because most calls have none and members may not take them.
        scales = self._scales(output, output_scale, output_block_scale)
        meta = attn_metadata
        decode, prefill = meta.decode, meta.prefill
        decoding, prefilling = self.members[meta.decode_place], self.members[meta.prefill_place]
        if prefill is None or decode is None:
            impl, part = (decoding, decode) if prefill is None else (prefilling, prefill)
            given = layer, query, key, value, kv_cache, part, output
            impl.attend(*given, output_lse=output_lse, use_sinks=use_sinks, **scales)
            return output
        cut = meta.num_decode_tokens
        for field, tensor in (("query", query), ("output", output)):
            if tensor.shape[0] < meta.num_actual_tokens:
                limit = f"must be at least the step's {meta.num_actual_tokens} tokens"
                raise BatchError(f"{field}.shape[0]", tensor.shape[0], limit)
        # One call for two views: this runs for every layer.
        queries = query.split_with_sizes((cut, query.shape[0] - cut))
        outputs = output.split_with_sizes((cut, output.shape[0] - cut))
        # Decodes read their keys from the pages, which have them; prefills may be faster on the given ones.
        new_k, new_v = (None if x is None or self._is_cross else x[cut:] for x in (key, value))
        for impl, part, rows, q, k, v, into in (
            (decoding, decode, slice(cut), queries[0], None, None, outputs[0]),
            (prefilling, prefill, slice(cut, None), queries[1], new_k, new_v, outputs[1]),
        ):
            lse = None if output_lse is None else output_lse[rows]
            # Only the scales of blocks have rows.
            cuts = {name: x[rows] if name == "output_block_scale" else x for name, x in scales.items()}
            impl.attend(layer, q, k, v, kv_cache, part, into, output_lse=lse, use_sinks=use_sinks, **cuts)
        return output

    def _scales(
        self, output: torch.Tensor, scale: torch.Tensor | None, block_scale: torch.Tensor | None
    ) -> dict[str, Any]:
        """The scales that are given; BatchError unless all members support them."""
        if scale is None and block_scale is None:
            return {}
        given = {"output_scale": scale, "output_block_scale": block_scale}
        found = {name: tensor for name, tensor in given.items() if tensor is not None}
        key = output_quant_key(output.dtype, block_scale is not None)
        # A member may accept a call of the layer's dtype as a plain one.
        if key is None or not self.fused_output_quant_supported(key):
            limit = f"must be None: {self.backend.get_name()} quantises no outputs to {output.dtype}"
            raise BatchError(next(iter(found)), "given", limit, "quantise the output after attention")
        return found


@functools.cache
def composite_impl(backend: type[CompositeBackend]) -> type[CompositeImpl]:
    """The impl class of a composite; the same each time."""
    impls = {place: member.get_impl_cls() for place, member in backend.members().items()}
    phases = backend.served_phases()
    decoding = [impl for place, impl in impls.items() if phases[place] != (Phase.PREFILL,)]
    prefilling = [impl for place, impl in impls.items() if phases[place] != (Phase.DECODE,)]
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "can_return_lse_for_decode": all(impl.can_return_lse_for_decode for impl in decoding),
        "supports_pcp": all(impl.supports_pcp for impl in prefilling),
        "supports_quant_query_input": all(impl.supports_quant_query_input for impl in impls.values()),
    }
    return type("CompositeImpl", (CompositeImpl,), namespace)
