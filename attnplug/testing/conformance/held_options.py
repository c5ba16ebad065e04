"""The impl of a layer has the options that from_spec was given, and no layer changes those of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attnplug._system.text import shown
from attnplug.core.errors import AttnplugError
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.expectations import expect_correct
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.steps import mixed, step_factory
from attnplug.testing.conformance.target import Target

_MISSING = object()


def expect_held(options: Any, given: Mapping[str, Any], what: str) -> None:
    """Raise ConformanceError unless `options` has the values that were given; `what` has them."""
    for name, value in given.items():
        found = getattr(options, name, _MISSING)
        if found is _MISSING or found != value:
            text = f"no {name}" if found is _MISSING else f"{name}={shown(found)}"
            raise ConformanceError(
                f"{what} has {text}, not {name}={shown(value)}: a value is honoured, or refused with a reason"
            )


def with_values(target: Target, given: Mapping[str, Any]) -> Any:
    """The options of the run, which are the defaults if it has none, with the `given` values."""
    declared: Any = target.backend.Options
    return (
        declared(**given) if target.own_options is None else dataclasses.replace(target.own_options, **given)
    )


def expect_independent(target: Target, given: Mapping[str, Any]) -> None:
    """Raise ConformanceError unless two equal layers, with options and without, both have theirs and right numbers.

    A layer that is refused with these options passes.
    """
    declared: Any = target.backend.Options
    spec = target.spec()
    make = step_factory(target, spec, mixed(target.block_size(spec)))
    sets = (with_values(target, given), with_values(target, {}))
    try:
        harnesses = [Harness.of(target, make(), options=each) for each in sets]
        for harness in harnesses:
            harness.forward(make())
    except ConformanceError as problem:
        # A refusal may come late, such as of a kernel that the device lacks.
        if isinstance(problem.__cause__, AttnplugError):
            return
        raise
    # The defaults of other fields may be resolved, such as "auto"; what a user has set may not change.
    wanted = (given, {name: getattr(sets[1], name) for name in given})
    _expect_own(harnesses, wanted, declared)
    for place in (0, 1, 0):
        what = f"layers with {_words(given)} and with the defaults, the one with {_words(wanted[place])}"
        batch = make()
        expect_correct(batch, harnesses[place].forward(batch, what=what), what)
    _expect_own(harnesses, wanted, declared)
    for each, kept in zip(sets, wanted, strict=True):
        expect_held(each, kept, f"the {declared.__qualname__} that from_spec was given, after steps,")


def _expect_own(harnesses: list[Harness], wanted: tuple[Mapping[str, Any], ...], declared: Any) -> None:
    for harness, values in zip(harnesses, wanted, strict=True):
        options = getattr(harness.impl, "options", None)
        what = f"from_spec was given {_words(values)}, and impl.options"
        if not isinstance(options, declared):
            raise ConformanceError(
                f"{what} is {shown(options)}: pass options on to super().from_spec, "
                "since a builder reads them from the impl"
            )
        expect_held(options, values, what)


def _words(given: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
    return f"the option {named}" if named else "their defaults"
