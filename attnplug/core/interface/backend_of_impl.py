"""Finds the backend of an impl, for engines that do not name it."""

from __future__ import annotations

from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import PluginError
from attnplug.core.interface.guarded import class_name, guarded_call


def backend_of(impl: type) -> type[AttentionBackend]:
    """The one backend whose `get_impl_cls` gives `impl`, of the nearest package around it that has such a backend.

    Raises:
        PluginError: no backend there gives it, or several do.
    """
    backends: list[type[AttentionBackend]] = [AttentionBackend]  # type: ignore[type-abstract]
    for each in backends:
        backends += each.__subclasses__()
    parts = impl.__module__.split(".")
    found: set[type[AttentionBackend]] = set()
    while parts and not found:
        near = [each for each in backends if each.__module__.split(".")[: len(parts)] == parts]
        found = {each for each in near if guarded_call(each.get_impl_cls)[0] is impl}
        parts.pop()
    if len(found) == 1:
        return found.pop()
    several = ", ".join(sorted(map(class_name, found)))
    why = (
        f"several backends give this impl ({several})"
        if found
        else "no backend in its package gives this impl"
    )
    raise PluginError(
        f"{class_name(impl)}.from_spec cannot know the backend: {why}; write from_spec(spec, backend=backend, ...)"
    )
