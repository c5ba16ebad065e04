"""The classes that serve latent attention under a backend's name, which the kit checks too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attnplug.core.backend import AttentionBackend
from attnplug.core.features import Feature
from attnplug.core.mla_backend import MLADecodeBackend
from attnplug.core.spec import LayerSpec
from attnplug.registry.default import get_registry
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.latent_sizes import fields_of
from attnplug.testing.conformance.target import Target

_REFERENCE = "TORCH"


def latent_targets(target: Target) -> Mapping[str, Target]:
    """By the first word of their ids, other classes to check: at most one.

    "mla" is the class that `for_layer` gives for latent attention. A backend that only decodes latents is checked
    with expanded prefills on TORCH too, as "mla+TORCH": its decodes are then parts of mixed steps.
    """
    backend = target.backend
    layer = LayerSpec(num_heads=4, **fields_of((512, 64), 128, 128))
    serving, error = guarded_call(backend.for_layer, layer)
    if error is not None or not issubclass(serving, AttentionBackend) or Feature.MLA not in serving.features:
        return {}
    if issubclass(serving, MLADecodeBackend) and serving.prefill is None:
        reference = get_registry().backends().get(_REFERENCE)
        if reference is None or target.device.type not in reference.device_types:
            return {}
        bound = serving.with_prefill(reference.for_layer(layer.expanded()))
        return {f"mla+{_REFERENCE}": dataclasses.replace(target, backend=bound)}
    return {} if serving is backend else {"mla": dataclasses.replace(target, backend=serving)}
