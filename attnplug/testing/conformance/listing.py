"""The list of all checks, which every entry point of the kit runs."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.features import Feature
from attnplug.core.mla.backend import MLADecodeBackend
from attnplug.core.spec import LayerSpec
from attnplug.core.state.dims import StateDims
from attnplug.registry.default import get_registry
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.plugins.options import build_options
from attnplug.registry.plugins.waiting import describe, guarded_call
from attnplug.testing.conformance.builders import (
    builder_inputs,
    builders,
    kv_group_builds,
    layer_state,
    step_machine,
    step_members,
)
from attnplug.testing.conformance.calls import after_unusual_steps, engine_tensors, inputs, outputs
from attnplug.testing.conformance.check import Check, ConformanceError, Level
from attnplug.testing.conformance.declared import (
    acceptance,
    attributes,
    declared_values,
    options,
    pages,
    refusals,
    stable_answers,
)
from attnplug.testing.conformance.numbers import (
    cache_layouts,
    cache_reads,
    cache_writes,
    common_prefix,
    correctness,
    invariance,
    kv_formats,
    merging,
    requests,
    sparse_selections,
)
from attnplug.testing.conformance.process import lightness, process_memory, process_state
from attnplug.testing.conformance.serving import context_parallel, forests, gpu, runtimes, serving
from attnplug.testing.conformance.states import state_checks
from attnplug.testing.conformance.target import Target, latent_dims, layer_fields

GROUPS: Mapping[Callable[[Target], Iterator[Check]], bool] = {
    # The first, because a backend may change the process once, when its parts are first asked for.
    process_state.kept_checks: True,
    process_state.checks: False,
    attributes.checks: False,
    stable_answers.checks: False,
    pages.checks: True,
    attributes.interface_checks: False,
    lightness.checks: False,
    refusals.checks: True,
    refusals.limit_checks: False,
    acceptance.checks: False,
    declared_values.checks: True,
    declared_values.untested_checks: False,
    options.checks: False,
    inputs.checks: True,
    inputs.misfit_checks: True,
    cache_writes.engine_scale_checks: False,
    outputs.checks: True,
    outputs.quantised_output_checks: False,
    engine_tensors.checks: False,
    gpu.capture_checks: False,
    layer_state.unlike_layer_checks: False,
    after_unusual_steps.checks: False,
    cache_writes.checks: True,
    cache_writes.scale_checks: False,
    cache_reads.checks: True,
    cache_layouts.checks: True,
    cache_layouts.far_offset_checks: True,
    kv_formats.checks: False,
    requests.checks: True,
    serving.checks: False,
    correctness.checks: True,
    invariance.checks: True,
    builders.checks: True,
    builder_inputs.checks: True,
    builder_inputs.host_copy_checks: False,
    layer_state.checks: False,
    step_machine.checks: True,
    step_members.checks: True,
    process_memory.checks: True,
    process_memory.output_checks: False,
    common_prefix.checks: False,
    sparse_selections.checks: True,
    kv_group_builds.checks: True,
    builders.isolation_checks: True,
    merging.checks: True,
    context_parallel.checks: True,
    context_parallel.rank_checks: False,
    forests.checks: False,
    runtimes.checks: True,
    gpu.checks: True,
    gpu.graph_checks: True,
    state_checks.checks: True,
}
"""Functions that list the checks of a target, always the same in the same order.

