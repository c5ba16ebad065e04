"""Every option is run with several values: those of its type, those that its field lists, and twice a number.

The impl of a layer has the options that from_spec was given, and no layer changes those of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnplug._system.text import shown
from attnplug.core.errors import AttnplugError
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.cases.cases import single_cases
from attnplug.testing.conformance.cases.steps import mixed_lengths, step_factory
from attnplug.testing.conformance.check import Check, CheckSkipped, CheckUntested, ConformanceError, Level
from attnplug.testing.conformance.harness import Harness, Output, run_batch
from attnplug.testing.conformance.mistakes.expectations import difference, expect_correct, wrong_answer
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
    make = step_factory(target, spec, mixed_lengths(target.block_size(spec)))
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


LISTED = "conformance"
"""The key of a field's metadata for more values to try: `field(default=0, metadata={"conformance": (1, 8)})`."""

_MOST_PRODUCT = 64


def checks(target: Target) -> Iterator[Check]:
    """One check for each value of an option that is no default, one for each option of which no more is known.

    Level full tries the products of all values too.
    """
    declared = target.backend.Options
    given, _ = guarded_call(lambda: values_of(declared, target.own_options))
    if dataclasses.is_dataclass(declared):
        summary = "the impl of a layer has the options that from_spec was given"
        yield Check.of("options/held", summary, expect_independent, target, {})
    values = given or {}
    for name, tried in values.items():
        guesses = [] if tried else _guesses(declared, name)
        for value in (*tried, *guesses):
            summary = f"with the option {name}={shown(value)} the numbers are right"
            check_id = f"options/{name}={re.sub(r'[^A-Za-z0-9._-]', '_', str(value))}"
            yield Check.of(check_id, summary, _check_options, target, {name: value})
        if not tried:
            some = f" and {', '.join(map(shown, guesses))} were" if guesses else " was"
            text = f"option {name}: only its default{some} tried; list values in field(metadata={{{LISTED!r}: (...)}})"
            yield Check.of(
                f"options/{name}", f"several values of the option {name} are tried", _untested, text
            )
    several = {name: tried for name, tried in values.items() if tried}
    if target.level is Level.FULL and len(several) > 1:
        summary = "options set together give right numbers"
        yield Check.of("options/together", summary, _check_together, target, several)


def values_of(options: type[Any] | None, usual_ones: Any = None) -> dict[str, list[Any]]:
    """By option, the values to try in place of the usual one: of flags, Literals and enumerations, and listed ones.

    The usual ones are the defaults, or those of an instance of `options`.
    """
    if options is None or not dataclasses.is_dataclass(options):
        return {}
    hints = typing.get_type_hints(options)
    default = options() if usual_ones is None else usual_ones
    found: dict[str, list[Any]] = {}
    for field in dataclasses.fields(options):
        if field.init:
            usual = getattr(default, field.name)
            every = [*_of_type(hints[field.name]), *field.metadata.get(LISTED, ())]
            # 1 == True, so the types are compared too.
            kinds = {
                (type(value), value): value for value in every if (type(value), value) != (type(usual), usual)
            }
            found[field.name] = list(kinds.values())
    return found


def _guesses(options: type[Any] | None, name: str) -> list[Any]:
    """Twice a default that is a number; none for a field that lists its values."""
    # An empty list also says that the author wants no guesses.
    if options is None:
        return []
    field = next(each for each in dataclasses.fields(options) if each.name == name)
    usual = getattr(options(), name)
    return [] if LISTED in field.metadata or type(usual) not in (int, float) else [2 * usual or 1]


def _of_type(hint: Any) -> list[Any]:
    hint = getattr(hint, "__supertype__", hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _of_type(arguments[0])
    if origin is typing.Literal:
        return list(arguments)
    if origin in (typing.Union, types.UnionType):
        return [value for each in arguments for value in _of_type(each)]
    if hint is bool:
        return [False, True]
    if hint is type(None):
        return [None]
    return list(hint) if isinstance(hint, type) and issubclass(hint, enum.Enum) else []


def _untested(text: str) -> None:
    raise CheckUntested(text)


def _check_together(target: Target, values: Mapping[str, Sequence[Any]]) -> None:
    sets = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    for given in sets[:: -(-len(sets) // _MOST_PRODUCT)]:
        try:
            _check_options(target, given)
        except CheckUntested:
            continue  # values may exclude each other


def _check_options(target: Target, given: Mapping[str, Any]) -> None:
    words = f"option {', '.join(f'{name}={shown(value)}' for name, value in given.items())}"
    declared: Any = target.backend.Options
    try:
        options = with_values(target, given)
    except (AttnplugError, ValueError) as problem:
        raise CheckUntested(f"{words}: {declared.__qualname__} refuses it: {problem}") from problem
    expect_held(options, given, f"{declared.__qualname__} given the {words}")
    # Other layers are tried below where the plainest one is not served.
    with contextlib.suppress(CheckSkipped):
        expect_independent(target, given)
    refused: Exception | None = None
    ran = False
    for case in single_cases(target):
        batch = case.batch(target)
        try:
            found = Output(*run_batch(target.backend, batch, options=options))
        except AttnplugError as problem:
            # No declaration says which layers an option goes with, so the backend may refuse some.
            refused = problem
            continue
        except Exception as problem:
            raise ConformanceError(
                f"with the {words}, {case.id} raised {type(problem).__name__}: {problem}; "
                f"{declared.__qualname__}.__post_init__ or from_spec must refuse a value that cannot be served"
            ) from problem
        ran = True
        if wrong := difference(batch, found):
            raise wrong_answer(f"with the {words}, {case.id} is wrong: {wrong}", None)
    if not ran:
        raise CheckUntested(f"{words}: refused for every layer on {target.device}: {refused}")
