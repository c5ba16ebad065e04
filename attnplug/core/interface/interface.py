"""Checks that a class follows the interface, by its names and signatures alone; no code of the class runs.

Everything that a plugin's author writes on a backend, an impl or a builder is read, or named here as a fault.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from abc import ABC
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Generic, Protocol

from attnplug._system.text import shown
from attnplug.core.dtypes import DTYPES, bare_dtype_name
from attnplug.core.features import Feature
from attnplug.core.interface.answers import DECLARED
from attnplug.core.interface.guarded import class_name
from attnplug.core.interface.ported_names import (
    BACKEND_NAMES,
    BUILDER_NAMES,
    IMPL_NAMES,
    LATENT_IMPL_NAMES,
    PORTED_PARAMETERS,
    SET_ON_INSTANCES,
    PortedName,
)
from attnplug.core.interface.signatures import (
    call_mismatch,
    definition_of,
    interface_signature,
    is_alike,
    methods_of,
    overrides,
    owner_of,
    signature_of,
)
from attnplug.core.interface.vllm_names import VLLM_BACKEND_NAMES, VLLM_BUILDER_NAMES, VLLM_IMPL_NAMES
from attnplug.core.invariance import INVARIANCES
from attnplug.core.spec import Phase
from attnplug.core.state.dims import STATE_RULES

_CLAIMS = ("supports_", "supported_", "get_supported_", "get_kv_cache_", "get_required_", "can_return_")
"""Beginnings of names that state what a class can do. attnplug reads only those of its interface."""
# The likeness from which a name counts as a misspelt one: one letter in ten.
_NEAR = 0.9
_MOST_VALUES = 1000
_PLAIN = (tuple, list, set, frozenset)
_UNREAD = PortedName("remove it: attnplug has nothing like it")
_SEQUENCES = (
    *("device_types", "supported_dtypes", "supported_kv_cache_dtypes", "supported_phases"),
    *("supported_sparse_kinds", "supported_invariances", "supported_state_rules"),
)
_FLAGS = ("step_safe", "quantizes_queries", "serves_dense", "depends_on_capability")


def in_lines(faults: Collection[str]) -> str:
    """Faults after a colon: one on the same line, several on a line each."""
    plain = [" ".join(each.splitlines()) for each in faults]
    return f" {plain[0]}" if len(plain) == 1 else "".join(f"\n- {each}" for each in plain)


def backend_faults(backend: type, base: type) -> list[str]:
    """The faults of a backend class that attnplug would not read, each as a sentence with the remedy.

    Args:
        backend: a subclass of `base`.
        base: AttentionBackend.
    """
    names = [*_unread_names(backend, base, BACKEND_NAMES, VLLM_BACKEND_NAMES), *_declarations(backend)]
    if overrides(backend, "get_required_kv_cache_layout"):
        title = f"{backend.__name__}.get_required_kv_cache_layout"
        names.append(
            f'{title} follows from supported_kv_cache_layouts; override that, to give ("HND",) or ("NHD",)'
        )
    return [*names, *_signatures(backend, base, on_class=True)]


# Cached, because a model makes an impl for each of its layers.
@functools.lru_cache(maxsize=256)
def impl_faults(impl: type, base: type) -> tuple[str, ...]:
    """As `backend_faults`, for an impl class; `base` is AttentionImpl."""
    missing = sorted(getattr(impl, "__abstractmethods__", ()))
    faults = list(_unread_names(impl, base, IMPL_NAMES, VLLM_IMPL_NAMES))
    single = overrides(impl, "forward") and {"attend", "update_kv_cache"}.intersection(missing)
    if single:
        faults.append(
            f"{impl.__name__}.forward writes the KV cache and attends in one; "
            f"write {' and '.join(definition_of(name, vars(base)[name]) for name in ('update_kv_cache', 'attend'))}"
        )
    elif missing:
        faults.append(f"{impl.__name__} lacks {', '.join(missing)}")
    skipped = ("__init__", "from_spec", *(("forward",) if single else ()))
    return (*faults, *_signatures(impl, base, on_class=False, skipped=skipped), *_constructor(impl, base))


@functools.lru_cache(maxsize=256)
def builder_faults(builder: type, base: type) -> tuple[str, ...]:
    """As `backend_faults`, for a builder class; `base` is AttentionMetadataBuilder."""
    # The base class reads vLLM's name of its level for each subclass.
    every = VLLM_BUILDER_NAMES.keys() - {"_cudagraph_support"}
    faults = list(_unread_names(builder, base, BUILDER_NAMES, every))
    missing = sorted(getattr(builder, "__abstractmethods__", ()))
    if missing:
        faults.append(f"{builder.__name__} lacks {', '.join(missing)}")
    level: Any = getattr(builder, "cudagraph_support", None)
    known = type(vars(base)["cudagraph_support"])
    if not isinstance(level, known):
        faults.append(
            f"{builder.__name__}.cudagraph_support is {shown(level)}, which is not an {known.__name__}"
        )
    ported, own = owner_of(builder, "_cudagraph_support"), owner_of(builder, "cudagraph_support")
    order = builder.__mro__.index
    # They differ if one class sets both, or if the name of vLLM was set after the class was made.
    if ported and own and order(ported) <= order(own) and vars(ported)["_cudagraph_support"] != level:
        faults.append(f"{builder.__name__}._cudagraph_support is not its cudagraph_support; set that alone")
    return (*faults, *_signatures(builder, base, on_class=False))


def constructor_faults(made: object, ported: Mapping[str, PortedName], before: Mapping[str, object]) -> str:
    """The attributes that the constructor of an impl or a builder has set in vain, as text; "" for none.

    Args:
        made: the new impl or builder.
        ported: the names that attnplug does not read from such an instance.
        before: the attributes that the framework had set before.
    """
    title, faults = type(made).__name__, []
    for name, value in vars(made).items():
        known = ported.get(name)
        if known is None or any(value is each for each in known.harmless):
            continue
        # A constructor may state again what the framework or the class says.
        stated = before.get(name, made), getattr(type(made), name, made)
        if any(each is value or (isinstance(value, (int, float, str)) and each == value) for each in stated):
            continue
        faults.append(f"{title}.__init__ sets {name}, which is not read by attnplug; {known.write}")
    return "; ".join(faults)


def _unread_names(
    cls: type, base: type, ported: Mapping[str, PortedName], every: Collection[str]
) -> Iterator[str]:
    """Sentences about the names of `cls` that nothing reads; `every` name of vLLM's class asks for something."""
    interface = _interface_names(base)
    # A class without an abstract method is refused for that, so such a name is never a misspelt one.
    likely = (interface | ported.keys()) - getattr(base, "__abstractmethods__", frozenset())
    likely -= SET_ON_INSTANCES
    for owner, name in _written_names(cls):
        known = ported.get(name)
        if known is None and name not in interface:
            # A class of attnplug above it may have the name too, such as a base of latent attention.
            inherited = (name in _names(each) for each in cls.__mro__ if not _is_of_plugin(each))
            if name in every and not any(inherited):
                known = LATENT_IMPL_NAMES.get(name, _UNREAD)
            elif not name.startswith("_"):
                known = _misspelt(owner, name, likely, ported)
        if known is not None and not any(vars(owner)[name] is each for each in known.harmless):
            yield f"{cls.__name__}.{name} is not read by attnplug; {known.write}"


