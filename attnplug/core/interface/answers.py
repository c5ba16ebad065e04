"""Asks a backend's class: each hook and each declaration is read in one guarded call, which checks and copies it.

A wrong answer, such as a tuple where True or False is due, is the backend's fault. It never counts as a yes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attnplug._system.text import shortened, shown
from attnplug.core.blocks import MultipleOf
from attnplug.core.composite.steps import StepPriority
from attnplug.core.errors import AttnplugError, PluginError
from attnplug.core.features import Feature
from attnplug.core.interface.guarded import Forks, class_title, describe, mro_of, plain_list, plain_text
from attnplug.core.interface.signatures import class_fault
from attnplug.core.reasons import plain_reason

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.spec import LayerSpec

_T = TypeVar("_T")
_MOST_SIZES = 100_000
# Requirements of a backend, and characters of each: a parser of text without a limit could take minutes.
_MOST_REQUIREMENTS, _LONGEST_REQUIREMENT = 100, 500
_MOST_DIMENSIONS = 16
# Tokens of a page: requests could not share a larger one, and a plan could not allocate it.
_LARGEST_BLOCK = 65_536
# Ranges of steps with a priority of their own: a builder looks through the routes in each step.
_MOST_RANGES = 16
_STR = frozenset({str})
_SIZE_TYPES = frozenset({int, MultipleOf})
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
NAME_RULE = (
    "a name has letters, digits and _ . -, begins with a letter, and is no longer than 100; it is a plain str"
)
"""The rule for names of backends and families, in words."""


class HookError(PluginError):
    """A hook or a declaration of a backend that raised, or gave what it must not; the message names both."""


def answer(backend: type[AttentionBackend], hook: str, *args: Any, **kwargs: Any) -> Any:
    """The answer of one hook of a backend, checked and copied.

    Args:
        backend: the class.
        hook: the name of a class method.
        args: of the hook.
        kwargs: of the hook.

    Raises:
        HookError: the hook raised, or its answer is of another type than the interface asks for.
        AttnplugError: as the hook raises it.
    """
    expected, check = HOOKS[hook]
    forks, found = Forks.count, None
    is_given = False
    try:
        found = getattr(backend, hook)(*args, **kwargs)
        is_given = True
        return check(found)
    except (KeyboardInterrupt, AttnplugError):
        raise
    except BaseException as error:
        if is_given:
            # The repr of a tensor has many lines.
            words = " ".join(shown(found, 200).split())
            did = f"returned {words} from {hook}, which must be {expected}"
            if error.args:
                did += f" ({describe(error)})"
            if isinstance(found, types.CoroutineType):
                # Otherwise Python warns that nobody awaited it.
                found.close()
        else:
            did = f"raised {describe(error)} in {hook}"
        raise HookError(f"{class_title(backend)} {did}") from error
    finally:
        # The hook forked, and this is the child: it must not do the parent's work again.
        if Forks.count != forks:
            Forks.end_child()


def declared(backend: type[AttentionBackend], field: str) -> Any:
    """The value of one declared attribute of a backend, checked and copied.

    Raises:
        HookError: it cannot be read, or is of another type than the interface asks for.
    """
    try:
        return DECLARED[field](getattr(backend, field))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise HookError(f"{class_title(backend)} has a wrong {field}: {describe(error)}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """The declarations of a backend's class at the time of reading; see the attributes of AttentionBackend."""

    family: str | None
    requires: tuple[str | tuple[str, ...], ...]
    device_types: tuple[str, ...]
    supported_dtypes: tuple[object, ...]
    supported_kv_cache_dtypes: tuple[object, ...]
    supported_phases: tuple[str, ...]
    features: Feature
    step_safe: bool
    Options: type[Any] | None

    @classmethod
    def of(cls, backend: type[AttentionBackend]) -> Declared:
        """Read the class once.

        Raises:
            HookError: an attribute cannot be read, or is of another type than the interface asks for.
        """
        return cls(**{field.name: declared(backend, field.name) for field in dataclasses.fields(cls)})


@functools.lru_cache(maxsize=1024)
def declarations(backend: type[AttentionBackend]) -> Declared:
    """As `Declared.of`, read once for each class: for one that `for_layer` gave, or that attnplug made of two."""
    return Declared.of(backend)


_SERVING: dict[tuple[type[AttentionBackend], LayerSpec], type[AttentionBackend]] = {}
"""The classes that serve layers, by the class that was asked."""
_MOST_SERVING = 4096


