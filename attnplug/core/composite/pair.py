"""Two or more backends as one class: its declarations, the words of its reasons, and the reference by which others find it.

A pair shares its pages, as a composite, or its layer, as latents with an expanded prefill. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.interface.answers import answer, declared
from attnplug.core.interface.signatures import is_found
from attnplug.core.reasons import Reason

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.composite.steps import StepRange

    _Backend: TypeAlias = type[AttentionBackend]

Reference: TypeAlias = Any
"""A class of a module, or a tuple of the function that pairs two classes, the references of these, and any routes."""
Routes: TypeAlias = "tuple[tuple[StepRange, _Backend], ...]"
"""Ranges of steps, each with the member that serves them; the first that has a step decides."""
_PAIRS: dict[_Backend, tuple[Callable[..., _Backend], _Backend, _Backend, Routes]] = {}
"""The classes made of two: the function that made each, the two classes, and the routes."""


def make_pair(
    pair: Callable[..., _Backend],
    prefill: _Backend,
    decode: _Backend,
    base: type,
    name: str,
    doc: str,
    routes: Routes = (),
    /,
    **attributes: Any,
) -> Any:
    """The class `name` that both serve, with what both and the members of the routes declare.

    Args:
        pair: the function of a module that makes the class of `prefill`, `decode` and any routes, the same each time.
        prefill: serves prefills.
        decode: serves decodes.
        base: of the class.
        name: the backend's.
        doc: its docstring; "{prefill}" and "{decode}" become the names of both.
        routes: ranges of steps that one member serves whole.
        attributes: others of the class.
    """
    names = {"prefill": answer(prefill, "get_name"), "decode": answer(decode, "get_name")}
    every = members_of(prefill, decode, routes)
    namespace: dict[str, Any] = {
        "__doc__": doc.format(**names),
        "__module__": base.__module__,
        "prefill": prefill,
        "get_name": staticmethod(lambda: name),
        "requires": tuple(dict.fromkeys(itertools.chain(*of_each("requires", every)))),
        "device_types": in_each(*of_each("device_types", every)),
        "step_safe": all(of_each("step_safe", every)),
        "quantizes_queries": any(of_each("quantizes_queries", every)),
        **attributes,
    }
    made: Any = type(f"{prefill.__name__}And{decode.__name__}", (base,), namespace)
    _PAIRS[made] = pair, prefill, decode, routes
    return made


def members_of(prefill: _Backend, decode: _Backend, routes: Routes) -> tuple[_Backend, ...]:
    """Both halves, then the other members that routes name, each once."""
    return tuple(dict.fromkeys((prefill, decode, *(member for _, member in routes))))


def of_each(field: str, members: Iterable[_Backend]) -> list[Any]:
    """The values that the members declare."""
    return [declared(each, field) for each in members]


def in_each(first: Sequence[Any], *others: Sequence[Any]) -> tuple[Any, ...]:
    """The items of `first` that all others have too."""
    return tuple(each for each in first if all(each in other for other in others))


def decode_of(backend: _Backend) -> Any:
    """The decoding class of one that was made of two; any other is its own."""
    return _PAIRS[backend][2] if backend in _PAIRS else backend


def parts_of(backend: _Backend) -> list[_Backend]:
    """The classes that one was made of, those of its parts too, each once; any other alone."""
    if backend not in _PAIRS:
        return [backend]
    _, prefill, decode, routes = _PAIRS[backend]
    every = (parts_of(each) for each in members_of(decode, prefill, routes))
    return list(dict.fromkeys(itertools.chain(*every)))


def said_by(members: Mapping[str, Reason]) -> Reason:
    """One reason for one cause, which one or both members gave."""
    first = next(iter(members.values()))
    text = "; ".join(f"{who}: {reason}" for who, reason in members.items())
    if len(set(members.values())) == 1:
        text = f"{' and '.join(members)}: {first}"
    return Reason.from_dict({**first.to_dict(), "text": text})


# Classes of two are in no module, so pickle cannot find them by name.


def reference_of(backend: _Backend) -> Reference | None:
    """The reference of a class; None for one that no other process finds, such as one made in a function."""
    if is_found(backend):
        return backend
    if backend not in _PAIRS:
        return None
    pair, prefill, decode, routes = _PAIRS[backend]
    halves = reference_of(prefill), reference_of(decode)
    others = tuple((steps, reference_of(member)) for steps, member in routes)
    if None in halves or any(member is None for _, member in others):
        return None
    return (pair, *halves, *((others,) if others else ()))


def class_of(reference: Reference | None) -> _Backend | None:
    """The class of a reference."""
    if not isinstance(reference, tuple):
        return reference
    pair, prefill, decode, *others = reference
    routes = (tuple((steps, class_of(member)) for steps, member in each) for each in others)
    made: _Backend = pair(class_of(prefill), class_of(decode), *routes)
    return made