Of classes that serve other layers under the backend's name, those with True are listed: the others check what the
backend declares for all its layers, or its process.
"""
STATE_GROUPS: tuple[Callable[[Target], Iterator[Check]], ...] = (
    attributes.checks,
    stable_answers.checks,
    attributes.interface_checks,
    lightness.checks,
    refusals.checks,
    state_checks.checks,
)
"""The functions for a class that serves layers with a state, and so no attention."""
# The area, the first word of all ids, of groups that search for their checks.
_SLOW_TO_LIST: dict[Callable[[Target], Iterator[Check]], str] = {correctness.checks: "correct"}


def conformance_checks(
    backend: type[AttentionBackend],
    *,
    device: DeviceLike = None,
    level: Level | str = Level.SMOKE,
    only: Iterable[str] = ("*",),
    options: Any = None,
) -> list[Check]:
    """Every check of `backend` on a device of this machine, always the same in the same order.

    Args:
        backend: the class.
        device: as `attnplug.select` takes it; default the current one.
        level: "smoke" or "full".
        only: patterns of the ids that are wanted. Groups that are slow to list are left out if none of theirs is
            wanted; other checks are listed even if they match no pattern.
        options: a mapping or an instance of the backend's `Options`, with which its layers are made; default the
            defaults.

    Raises:
        SpecError: an unknown level or device.
        PolicyError: options that the backend does not have, or refuses.
    """
    chosen = None if options is None else build_options(backend, options)
    return target_checks(Target(backend, resolve_device(device), Level.read(level), chosen), only)


def target_checks(target: Target, only: Iterable[str] = ("*",)) -> list[Check]:
    """As `conformance_checks`, of a target."""
    areas = {pattern.partition("/")[0] if "/" in pattern else "*" for pattern in only}

    def may_be_wanted(area: str) -> bool:
        # A group that cannot be listed has one check, "listed/GROUP".
        return "listed" in areas or any(fnmatch.fnmatch(area, each) for each in areas)

    groups = [each for each in GROUPS if each not in _SLOW_TO_LIST or may_be_wanted(_SLOW_TO_LIST[each])]
    groups = [group for group in groups if _is_for(group, target)]
    checks = [check for group in groups for check in list_group(group, target)]
    for prefix, other in _other_targets(target).items():
        if may_be_wanted(prefix):
            of_class = [group for group, is_of_all in GROUPS.items() if is_of_all and _is_for(group, other)]
            named = (check for group in of_class for check in list_group(group, other))
            checks += [dataclasses.replace(check, id=f"{prefix}/{check.id}") for check in named]
    return checks


def _is_for(group: Callable[[Target], Iterator[Check]], target: Target) -> bool:
    """Whether a group is for the layers of a target: those with a state have groups of their own."""
    has_states, _ = guarded_call(lambda: Feature.STATE in target.backend.features)
    return group in STATE_GROUPS if has_states else group is not state_checks.checks


_REFERENCE = "TORCH"
_OTHER_LAYERS = {
    "mla": LayerSpec(num_heads=4, **layer_fields({"mla": latent_dims((512, 64), 128, 128)})),
    "state": LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=128, state=StateDims(rule="delta", decay="head")
    ),
}
"""Layers that another class may serve under a backend's name, by the first word of the ids of its checks."""


def _other_targets(target: Target) -> Mapping[str, Target]:
    """The other classes to check, by the first word of their ids: those that `for_layer` gives for _OTHER_LAYERS."""
    # A backend that only decodes latents is checked with expanded prefills on
    # TORCH too, as "mla+TORCH": its decodes are then parts of mixed steps.
    backend, found = target.backend, {}
    for name, layer in _OTHER_LAYERS.items():
        serving, error = guarded_call(backend.for_layer, layer)
        if error is not None or not issubclass(serving, AttentionBackend):
            continue
        if layer.required_features() & ~serving.features:
            continue
        if issubclass(serving, MLADecodeBackend) and serving.prefill is None:
            reference = get_registry().backends().get(_REFERENCE)
            if reference is not None and target.device.type in reference.device_types:
                bound = serving.with_prefill(reference.for_layer(layer.expanded()))
                found[f"{name}+{_REFERENCE}"] = dataclasses.replace(target, backend=bound)
        elif serving is not backend:
            found[name] = dataclasses.replace(target, backend=serving)
    return found


def list_group(group: Callable[[Target], Iterator[Check]], target: Target) -> list[Check]:
    """The checks of one group; if the backend's declarations cannot be read, one check that fails with the cause."""
    found, error = guarded_call(lambda: list(group(target)))
    if error is None:
        return list(found)
    name = (
        group.__module__.rpartition(".")[2]
        if group.__name__ == "checks"
        else group.__name__.removesuffix("_checks")
    )

    def run() -> None:
        raise ConformanceError(
            f"no check can be listed: reading the declarations raised {describe(error)}"
        ) from error

    return [Check(f"listed/{name}", run, f"the declarations that the checks of {name} need can be read")]
