"""Two backends as one class: what it declares, the words of its reasons, and the reference by which others find it.

A pair shares its pages, as a composite, or its layer, as latents with an expanded prefill. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.interface.answers import answer, declared
from attnplug.core.interface.signatures import is_found
from attnplug.core.reasons import Reason

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

    _Backend: TypeAlias = type[AttentionBackend]

Reference: TypeAlias = Any
"""A class of a module, or a tuple of the function that pairs two classes and the references of these."""
_PAIRS: dict[_Backend, tuple[Callable[..., _Backend], _Backend, _Backend]] = {}
"""The classes made of two: the function that made each, and the two classes."""


def make_pair(
    pair: Callable[..., _Backend],
    prefill: _Backend,
    decode: _Backend,
    base: type,
    name: str,
    doc: str,
    /,
    **attributes: Any,
) -> Any:
    """The class `name` that both serve, with what both declare.

    Args:
        pair: the function of a module that makes the class of `prefill` and `decode`, the same each time.
        prefill: serves prefills.
        decode: serves decodes.
        base: of the class.
        name: the backend's.
        doc: its docstring; "{prefill}" and "{decode}" become the names of both.
        attributes: others of the class.
    """
    names = {"prefill": answer(prefill, "get_name"), "decode": answer(decode, "get_name")}
    namespace: dict[str, Any] = {
        "__doc__": doc.format(**names),
        "__module__": base.__module__,
        "prefill": prefill,
        "get_name": staticmethod(lambda: name),
        "requires": tuple(dict.fromkeys(itertools.chain(*of_both("requires", prefill, decode)))),
        "device_types": in_both(*of_both("device_types", prefill, decode)),
        "step_safe": all(of_both("step_safe", prefill, decode)),
        "quantizes_queries": any(of_both("quantizes_queries", prefill, decode)),
        **attributes,
    }
    made: Any = type(f"{prefill.__name__}And{decode.__name__}", (base,), namespace)
    _PAIRS[made] = pair, prefill, decode
    return made


def of_both(field: str, prefill: _Backend, decode: _Backend) -> list[Any]:
    """The values that the two declare."""
    return [declared(each, field) for each in (prefill, decode)]


def in_both(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
    """The items of `one` that `other` has too."""
    return tuple(each for each in one if each in other)


def decode_of(backend: _Backend) -> Any:
    """The decoding class of one that was made of two; any other is its own."""
    return _PAIRS[backend][2] if backend in _PAIRS else backend


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
    pair, *halves = _PAIRS.get(backend, (None,))
    found = [reference_of(each) for each in halves]
    return (pair, *found) if found and None not in found else None


def class_of(reference: Reference | None) -> _Backend | None:
    """The class of a reference."""
    if not isinstance(reference, tuple):
        return reference
    pair, *halves = reference
    made: _Backend = pair(*map(class_of, halves))
    return made
