"""A backend made of several: one prefills, another decodes, and routes give ranges of steps to one of them."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.composite.agreement import (
    common_block_sizes,
    common_layouts,
    composite_options,
    declared_by,
    disagreements,
)
from attnplug.core.composite.latents import bind_prefill, latent_halves
from attnplug.core.composite.pair import Routes, in_each, make_pair, members_of, of_each, said_by
from attnplug.core.composite.steps import StepKind, StepRange, join_routes
from attnplug.core.errors import LayoutError, SpecError
from attnplug.core.features import Feature
from attnplug.core.interface.answers import answer, declared, serving_class
from attnplug.core.reasons import Reason
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.core.validation import accepts_blocks, reads_blocks, validate

if TYPE_CHECKING:
    import torch

    from attnplug.core.composite.builder import CompositeMetadataBuilder
    from attnplug.core.composite.impl import CompositeImpl
    from attnplug.core.device import Device


class CompositeBackend(AttentionBackend):
    """Prefills on one backend and decodes on another, on one KV cache; made by `composite_backend`.

    A step that one of `routes` has runs whole on the member of that route. A mixed step that none has is cut, and the
    routes of decodes and of prefills then choose for its parts.
    """

    prefill: ClassVar[type[AttentionBackend]]
    """Serves prefills and extends."""
    decode: ClassVar[type[AttentionBackend]]
    """Serves decodes, and writes the KV cache in both phases."""
    is_latent: ClassVar[bool] = False
    """Whether its members decode latents, each with the expanded prefill of one half."""
    routes: ClassVar[Routes] = ()
    """Ranges of steps, each with the member that serves them; the first that has a step decides."""

    @classmethod
    def members(cls) -> Mapping[str, type[AttentionBackend]]:
        """The backend of each phase, then the others that routes name, as "third" and so on."""
        halves: dict[str, type[AttentionBackend]] = {Phase.PREFILL: cls.prefill, Phase.DECODE: cls.decode}
        _, *others = members_of(cls.prefill, cls.decode, cls.routes)
        thirds = (each for each in others if each is not cls.decode)
        return halves | dict(zip(_PLACES, thirds, strict=False))

    @classmethod
    def places(cls) -> tuple[tuple[StepRange, str], ...]:
        """The ranges of `routes`, each with the place in `members` of the one that serves it."""
        return tuple((steps, cls._place(member, steps.kind)) for steps, member in cls.routes)

    @classmethod
    def served_phases(cls) -> Mapping[str, tuple[Phase | None, ...]]:
        """By place in `members`, the phases that the member serves; None for steps of both."""
        found: dict[str, dict[Phase | None, None]] = {place: {} for place in cls.members()}
        found[Phase.PREFILL][Phase.PREFILL] = found[Phase.DECODE][Phase.DECODE] = None
        for steps, place in cls.places():
            found[place][steps.kind.phase] = None
        # A member that serves both phases has mixed steps too: they are cut only between two members.
        return {
            place: (None,) if None in phases or len(phases) > 1 else tuple(phases)
            for place, phases in found.items()
        }

    @classmethod
    def _place(cls, member: type[AttentionBackend], kind: StepKind) -> str:
        own = Phase.PREFILL if kind.phase is not Phase.DECODE else Phase.DECODE
        places = (own, *cls.members())
        return next(place for place in places if cls.members()[place] is member)

    @classmethod
    def full_name(cls) -> str:
        """The name with its routes, by which a registry finds the class: "A+B[draft on A]"."""
        halves = "+".join(answer(each, "get_name") for each in (cls.prefill, cls.decode))
        return join_routes(halves, tuple((steps, answer(each, "get_name")) for steps, each in cls.routes))

    @classmethod
    def for_layer(cls, spec: LayerSpec) -> type[AttentionBackend]:
        """With latent attention, the decoding members with the prefilling half for their expanded prefill."""
        if spec.mla is None or spec.sparse is not None or cls.is_latent:
            return cls
        halves = latent_halves(cls.prefill, cls.decode, cls.routes, spec)
        if halves is None:
            return cls
        prefill, decode, routes = halves
        return _latents(*halves, cls.get_name()) if routes else bind_prefill(decode, prefill)

    @classmethod
    def get_impl_cls(cls) -> type[CompositeImpl]:
        """A CompositeImpl of the members' impls; imports both."""
        from attnplug.core.composite.impl import composite_impl

        return composite_impl(cls)

    @classmethod
    def get_builder_cls(cls) -> type[CompositeMetadataBuilder]:
        """A CompositeMetadataBuilder of the members' builders; imports both."""
        from attnplug.core.composite.builder import composite_builder

        return composite_builder(cls)

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """The member's own priority in its phase; the mean of both if `phase` is None."""
        asked = [Phase(phase)] if phase is not None else list(Phase)
        found: list[int] = [answer(cls.members()[each], "get_priority", spec, device, each) for each in asked]
        return sum(found) // len(found)

    # Limits: the intersection of all members

    @classmethod
    def _both_answer(cls, hook: str, value: object) -> bool:
        return all(answer(member, hook, value) for member in cls.members().values())

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """Head sizes that all serve."""
        found = (answer(member, "get_supported_head_sizes") for member in cls.members().values())
        limited = [sizes for sizes in found if sizes]
        return functools.reduce(MultipleOf.common, limited) if limited else ()

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether all serve it."""
        return cls._both_answer("supports_head_size", head_size)

    @classmethod
    def supports_dtype(cls, dtype: object) -> bool:
        """Whether all serve it."""
        return cls._both_answer("supports_dtype", dtype)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether all accept it, where a method of their own decides."""
        members = cls.members().values()
        return block_size is None or all(accepts_blocks(member, block_size) for member in members)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """Tokens per page that all can read."""
        return common_block_sizes(cls.prefill, cls.decode, spec, device, others=cls._others())

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
        """Whether all serve it, and its keys are in pages: decoders and cross attention."""
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
        """Each member's reasons in its phases, with its name, then the reasons why they cannot share a cache."""
        serving = serving_class(cls, spec)
        if serving is not cls:
            return serving.validate_configuration(spec, device, phase)
        causes: dict[tuple[str, str | None], dict[str, Reason]] = {}
        members = cls.members()
        for place, phases in cls.served_phases().items():
            for own in phases:
                if phase is None or own in (None, phase):
                    who = f"{own or 'all steps'} on {answer(members[place], 'get_name')}"
                    for reason in answer(members[place], "validate_configuration", spec, device, own):
                        causes.setdefault((reason.code, reason.field), {})[who] = reason
        reasons = [said_by(found) for found in causes.values()]
        shared = [
            reason
            for other in (cls.prefill, *cls._others())
            for reason in (disagreements(other, cls.decode, spec, device) if other is not cls.decode else ())
        ]
        for reason in (*shared, *validate(cls, spec, device, phase)):
            if (reason.code, reason.field) not in causes:
                causes[reason.code, reason.field] = {}
                reasons.append(reason)
        return reasons

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """All members' keys; None where none compiles."""
        keys = tuple(answer(member, "compile_key", spec) for member in cls.members().values())
        return None if set(keys) == {None} else keys

    @classmethod
    def _others(cls) -> tuple[type[AttentionBackend], ...]:
        """The members that are neither half."""
        return tuple(each for place, each in cls.members().items() if place in _PLACES)

    # KV cache: all members agree, so the decoding member answers

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
        """Physical orders that all can read."""
        return common_layouts(cls.prefill, cls.decode, cls._others())

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
        layouts = common_layouts(cls.prefill, cls.decode, cls._others())
        chosen = layout or next(iter(layouts), None)
        if chosen not in layouts:
            limit = f"must be one that both halves of {cls.get_name()} read: {', '.join(layouts) or 'none'}"
            raise LayoutError("layout", layout, limit)
        hook = "get_kv_cache_stride_order"
        order: tuple[int, ...] = answer(
            cls.decode, hook, include_num_layers_dimension, layout=chosen, spec=spec
        )
        return order