def serving_class(
    backend: type[AttentionBackend], spec: LayerSpec, *, keep: bool = False
) -> type[AttentionBackend]:
    """The class that `for_layer` of a backend gives for a layer; a class other than `backend` is looked up once.

    Args:
        backend: the class to ask.
        spec: the layer.
        keep: also ask only once if it gives itself, as for the classes of plugins that are loaded.

    Raises:
        HookError: it is not a class of the same plugin under the same name, or it gives yet another class.
    """
    known = _SERVING.get((backend, spec))
    if known is not None:
        return known
    serving: type[AttentionBackend] = answer(backend, "for_layer", spec)
    if serving is not backend:
        _check_serving(backend, spec, serving)
    if len(_SERVING) > _MOST_SERVING:
        _SERVING.clear()
    if keep or serving is not backend:
        # The class itself is not asked again either: one that gives another class each time has no end.
        _SERVING[backend, spec] = _SERVING[serving, spec] = serving
    return serving


def _check_serving(backend: type[AttentionBackend], spec: LayerSpec, serving: type[AttentionBackend]) -> None:
    """HookError unless a backend may give another class for a layer."""
    title, found = class_title(backend), class_title(serving)
    # The interface itself has the first `for_layer`. This module cannot import it.
    root = next(each for each in reversed(mro_of(backend)) if "for_layer" in vars(each))
    if root not in mro_of(serving) or serving.__abstractmethods__:
        limit = "must be a subclass of AttentionBackend without abstract methods"
        raise HookError(f"{title} returned {found} from for_layer, which {limit}")
    if why := class_fault(serving, root):
        raise HookError(f"{title} returned {found} from for_layer, whose {why}")
    name = answer(backend, "get_name")
    own = answer(serving, "get_name")
    # A pair has the names of both halves, and may give the class of the one that serves the layer alone.
    if own not in (name, *name.split("+")) or (_is_of_attnplug(serving) and not _is_of_attnplug(backend)):
        limit = f"must be a class of the same plugin under the name {name}"
        raise HookError(f"{title} returned {found}, which is {own}, from for_layer; it {limit}")
    of_its_own: object = answer(serving, "for_layer", spec)
    if of_its_own is not serving:
        text = f"{title} returned {found} from for_layer, which gives another class; it must give itself"
        raise HookError(text)
    again: object = answer(backend, "for_layer", spec)
    if again is not serving:
        raise HookError(f"{title} returned another class from for_layer each time; it must give the same one")


def forget_answers() -> None:
    """Read every class again, from the next question on."""
    # Called when a plugin is registered, because its classes may have changed since.
    declarations.cache_clear()
    _SERVING.clear()


def _is_of_attnplug(backend: type) -> bool:
    return class_title(backend).partition(".")[0] == "attnplug"


def _exactly(kind: type[_T], *limit: str) -> Callable[[object], _T]:
    """A check that a value is a `kind`, and of no subclass."""

    def check(value: object) -> _T:
        if type(value) is not kind:
            raise TypeError(*limit)
        return value

    return check


# `isinstance` takes True and False for integers too.
_int = _exactly(int)


def _block_size(value: object) -> int:
    if not 1 <= _int(value) <= _LARGEST_BLOCK:
        raise ValueError
    return _int(value)


def _text(value: object) -> str:
    if type(value) is not str or not value:
        raise TypeError
    return value


def plain_name(value: object) -> str:
    """A name of a backend or a family; TypeError or ValueError for another type, or for text that is not a name."""
    # A subclass of str may compare as it likes, and letters of other alphabets look like those of another name.
    if type(value) is not str:
        raise TypeError(NAME_RULE)
    if not _NAME.fullmatch(value):
        raise ValueError(NAME_RULE)
    return value


def _objection(value: object) -> str | None:
    if value is None:
        return None
    text = plain_text(value)
    if not text:
        raise ValueError
    return shortened(text)


def _sizes(values: object) -> tuple[int | MultipleOf, ...] | range:
    # A range needs no copy: nobody can change it.
    if type(values) is range and len(values) <= _MOST_SIZES:
        return values
    found = values if type(values) is tuple else tuple(plain_list(values, _MOST_SIZES))
    if not _SIZE_TYPES.issuperset(map(type, found)) or len(found) > _MOST_SIZES:
        raise TypeError
    return found


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)):
        raise TypeError
    return tuple(map(_int, plain_list(values, _MOST_DIMENSIONS)))


def _layouts(values: object) -> tuple[str, ...]:
    found = _plain_values(values)
    if not found:
        raise ValueError
    return found


def _step_priorities(values: object) -> tuple[StepPriority, ...]:
    found = plain_list(values, _MOST_RANGES)
    if not all(type(each) is StepPriority for each in found):
        raise TypeError
    return tuple(found)


def _class(value: object) -> type:
    # isinstance would ask the metaclass of the value.
    if type not in mro_of(type(value)):
        raise TypeError
    return value  # type: ignore[return-value]


def _hashable(value: object) -> object:
    hash(value)
    return value


