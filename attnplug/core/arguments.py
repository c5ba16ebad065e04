"""Checks of the arguments of public functions: each returns the value in its plain type, or names what is wrong.

`checked` declares them beside a function, so that the function itself may rely on them. They read types, dtypes, shapes
and devices, and never the values of a tensor, so nothing waits for a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar, cast

import numpy as np
import torch

from attnplug.core.checks import check_positive, check_rank_group, index_of
from attnplug.core.errors import BatchError, LayoutError, SpecError

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_Error = type[BatchError] | type[LayoutError] | type[SpecError]
Check: TypeAlias = Callable[[str, Any], Any]
"""Called with an argument's name and value; returns the value to use."""

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STORED: Final = (
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *_FLOATS,
)
_DTYPES: Final[Mapping[str, tuple[torch.dtype, ...]]] = {
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "integers": (torch.int32, torch.int64),
    "float32": (torch.float32,),
    "floats": _FLOATS,
    "stored": _STORED,
    "any": (),
}


def integer(field: str, value: object, limit: str = "must be an integer") -> int:
    """`value` as an int; BatchError for a bool, a float and any other type, which numpy would round in silence."""
    if type(value) is int:
        return value
    try:
        # numpy and torch read True as 1.
        if getattr(value, "dtype", None) in (torch.bool, np.dtype(bool)):
            raise TypeError("a bool is not a number here")
        return index_of(value)
    except Exception:  # noqa: BLE001  (`__index__` is code of the caller)
        raise BatchError(field, value, limit) from None


def listed(field: str, value: Any, what: str) -> list[Any]:
    """The items of `value`; BatchError for text, a mapping, and anything that has no items."""
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError("its items would be letters or keys")
        return list(value)
    except Exception:  # noqa: BLE001  (`__iter__` is code of the caller)
        raise BatchError(field, value, f"must be a sequence of {what}") from None


def integers(field: str, value: object) -> list[int]:
    """The items of `value` as ints; BatchError for anything else."""
    return [integer(field, item) for item in listed(field, value, "integers")]


