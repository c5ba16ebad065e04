"""The class of a composite for layers of latent attention: decoding members, each with the expanded prefill of one half."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from attnplug.core.composite.agreement import composite_options
from attnplug.core.composite.backend import CompositeBackend, declared_by
from attnplug.core.composite.pair import Routes, in_each, make_pair, members_of, of_each
from attnplug.core.composite.steps import StepKind
from attnplug.core.features import Feature
from attnplug.core.interface.answers import answer, serving_class
from attnplug.core.mla.backend import MLADecodeBackend
from attnplug.core.spec import Phase

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.spec import LayerSpec

_DECODED = (StepKind.DECODE, StepKind.DRAFT)


def latent_class(backend: type[CompositeBackend], spec: LayerSpec) -> type[AttentionBackend] | None:
    """The class that serves a layer of latents under a composite's name; None if its members do not decode latents.

    Without routes it is the decoding half with the other for its expanded prefill. With routes, that class serves all
    steps but those of the routes, whose members decode them. Prefills are of one backend, so routes of other kinds
    give no class.
    """
    decode = serving_class(backend.decode, spec)
    routes = tuple((steps, serving_class(member, spec)) for steps, member in backend.routes)
    every = (decode, *(member for _, member in routes))
    if not all(issubclass(each, MLADecodeBackend) for each in every):
        return None
    if any(steps.kind not in _DECODED for steps, _ in routes):
        return None
    prefill = serving_class(backend.prefill, spec.expanded())
    if routes:
        return _latents(prefill, decode, routes, backend.get_name())
    return _bound(decode, prefill)


def _bound(decode: type[AttentionBackend], prefill: type[AttentionBackend]) -> type[AttentionBackend]:
    return decode.with_prefill(prefill) if issubclass(decode, MLADecodeBackend) else decode


def latent_composite(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], routes: Routes
) -> type[CompositeBackend]:
    """The class of `latent_class` for classes that decode latents and one that attends expanded keys."""
    names = [answer(each, "get_name") for each in (prefill, decode)]
    others = (answer(member, "get_name") for _, member in routes)
    name = "+".join((*names, *dict.fromkeys(each for each in others if each not in names)))
    return _latents(prefill, decode, routes, name)


# Cached, because `for_layer` must give the same class each time.
@functools.cache
def _latents(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], routes: Routes, name: str
) -> type[CompositeBackend]:
    half = _bound(decode, prefill)
    own = tuple((steps, _bound(member, prefill)) for steps, member in routes)
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
