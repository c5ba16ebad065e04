"""Options that a user sets for a backend, checked against what the backend declares.

Options as text: `NAME.option=value` in ATTNPLUG_OPTIONS and on the command line.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attnplug._system.text import shortened, shown
from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import PluginError, PolicyError
from attnplug.core.interface.answers import answer, declared
from attnplug.core.interface.guarded import class_name, describe, guarded_call, plain_text
from attnplug.registry.plugins.option_values import (
    alike,
    as_tuples,
    fields_of,
    make_options,
    plain_value,
    read_value,
    round_trips,
)

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.registry.plugin_set import PluginSet
    from attnplug.registry.plugins.records import Offer


def by_backend(options: Any, asked: str | None, plugins: PluginSet) -> dict[str, Any]:
    """Options by the name of their backend or family.

    Args:
        options: a mapping from backend or family name to its options; or an instance of a backend's
            `Options`; or, with one backend in `asked`, a plain mapping of its options.
        asked: the one backend that the user named, or None.
        plugins: the plugins whose names count.

    Raises:
        PolicyError: the backend of the options is not clear.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        offers = plugins.every_offer
        owners = [offer.full_name for offer in offers if _is_of(options, offer.declared.Options)]
        if not owners:
            raise PolicyError("options", options, "is neither Options of a backend nor a mapping")
        return dict.fromkeys(owners, options)
    if all(isinstance(name, str) and plugins.find(name) for name in options):
        return dict(options)
    if asked is None:
        names = ", ".join(plugins.names) or "none"
        remedy = "write {'NAME': {...}}, or ask for one backend by name"
        raise PolicyError("options", options, f"has keys that are not backends; there are: {names}", remedy)
    return {asked: options}


def check_options(options: Mapping[str, Any], plugins: PluginSet) -> None:
    """Check the result of `by_backend`, also options of backends that will not be chosen.

    Raises:
        PolicyError: as `build_options`; for a family, only if no member takes them.
    """
    for name, given in options.items():
        refused: list[PolicyError] = []
        members = plugins.find(name)
        for offer in members:
            try:
                build_options(offer.backend, given)
            except PolicyError as error:
                refused.append(error)
        if refused and len(refused) == len(members):
            raise refused[0]


def freeze(options: Any) -> Any:
    """Options as a hashable value; PolicyError where a value cannot be hashed."""
    if isinstance(options, Mapping):
        return tuple(sorted((str(name), freeze(value)) for name, value in options.items()))
    try:
        # Options are part of the key under which a registry remembers a decision.
        hash(options)
    except TypeError:
        raise PolicyError("options", options, "must have hashable values") from None
    return options


def options_of(offer: Offer, given: Mapping[str, Any]) -> Any:
    """The options for one backend, from the frozen result of `by_backend`.

    A composite also takes the options of its halves, by their names or families. Their phase is put in
    front, as in the composite's `Options`. Options under the composite's own name come first.
    """
    backend = offer.backend
    own = _thawed(given, (offer.full_name, offer.name, offer.declared.family))
    if not issubclass(backend, CompositeBackend) or not (own is None or isinstance(own, dict)):
        return own
    merged: dict[str, Any] = {}
    for place, member in backend.members().items():
        name = answer(member, "get_name")
        shipped = (key for key in given if key.partition("@")[0] == name)
        theirs = _thawed(given, (*shipped, declared(member, "family")))
        if dataclasses.is_dataclass(theirs):
            theirs = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs) if f.init}
        merged |= {f"{place}_{option}": value for option, value in (theirs or {}).items()}
    return merged | (own or {}) or None


def _thawed(given: Mapping[str, Any], names: Iterable[str | None]) -> Any:
    own = next((given[name] for name in names if name is not None and name in given), None)
    return dict(own) if isinstance(own, tuple) else own


