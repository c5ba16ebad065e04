"""Builds a composite's step: decodes in front with one builder, the rest with another, or all of it with one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.composite.impl import CompositeMetadata
from attnplug.core.composite.member_layers import MemberLayers
from attnplug.core.composite.routing import Router
from attnplug.core.composite.step_split import StepSplit
from attnplug.core.composite.steps import StepKind, StepRange
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder
from attnplug.core.kv_cache_spec import CrossAttentionSpec, KVCacheSpec
from attnplug.core.metadata import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    own_build_key,
)
from attnplug.core.spec import Phase

if TYPE_CHECKING:
    from attnplug.core.composite.backend import CompositeBackend

_Needs = Literal["none", "upper_bound", "exact"]
_BY_PRECISION: tuple[_Needs, ...] = ("none", "upper_bound", "exact")
"""Forms of host lengths, the most precise last."""


class CompositeMetadataBuilder(AttentionMetadataBuilder[CompositeMetadata]):
    """Builds each part with the builder of its member; a part without requests is not built."""

    backend: ClassVar[type[CompositeBackend]]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: Sequence[str],
        config: BuilderConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, config, device)
        # Computed once, because a build is part of every step.
        self._backends = self.backend.members()
        self.members: dict[str, AttentionMetadataBuilder[Any]] = {
            place: make_builder(
                backend,
                kv_cache_spec,
                layer_names,
                dataclasses.replace(config, layers=MemberLayers(config.layers, place)),
                device,
            )
            for place, backend in self._backends.items()
        }
        """The builder of each place of `CompositeBackend.members`."""
        is_one = self.backend.prefill is self.backend.decode
        self.router = Router(self.backend.places(), Phase.DECODE if is_one else Phase.PREFILL)
        self._is_cross = isinstance(kv_cache_spec, CrossAttentionSpec)
        # By phase, the last answer to use_cascade_attention of the member that serves its part; a build that was not
        # asked about gives it all.
        self._cascades = dict.fromkeys(Phase, True)
        self.reorder_batch_threshold = self._threshold()

    @property
    def decode(self) -> AttentionMetadataBuilder[Any]:
        """The builder of the decoding half."""
        return self.members[Phase.DECODE]

    @property
    def prefill(self) -> AttentionMetadataBuilder[Any]:
        """The builder of the prefilling half."""
        return self.members[Phase.PREFILL]

    def _threshold(self) -> int:
        """The decoding half's threshold; long enough for speculative decodes if all that serve them run or capture them."""
        own = self.decode.reorder_batch_threshold or 1
        speculative = 1 + self.config.num_speculative_tokens
        if all(map(self._takes_drafts, _serving(self.backend, StepKind.DRAFT))):
            return max(own, speculative)
        return own

    def _takes_drafts(self, place: str) -> bool:
        builder = self.members[place]
        level = builder.get_cudagraph_support(self.config, self.kv_cache_spec)
        # A member that only decodes may refuse queries of several tokens.
        takes_any = Phase.PREFILL in map(str, self._backends[place].supported_phases)
        return takes_any and (
            builder.reorder_batch_threshold is None or level >= AttentionCGSupport.UNIFORM_BATCH
        )

    @property
    def build_key(self) -> Hashable:
        """The keys of all members; None where one has none."""
        # The decoding half comes first.
        ordered = dict.fromkeys((Phase.DECODE, *self.members))
        keys = [own_build_key(self.members[place]) for place in ordered]
        return None if None in keys else (*keys, self.reorder_batch_threshold)

    @classmethod
    def get_cudagraph_support(cls, config: BuilderConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """That of the builders which decode, at most uniform batches: a graph cannot replay the cut of a mixed step."""
        builders = {place: each.get_builder_cls() for place, each in cls.backend.members().items()}
        levels = {
            place: each.get_cudagraph_support(config, kv_cache_spec) for place, each in builders.items()
        }
        return _level(cls.backend, levels)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CompositeMetadata:
        """The metadata of one step.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`, or a member's refusal.
        """
        # Members were asked about the parts of a cut step, so that one with a shared prefix is cut.
        split = self._split(common_attn_metadata, cut=common_prefix_len > 0)
        cascades = self._cascades
        shared = common_prefix_len if cascades[Phase.DECODE] else 0
        decode = shared, split.decode, fast_build
        shared = common_prefix_len if cascades[Phase.PREFILL] else 0
        prefill = shared, split.prefill, fast_build
        return self._joined(common_attn_metadata, split, *self._built("build", split, decode, prefill))

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: npt.NDArray[np.int32], *args: Any, **kwargs: Any
    ) -> bool:
        """Whether a member wants the prefix for the requests of its part; `build` gives it to that member only."""
        decodes, *places = self.router.cut_places(query_lens, self.reorder_batch_threshold or 1)
        decoding, prefilling = (self.members[place] for place in places)
        parts = {
            Phase.DECODE: (decoding, query_lens[:decodes]),
            Phase.PREFILL: (prefilling, query_lens[decodes:]),
        }
        self._cascades = {
            # One request shares its prefix with no other.
            phase: lens.size > 1 and builder.use_cascade_attention(common_prefix_len, lens, *args, **kwargs)
            for phase, (builder, lens) in parts.items()
        }
        return any(self._cascades.values())

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> CompositeMetadata:
        """The metadata of a step to capture, which must be all decodes or all prefills.

        Raises:
            BatchError: requests of both kinds, or prefills that the prefilling builder cannot capture.
        """
        common, split = common_attn_metadata, self._split(common_attn_metadata, cut=True)
        prefilling = self.members[split.prefill_place]
        level = prefilling.get_cudagraph_support(self.config, self.kv_cache_spec)
        if split.prefill and (split.decode or level < AttentionCGSupport.UNIFORM_BATCH):
            limit = f"is past the {self.reorder_batch_threshold} of a decode"
            who = f"{self._backends[split.prefill_place].get_name()} captures {level.name}"
            where = self._backends[split.decode_place].get_name()
            raise BatchError("max_query_len", common.max_query_len, f"{limit} on {where}, and {who}")
        made = self._built("build_for_cudagraph_capture", split, (common,), (common,))
        return self._joined(common, split, *made)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CompositeMetadata:
        """The metadata of a draft step, each part from its builder."""
        split = self._split(common_attn_metadata)
        given = (split.decode, draft_index), (split.prefill, draft_index)
        return self._joined(common_attn_metadata, split, *self._built("build_for_drafting", split, *given))

    def update_block_table(
        self, metadata: CompositeMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CompositeMetadata:
        """`metadata` with another KV group's table and slots, each part with its rows."""
        if not self.supports_update_block_table:
            return super().update_block_table(metadata, blk_table, slot_mapping)
        reqs, tokens = metadata.num_decodes, metadata.num_decode_tokens
        # The slots of a cross layer are of encoder tokens, which no query owns, so both parts have them all.
        first = rest = written = slot_mapping
        if not self._is_cross:
            written = slot_mapping[: metadata.num_actual_tokens]
            if metadata.prefill is not None:
                first, rest = slot_mapping[:tokens], slot_mapping[tokens:]
        given = metadata.decode, blk_table[:reqs], first
        others = metadata.prefill, blk_table[reqs : metadata.num_reqs], rest
        decode, prefill = self._built("update_block_table", metadata, given, others)
        return dataclasses.replace(metadata, slot_mapping=written, decode=decode, prefill=prefill)

    def _split(self, common: CommonAttentionMetadata, *, cut: bool = False) -> StepSplit:
        return self.router.split(common, self.reorder_batch_threshold or 1, self._is_cross, cut=cut)

    def _built(
        self,
        method: str,
        parts: StepSplit | CompositeMetadata,
        decode: tuple[Any, ...],
        prefill: tuple[Any, ...],
    ) -> list[Any]:
        """The result of a method of the builder of each part for these arguments; None for a part without requests."""
        asked = (parts.decode, parts.decode_place, decode), (parts.prefill, parts.prefill_place, prefill)
        return [
            None
            if part is None
            else checked_metadata(self._backends[place], method, getattr(self.members[place], method)(*given))
            for part, place, given in asked
        ]

    def _joined(
        self, common: CommonAttentionMetadata, split: StepSplit, decode: Any, prefill: Any
    ) -> CompositeMetadata:
        tokens, slots = common.num_actual_tokens, common.slot_mapping
        if not self._is_cross and slots.shape[0] > tokens:
            slots = slots[:tokens]
        cut, places = (split.num_reqs, split.num_tokens), (split.decode_place, split.prefill_place)
        return CompositeMetadata(slots, common.num_reqs, tokens, *cut, decode, prefill, *places)


# Cached, because only builders of one class share metadata by `update_block_table`.
@functools.cache
def composite_builder(backend: type[CompositeBackend]) -> type[CompositeMetadataBuilder]:
    """The builder class of a composite; the same each time."""
    builders = {place: member.get_builder_cls() for place, member in backend.members().items()}
    needs = max((each.needs_host_seq_lens for each in builders.values()), key=_BY_PRECISION.index)
    levels = {place: each.cudagraph_support for place, each in builders.items()}
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "backend": backend,
        "supports_update_block_table": all(each.supports_update_block_table for each in builders.values()),
        "needs_host_seq_lens": needs,
        "cudagraph_support": _level(backend, levels),
    }
    # A runtime takes each builder that has these names for one with a workspace.
    if any(hasattr(builder, "get_workspace_buffer") for builder in builders.values()):
        namespace |= {"get_workspace_buffer": _get_workspace, "set_workspace_buffer": _set_workspace}
        namespace["workspace_bytes"] = property(_workspace_bytes)
    return type("CompositeMetadataBuilder", (CompositeMetadataBuilder,), namespace)


