"""A backend made of two: one prefills, the other decodes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.composite.agreement import (
    common_block_sizes,
    common_layouts,
    composite_options,
    disagreements,
)
from attnplug.core.composite.pair import in_both, make_pair, of_both, said_by
from attnplug.core.dtypes import bare_dtype_name
from attnplug.core.errors import LayoutError, SpecError
from attnplug.core.features import Feature
from attnplug.core.interface.answers import answer, declared, serving_class
from attnplug.core.mla_backend import MLADecodeBackend
from attnplug.core.reasons import Reason
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.core.validation import (
    accepts_blocks,
    depends_on_capability,
    reads_blocks,
    stored_dtypes,
    validate,
)

if TYPE_CHECKING:
    import torch

    from attnplug.core.composite.builder import CompositeMetadataBuilder
    from attnplug.core.composite.impl import CompositeImpl
    from attnplug.core.device import Device


class CompositeBackend(AttentionBackend):
    """Prefills on one backend and decodes on another, on one KV cache; made by `composite_backend`."""

    prefill: ClassVar[type[AttentionBackend]]
    """Serves prefills and extends."""
    decode: ClassVar[type[AttentionBackend]]
    """Serves decodes, and writes the KV cache in both phases."""

    @classmethod
    def members(cls) -> Mapping[Phase, type[AttentionBackend]]:
        """The backend of each phase."""
        return {Phase.PREFILL: cls.prefill, Phase.DECODE: cls.decode}

    @classmethod
    def for_layer(cls, spec: LayerSpec) -> type[AttentionBackend]:
        """With latent attention, the decoding member with the other for its expanded prefill."""
        decode = serving_class(cls.decode, spec)
        if spec.mla is None or spec.sparse is not None or not issubclass(decode, MLADecodeBackend):
            return cls
        return decode.with_prefill(serving_class(cls.prefill, spec.expanded()))

    @classmethod
    def get_impl_cls(cls) -> type[CompositeImpl]:
        """A CompositeImpl of the members' impls; imports both."""
        from attnplug.core.composite.impl import composite_impl

        return composite_impl(cls.prefill, cls.decode)

    @classmethod
    def get_builder_cls(cls) -> type[CompositeMetadataBuilder]:
        """A CompositeMetadataBuilder of the members' builders; imports both."""
        from attnplug.core.composite.builder import composite_builder

        return composite_builder(cls.prefill, cls.decode)

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """The member's own priority in its phase; the mean of both if `phase` is None."""
        asked = [Phase(phase)] if phase is not None else list(Phase)
        found: list[int] = [answer(cls.members()[each], "get_priority", spec, device, each) for each in asked]
        return sum(found) // len(found)

    # Limits: the intersection of both members

    @classmethod
    def _both_answer(cls, hook: str, value: object) -> bool:
        return all(answer(member, hook, value) for member in cls.members().values())

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """Head sizes that both serve."""
        one, other = (answer(member, "get_supported_head_sizes") for member in cls.members().values())
        return MultipleOf.common(one, other) if one and other else one or other

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether both serve it."""
        return cls._both_answer("supports_head_size", head_size)

    @classmethod
    def supports_dtype(cls, dtype: object) -> bool:
        """Whether both serve it."""
        return cls._both_answer("supports_dtype", dtype)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether both accept it, where a method of their own decides."""
        members = cls.members().values()
        return block_size is None or all(accepts_blocks(member, block_size) for member in members)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """Tokens per page that both can read."""
        return common_block_sizes(cls.prefill, cls.decode, spec, device)

    @classmethod
    def get_preferred_block_size(
        cls, spec: LayerSpec | None = None, device: Device | None = None, default: int = 16
    ) -> int:
        """The decoding member's, else the other's, else the nearest that both can read."""
        for member in (cls.decode, cls.prefill):
            size: int = answer(member, "get_preferred_block_size", spec, device, default)
            if reads_blocks(cls, size, spec, device):
                return size
        return super().get_preferred_block_size(spec, device, default)

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType) -> bool:
        """Whether both serve it, and its keys are in pages: decoders and cross attention."""
        has_pages = attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        return has_pages and cls._both_answer("supports_attn_type", attn_type)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Each member's objection, with the member's name."""
        members = cls.members().values()
        found = ((member, answer(member, "supports_combination", spec, device)) for member in members)
        return "; ".join(f"{answer(member, 'get_name')}: {why}" for member, why in found if why) or None

    @classmethod
    def validate_configuration(
        cls, spec: LayerSpec, device: Device, phase: Phase | None = None
    ) -> list[Reason]:
        """Each member's reasons in its phase, with its name, then the reasons why they cannot share a cache."""
        serving = serving_class(cls, spec)
        if serving is not cls:
            return serving.validate_configuration(spec, device, phase)
        causes: dict[tuple[str, str | None], dict[str, Reason]] = {}
        for own, member in cls.members().items():
            if phase is None or own == phase:
                who = f"{own} on {answer(member, 'get_name')}"
                for reason in answer(member, "validate_configuration", spec, device, own):
                    causes.setdefault((reason.code, reason.field), {})[who] = reason
        reasons = [said_by(members) for members in causes.values()]
        shared = disagreements(cls.prefill, cls.decode, spec, device)
        for reason in (*shared, *validate(cls, spec, device, phase)):
            if (reason.code, reason.field) not in causes:
                causes[reason.code, reason.field] = {}
                reasons.append(reason)
        return reasons

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """Both members' keys; None where neither compiles."""
        keys = tuple(answer(member, "compile_key", spec) for member in cls.members().values())
        return None if keys == (None, None) else keys

    # KV cache: both members agree, so the decoding member answers

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype: str = "auto",
        head_size_v: int | None = None,
    ) -> tuple[int, ...]:
        """The members' shape."""
        sizes = num_blocks, block_size, num_kv_heads, head_size, cache_dtype, head_size_v
        shape: tuple[int, ...] = answer(cls.decode, "get_kv_cache_shape", *sizes)
        return shape

    @classmethod
    def split_kv(cls, kv_cache: torch.Tensor, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as both members see them."""
        return cls.decode.split_kv(kv_cache, spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Sequence[str]:
        """Physical orders that both can read."""
        return common_layouts(cls.prefill, cls.decode)

    @classmethod
    def get_kv_cache_stride_order(
        cls,
        include_num_layers_dimension: bool = False,
        *,
        layout: str | None = None,
        spec: LayerSpec | None = None,
    ) -> tuple[int, ...]:
        """The members' order.

        Raises:
            LayoutError: a `layout` that one of them cannot read.
        """
        layouts = common_layouts(cls.prefill, cls.decode)
        chosen = layout or next(iter(layouts), None)
        if chosen not in layouts:
            limit = f"must be one that both halves of {cls.get_name()} read: {', '.join(layouts) or 'none'}"
            raise LayoutError("layout", layout, limit)
        hook = "get_kv_cache_stride_order"
        order: tuple[int, ...] = answer(
            cls.decode, hook, include_num_layers_dimension, layout=chosen, spec=spec
        )
        return order


def composite_backend(
    prefill: type[AttentionBackend], decode: type[AttentionBackend]
) -> type[AttentionBackend]:
    """The backend "PREFILL+DECODE", always the same class; one backend given twice is returned as it is.

    It serves layers with pages if each member serves its phase and both can share the cache, and refuses
    all others with reasons. A composite given as a member contributes its half for that phase.
    """
    for name, given in (("prefill", prefill), ("decode", decode)):
        if not (isinstance(given, type) and issubclass(given, AttentionBackend)):
            raise SpecError(name, given, "must be a subclass of AttentionBackend")
    first = prefill.prefill if issubclass(prefill, CompositeBackend) else prefill
    second = decode.decode if issubclass(decode, CompositeBackend) else decode
    return first if first is second else _composed(first, second)


# Cached, because selections and plans compare classes by identity.
@functools.cache
def _composed(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> type[CompositeBackend]:
    pair = (prefill, decode)
    members = {Phase.PREFILL: prefill, Phase.DECODE: decode}
    name = "+".join(answer(each, "get_name") for each in pair)
    dtypes = (
        [bare_dtype_name(each, "supported_dtypes") for each in found]
        for found in of_both("supported_dtypes", *pair)
    )
    served = operator.and_(*of_both("features", *pair))
    attributes: dict[str, Any] = {
        "decode": decode,
        "supported_dtypes": in_both(*dtypes),
        "supported_kv_cache_dtypes": in_both(*map(stored_dtypes, pair)),
        "supported_phases": tuple(
            p for p, each in members.items() if p in declared(each, "supported_phases")
        ),
        "features": Feature(sum(flag.value for flag in served if flag.ask.per_request)),
        "supported_sparse_kinds": in_both(*of_both("supported_sparse_kinds", *pair)),
        # Prompts and decodes of two backends have other bits, so a row depends on which half computes it.
        "supported_invariances": tuple(
            word for word in in_both(*of_both("supported_invariances", *pair)) if word != "rows"
        ),
        "serves_dense": all(of_both("serves_dense", *pair)),
        "Options": composite_options(name, members),
    }
    if any(map(depends_on_capability, pair)):

        def supports(cls: type[CompositeBackend], capability: Any) -> bool:
            return cls._both_answer("supports_compute_capability", capability)

        attributes["supports_compute_capability"] = classmethod(supports)
    doc = "Prefills on {prefill} and decodes on {decode}."
    made: type[CompositeBackend] = make_pair(_composed, *pair, CompositeBackend, name, doc, **attributes)
    return made