def unusual_form(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor without memory of its own with one place for each element; None for other tensors."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    # torch has no public test for tensors of vmap, grad and jvp.
    functorch: Any = getattr(torch._C, "_functorch", None)
    if functorch is not None and functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor of a torch.func transform, such as vmap"
    return None


def instance(
    field: str, value: object, kind: type[_T], error: _Error = BatchError, remedy: str | None = None
) -> _T:
    """`value`, if it is a `kind`.

    Raises:
        BatchError: it is not, or another `error`.
    """
    if not isinstance(value, kind):
        raise error(field, value, f"must be a {kind.__name__}", remedy)
    return value


def torch_device(
    field: str, value: object, error: _Error = BatchError, *, is_used: bool = True
) -> torch.device:
    """`value` as a torch.device, on which a tensor can be made if `is_used`.

    Raises:
        BatchError: it names no device, or torch cannot use it here; or another `error`.
    """
    try:
        if not isinstance(value, (str, torch.device)):
            raise TypeError("a number would be the index of a GPU")
        where = torch.device(value)
        if is_used:
            # torch.device accepts every known type; only an allocation shows whether this build and machine have it.
            torch.empty(0, device=where)
    except (ImportError, RuntimeError, TypeError, AssertionError) as raised:
        # torch explains some of these over many lines, and imports the module of a device that a package adds.
        reason = (str(raised).splitlines() or [""])[0]
        found = str(value) if isinstance(value, torch.device) else value
        raise error(field, found, f"is not a device that torch can use here: {reason}") from None
    return where


def at_least(least: int, error: _Error = BatchError) -> Check:
    """A check for an integer from `least` to 2**63 - 1."""

    def check(field: str, value: object) -> int:
        limit = f"must be an integer of at least {least}"
        try:
            number = integer(field, value, limit)
        except BatchError:
            raise error(field, value, limit) from None
        if number < least:
            raise error(field, number, f"must be at least {least}")
        # torch and numpy take sizes of 64 bits.
        if number >= 1 << 63:
            raise error(field, number, f"must be below {1 << 63}")
        return number

    return check


def one_of(*kinds: type, error: _Error = BatchError) -> Check:
    """A check for an instance of one of `kinds`."""
    limit = "must be " + " or ".join(f"a {kind.__name__}" for kind in kinds)

    def check(field: str, value: _T) -> _T:
        if not isinstance(value, kinds):
            raise error(field, value, limit)
        return value

    return check


def subclass_of(base: type, error: _Error = BatchError) -> Check:
    """A check for `base` or a subclass of it."""

    def check(field: str, value: _T) -> _T:
        if not (isinstance(value, type) and issubclass(value, base)):
            raise error(field, value, f"must be a subclass of {base.__name__}")
        return value

    return check


def sequence_of(item: Check, what: str) -> Check:
    """A check for a sequence whose items pass `item`; it returns a list, and its errors name the index."""

    def check(field: str, value: object) -> list[Any]:
        return [item(f"{field}[{i}]", each) for i, each in enumerate(listed(field, value, what))]

    return check


def mapping_of(item: Check | type, error: _Error = LayoutError) -> Check:
    """A check for a mapping of names to values that pass `item`; it returns a dict, and its errors name the key."""
    checks = one_of(item, error=error) if isinstance(item, type) else item

    def check(field: str, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise error(field, value, "must be a mapping of layer names")
        for name in value:
            if not isinstance(name, str):
                raise error(field, name, "must have names as keys")
        return {name: checks(f"{field}[{name!r}]", each) for name, each in value.items()}

    return check


def positive(field: str, value: object) -> float:
    """`value` as a finite float above 0; BatchError for anything else. A tensor of one element on a CPU counts."""
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.device.type != "cpu"):
        raise BatchError(field, f"{tuple(value.shape)} on {value.device}", "must be a number")
    return check_positive(field, value, error=BatchError)


def number(field: str, value: object) -> int | float:
    """`value`, if it is an int or a float of Python or numpy that a kernel can multiply; BatchError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise BatchError(field, value, "must be a number")
    return cast("int | float", value)


class Shape:
    """The shape and dtype of a tensor argument, written as "T H D: float32", or "R+1: int32 int64".

    A letter is one size in all tensors of a call, "_" for any size, and a last "*" for any dimensions. The
    tensors of a call are on one device, except those marked "host".

    Args:
        text: sizes, a colon, and dtypes: int32, int64, integers, float32, floats, stored (with 8-bit floats), or any. A
            text that begins with "?" allows None.
        error: raised for a tensor of another form.
    """

    def __init__(self, text: str, error: _Error = BatchError) -> None:
        self.may_be_none = text.startswith("?")
        sizes, _, words = text.removeprefix("?").partition(":")
        self.sizes = sizes.split()
        names = words.split() or ["any"]
        self.is_host = "host" in names
        self.dtypes = frozenset(dtype for name in names if name != "host" for dtype in _DTYPES[name])
        self.error = error

    def check(self, field: str, value: Any, known: dict[str, Any]) -> torch.Tensor:
        """`value`, if it has this form; `known` has the sizes of the call's tensors so far, and gets its own."""
        if not isinstance(value, torch.Tensor):
            raise self.error(field, value, "must be a torch.Tensor")
        if (found := unusual_form(value)) is not None:
            raise self.error(f"{field}.layout", found, "must be torch.strided")
        if self.dtypes and value.dtype not in self.dtypes:
            names = ", ".join(sorted(map(str, self.dtypes)))
            raise self.error(f"{field}.dtype", value.dtype, f"must be {names}")
        device = value.device
        if self.is_host:
            if device.type != "cpu":
                raise self.error(f"{field}.device", str(device), "must be on the host")
        else:
            expected, source = known.setdefault("device", (device, field))
            if device != expected:
                limit = f"must be {expected}, that of {source}"
                raise self.error(f"{field}.device", str(device), limit)
        self._compare(field, value.shape, known)
        return value

    def _compare(self, field: str, shape: torch.Size, known: dict[str, Any]) -> None:
        sizes = self.sizes
        found = shape
        if sizes and sizes[-1] == "*":
            sizes = sizes[:-1]
            found = shape[: len(sizes)]
        if len(found) != len(sizes):
            raise self._refusal(field, shape, known)
        for size, number in zip(sizes, found, strict=True):
            if size == "_":
                continue
            name = size.removesuffix("+1")
            count = number - (name != size)
            expected, source = known.setdefault(name, (count, field))
            if count != expected or count < 0:
                raise self._refusal(field, shape, known, source)

    def _refusal(
        self, field: str, shape: torch.Size, known: Mapping[str, Any], source: str | None = None
    ) -> BatchError | LayoutError | SpecError:
        words = []
        for size in self.sizes:
            name = size.removesuffix("+1")
            # The first tensor with a size sets it, so its own size does not limit it.
            if name in known and known[name][1] != field:
                words.append(str(known[name][0] + (size != name)))
            else:
                words.append("..." if size == "*" else size)
        limit = f"must have the shape ({', '.join(words)}{',' if len(words) == 1 else ''})"
        fits = f"{limit} beside {source}" if source not in (None, field) else limit
        return self.error(field, tuple(shape), fits)


def checked(**declared: Check | type | str | Shape) -> Callable[[_F], _F]:
    """Check the arguments of a function before it runs, in the order given here.

    Args:
        **declared: by argument, a check, a type, or the text of a Shape. An argument whose default is None may be None.
    """
    checks = {
        name: Shape(each) if isinstance(each, str) else one_of(each) if isinstance(each, type) else each
        for name, each in declared.items()
    }

    def decorate(function: _F) -> _F:
        # Read once from the code object, so that a call does no work but its checks.
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        positional = names[: code.co_argcount]
        defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
        defaults |= function.__kwdefaults__ or {}
        optional = {name for name, default in defaults.items() if default is None}
        optional |= {name for name, check in checks.items() if isinstance(check, Shape) and check.may_be_none}
        steps = tuple((name, check, name in optional) for name, check in checks.items())
        most = len(positional)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            bound = dict(zip(positional, args, strict=False))
            if len(args) > most or not bound.keys().isdisjoint(given):
                # Python names the argument that is given twice, or the number of them.
                return function(*args, **given)
            bound |= given
            known: dict[str, Any] = {}
            for name, check, may_be_none in steps:
                if name not in bound:
                    continue
                value = bound[name]
                if value is None and may_be_none:
                    continue
                if isinstance(check, Shape):
                    check.check(name, value, known)
                else:
                    bound[name] = check(name, value)
            return function(**bound)

        return cast("_F", call)

    return decorate


def flag(field: str, value: object) -> bool:
    """`value`, if it is True or False itself; BatchError for anything else, such as the text "False"."""
    if not isinstance(value, (bool, np.bool_)):
        raise BatchError(field, value, "must be True or False")
    return bool(value)


def rank_group(field: str, value: _T) -> _T:
    """As `check_rank_group`, with a BatchError."""
    return check_rank_group(field, value, BatchError)
