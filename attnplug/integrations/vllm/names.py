"""The names by which vLLM's options choose attnplug's backends."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from attnplug.registry.default import list_backends

AUTOMATIC = "ATTNPLUG"
LATENT = "MLA"
"""The end of the names for latent attention."""
_FOLDER = "attnplug.integrations.vllm"


def register_names() -> None:
    """Add ATTNPLUG and a name for each loaded backend, and those for latent attention, unless they are there."""
    for name in (AUTOMATIC, *(f"{AUTOMATIC}_{backend}" for backend in list_backends())):
        latent = f"{name}_{LATENT}"
        for each, module in ((name, "backends"), (latent, "latent_backends")):
            if each not in AttentionBackendEnum.__members__:
                _add(each, f"{_FOLDER}.{module}.{each}")


def backend_named(name: str) -> Any:
    """The member of vLLM's enum with one of these names, also in a process where nobody has registered them."""
    register_names()
    return AttentionBackendEnum[name]


def _add(name: str, path: str) -> None:
    enum: Any = AttentionBackendEnum
    if hasattr(enum, "register"):
        register_backend(name, path)
        return
    # Versions without names of others have one place for them all; a member is what later versions make.
    member = object.__new__(enum)
    member._name_, member._value_ = name, path
    # Processes read the engine's configuration before they load plugins, when the enum has no such value for pickle.
    member.__reduce_ex__ = lambda protocol: (backend_named, (name,))
    setattr(enum, name, member)
    enum._member_map_[name] = member
    enum._value2member_map_[path] = member
    enum._member_names_.append(name)
