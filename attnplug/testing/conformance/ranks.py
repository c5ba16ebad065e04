"""An impl knows the context-parallel groups that from_spec was given, or refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnplug.core.context_parallel import ContextParallel
from attnplug.registry.plugins.waiting import describe
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.harness import make_impl
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors

_FLAGS = {"dcp": "can_return_lse_for_decode", "pcp": "supports_pcp"}
_GROUP = ContextParallel(3, 1)


def checks(target: Target) -> Iterator[Check]:
    """One check for each kind of group."""
    for field in _FLAGS:
        summary = f"an impl knows its rank in the group {field}, or refuses the group"
        yield Check.of(f"context_parallel/ranks-{field}", summary, _check_ranks, target, field)


def _check_ranks(target: Target, field: str) -> None:
    backend, flag, given = target.backend, _FLAGS[field], f"{field}={_GROUP}"
    spec = target.spec()
    shared: dict[str, Any] = {field: _GROUP, "options": target.own_options}
    try:
        impl = make_impl(backend, spec, layer_tensors(spec, device=target.torch_device), **shared)
    except Exception as problem:
        if getattr(backend.get_impl_cls(), flag):
            raise ConformanceError(
                f"from_spec refuses {given}, though {flag} is True: {describe(problem)}"
            ) from problem
        return
    wanted: dict[str, Any] = {f"{field}_world_size": _GROUP.size, f"{field}_rank": _GROUP.rank}
    if field == "dcp":
        wanted["need_to_return_lse_for_decode"] = True
    for name, value in wanted.items():
        if (found := getattr(impl, name, None)) != value:
            raise ConformanceError(
                f"from_spec was given {given}, and impl.{name} is {found!r}, not {value!r}: "
                f"pass {field} on to super().from_spec, or refuse the group with a SpecError"
            )
