"""What a backend declares and this machine cannot try is reported, not passed over."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug.core.features import Feature
from attnplug.core.interface.signatures import overrides
from attnplug.core.metadata import AttentionCGSupport
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.cases.steps import decode_lengths, layer_kinds, layer_of_kind, step_factory
from attnplug.testing.conformance.check import Check, CheckSkipped, CheckUntested
from attnplug.testing.conformance.declared.claims import block_sizes, head_sizes
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.target import GPU_TYPES, Target


def checks(target: Target) -> Iterator[Check]:
    """One check for each declaration that needs another machine, or more time; each raises CheckUntested."""
    backend, here = target.backend, target.device
    if others := [kind for kind in dict.fromkeys(backend.device_types) if kind != here.type]:
        what = f"{'device types' if len(others) > 1 else 'device type'} {', '.join(others)}"
        yield _untested("device-types", what, f"this run is on {here}")
    # Requirements that are not installed, because an alternative to them is.
    groups = [entry for entry in target.backend.requires if isinstance(entry, tuple)]
    for name in (name for group in groups for name in group if missing_requirements((name,))):
        yield _untested(f"requires-{name}", f"alternative requirement {name}", "it is not installed")
    for field, listed, tried in (
        ("head_size", target.head_sizes, head_sizes(target)),
        ("block_size", target.block_sizes, block_sizes(target)),
    ):
        if more := len(listed) - len(tried):
            why = f"level {target.level} tries {len(tried)} of the {len(listed)} that are listed"
            yield _untested(f"{field}-others", f"{more} values of {field}", why)
    impl, _ = guarded_call(backend.get_impl_cls)
    if Feature.LSE not in backend.features and getattr(impl, "can_return_lse_for_decode", False):
        yield _untested("can_return_lse_for_decode", "can_return_lse_for_decode", "features has no LSE")
    if here.type in GPU_TYPES:
        return
    if backend.step_safe:
        yield _untested("step_safe", "step_safe", f"it is about GPUs, and this run is on {here}")
    builder, _ = guarded_call(backend.get_builder_cls)
    level = getattr(builder, "cudagraph_support", None)
    declares = isinstance(level, AttentionCGSupport) and level > 0
    if builder is not None and (declares or overrides(builder, "get_cudagraph_support")):
        summary = "the declared support of CUDA graphs is tried on a GPU"
        yield Check.of("declared/cudagraph_support", summary, _check_graphs, target)


def _untested(name: str, what: str, why: str) -> Check:
    return Check.of(
        f"declared/{name}", f"another run tries the declared {what}", _raise_untested, f"{what}: {why}"
    )


def _raise_untested(text: str) -> None:
    raise CheckUntested(text)


def _check_graphs(target: Target) -> None:
    levels = []
    for kind in layer_kinds(target):
        try:
            spec, size = layer_of_kind(target, kind)
        except CheckSkipped:
            continue
        builder = Harness.of(target, step_factory(target, spec, decode_lengths(size))()).builder
        levels.append(builder.get_cudagraph_support(builder.config, builder.kv_cache_spec))
    most = max(levels, default=AttentionCGSupport.NEVER)
    if most > AttentionCGSupport.NEVER:
        raise CheckUntested(f"CUDA graphs ({most.name}): they need a GPU, and this run is on {target.device}")