_PLACES = ("third", "fourth", "fifth", "sixth")
"""The places of members that are neither half."""


def composite_backend(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], routes: Routes = ()
) -> type[AttentionBackend]:
    """The backend "PREFILL+DECODE", always the same class; one backend given twice, without routes, is returned as it is.

    It serves layers with pages if each member serves its steps and all can share the cache, and refuses
    all others with reasons. A composite given as a half contributes its half for that phase.

    Args:
        prefill: serves prefills and extends.
        decode: serves decodes, and writes the KV cache.
        routes: ranges of steps that another member serves, or a half that is not of their phase; the first that has
            a step decides. Results of a row then depend on the step, so no invariance of batches is kept.

    Raises:
        SpecError: an argument of another type, or more than four members beside the halves.
    """
    routes = tuple(routes)
    given = [("prefill", prefill), ("decode", decode), *(("routes", member) for _, member in routes)]
    for name, each in given:
        if not (isinstance(each, type) and issubclass(each, AttentionBackend)):
            raise SpecError(name, each, "must be a subclass of AttentionBackend")
    for steps, member in routes:
        if not isinstance(steps, StepRange):
            raise SpecError("routes", steps, "must be pairs of a StepRange and a backend")
        if issubclass(member, CompositeBackend):
            raise SpecError("routes", answer(member, "get_name"), "is a composite: name one of its members")
    first = prefill.prefill if issubclass(prefill, CompositeBackend) else prefill
    second = decode.decode if issubclass(decode, CompositeBackend) else decode
    if first is second and not routes:
        return first
    if len(members_of(first, second, routes)) > 2 + len(_PLACES):
        raise SpecError("routes", len(routes), f"name more than {len(_PLACES)} members beside the halves")
    # Without routes in as few arguments as a reference of older pickles has, because the cache compares them.
    return _composed(first, second, routes) if routes else _composed(first, second)


