"""The halves and routes of a composite for layers of latent attention: decoding classes, and one that prefills for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core.composite.steps import StepKind
from attnplug.core.interface.answers import serving_class
from attnplug.core.mla.backend import MLADecodeBackend

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.composite.pair import Routes
    from attnplug.core.spec import LayerSpec

_DECODED = (StepKind.DECODE, StepKind.DRAFT)


def latent_halves(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], routes: Routes, spec: LayerSpec
) -> tuple[type[AttentionBackend], type[AttentionBackend], Routes] | None:
    """The classes that serve a layer of latents for a composite's halves and routes; None if they do not decode latents.

    The first attends expanded K and V, and the others decode. Prefills are of one backend, so routes of prefills or of
    mixed steps give None.
    """
    decodes = serving_class(decode, spec)
    own = tuple((steps, serving_class(member, spec)) for steps, member in routes)
    every = (decodes, *(member for _, member in own))
    if not all(issubclass(each, MLADecodeBackend) for each in every):
        return None
    if any(steps.kind not in _DECODED for steps, _ in own):
        return None
    return serving_class(prefill, spec.expanded()), decodes, own


def bind_prefill(decode: type[AttentionBackend], prefill: type[AttentionBackend]) -> type[AttentionBackend]:
    """A class that decodes latents with `prefill` for expanded K and V; any other as it is."""
    return decode.with_prefill(prefill) if issubclass(decode, MLADecodeBackend) else decode