def _written_names(cls: type) -> Iterator[tuple[type, str]]:
    """The names that `cls` has from a plugin's class or mixin, and that class."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        # The first class that has a name is the one that it comes from.
        own = [name for name in vars(owner) if name not in seen]
        seen.update(own)
        if _is_of_plugin(owner):
            yield from ((owner, name) for name in own)


@functools.lru_cache(maxsize=16)
def _interface_names(base: type) -> frozenset[str]:
    return frozenset(name for each in base.__mro__ if each is not object for name in _names(each))


def _misspelt(
    owner: type, name: str, likely: Collection[str], ported: Mapping[str, PortedName]
) -> PortedName | None:
    """The remedy for a public name that looks like one of the interface, or states what a class can do."""
    lower = {each.lower(): each for each in sorted(likely) if not each.startswith("_")}
    found = difflib.get_close_matches(name.lower(), lower, 1, _NEAR)
    near = lower[found[0]] if found else None
    # A class that has the right name too has written a helper with a like name.
    if near is not None and near not in vars(owner):
        return ported.get(near) or PortedName(f"did you mean {near}?")
    if name.startswith(_CLAIMS):
        return PortedName("begin the name of a helper with an underscore")
    return None


def _names(cls: type) -> list[str]:
    return [*vars(cls), *inspect.get_annotations(cls)]


def _is_of_plugin(owner: type) -> bool:
    # A class made by a call of type() has the module "abc", so these are compared by identity.
    if owner in (object, ABC, Generic, Protocol):
        return False
    return owner.__module__.partition(".")[0] not in ("attnplug", "torch")


def _declarations(backend: Any) -> Iterator[str]:
    """The class attributes that must be values of a certain form."""
    title = class_name(backend)
    for field in (*DECLARED, "accept_output_buffer"):
        owner = owner_of(backend, field)
        raw = None if owner is None else vars(owner)[field]
        # A descriptor of any kind is code, which may give another value at each look.
        if any("__get__" in vars(each) for each in type(raw).__mro__):
            yield f"{title}.{field} is a method; attnplug reads a class attribute: write {field} = ..."
            continue
        value = values = getattr(backend, field)
        if field == "features" and type(value) is not Feature:
            yield f"{title}.features is {shown(value)}; it must be a Feature, such as Feature.SINKS | Feature.ALIBI"
        elif field in _FLAGS and type(value) is not bool:
            yield f"{title}.{field} is {shown(value)}; it must be True or False"
        elif field == "accept_output_buffer":
            if value is not True:
                yield f"{title}.accept_output_buffer is {shown(value)}; attend always writes the output that it is given"
        elif field in _SEQUENCES and isinstance(value, str):
            yield f"{title}.{field} is text; it must be a sequence: a comma is missing"
        # A sequence of another type may be endless, or change.
        elif field in _SEQUENCES and (type(value) not in _PLAIN or len(values) > _MOST_VALUES):
            limit = f"it must be a sequence: a tuple or list of at most {_MOST_VALUES} values"
            yield f"{title}.{field} is {shown(value)}; {limit}"
        elif field in _SEQUENCES:
            found = ((each, _entry(field, each)) for each in values)
            yield from (f"{title}.{field} has {shown(each)}, {why}" for each, why in found if why)


def _entry(field: str, value: object) -> str | None:
    """Why a value means nothing in a declared sequence, or None."""
    if field == "supported_phases" and value not in list(Phase):
        return f"which is not a phase; phases are {', '.join(Phase)}"
    if field == "device_types" and not (isinstance(value, str) and value.islower() and value.isidentifier()):
        return "which is not a device type; write names such as 'cpu', 'cuda' or 'rocm'"
    if field == "supported_sparse_kinds" and not isinstance(value, str):
        return "which is no text"
    if field == "supported_invariances" and value not in INVARIANCES:
        return f"which is none of {', '.join(INVARIANCES)}"
    if field == "supported_state_rules" and value not in STATE_RULES:
        return f"which is none of {', '.join(STATE_RULES)}"
    if field == "supported_dtypes":
        if isinstance(value, str) and bare_dtype_name(value, field) not in DTYPES:
            near = difflib.get_close_matches(value, DTYPES, 1)
            return f"which is not a dtype of a layer; {f'did you mean {near[0]}?' if near else ', '.join(DTYPES)}"
        if not isinstance(value, str) and type(value).__name__ != "dtype":
            return "which is not a dtype; write names such as 'bfloat16', or torch dtypes"
    return None


def _signatures(cls: type, base: type, *, on_class: bool, skipped: Collection[str] = ()) -> Iterator[str]:
    """Overrides that do not take the arguments that attnplug gives."""
    methods = methods_of(cls, base)
    for owner, name in _written_names(cls):
        if name not in methods or name in skipped:
            continue
        raw, theirs = vars(owner)[name], methods[name]
        if is_alike(raw, theirs):
            continue
        title = f"{cls.__name__}.{name}"
        if on_class and not callable(raw) and not isinstance(raw, (staticmethod, classmethod)):
            kind = "a property" if isinstance(raw, property) else repr(raw)
            yield f"{title} is {kind}; it must be a class method: write {definition_of(name, theirs)}"
            continue
        expected, found = interface_signature(theirs), signature_of(raw, on_class=on_class)
        if found is None or expected is None:
            continue
        ported = [each for each in found.parameters if each in PORTED_PARAMETERS]
        if "head_size" in found.parameters and "head_size" not in expected.parameters:
            yield f"{title} has vLLM's arguments; write {definition_of(name, theirs)}, and read spec and device"
        elif ported:
            yield f"{title} has the parameter {ported[0]}; {PORTED_PARAMETERS[ported[0]]}"
        elif why := call_mismatch(found, expected):
            yield f"{title} does not take what attnplug gives ({why}); write {definition_of(name, theirs)}"


def _constructor(impl: type, base: type) -> Iterator[str]:
    """Whether an impl's constructor takes the keywords that `from_spec` gives."""
    owner = owner_of(impl, "__init__")
    if owner is None or not _is_of_plugin(owner):
        return
    expected, found = (signature_of(vars(each)["__init__"], on_class=False) for each in (base, owner))
    if found is None or expected is None:
        return
    given = [*expected.parameters, "sinks"]
    parameters = found.parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown := [name for name in needed if name not in given]:
        read = "self.spec, self.tensors and self.options"
        yield f"{impl.__name__}.__init__ requires {', '.join(unknown)}, which attnplug does not give; read {read}"
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        lacking = [name for name in expected.parameters if name not in found.parameters]
        if lacking:
            yield f"{impl.__name__}.__init__ does not take {', '.join(lacking)}; add them, or **rest"