def build_options(backend: type[AttentionBackend], given: Any) -> Any:
    """An instance of `backend.Options` with `given` in it; None where the backend has no options.

    Raises:
        PolicyError: an unknown option, a value of the wrong type (it lists what exists), or values
            that `Options` refuses.
        PluginError: `Options` is not a dataclass, or its annotations cannot be resolved.
    """
    name = answer(backend, "get_name")
    kind = declared(backend, "Options")
    if kind is None:
        if given:
            raise PolicyError("options", given, f"cannot be set: {name} has no options", "leave them out")
        return None
    fields, error = guarded_call(fields_of, kind)
    if error is not None or fields is None:
        why = "it is not a dataclass" if error is None else describe(error)
        raise PluginError(f"the Options of {name} cannot be read: {why}") from error
    made = given if _is_of(given, kind) else None
    if made is not None:
        # The values of an instance are checked as those of a mapping are.
        given, error = guarded_call(lambda: {f.name: getattr(made, f.name) for f in _init_fields(made)})
        if error is not None:
            raise PolicyError("options", made, f"cannot be read: {describe(error)}") from error
    if given is not None and not isinstance(given, Mapping):
        limit = f"must be the {class_name(kind)} of {name}, or a mapping"
        raise PolicyError("options", given, limit)
    exists = ", ".join(f"{field}: {_type_name(hint)}" for field, hint in fields.items()) or "none"
    read: dict[str, Any] = {}
    for option, value in (given or {}).items():
        if option not in fields:
            limit = f"is unknown: {name} has no such option; there are: {exists}"
            raise PolicyError(f"options[{option!r}]", value, limit)
        # A type of a plugin may raise where a value is compared with it.
        read[option], error = guarded_call(read_value, value, fields[option])
        if error is not None:
            limit = f"must be {_type_name(fields[option])}; options of {name} are: {exists}"
            raise PolicyError(f"options[{option!r}]", value, limit)
    # An instance may have the value of an enumeration in place of its member.
    is_kept = (
        type(made) is kind
        and guarded_call(lambda: all(alike(value, getattr(made, each)) for each, value in read.items()))[0]
    )
    built, error = (made, None) if is_kept else guarded_call(kind, **read)
    if error is not None:
        raise PolicyError(
            "options", given, f"cannot be set: {name} refuses them: {describe(error)}"
        ) from error
    for option, hint in fields.items():
        _check_value(name, option, hint, built, given or {})
    _check_rebuilt(name, kind, fields, built, given)
    return built


def plain_options(options: Any) -> tuple[tuple[str, Any], ...]:
    """The fields of an instance that `build_options` made, by name, as a decision keeps them."""
    return tuple(sorted((f.name, plain_value(getattr(options, f.name))) for f in _init_fields(options)))


def _init_fields(options: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(options) if field.init]


def _is_of(value: object, kind: type | None) -> bool:
    """Whether a value is an instance of `kind`; the metaclass of a plugin's class is not asked."""
    return any(each is kind for each in type(value).__mro__)


def _check_value(name: str, option: str, hint: Any, options: Any, given: Mapping[str, Any]) -> None:
    """Refuse a value that a decision could not be written with as JSON."""
    value, error = guarded_call(getattr, options, option)
    fits = error is None and guarded_call(round_trips, value, hint)[0]
    if not fits:
        limit = "cannot be written as JSON and read back; options are numbers, text, flags, enumerations, None and tuples of these"
        if option in given:
            raise PolicyError(f"options[{option!r}]", value, f"of {name} {limit}")
        raise PluginError(f"the option {option} of {name}, which is {shown(value)} by default, {limit}")


def _check_rebuilt(name: str, kind: type[Any], fields: Iterable[str], built: Any, given: Any) -> None:
    """Refuse Options that change their own values."""
    # A decision that is read from JSON makes them again from these values.
    again, error = guarded_call(lambda: make_options(kind, dict(plain_options(built))))
    for option in fields:
        value = getattr(built, option)
        later, failure = guarded_call(getattr, again, option)
        if error is None and failure is None and guarded_call(alike, later, value)[0]:
            continue
        did = f"raises {describe(error)}" if error is not None else f"gives {option}={shown(later)}"
        words = f"made anew from its own values, with {option}={shown(value)}, the {class_name(kind)} of {name} {did}"
        remedy = "let __post_init__ keep the fields, and compute from them in field(init=False)"
        if given:
            raise PolicyError("options", given, words, remedy)
        raise PluginError(f"{words}; {remedy}")


def _type_name(hint: Any) -> str:
    text, _ = guarded_call(lambda: plain_text(str(hint)).replace("typing.", ""))
    return class_name(hint) if isinstance(hint, type) else shortened(text or "unreadable", 200)


VARIABLE = "ATTNPLUG_OPTIONS"
_FORM = "must be NAME.option=value, or option=value for the one backend asked for"
# A comma inside a value, such as [1, 2], is followed by no name and no equals sign.
_BETWEEN = re.compile(r",(?=\s*[A-Za-z_][\w.+@-]*=)")


def parse_options(texts: Iterable[str], source: str, asked: str | None) -> dict[str, dict[str, Any]]:
    """Options by backend name, as `attnplug.select` takes them.

    Args:
        texts: each one option. The value is read as JSON, such as 4, true, null or [1, 2], and else as text.
        source: the variable or option that gave the texts, for messages.
        asked: the one backend that the user named, or None.

    Raises:
        PolicyError: text of another form, an option given twice, or none that says which backend is meant.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        backend, dot, option = name.rpartition(".")
        if not equals or not option.isidentifier() or (dot and not backend):
            raise PolicyError(source, text, _FORM)
        backend = backend or asked or ""
        if not backend:
            limit = "names no backend, and no single one is asked for"
            raise PolicyError(source, text, limit, f"write NAME.{text}")
        given = found.setdefault(backend, {})
        if option in given:
            raise PolicyError(source, text, f"sets {backend}.{option} a second time")
        given[option] = _value(value)
    return found


def split_options(text: str) -> list[str]:
    """The options in the text of ATTNPLUG_OPTIONS, which has commas between them."""
    return _BETWEEN.split(text) if text.strip() else []


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # An option must be hashable, and a list is not.
    return as_tuples(value)
