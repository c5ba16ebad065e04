"""The options of a composite: those of both members, each prefixed by its phase."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.spec import Phase


def composite_options(name: str, members: Mapping[Phase, type[AttentionBackend]]) -> type[Any] | None:
    """A frozen dataclass of the members' options as `prefill_...` and `decode_...`; None without any."""
    fields: list[tuple[str, Any, Any]] = []
    for phase, member in members.items():
        if member.Options is None:
            continue
        hints = typing.get_type_hints(member.Options)
        for each in dataclasses.fields(member.Options):
            if each.init:
                default = dataclasses.field(default=each.default, default_factory=each.default_factory)
                fields.append((f"{phase}_{each.name}", hints[each.name], default))
    if not fields:
        return None

    # Each member's own Options may refuse values, so both are made once.
    def check(self: Any) -> None:
        for phase, member in members.items():
            member_options(self, phase, member)

    title = "".join(part for part in name.title() if part.isalnum()) + "Options"
    made = dataclasses.make_dataclass(title, fields, frozen=True, namespace={"__post_init__": check})
    made.__doc__ = f"The options of both members of {name}."
    return made


def member_options(options: Any, phase: Phase, member: type[AttentionBackend]) -> Any:
    """A member's Options from the composite's `options` (None: its defaults); None if it has no Options."""
    declared = member.Options
    if declared is None:
        return None
    if options is None:
        return declared()
    names = (field.name for field in dataclasses.fields(declared) if field.init)
    return declared(**{name: getattr(options, f"{phase}_{name}") for name in names})
