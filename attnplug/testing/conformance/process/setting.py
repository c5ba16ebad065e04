"""One setting of a process, and its value before and after a backend ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

_LONGEST = 60


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting of the process.

    Args:
        name: for messages.
        read: its value, which can be compared; a mapping for several values by name.
        write: sets a value that `read` gave; None if it cannot be set back.
        by_imports: whether a library may change it when it is imported.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None
    by_imports: bool = False


def change_of(setting: Setting, before: Any, after: Any) -> str:
    """What changed, such as "default dtype: torch.float32 became torch.float64"."""
    if isinstance(before, Opaque):
        return setting.name
    if not isinstance(before, Mapping):
        return f"{setting.name}: {_short(before)} became {_short(after)}"
    names = [name for name in before | after if before.get(name, _UNSET) != after.get(name, _UNSET)]
    return "; ".join(
        f"{setting.name} {name}: {_short(before.get(name, _UNSET))} became {_short(after.get(name, _UNSET))}"
        for name in names
    )


class Opaque:
    """A long value, which is compared and not shown."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


class _Unset:
    """No value."""

    def __repr__(self) -> str:
        return "unset"


_UNSET = _Unset()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