def _serving(backend: type[CompositeBackend], kind: StepKind) -> list[str]:
    """The places of the members that serve decodes, or drafts."""
    routed = [(steps, place) for steps, place in backend.places() if steps.kind is kind]
    is_all = any(steps == StepRange(kind) for steps, _ in routed)
    return list(dict.fromkeys([place for _, place in routed] + ([] if is_all else [str(Phase.DECODE)])))


def _level(backend: type[CompositeBackend], levels: Mapping[str, AttentionCGSupport]) -> AttentionCGSupport:
    """The level of a composite whose members have these levels, by place."""
    single = min(levels[place] for place in _serving(backend, StepKind.DECODE))
    drafts = min(levels[place] for place in _serving(backend, StepKind.DRAFT))
    uniform, alone = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return uniform if single >= alone and drafts >= uniform else min(single, alone)


def _users(builder: CompositeMetadataBuilder) -> list[Any]:
    return [each for each in builder.members.values() if hasattr(each, "get_workspace_buffer")]


def _workspace_bytes(self: CompositeMetadataBuilder) -> int:
    """Bytes of the scratch buffer: the largest need of the members."""
    return max(int(user.workspace_bytes) for user in _users(self))


def _get_workspace(self: CompositeMetadataBuilder) -> torch.Tensor:
    """The largest member's scratch buffer, which the others then use too."""
    largest = max(_users(self), key=lambda user: int(user.workspace_bytes))
    buffer: torch.Tensor = largest.get_workspace_buffer()
    for other in _users(self):
        if other is not largest:
            other.set_workspace_buffer(buffer)
    return buffer


def _set_workspace(self: CompositeMetadataBuilder, buffer: torch.Tensor) -> None:
    """Give `buffer` to all members that need scratch."""
    for user in _users(self):
        user.set_workspace_buffer(buffer)