def _context(value: object) -> object:
    # On the type, where a `with` statement looks for them.
    if not all(callable(getattr(type(value), name, None)) for name in ("__enter__", "__exit__")):
        raise TypeError
    return value


def _pair(value: object) -> tuple[Any, Any]:
    first, second = plain_list(value, 2)
    return first, second


_Check: TypeAlias = Callable[[object], Any]
_SIZES: tuple[str, _Check] = (f"a tuple or list of integers and MultipleOf, at most {_MOST_SIZES}", _sizes)

HOOKS: Mapping[str, tuple[str, _Check]] = {
    **dict.fromkeys(
        (
            *("supports_head_size", "supports_dtype", "supports_kv_cache_dtype", "supports_block_size"),
            *("supports_compute_capability", "supports_attn_type", "supports_sink", "supports_mm_prefix"),
            *("is_mla", "is_sparse"),
        ),
        ("True or False", _exactly(bool)),
    ),
    "get_name": ("text of exactly the type str", _text),
    "get_priority": ("an integer from 1 to 999", _int),
    "get_step_priorities": (f"a tuple or list of StepPriority, at most {_MOST_RANGES}", _step_priorities),
    "for_layer": ("a subclass of AttentionBackend", _class),
    "get_supported_head_sizes": _SIZES,
    "get_supported_kernel_block_sizes": _SIZES,
    "get_preferred_block_size": (f"an integer of at least 1, and at most {_LARGEST_BLOCK}", _block_size),
    "supports_combination": ("None, or why the layer is not served, as text", _objection),
    "validate_configuration": (
        "a list of reasons",
        lambda values: list(map(plain_reason, plain_list(values))),
    ),
    "compile_key": ("hashable, or None", _hashable),
    "watch_compiling": ("a context manager", _context),
    "get_kv_cache_shape": ("a tuple of integers", _numbers),
    "get_kv_cache_stride_order": ("a tuple of integers", _numbers),
    "supported_kv_cache_layouts": ("a tuple or list of at least one of NHD and HND", _layouts),
    "split_kv": ("the tensors of K and V, in a tuple", _pair),
    "notes": (
        "a tuple of texts",
        lambda values: tuple(shortened(plain_text(each)) for each in plain_list(values)),
    ),
}
"""For each hook of a backend: what it must return, in words, and the function that checks and copies it."""


def _options(value: object) -> type[Any] | None:
    if value is not None and not isinstance(value, type):
        raise TypeError("it must be a frozen dataclass, or None")
    return value


def _requires(values: object) -> tuple[str | tuple[str, ...], ...]:
    # A plugin may declare one string, which would otherwise be read letter by letter.
    entries = [values] if isinstance(values, str) else plain_list(values)
    found = [
        plain_text(each) if isinstance(each, str) else tuple(map(plain_text, plain_list(each)))
        for each in entries
    ]
    choices = [(each,) if isinstance(each, str) else each for each in found]
    if max([len(found), *map(len, choices)]) > _MOST_REQUIREMENTS or any(
        len(text) > _LONGEST_REQUIREMENT for texts in choices for text in texts
    ):
        limit = f"{_MOST_REQUIREMENTS} requirements, or one of more than {_LONGEST_REQUIREMENT} characters"
        raise ValueError(f"it has more than {limit}")
    return tuple(found)


def _dtypes(values: object) -> tuple[object, ...]:
    if type(values) is tuple and _STR.issuperset(map(type, values)):
        return values
    # A dtype of torch stays as it is.
    return tuple(
        plain_text(each) if isinstance(each, str) else each for each in plain_list(_in_any_order(values))
    )


def _in_any_order(values: object) -> object:
    # A declaration may be a set, because its order means nothing.
    return list(values) if type(values) in (set, frozenset) else values  # type: ignore[call-overload]


def _plain_values(values: object) -> tuple[str, ...]:
    if type(values) is tuple and _STR.issuperset(map(type, values)):
        return values
    return tuple(map(plain_text, plain_list(values)))


DECLARED: Mapping[str, _Check] = {
    **dict.fromkeys(
        (
            *("device_types", "supported_phases", "supported_sparse_kinds"),
            *("supported_invariances", "supported_state_rules"),
        ),
        lambda values: _plain_values(_in_any_order(values)),
    ),
    **dict.fromkeys(("supported_dtypes", "supported_kv_cache_dtypes"), _dtypes),
    **dict.fromkeys(
        ("serves_dense", "step_safe", "quantizes_queries", "depends_on_capability", "drafts_on_prefill"),
        _exactly(bool),
    ),
    "features": _exactly(Feature, "it must be a Feature, such as Feature.SINKS | Feature.ALIBI"),
    "requires": _requires,
    "family": lambda value: None if value is None else plain_name(value),
    "Options": _options,
}
"""For each declared attribute, the function that checks and copies it."""