# Cached, because selections and plans compare classes by identity.
@functools.cache
def _composed(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], routes: Routes = ()
) -> type[CompositeBackend]:
    every = members_of(prefill, decode, routes)
    pair = (prefill, decode)
    name = "+".join(answer(each, "get_name") for each in (*pair, *every[len(set(pair)) :]))
    attributes = declared_by(every, routes)
    served: Feature = attributes["features"]
    attributes |= {
        "decode": decode,
        "supported_phases": tuple(
            phase
            for phase, each in zip((Phase.PREFILL, Phase.DECODE), pair, strict=True)
            if phase in declared(each, "supported_phases")
        ),
        "features": Feature(sum(flag.value for flag in served if flag.ask.per_request)),
    }
    doc = "Prefills on {prefill} and decodes on {decode}."
    if routes:
        doc += " " + " ".join(
            f"{steps.words.capitalize()} run on {answer(each, 'get_name')}." for steps, each in routes
        )
    made: type[CompositeBackend]
    made = make_pair(_composed, *pair, CompositeBackend, name, doc, routes, **attributes)
    made.Options = composite_options(name, made.members())
    return made


def latent_composite(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], routes: Routes
) -> type[CompositeBackend]:
    """The composite of classes that decode latents, and of one that attends expanded keys: `for_layer` with routes."""
    names = [answer(each, "get_name") for each in (prefill, decode)]
    others = (answer(member, "get_name") for _, member in routes)
    name = "+".join((*names, *dict.fromkeys(each for each in others if each not in names)))
    return _latents(prefill, decode, routes, name)


# Cached, because `for_layer` must give the same class each time.
@functools.cache
def _latents(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], routes: Routes, name: str
) -> type[CompositeBackend]:
    half = bind_prefill(decode, prefill)
    own = tuple((steps, bind_prefill(member, prefill)) for steps, member in routes)
    every = members_of(half, half, own)
    attributes: dict[str, Any] = {
        **declared_by(every, own),
        "is_latent": True,
        "prefill": half,
        "decode": half,
        "supported_phases": tuple(Phase),
        "device_types": in_each(*of_each("device_types", every)),
    }
    # A sparse layer is served by a class of its own, which decodes each query.
    attributes["features"] &= ~(Feature.SPARSE | Feature.INVARIANCE)
    doc = "Decodes latents on {decode} and prefills expanded K and V on {prefill}; routes give decodes to others."
    made: type[CompositeBackend]
    made = make_pair(latent_composite, prefill, decode, CompositeBackend, name, doc, routes, **attributes)
    made.Options = composite_options(name, made.members())
    return made
